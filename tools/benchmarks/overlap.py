"""Does the asynchronous run keep trainer and engine busy? The real trainer over a rollout loop with a chosen speed.

Synchronous (max_staleness 0) a step takes rollouts plus training; asynchronous, in the steady state, the longer of the two.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ebft_ds import AsyncEBFTConfig, AsyncEBFTTrainer
from ebft_ds.trainers.callbacks import TrainerCallback, TrainerControl, TrainerState
from ebft_ds.types import ScoredGroup
from tools.benchmarks.turns import Measurement, Report, in_turns, medians

SYNC, ASYNC = "max_staleness 0", "asynchronous"
GROUPS_PER_STEP = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rollout-seconds", type=float, default=2.0, help="what the engine takes for a step's groups")
    parser.add_argument("--train-seconds", type=float, default=1.5, help="slept in every step, on top of its real work")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--skip", type=int, default=3, help="first steps that do not count: the pipeline is still filling")
    parser.add_argument("--max-staleness", type=int, default=1, help="of the asynchronous run")


def run(model: Path, options: argparse.Namespace) -> Report:
    samples = in_turns(
        {SYNC: lambda: _run(model, options, 0), ASYNC: lambda: _run(model, options, options.max_staleness)},
        options.rounds,
    )
    found = medians(samples)
    settings: dict[str, str | int | float] = {
        "model": model.name,
        "dtype": options.dtype,
        "steps": options.steps,
        "max_staleness": options.max_staleness,
        "rounds": options.rounds,
    }
    ratios = {
        f"{SYNC}: step / (rollout + train)": _ratio(samples[SYNC], lambda rollout, train: rollout + train),
        f"{ASYNC}: step / max(rollout, train)": _ratio(samples[ASYNC], max),
    }
    return Report("overlap", settings, found, samples, ratios)


def _ratio(samples: list[Measurement], ideal: Callable[[float, float], float]) -> float:
    return statistics.median(m["step_s"] / ideal(m["rollout_s"], m["train_s"]) for m in samples)


class StepClock(TrainerCallback):
    """Times each step from end to end, and prolongs it."""

    def __init__(self, train_seconds: float) -> None:
        self._sleep = train_seconds
        self._last = time.monotonic()
        self.steps: list[float] = []
        self.waits: list[float] = []

    def on_scored(self, state: TrainerState, groups: Sequence[ScoredGroup]) -> None:
        time.sleep(self._sleep)

    def on_step_end(self, state: TrainerState, control: TrainerControl, metrics: dict[str, float | None]) -> None:
        now = time.monotonic()
        self.steps.append(now - self._last)
        self.waits.append(metrics["time/wait_rollout"] or 0.0)
        self._last = now


def _run(model: Path, options: argparse.Namespace, max_staleness: int) -> Measurement:
    """Medians over the counted steps of one run. Training is all of a step but the wait for its groups."""
    clock = StepClock(options.train_seconds)
    with tempfile.TemporaryDirectory() as folder:
        trainer = AsyncEBFTTrainer(str(model), _config(folder, options, max_staleness), train_dataset=_rows(), callbacks=[clock])
        trainer.train()
        trainer.close()
    steps, waits = clock.steps[options.skip :], clock.waits[options.skip :]
    return {
        "step_s": statistics.median(steps),
        "rollout_s": options.rollout_seconds,
        "train_s": statistics.median(step - wait for step, wait in zip(steps, waits, strict=True)),
        "wait_s": statistics.median(waits),
    }


def _config(folder: str, options: argparse.Namespace, max_staleness: int) -> AsyncEBFTConfig:
    return AsyncEBFTConfig(
        output_dir=folder,
        dtype=options.dtype,
        max_steps=options.steps,
        num_generations=4,
        per_device_train_batch_size=4 * GROUPS_PER_STEP,
        max_seq_length=128,
        max_completion_length=16,
        ebft_adaptive_min_tokens=8,
        use_peft=True,
        lora_r=4,
        max_staleness=max_staleness,
        rollout_loop="tools.benchmarks.sleeping_loop:SleepingLoop",
        rollout_loop_kwargs={"seconds_per_group": options.rollout_seconds / GROUPS_PER_STEP},
        rollout_device="cpu",
        save_at_end=False,
        eval_at_start=False,
        eval_at_end=False,
        report_to=[],
        log_samples_steps=0,
        log_level="warning",
    )


def _rows() -> list[dict[str, object]]:
    """Prompts of a few words; what they say does not matter."""
    return [{"prompt": [{"role": "user", "content": f"Count to {n}."}], "ground_truth": f"One, two, and so on to {n}."} for n in range(64)]
