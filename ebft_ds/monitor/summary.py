"""What an evaluation on held-out prompts found, and the table of before and after."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

from rich.table import Table


@dataclass(frozen=True)
class EvalResult:
    """Means over held-out prompts. NaN: not measured (the unbiased loss needs two completions a prompt)."""

    alignment: float
    diversity: float
    cfm_loss: float
    fm_loss_unbiased: float
    pooling: str
    """The trained one."""
    cfm_loss_other: float
    fm_loss_unbiased_other: float
    other_pooling: str
    reference_ce: float
    """Nats per reference token."""
    char_ngram_f: float
    mean_length: float
    """Tokens."""
    reference_mean_length: float
    ended_share: float
    """Completions that ended by a stop token."""
    distinct_share: float
    """Different completions among a prompt's, mean over prompts."""
    prompts: int
    completions: int

    def to_metrics(self) -> dict[str, float]:
        """The numbers as `eval/*` keys."""
        return {f"eval/{field.name}": getattr(self, field.name) for field in fields(self) if field.type != "str"}


class _Row(NamedTuple):
    label: Callable[[EvalResult], str]
    value: Callable[[EvalResult], float]
    badness: Callable[[EvalResult], float] | None
    """What should fall; None: neither direction is better by itself."""


_ROWS = (
    _Row(lambda r: "alignment (higher)", lambda r: r.alignment, lambda r: -r.alignment),
    _Row(lambda r: "diversity term", lambda r: r.diversity, None),
    _Row(lambda r: f"cfm_loss, {r.pooling} (lower)", lambda r: r.cfm_loss, lambda r: r.cfm_loss),
    _Row(lambda r: f"fm_loss_unbiased, {r.pooling} (lower)", lambda r: r.fm_loss_unbiased, lambda r: r.fm_loss_unbiased),
    _Row(lambda r: f"cfm_loss, {r.other_pooling} (lower)", lambda r: r.cfm_loss_other, lambda r: r.cfm_loss_other),
    _Row(lambda r: f"fm_loss_unbiased, {r.other_pooling} (lower)", lambda r: r.fm_loss_unbiased_other, lambda r: r.fm_loss_unbiased_other),
    _Row(lambda r: "reference cross-entropy (lower)", lambda r: r.reference_ce, lambda r: r.reference_ce),
    _Row(lambda r: "character trigram F (higher)", lambda r: r.char_ngram_f, lambda r: -r.char_ngram_f),
    _Row(
        lambda r: f"mean length (reference {r.reference_mean_length:.1f})",
        lambda r: r.mean_length,
        lambda r: abs(r.mean_length - r.reference_mean_length),
    ),
    _Row(lambda r: "ended share (higher)", lambda r: r.ended_share, lambda r: -r.ended_share),
    _Row(lambda r: "distinct share", lambda r: r.distinct_share, None),
)


def render_before_after(before: EvalResult | None, after: EvalResult) -> Table:
    """Both results side by side, with an arrow that says better or worse. Without `before`, only the values after."""
    table = Table(title=f"held-out: {after.prompts} prompts, {after.completions} completions", title_justify="left")
    table.add_column("measure", no_wrap=True)
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in _ROWS:
        new = row.value(after)
        if before is None:
            table.add_row(row.label(after), "-", _number(new), "-", "")
            continue
        old = row.value(before)
        table.add_row(row.label(after), _number(old), _number(new), _number(new - old, "+.4f"), _verdict(row, before, after))
    return table


def _number(value: float, spec: str = ".4f") -> str:
    return "-" if math.isnan(value) else format(value, spec)


def _verdict(row: _Row, before: EvalResult, after: EvalResult) -> str:
    if row.badness is None:
        return ""
    change = row.badness(after) - row.badness(before)
    arrow = "↑" if row.value(after) > row.value(before) else "↓"
    if math.isnan(change) or change == 0:
        return ""
    return f"[green]{arrow} better[/green]" if change < 0 else f"[red]{arrow} worse[/red]"
