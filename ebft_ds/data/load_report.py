"""Counts of what became of a source's rows."""

from __future__ import annotations

import msgspec


class LoadReport(msgspec.Struct):
    """What became of the source's rows."""

    source: str
    rows: int = 0
    usable: int = 0
    bad_rows: int = 0
    overlong_prompts: int = 0
    overlong_references: int = 0
    """Reference alone, or prompt plus reference, over the limit."""
    remaining_turns: int = 0
    """Rows whose further turns are ignored."""
    held_out_duplicates: int = 0
    """Training rows left out because their prompt is held out for evaluation."""
    chat_rows: int = 0
    first_bad: str | None = None
    first_overlong: str | None = None

    def summary(self) -> str:
        """One line with every count that is not zero."""
        counts = [
            (self.bad_rows, f"bad, skipped (first: {self.first_bad})"),
            (self.overlong_prompts + self.overlong_references, f"over-long, dropped (first: {self.first_overlong})"),
            (self.held_out_duplicates, "left out: their prompt is held out"),
        ]
        parts = [f"{self.usable} of {self.rows} rows usable"] + [f"{count} {text}" for count, text in counts if count]
        return f"{self.source}: " + "; ".join(parts)
