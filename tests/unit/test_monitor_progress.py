"""The progress line, step timing, memory, throughput."""

from __future__ import annotations

import contextlib
import io
from types import TracebackType

import pytest
from rich.console import Console
from rich.table import Table

from ebft_ds.monitor import ModelSizes, PeakMemory, ProgressReporter, StepTimer, model_flops_utilisation
from ebft_ds.monitor.progress import format_seconds
from ebft_ds.monitor.throughput import peak_flops


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), width=120, force_terminal=terminal, color_system=None, legacy_windows=False)


def text(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


METRICS = {"loss": 0.123456, "ebft/reward": 1.5, "staleness/mean": 0.25, "perf/tokens_per_s": 1234.5, "grad_norm": 9.0}


def test_plain_lines_when_not_a_terminal() -> None:
    target, clock = console(terminal=False), Clock()
    with ProgressReporter(40, 10, console=target, clock=clock) as progress:
        for step in (11, 12):
            clock.now += 30.0
            progress.update(step, METRICS)
        progress.note("[saved] a checkpoint")
    assert text(target).splitlines() == [
        "step 11/40  loss 0.1235  reward 1.5  staleness 0.25  tok/s 1234  eta 14:30",
        "step 12/40  loss 0.1235  reward 1.5  staleness 0.25  tok/s 1234  eta 14:00",
        "[saved] a checkpoint",
    ]


def test_values_not_measured_are_left_out_and_nan_is_shown() -> None:
    target = console(terminal=False)
    ProgressReporter(2, console=target, clock=Clock()).update(1, {"loss": float("nan"), "ebft/reward": None})
    assert text(target) == "step 1/2  loss nan  eta 0s\n"


def test_the_time_left_follows_the_recent_steps() -> None:
    target, clock = console(terminal=False), Clock()
    progress = ProgressReporter(100, console=target, clock=clock)
    for step, seconds in enumerate([600.0] + [1.0] * 20, start=1):
        clock.now += seconds
        progress.update(step, {})
    assert text(target).splitlines()[-1].endswith("eta 1:19")


def test_live_line_on_a_terminal_with_tables_above_it() -> None:
    target, clock = console(terminal=True), Clock()
    table = Table()
    table.add_column("completion")
    table.add_row("x")
    with ProgressReporter(4, console=target, clock=clock) as progress:
        clock.now += 2.0
        progress.update(1, METRICS)
        progress.note(table)
        progress.update(4, METRICS)
    output = text(target)
    assert "reward 1.5" in output
    assert "completion" in output
    assert "4/4" in output


@pytest.mark.parametrize(
    ("seconds", "expected"), [(-1, "0s"), (59.4, "59s"), (59.6, "1:00"), (187, "3:07"), (7387, "2:03:07"), (266580, "3d 02:03")]
)
def test_durations(seconds: float, expected: str) -> None:
    assert format_seconds(seconds) == expected


def test_timer_adds_repeats_and_starts_each_step_anew() -> None:
    clock = Clock()
    timer = StepTimer(clock=clock)
    for seconds in (1.0, 2.5):
        with timer("score"):
            clock.now += seconds
    with contextlib.suppress(RuntimeError), timer("policy"):
        clock.now += 0.5
        raise RuntimeError
    timer.add("save", 0.25)
    clock.now += 1.0
    assert timer.take() == {"time/score": 3.5, "time/policy": 0.5, "time/save": 0.25, "time/step": 5.0}
    clock.now += 2.0
    assert timer.take() == {"time/step": 2.0}


def test_timer_waits_for_the_device_before_it_reads_the_clock() -> None:
    clock = Clock()

    def synchronize() -> None:
        clock.now += 1.0

    timer = StepTimer(clock=clock, synchronize=synchronize)
    with timer("policy"):
        pass
    assert timer.take()["time/policy"] == 1.0


class Ballast:
    """Resident memory of the given size while the block runs."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __enter__(self) -> None:
        self.data = bytearray(b"x") * self.size

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        del self.data


def test_peak_memory_sees_what_is_gone_and_then_forgets_it() -> None:
    memory = PeakMemory()
    before = memory.take_gb()
    with Ballast(300_000_000):
        memory.sample()
    assert memory.take_gb() > before + 0.25
    assert memory.take_gb() < before + 0.25


def test_an_accelerators_peak_is_used_where_there_is_one() -> None:
    assert PeakMemory(lambda: 3_000_000_000).take_gb() == 3.0


def test_flops() -> None:
    full = ModelSizes(blocks=100, trained_blocks=100, head=30, trained_head=30, feature_blocks=50)
    assert full.step_flops(tokens=10, head_positions=0, feature_tokens=0) == 10 * 600
    assert full.step_flops(tokens=10, head_positions=7, feature_tokens=4) == 10 * 600 + 7 * 180 + 4 * 100
    adapter = ModelSizes(blocks=100, trained_blocks=2, head=30, trained_head=0, feature_blocks=50)
    assert adapter.step_flops(tokens=10, head_positions=7, feature_tokens=4) == 10 * 404 + 7 * 120 + 4 * 100
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert model_flops_utilisation(989e12, 2.0, devices=2, device_name="NVIDIA H200") == 0.25
    assert model_flops_utilisation(1e12, 1.0, devices=1, device_name=None) is None
    assert model_flops_utilisation(1e12, 1.0, devices=1, device_name="Some CPU") is None
