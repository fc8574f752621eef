"""Benchmarks: python tools/bench.py NAME [--model DIR] [--dtype float32] [--rounds N] [--json FILE] ...

    scoring   features and rewards of groups, against padded rows through all layers
    policy    forward and backward with LoRA, against padded rows with full logits
    reward    training step of a reward model, against TRL's RewardTrainer
    logprobs  the log-prob head alone, against full logits
    planner   time and balance of micro-batch plans over many ranks
    sync      seconds, bytes and memory of reading merged weights out of ZeRO-3 shards
    overlap   step time of the asynchronous run against the synchronous one, over an engine of a chosen speed

Every benchmark runs its variants in turns and compares medians. Without --model a tiny random one is made
(reward: a medium one).
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from pathlib import Path

if __package__ in (None, ""):  # started as a script: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

BENCHMARKS = ("scoring", "policy", "reward", "logprobs", "planner", "sync", "overlap")
"""Modules of tools.benchmarks; each has add_arguments(parser) and run(model, options) -> Report | None (no report on this rank), and may
have default_model(folder, options) -> Path instead of the tiny one."""


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="benchmark", required=True)
    modules = {}
    for name in BENCHMARKS:
        modules[name] = importlib.import_module(f"tools.benchmarks.{name}")
        command = commands.add_parser(name, description=modules[name].__doc__)
        command.add_argument("--model", type=Path, help="checkpoint; default: a tiny random one")
        command.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
        command.add_argument("--rounds", type=int, default=3, help="times that each variant runs")
        command.add_argument("--json", type=Path, help="also write settings, medians and all samples there")
        command.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # of the launcher
        modules[name].add_arguments(command)
    options = parser.parse_args(arguments)

    from tools.benchmarks.turns import show
    from tools.random_model import make_random_model

    with tempfile.TemporaryDirectory() as folder:
        module = modules[options.benchmark]
        if options.model is not None:
            model = options.model
        elif hasattr(module, "default_model"):
            model = module.default_model(Path(folder) / "made", options)
        else:
            model = make_random_model(Path(folder) / "tiny", seed=0)
        report = module.run(model, options)
    if report is not None:
        show(report, options.json)


if __name__ == "__main__":
    main()
