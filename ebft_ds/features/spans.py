"""Which hidden states make up which feature: flat positions, cut into spans that are summed and then averaged.

In a row with a shared prompt, a feature over prompt and completion is made of two spans, and the prompt's is summed once for all
branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ebft_ds.errors import ConfigError
from ebft_ds.packing.rows import Place

EmbedMethod = Literal["last_token", "mean_pooling", "completion_mean", "concat"]


@dataclass(frozen=True)
class TokenRange:
    """Tokens a feature is taken from, in the sequence's own positions (0: first prompt token)."""

    start: int
    length: int
    prompt_start: int = 0
    """Where `mean_pooling` begins."""

    def ranges(self, method: str) -> list[tuple[int, int]]:
        """[(first, end)] of each of the method's slots; concat has three. Length 0: empty slots."""
        end = self.start + self.length
        if method in ("completion_mean", "mean_pooling"):
            first = self.prompt_start if method == "mean_pooling" and self.length else self.start
            return [(first, end)]
        if method == "last_token":
            return [(end - 1, end) if self.length else (end, end)]
        if not self.length:
            return [(end, end)] * 3
        picked = [self.start + min(self.length * quarter // 4, self.length - 1) for quarter in (1, 2, 3)]
        return [(position, position + 1) for position in picked]


@dataclass(frozen=True)
class FeatureSpans:
    """F features of P slots (concat: 3, otherwise 1), each the mean over one or two of S spans of N positions."""

    positions: Tensor
    """int64 [N]: flat positions into the rows, span by span. One dummy position where no feature wants any."""
    lengths: Tensor
    """int64 [S], their sum is N."""
    pieces: Tensor
    """int64 [F * P, 2]: the spans of each slot; S where there is none."""
    counts: Tensor
    """int64 [F * P]: tokens of each slot, 1 where there is none."""
    slots: int

    def to(self, device: torch.device | str) -> FeatureSpans:
        return FeatureSpans(self.positions.to(device), self.lengths.to(device), self.pieces.to(device), self.counts.to(device), self.slots)


def check_method(method: str) -> None:
    """ConfigError for an unknown pooling."""
    if method not in get_args(EmbedMethod):
        raise ConfigError(f"ebft_embed_method is {method!r}; use one of {', '.join(get_args(EmbedMethod))}")


def feature_spans(places: Sequence[Place], ranges: Sequence[TokenRange], method: EmbedMethod | str) -> FeatureSpans:
    """Spans of the features of the sequences at `places`, one range each.

    Raises:
        ConfigError: an unknown method.
    """
    check_method(method)
    known: dict[tuple[int, int], int] = {}
    pieces: list[list[int]] = []
    counts: list[int] = []
    for place, wanted in zip(places, ranges, strict=True):
        for first, end in wanted.ranges(method):
            pieces.append([known.setdefault(span, len(known)) for span in _flat_spans(place, first, end)])
            counts.append(max(end - first, 1))
    spans = list(known) or [(0, 1)]
    return FeatureSpans(
        positions=torch.cat([torch.arange(start, start + length) for start, length in spans]),
        lengths=torch.tensor([length for _, length in spans]),
        pieces=torch.tensor([(found + [len(spans)] * 2)[:2] for found in pieces], dtype=torch.int64).view(-1, 2),
        counts=torch.tensor(counts, dtype=torch.int64),
        slots=3 if method == "concat" else 1,
    )


def _flat_spans(place: Place, first: int, end: int) -> list[tuple[int, int]]:
    """(flat start, length) of own positions [first, end): at most a piece of the prompt and a piece of the branch."""
    boundary = min(max(place.prompt_length, first), end)
    found = [(place.flat(first), boundary - first)] if boundary > first else []
    return found + ([(place.flat(boundary), end - boundary)] if end > boundary else [])
