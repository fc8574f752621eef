"""Features and rewards of groups: padded rows through all layers, against EBFTScorer with shared rows through the layers it needs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ebft_ds.engine.network import FeatureWork, LanguageNetwork
from ebft_ds.features.forwards import Pooling, forward_features
from ebft_ds.features.layers import feature_layer_indices
from ebft_ds.features.scorer import EBFTScorer
from ebft_ds.features.scoring_layout import scoring_layout
from ebft_ds.packing.rows import TokenRows
from ebft_ds.rewards.feature_matching import FeatureRewards, group_feature_rewards
from ebft_ds.types import RolloutGroup
from tools.benchmarks.comparison import Way, compare
from tools.benchmarks.flops import ModelShape, padded_pairs, row_pairs
from tools.benchmarks.models import load_ours, load_plain, row_packer
from tools.benchmarks.plain import plain_batches, plain_features
from tools.benchmarks.turns import Report
from tools.benchmarks.workload import add_workload_arguments, machine_settings, make_groups, workload_settings

PLAIN, OURS = "plain: padded, all layers", "ours"
FRACTIONS = (0.25, 0.5, 0.75)
METHOD = "completion_mean"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload_arguments(parser)
    parser.add_argument("--layers", type=float, nargs="+", default=list(FRACTIONS), help="depths of the feature layers")


def run(model: Path, options: argparse.Namespace) -> Report:
    plain_model, our_model = load_plain(model, options), load_ours(model, options)
    layers = feature_layer_indices(options.layers, our_model.config.get_text_config().num_hidden_layers)
    groups = make_groups(options, our_model.config.get_text_config().vocab_size)
    shape = ModelShape.of(plain_model)
    settings = (
        {"model": model.name} | workload_settings(options) | {"layers": f"{max(layers)} of {shape.layers}"} | machine_settings(options)
    )
    ways = _plain_way(plain_model, groups, layers, shape, options), _our_way(LanguageNetwork(our_model), groups, layers, shape, options)
    return compare("scoring", settings, [ways], options)


def _plain_way(
    model: PreTrainedModel, groups: Sequence[RolloutGroup], layers: list[int], shape: ModelShape, options: argparse.Namespace
) -> Way:
    batches = [
        plain_batches(g.prompt.token_ids, [*(r.token_ids for r in g.rollouts), g.prompt.reference_ids], options.plain_rows, options.device)
        for g in groups
    ]

    def score() -> dict[str, Tensor]:
        features = torch.stack([plain_features(model, group, layers) for group in batches]).cpu()
        return _outcome(group_feature_rewards(features[:, :-1], features[:, -1])) | {"features": features}

    shapes = [batch.input_ids.shape for group in batches for batch in group]
    tokens = sum(rows * width for rows, width in shapes)
    gflop = shape.forward(tokens, padded_pairs([(rows, width) for rows, width in shapes]))
    return Way(PLAIN, score, {"tokens": tokens, "gflop": gflop})


def _our_way(
    network: LanguageNetwork, groups: Sequence[RolloutGroup], layers: list[int], shape: ModelShape, options: argparse.Namespace
) -> Way:
    packer = row_packer(options)
    features_of = UnshardedFeatures(network, torch.device(options.device))
    scorer = EBFTScorer(layers, METHOD, False, 1.0, 1.0, features_of, token_budget=options.token_budget, packer=packer)
    layout = scoring_layout(groups, (), "include")
    micro_batches = packer.plan(layout.sequences, 1, token_budget=options.token_budget).ranks[0]

    def score() -> dict[str, Tensor]:
        return _outcome(scorer.score(groups).rewards)

    def check() -> dict[str, Tensor]:
        """Rewards as timed, and the features behind them: the scorer gives none."""
        found = forward_features(layout.sequences, micro_batches, features_of, packer, Pooling(layers, METHOD, "pooled")).features
        order = [[*layout.completion[g], layout.reference[g]] for g in range(len(groups))]
        return score() | {"features": torch.stack([torch.stack([found[i] for i in row if i is not None]) for row in order])}

    built = [packer.build([layout.sequences[i] for i in batch], device=options.device).rows for batch in micro_batches]
    tokens = sum(rows.input_ids.numel() for rows in built)
    gflop = shape.forward(tokens, sum(map(row_pairs, built)), layers=max(layers))
    return Way(OURS, score, {"tokens": tokens, "gflop": gflop}, check)


class UnshardedFeatures:
    """The scorer's feature network over a network without an engine."""

    def __init__(self, network: LanguageNetwork, device: torch.device) -> None:
        self._network = network
        self.device = device

    def hidden_states(self, rows: TokenRows, layers: Sequence[int], positions: Tensor) -> list[Tensor]:
        found: list[Tensor] = self._network(FeatureWork(rows, layers, positions))
        return found

    def identity(self, layers: Sequence[int]) -> str:
        return "benchmark"


def _outcome(rewards: FeatureRewards) -> dict[str, Tensor]:
    # Not the reward itself: it is the small difference of these two.
    return {"alignment": rewards.alignment, "diversity": rewards.diversity}
