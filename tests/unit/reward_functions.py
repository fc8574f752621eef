"""Reward functions that the tests name as `tests.unit.reward_functions:...`."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import subprocess
import time
from typing import Any

HERE_IS_NO_FUNCTION = 3


def length(completions: list[str], **_: Any) -> list[float | None]:
    return [float(len(text)) if text else None for text in completions]


def reference_overlap(prompts: list[str], completions: list[str], ground_truth: list[str], completion_ids: list[list[int]]) -> list[float]:
    return [float(sum(ids)) + (text == truth) for text, truth, ids in zip(completions, ground_truth, completion_ids, strict=True)]


def process_and_size(completions: list[str], **_: Any) -> list[float]:
    return [os.getpid() + len(completions) / 1000] * len(completions)


def hang(completions: list[str], **_: Any) -> list[float]:
    if "hang" in completions:
        time.sleep(600)
    return [0.0] * len(completions)


def die(completions: list[str], **_: Any) -> list[float]:
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def fail(completions: list[str], **_: Any) -> list[float]:
    raise KeyError("no such answer")


def short(completions: list[str], **_: Any) -> list[float]:
    return [1.0]


def infinite(completions: list[str], **_: Any) -> list[float]:
    return [math.inf] * len(completions)


def no_number(completions: list[str], **_: Any) -> list[Any]:
    return ["good"] * len(completions)


def with_alarm(completions: list[str], **_: Any) -> list[float]:
    """Signals need the main thread."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(0)
    return [1.0] * len(completions)


def _square(value: int) -> int:
    return value * value


def with_processes(completions: list[str], **_: Any) -> list[float]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return [float(v) for v in pool.map(_square, range(len(completions)))]


def leaves_a_child_and_hangs(completions: list[str], **_: Any) -> list[float]:
    child = subprocess.Popen(["sleep", "600"])
    with open(completions[0], "w") as file:
        file.write(str(child.pid))
    time.sleep(600)
    return []


class Scaled:
    """A callable object."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [self.scale * len(text) for text in completions]


def nap(completions: list[str], **_: Any) -> list[float]:
    time.sleep(0.5)
    return [0.0] * len(completions)


def always_hangs(completions: list[str], **_: Any) -> list[float]:
    time.sleep(600)
    return []
