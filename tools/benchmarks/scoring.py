"""Features and rewards of groups: padded rows through all layers, against EBFTScorer with shared rows through the layers it needs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ebft_ds.engine.network import FeatureWork, LanguageNetwork
from ebft_ds.features.layers import feature_layer_indices
from ebft_ds.features.pooling import pool_features
from ebft_ds.features.scorer import EBFTScorer
from ebft_ds.features.spans import TokenRange, feature_spans
from ebft_ds.packing.rows import TokenRows
from ebft_ds.policy.batch import TrainSequence, completion_sequence, reference_sequence
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
    sequences = [s for g, group in enumerate(groups) for s in scored_sequences(g, group)]
    plan = packer.plan(sequences, 1, token_budget=options.token_budget)

    def score() -> dict[str, Tensor]:
        return _outcome(scorer.score(groups).rewards)

    def check() -> dict[str, Tensor]:
        """Rewards as timed, and the features behind them: the scorer gives none."""
        found: dict[int, Tensor] = {}
        for batch in plan.ranks[0]:
            built = packer.build([sequences[i] for i in batch], device=options.device)
            ranges = [TokenRange(len(sequences[i].prompt_ids), len(sequences[i].completion_ids)) for i in batch]
            spans = feature_spans(built.places, ranges, METHOD).to(options.device)
            hidden = features_of.hidden_states(built.rows, layers, spans.positions)
            found |= dict(zip(batch, pool_features(hidden, spans).cpu(), strict=True))
        features = torch.stack([found[i] for i in range(len(sequences))]).unflatten(0, (len(groups), -1))
        return score() | {"features": features}

    built = [packer.build([sequences[i] for i in batch], device=options.device) for batch in plan.ranks[0]]
    tokens = sum(batch.rows.input_ids.numel() for batch in built)
    gflop = shape.forward(tokens, sum(row_pairs(batch.rows) for batch in built), layers=max(layers))
    return Way(OURS, score, {"tokens": tokens, "gflop": gflop}, check)


def scored_sequences(number: int, group: RolloutGroup) -> list[TrainSequence]:
    """A group's completions, then its reference."""
    completions = [completion_sequence(number, group.prompt, r, 0.0, mask_truncated=False) for r in group.rollouts]
    return [*completions, reference_sequence(number, group.prompt)]


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
