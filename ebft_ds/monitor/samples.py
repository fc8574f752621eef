"""Sample completions: samples.jsonl, and the table of a few of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.table import Table
from rich.text import Text

from ebft_ds.errors import DataError
from ebft_ds.monitor.jsonl import LineSink, encode, read_json_lines, trim_after
from ebft_ds.monitor.visible_text import visible

_MAX_TEXT = 400


class SampleRow(msgspec.Struct, frozen=True):
    """One completion with its scores; None where a score does not exist."""

    step: int
    prompt_id: int
    index: int
    """Of the completion in its group."""
    prompt: str
    completion: str
    reference: str
    reward: float | None
    alignment: float | None
    diversity: float | None
    advantage: float | None
    length: int
    """Tokens."""
    finish_reason: str
    version: int | None
    """Oldest policy version among its tokens."""


class SampleLog:
    """Appends rows to samples.jsonl. With `start_step`, rows of later steps (of a run that died after its last save) move out first."""

    def __init__(self, path: Path, *, start_step: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if start_step is not None:
            trim_after(path, start_step, unique=False)
        self._lines = LineSink(path)

    def append(self, rows: Sequence[SampleRow]) -> None:
        """Write rows. A full disk is reported once and does not raise."""
        for row in rows:
            self._lines.append(encode(msgspec.structs.asdict(row)))

    def close(self) -> None:
        self._lines.close()


def read_samples(path: Path, step: int | None = None, limit: int | None = None) -> list[SampleRow]:
    """Rows of a samples.jsonl, of one step if given, at most `limit`, in file order. Raises DataError for a file that is not one."""
    rows: list[SampleRow] = []
    for number, value in enumerate(read_json_lines(path), start=1):
        if step is not None and value.get("step") != step:
            continue
        if limit is not None and len(rows) >= limit:
            break
        try:
            rows.append(msgspec.convert(value, SampleRow))
        except msgspec.ValidationError as error:
            raise DataError(f"{path}, line {number} is not a sample: {error}") from None
    return rows


def render_table(rows: Sequence[SampleRow], *, title: str | None = None) -> Table:
    """A table of completions beside their references. Texts are shown on one line, controls made visible, never read as markup."""
    table = Table(title=Text(title) if title is not None else None, show_lines=True, expand=True)
    for heading in ("prompt", "completion", "reference"):
        table.add_column(heading, ratio=3, overflow="fold")
    table.add_column("scores", no_wrap=True)
    for row in rows:
        texts = [Text(visible(text, _MAX_TEXT)) for text in (row.prompt, row.completion, row.reference)]
        table.add_row(*texts, Text(_scores(row)))
    return table


def _scores(row: SampleRow) -> str:
    """One line per value: narrow, so that the texts keep the width."""
    values = {"reward": row.reward, "align": row.alignment, "diverse": row.diversity, "advant": row.advantage}
    lines = [f"{name:<7} {value:>8.3f}" for name, value in values.items() if value is not None]
    version = "" if row.version is None else f", v{row.version}"
    return "\n".join([*lines, f"{row.length} tokens", f"{visible(row.finish_reason)}{version}"])
