"""Forward and backward of the policy loss with LoRA on every linear layer: padded rows and full logits, against shared rows and the
chunked head.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ebft_ds.engine.network import LanguageNetwork, LogProbWork
from ebft_ds.policy import LossDenominators, policy_loss
from ebft_ds.policy.batch import build_micro_batch, completion_sequences
from ebft_ds.types import RolloutGroup
from tools.benchmarks.comparison import Way, compare
from tools.benchmarks.flops import ModelShape, padded_pairs, row_pairs
from tools.benchmarks.models import load_ours, load_plain, row_packer, with_adapter
from tools.benchmarks.plain import plain_batches, plain_policy
from tools.benchmarks.turns import Report
from tools.benchmarks.workload import add_workload_arguments, machine_settings, make_groups, workload_settings

PLAIN, OURS = "plain: padded, full logits", "ours"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload_arguments(parser)
    parser.add_argument("--lora-r", type=int, default=16)
    parser.add_argument("--plain-logits", default="all", choices=["all", "completion"], help="positions that the plain way has logits of")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="both ways recompute their blocks in the backward")


def run(model: Path, options: argparse.Namespace) -> Report:
    plain_model, our_model = load_plain(model, options), load_ours(model, options)
    if options.gradient_checkpointing:
        for loaded in (plain_model, our_model):
            loaded.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    plain, ours = (with_adapter(loaded, options.lora_r) for loaded in (plain_model, our_model))
    groups = make_groups(options, our_model.config.get_text_config().vocab_size)
    advantages = torch.randn(len(groups), options.n, generator=torch.Generator().manual_seed(1))
    sizes = [[len(r.token_ids) for r in group.rollouts] for group in groups]
    count = sum(map(len, sizes))
    denominators = LossDenominators(sum(map(sum, sizes)), count, count, options.max_completion)
    shape = ModelShape.of(plain_model)
    own: dict[str, str | int | float] = {
        "lora_r": options.lora_r,
        "plain logits": options.plain_logits,
        "gradient checkpointing": "on" if options.gradient_checkpointing else "off",
    }
    settings = {"model": model.name} | workload_settings(options) | own | machine_settings(options)
    ways = (
        _plain_way(plain, groups, advantages, denominators, shape, options),
        _our_way(ours, groups, advantages, denominators, shape, options),
    )
    return compare("policy", settings, [ways], options)


def _plain_way(
    model: Any,
    groups: Sequence[RolloutGroup],
    advantages: Tensor,
    denominators: LossDenominators,
    shape: ModelShape,
    options: argparse.Namespace,
) -> Way:
    batches = [plain_batches(g.prompt.token_ids, [r.token_ids for r in g.rollouts], options.plain_rows, options.device) for g in groups]
    advantages = advantages.to(options.device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        for group, row in zip(batches, advantages, strict=True):
            plain_policy(model, group, row, denominators, logits=options.plain_logits)

    def check() -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        found = []
        for group, row in zip(batches, advantages, strict=True):
            for log_probs, batch in zip(plain_policy(model, group, row, denominators, logits=options.plain_logits), group, strict=True):
                found.append(log_probs[batch.completion_mask])
        return {"log-probs": torch.cat(found)} | _gradients(model)

    shapes = [batch.input_ids.shape for group in batches for batch in group]
    tokens = sum(rows * width for rows, width in shapes)
    kept = {"all": tokens, "completion": sum(rows * (width - options.prompt + 1) for rows, width in shapes)}
    gflop = shape.forward_backward(tokens, padded_pairs([(rows, width) for rows, width in shapes]), head_tokens=kept[options.plain_logits])
    return Way(PLAIN, step, {"tokens": tokens, "gflop": gflop}, check, partial(model.zero_grad, set_to_none=True))


def _our_way(
    model: Any,
    groups: Sequence[RolloutGroup],
    advantages: Tensor,
    denominators: LossDenominators,
    shape: ModelShape,
    options: argparse.Namespace,
) -> Way:
    network = LanguageNetwork(model)
    packer = row_packer(options)
    sequences = completion_sequences(groups, advantages, mask_truncated=False)

    def micro_batches() -> list[list[int]]:
        return packer.plan(sequences, 1, token_budget=options.token_budget).ranks[0]

    def step() -> dict[int, Tensor]:
        """Log-probs of each sequence."""
        model.zero_grad(set_to_none=True)
        found: dict[int, Tensor] = {}
        for indices in micro_batches():
            batch = build_micro_batch([sequences[i] for i in indices], temperature=1.0, packer=packer, device=options.device)
            flat, _ = network(LogProbWork(batch.rows, batch.positions, batch.targets, batch.inverse_temperature))
            log_probs = batch.scatter(flat)
            result = policy_loss(log_probs, log_probs.detach(), batch.advantages, batch.mask, loss_type="dapo", denominators=denominators)
            result.loss.backward()
            found |= {i: row[mask] for i, row, mask in zip(indices, log_probs.detach(), batch.mask, strict=True)}
        return found

    def check() -> dict[str, Tensor]:
        found = step()
        return {"log-probs": torch.cat([found[i] for i in range(len(sequences))])} | _gradients(model)

    built = [
        build_micro_batch([sequences[i] for i in indices], temperature=1.0, packer=packer, device=options.device)
        for indices in micro_batches()
    ]
    tokens = sum(batch.rows.input_ids.numel() for batch in built)
    gflop = shape.forward_backward(
        tokens, sum(row_pairs(batch.rows) for batch in built), head_tokens=sum(batch.targets.numel() for batch in built)
    )
    return Way(OURS, step, {"tokens": tokens, "gflop": gflop}, check, partial(model.zero_grad, set_to_none=True))


def _gradients(model: Any) -> dict[str, Tensor]:
    # The head is a module of another class in ours, not another name: names agree.
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
