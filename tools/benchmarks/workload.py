"""The groups that scoring and policy benchmarks run on: random tokens, completions of spread lengths, the same in every run."""

from __future__ import annotations

import argparse
import os
import random

from ebft_ds.types import Prompt, Rollout, RolloutGroup, TokenSpan


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", type=int, default=256, help="prompt tokens")
    parser.add_argument("--n", type=int, default=8, help="completions of each group")
    parser.add_argument("--min-completion", type=int, default=32)
    parser.add_argument("--max-completion", type=int, default=96)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--plain-rows", type=int, help="rows in a micro-batch of the plain way; default: all rows of a group")
    parser.add_argument("--token-budget", type=int, default=16384, help="most tokens in a micro-batch of ours")
    parser.add_argument("--packing", default="shared", choices=["shared", "unshared", "padded"], help="row layout of ours")
    parser.add_argument("--attention", default="auto", choices=["auto", "split", "dense", "flex"], help="attention of packed rows")
    add_machine_arguments(parser)


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="CPU threads; default: all cores it may use")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--profile", action="store_true", help="also print where the time of each variant goes")


def make_groups(options: argparse.Namespace, vocab_size: int, seed: int = 0) -> list[RolloutGroup]:
    """Completion lengths are spaced evenly from the shortest to the longest, in random order; a reference has the length between."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    shortest, longest, n = options.min_completion, options.max_completion, options.n
    groups = []
    for g in range(options.groups):
        lengths = [round(shortest + (longest - shortest) * j / max(n - 1, 1)) for j in range(n)]
        rng.shuffle(lengths)
        prompt = Prompt(g, g, 0, tokens(options.prompt), tokens((shortest + longest) // 2))
        rollouts = [Rollout(tokens(k), [0.0] * k, [TokenSpan(0, k, 0)], "length") for k in lengths]
        groups.append(RolloutGroup(prompt, rollouts))
    return groups


def workload_settings(options: argparse.Namespace) -> dict[str, str | int | float]:
    """What a report says about the workload."""
    return {
        "prompt": options.prompt,
        "n": options.n,
        "completions": f"{options.min_completion}-{options.max_completion}",
        "groups": options.groups,
        "plain rows": options.plain_rows or "all",
        "ours": f"{options.packing} rows, {options.attention} attention",
    }


def machine_settings(options: argparse.Namespace) -> dict[str, str | int | float]:
    """What a report says about where it ran."""
    return {"dtype": options.dtype, "device": options.device, "threads": options.threads, "rounds": options.rounds}
