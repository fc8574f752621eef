"""What became of preference rows on their way to tokens."""

from __future__ import annotations

import msgspec


class EncodingCounts(msgspec.Struct):
    """Counts of rows, unless a line says responses. A row may stand under several."""

    rows: int = 0
    used: int = 0
    bad_rows: int = 0
    identical: int = 0
    """All responses encode to the same tokens."""
    empty: int = 0
    """A response says nothing, or there is no token at all."""
    dropped: int = 0
    """Over max_length, left out."""
    truncated: int = 0
    """Over max_length, cut."""
    responses_cut: int = 0
    """Responses that lost tokens of their own, the prompt's not being enough."""
    end_restored: int = 0
    """Responses whose end token was put back after the cut."""
    eos_added: int = 0
    """Responses whose text or template brought no end token."""
    without_end: int = 0
    """Responses of tokenised rows that do not end with an end token; they are taken as they are."""
    no_common_prompt: int = 0
    """Responses that have not even their first token in common."""
    held_out_duplicates: int = 0
    """Training rows left out because their prompt is held out for evaluation."""
    first_bad: str | None = None

    def merge(self, other: EncodingCounts) -> None:
        for name in self.__struct_fields__:
            if name != "first_bad":
                setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first_bad = self.first_bad or other.first_bad

    def summary(self) -> str:
        """One line with every count that is not zero."""
        counts = [
            (self.bad_rows, f"bad, skipped (first: {self.first_bad})"),
            (self.identical, "with identical responses"),
            (self.empty, "with an empty response"),
            (self.dropped, "over max_length, left out"),
            (self.truncated, "over max_length, cut"),
            (self.responses_cut, "responses cut themselves"),
            (self.end_restored, "responses given their end token back"),
            (self.eos_added, "responses closed with an end token"),
            (self.without_end, "tokenised responses without an end token"),
            (self.no_common_prompt, "without a common prompt"),
            (self.held_out_duplicates, "left out: their prompt is held out"),
        ]
        return "; ".join([f"{self.used} of {self.rows} preference rows used"] + [f"{count} {text}" for count, text in counts if count])
