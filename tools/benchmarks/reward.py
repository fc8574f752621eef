"""A whole training step of a reward model (rows, forward, backward, clipping, AdamW): TRL's RewardTrainer, against shared rows.

Both begin with the same weights and take the same pairs; a pair's responses follow the same prompt. Without --model a Llama of --layers
and --hidden is made. Needs trl (the extra `dev`).
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ebft_ds.engine.network import LanguageNetwork, ScoreWork
from ebft_ds.packing.whole_groups import WholeGroup, build_group_rows, plan_whole_groups
from ebft_ds.rewards.preference_loss import PreferenceLoss
from tools.benchmarks.comparison import Way, compare
from tools.benchmarks.flops import ModelShape, padded_pairs, row_pairs
from tools.benchmarks.models import load_our_reward_model, load_plain_reward_model, row_packer
from tools.benchmarks.turns import Report
from tools.benchmarks.workload import add_machine_arguments, machine_settings
from tools.random_model import make_random_model

PLAIN, OURS = "plain: TRL RewardTrainer", "ours"
LEARNING_RATE, CLIP = 1e-5, 1.0
LOSS_TOLERANCE = 1e-5
"""Largest relative difference of the losses in float32."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", type=int, default=192, help="prompt tokens")
    parser.add_argument("--response", type=int, default=64, help="tokens of each response")
    parser.add_argument("--pairs", type=int, default=4, help="pairs of a step")
    parser.add_argument("--layers", type=int, default=12, help="of the model that is made")
    parser.add_argument("--hidden", type=int, default=512, help="of the model that is made")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="both ways recompute their blocks in the backward")
    parser.add_argument("--token-budget", type=int, default=16384, help="most tokens in a micro-batch of ours")
    parser.add_argument("--packing", default="shared", choices=["shared", "unshared", "padded"], help="row layout of ours")
    parser.add_argument("--attention", default="auto", choices=["auto", "split", "dense", "flex"], help="attention of packed rows")
    add_machine_arguments(parser)


def default_model(folder: Path, options: argparse.Namespace) -> Path:
    """A medium Llama with heads of 64."""
    heads = max(1, options.hidden // 64)
    return make_random_model(
        folder,
        num_layers=options.layers,
        hidden=options.hidden,
        num_heads=heads,
        num_kv_heads=heads,
        max_position_embeddings=max(512, options.prompt + options.response),
        vocab_size=8192,
    )


def run(model: Path, options: argparse.Namespace) -> Report:
    plain, ours = load_plain_reward_model(model, options), load_our_reward_model(model, options)
    groups = make_pairs(options, plain.config.get_text_config().vocab_size)
    shape = ModelShape.of(plain)
    settings: dict[str, str | int | float] = {
        "model": f"{model.name}, {shape.layers} layers, hidden {plain.config.get_text_config().hidden_size}",
        "prompt": options.prompt,
        "response": options.response,
        "pairs": options.pairs,
        "gradient checkpointing": "on" if options.gradient_checkpointing else "off",
        "ours": f"{options.packing} rows, {options.attention} attention",
    } | machine_settings(options)
    with tempfile.TemporaryDirectory() as folder:
        ways = _plain_way(plain, model, groups, shape, options, folder), _our_way(ours, groups, shape, options)
        losses = {}

        def keeping(way: Way) -> Way:
            """The way, whose losses are kept when it is checked."""

            def check() -> dict[str, Tensor]:
                assert way.check is not None
                found = dict(way.check())
                losses[way.name] = found["losses"].double()
                return found

            return Way(way.name, way.run, way.facts, check, way.release)

        report = compare("reward", settings, [(keeping(ways[0]), keeping(ways[1]))], options)
    difference = float(((losses[OURS] - losses[PLAIN]) / losses[PLAIN]).abs().max())
    if options.dtype == "float32" and not difference <= LOSS_TOLERANCE:
        raise SystemExit(f"{OURS}: the losses differ by {difference:.1e} (allowed: {LOSS_TOLERANCE:.0e})")
    report.ratios["largest relative difference of the losses"] = difference
    return report


def make_pairs(options: argparse.Namespace, vocab_size: int) -> list[WholeGroup]:
    """Random tokens, the same in every run, none of them a special one."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(20, vocab_size) for _ in range(count)]

    return [WholeGroup(tokens(options.prompt), [tokens(options.response) for _ in range(2)]) for _ in range(options.pairs)]


def _plain_way(model: Any, source: Path, groups: Sequence[WholeGroup], shape: ModelShape, options: argparse.Namespace, folder: str) -> Way:
    rows = [
        {name: [*group.prefix_ids, *branch] for name, branch in zip(("chosen_ids", "rejected_ids"), group.branches, strict=True)}
        for group in groups
    ]
    trainer = _trl_trainer(model, source, rows, options, folder)

    def forward_backward() -> Tensor:
        loss: Tensor = trainer.training_step(model, trainer.data_collator(rows))
        return loss

    width = options.prompt + options.response
    tokens = 2 * len(groups) * width
    gflop = shape.forward_backward(tokens, padded_pairs([(2 * len(groups), width)]), head_tokens=0)
    return _way(PLAIN, model, trainer.optimizer, forward_backward, {"tokens": tokens, "gflop": gflop})


def _trl_trainer(model: Any, source: Path, rows: list[dict[str, list[int]]], options: argparse.Namespace, folder: str) -> Any:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.trainer.reward_config import RewardConfig
    from trl.trainer.reward_trainer import RewardTrainer

    arguments = RewardConfig(
        output_dir=folder,
        per_device_train_batch_size=len(rows),
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        gradient_checkpointing=options.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if options.gradient_checkpointing else None,
        bf16=False,  # the model has its precision: no autocast
        max_length=None,
        report_to="none",
        disable_tqdm=True,
        use_cpu=options.device == "cpu",
    )
    trainer = RewardTrainer(
        model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=AutoTokenizer.from_pretrained(source)
    )
    trainer.current_gradient_accumulation_steps = 1  # its train() sets it
    if options.gradient_checkpointing:  # as does this
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trainer.create_optimizer()
    return trainer


def _our_way(model: Any, groups: Sequence[WholeGroup], shape: ModelShape, options: argparse.Namespace) -> Way:
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    network = LanguageNetwork(model).train()
    packer = row_packer(options)
    loss = PreferenceLoss()
    terms = loss.terms([len(group.branches) for group in groups])

    def micro_batches() -> list[list[int]]:
        return plan_whole_groups(groups, 1, packer, token_budget=options.token_budget).ranks[0]

    def forward_backward() -> Tensor:
        total = torch.zeros((), device=options.device)
        for indices in micro_batches():
            built = build_group_rows([groups[i] for i in indices], packer, device=options.device)
            rewards = network(ScoreWork(built.rows, built.ends))
            share = loss.sums(rewards, built.counts, [0.0] * len(indices), [1.0] * len(indices))[0] / terms
            share.backward()
            total += share.detach()
        return total

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    built = [build_group_rows([groups[i] for i in indices], packer, device=options.device).rows for indices in micro_batches()]
    tokens = sum(rows.input_ids.numel() for rows in built)
    gflop = shape.forward_backward(tokens, sum(map(row_pairs, built)), head_tokens=0)
    return _way(OURS, model, optimizer, forward_backward, {"tokens": tokens, "gflop": gflop})


def _way(name: str, model: Any, optimizer: Any, forward_backward: Callable[[], Tensor], facts: dict[str, float]) -> Way:
    release = partial(model.zero_grad, set_to_none=True)

    def finish() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        release()

    def step() -> None:
        forward_backward()
        finish()

    def check() -> dict[str, Tensor]:
        """Losses before and after a step, and the gradients of the first."""
        release()
        first = forward_backward().cpu()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
        finish()
        second = forward_backward().cpu()
        release()
        return {"losses": torch.stack([first, second])} | gradients

    return Way(name, step, facts, check, release)
