"""The metrics of a run, on rank 0: metrics.jsonl and TensorBoard."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

from ebft_ds.errors import ConfigError
from ebft_ds.monitor.jsonl import LineSink, encode, finite_or_none, last_object, plain, trim_after
from ebft_ds.monitor.keys import tensorboard_tag
from ebft_ds.monitor.reliability import Figure
from ebft_ds.monitor.tensorboard_sink import TensorBoardSink

Value = SupportsFloat | str | None
"""A number (NumPy and torch scalars included), a text, or nothing."""


class MetricsWriter:
    """Writes one object per step to `output_dir/metrics.jsonl`, and its numbers to `output_dir/tb/`.

    On resume after `start_step`, lines of later steps move to metrics.replaced.jsonl, so that steps stay strictly increasing;
    TensorBoard drops those points too. Raises ConfigError if the folder cannot be written at the start; after that a full disk
    is reported once and never ends the run.
    """

    def __init__(self, output_dir: Path, *, tensorboard: bool, start_step: int) -> None:
        path = output_dir / "metrics.jsonl"
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            self.moved_lines = trim_after(path, start_step, unique=True)
            path.touch()
            last = last_object(path)
        except OSError as error:
            raise ConfigError(f"output_dir {output_dir} cannot be written: {error.strerror}; choose another one") from error
        self._lines = LineSink(path)
        self._current: dict[str, Any] = {"step": -1}
        if last is not None:
            self._current, length = last
            self._lines.adopt_last(length)
        self._tensorboard = TensorBoardSink(output_dir / "tb", start_step=start_step) if tensorboard else None

    def write(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Write a step's values. A second call for the newest step (an evaluation after it, say) merges into its object.

        Raises ValueError for a step before the newest one. TensorBoard gets each key once a step: the first value.
        """
        newest = self._current["step"]
        if step < newest:
            raise ValueError(f"metrics of step {step} come after those of step {newest}")
        values = {key: plain(value) for key, value in metrics.items() if key != "step"}
        new = values
        if step == newest:
            new = {key: value for key, value in values.items() if key not in self._current}
            self._current |= {key: finite_or_none(value) for key, value in values.items()}
            self._lines.replace_last(encode(self._current))
        else:
            self._current = {"step": step} | {key: finite_or_none(value) for key, value in values.items()}
            self._lines.append(encode(self._current))
        if self._tensorboard is not None and (numbers := _numbers(new)):
            self._tensorboard.scalars(step, {tensorboard_tag(key): value for key, value in numbers.items()})

    def write_text(self, tag: str, text: str, step: int = 0) -> None:
        """A text for TensorBoard alone (the configuration, say), shown as it is."""
        if self._tensorboard is not None:
            self._tensorboard.text(tag, "\n".join(f"    {line}" for line in text.splitlines()), step)

    def histogram(self, tag: str, values: Sequence[float], step: int) -> None:
        """A distribution for TensorBoard alone."""
        if self._tensorboard is not None:
            self._tensorboard.histogram(tag, values, step)

    def figure(self, tag: str, figure: Figure, step: int) -> None:
        """An image for TensorBoard alone (`draw_reliability`, say)."""
        if self._tensorboard is not None:
            self._tensorboard.figure(tag, figure, step)

    def close(self) -> None:
        self._lines.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _numbers(metrics: Mapping[str, Value]) -> dict[str, float]:
    return {key: float(value) for key, value in metrics.items() if isinstance(value, int | float) and not math.isinf(value)}
