"""Two ways to the same numbers: checked to be the same, timed in turns, then their peak memory."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tools.benchmarks.memory import PeakMemory
from tools.benchmarks.profiling import print_profile
from tools.benchmarks.turns import Measurement, Report, in_turns, medians, ratio

TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Largest relative difference of any tensor. Float32 shows that two ways are the same; a narrower type only that none is broken."""


@dataclass(frozen=True)
class Way:
    """One way of computing. What `run` returns by name must equal the other way's, unless there is a `check`."""

    name: str
    run: Callable[[], Mapping[Any, Tensor] | None]
    facts: Measurement
    """Known without measuring: tokens, operations (gflop)."""
    check: Callable[[], Mapping[str, Tensor]] | None = None
    """Gives what to compare, so that `run` is free of what only the comparison needs."""
    release: Callable[[], None] | None = None
    """Lets go of what the last run left behind (gradients), so that the next one's memory counts whole."""


def compare(
    benchmark: str,
    settings: dict[str, str | int | float],
    pairs: list[tuple[Way, Way]],
    options: argparse.Namespace,
    *,
    label: bool = False,
) -> Report:
    """Measures every pair (plain, ours). With `label` the ratios say which way of ours they are about.

    Raises:
        SystemExit: the ways of a pair do not give the same numbers.
    """
    torch.set_num_threads(options.threads)
    ways = [way for pair in pairs for way in pair]
    differences = {id(ours): _difference(plain, ours, TOLERANCE[options.dtype]) for plain, ours in pairs}  # the warm-up as well
    samples = in_turns({way.name: lambda way=way: _times(way, options.device) for way in ways}, options.rounds)  # type: ignore[misc]
    for way in ways:
        found = way.facts | {"peak_extra_mb": _peak(way)}
        for sample in samples[way.name]:
            sample |= found
    ratios: dict[str, float] = {}
    for plain, ours in pairs:
        suffix = f" ({ours.name})" if label else ""
        speed = 1 / ratio(samples, "seconds", ours.name, plain.name)
        ratios[f"speed, times the plain way{suffix}"] = speed
        ratios[f"speed by CPU time{suffix}"] = 1 / ratio(samples, "cpu_seconds", ours.name, plain.name)
        for fact in ("gflop", "tokens"):
            if fact in plain.facts:
                bound = plain.facts[fact] / ours.facts[fact]
                ratios[f"bound of the speed by {fact}{suffix}"] = bound
                ratios[f"share of the bound by {fact}{suffix}"] = speed / bound
        ratios[f"peak memory above weights, of the plain way's{suffix}"] = ratio(samples, "peak_extra_mb", ours.name, plain.name)
        ratios[f"largest relative difference of the numbers{suffix}"] = differences[id(ours)]
    if options.profile:
        for way in ways:
            print_profile(way.name, way.run)
    return Report(benchmark, settings, medians(samples), samples, ratios)


def _difference(plain: Way, ours: Way, tolerance: float) -> float:
    """Largest |a - b| / |b| over the tensors (2-norms)."""
    expected, got = (plain.check or plain.run)(), (ours.check or ours.run)()
    assert expected is not None
    assert got is not None
    if set(expected) != set(got):
        raise SystemExit(f"{plain.name} and {ours.name} give different things: {sorted(set(expected) ^ set(got))[:5]}")
    worst = 0.0
    for name, value in expected.items():
        difference = float((got[name].double() - value.double()).norm() / value.double().norm().clamp_min(1e-30))
        if not difference <= tolerance:  # NaN fails too
            raise SystemExit(f"{ours.name}: {name} differs from {plain.name} by {difference:.1e} (allowed: {tolerance:.0e})")
        worst = max(worst, difference)
    return worst


def _times(way: Way, device: str) -> Measurement:
    """Wall clock, and the CPU time of all threads: it hardly grows where other processes take the cores away."""
    _wait(device)
    started, cpu_started = time.perf_counter(), time.process_time()
    way.run()
    _wait(device)
    return {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu_started}


def _peak(way: Way) -> float:
    if way.release is not None:
        way.release()
    with PeakMemory() as peak:
        way.run()
    return peak.extra_mb


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
