"""The progress line of a run on rank 0: live on a terminal, one plain line a step elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from ebft_ds.monitor.console import error_console

_SHOWN = {"loss": "loss", "ebft/reward": "reward", "staleness/mean": "staleness", "perf/tokens_per_s": "tok/s"}
_RECENT_STEPS = 20


class ProgressReporter:
    """Shows step, loss, reward, staleness, tokens/s and the time left (from the mean of the last 20 steps)."""

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console if console is not None else error_console()
        self._total, self._clock = total_steps, clock
        self._step, self._since = start_step, clock()
        self._seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._live: Progress | None = None
        if self._console.is_terminal:
            columns = (
                TextColumn("train"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}", markup=False),
            )
            self._live = Progress(*columns, console=self._console)
            self._task = self._live.add_task("train", total=total_steps, completed=start_step, status="")
            self._live.start()

    def update(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Report that `step` is done. Values that the step did not measure are left out."""
        now = self._clock()
        if step > self._step:
            self._seconds.append((now - self._since) / (step - self._step))
        self._step, self._since = step, now
        status = self._status(metrics)
        if self._live is not None:
            self._live.update(self._task, completed=step, status=status)
        else:
            self._console.print(Text(f"step {step}/{self._total}  {status}"), soft_wrap=True)

    def note(self, content: RenderableType) -> None:
        """Print something above the progress line. A string is printed as it is, without markup."""
        self._console.print(Text(content) if isinstance(content, str) else content)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def __enter__(self) -> ProgressReporter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _status(self, metrics: Mapping[str, float | None]) -> str:
        shown = [f"{label} {value:.4g}" for key, label in _SHOWN.items() if (value := metrics.get(key)) is not None]
        if self._seconds:
            left = (self._total - self._step) * sum(self._seconds) / len(self._seconds)
            shown.append(f"eta {format_seconds(left)}")
        return "  ".join(shown)


def format_seconds(seconds: float) -> str:
    """`59s`, `3:07`, `2:03:07` or `3d 02:03`."""
    whole = max(0, round(seconds))
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02d}:{minute:02d}"
    if hours:
        return f"{hours}:{minute:02d}:{second:02d}"
    return f"{minutes}:{second:02d}" if minutes else f"{second}s"
