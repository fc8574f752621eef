"""The progress of a scoring run: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from ebft_ds.monitor.console import error_console
from ebft_ds.monitor.progress import format_seconds

PLAIN_SECONDS = 10.0
"""Between two plain lines."""


class ScoreProgress:
    """Counts input lines of `total`; `done` of them were there before."""

    def __init__(self, total: int, done: int, *, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console if console is not None else error_console()
        self._total, self._start, self._clock = total, done, clock
        self._since = self._told = clock()
        self._live: Progress | None = None
        if self._console.is_terminal:
            columns = (TextColumn("score"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn())
            self._live = Progress(*columns, console=self._console)
            self._task = self._live.add_task("score", total=total, completed=done)
            self._live.start()

    def update(self, line: int) -> None:
        """`line`: number of the last input line that is done."""
        now = self._clock()
        if self._live is not None:
            self._live.update(self._task, completed=line)
        elif now - self._told >= PLAIN_SECONDS or line >= self._total:
            self._told = now
            per_line = (now - self._since) / max(1, line - self._start)
            self.note(f"line {line} of {self._total}, {format_seconds(per_line * (self._total - line))} left")

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(Text(text), soft_wrap=True)

    def __enter__(self) -> ScoreProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
