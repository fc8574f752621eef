"""Losses of a reward model on preferences. Pure functions of rewards; half-precision rewards are widened to float32 first.

A row holds K >= 2 responses, best first, with rewards r_1..r_K. For a pair (i better than j) of a row with margin m

    z = r_i - r_j - m                            m: by how much i should lead; 0 unless the row has one
    q = p (1 - e) + (1 - p) e                    p: preference of the row (1: i is better, 0.5: a tie), e: label_smoothing

    bradley_terry   q softplus(-z) + (1 - q) softplus(z)
    hinge           q max(0, h - z) + (1 - q) max(0, h + z)          h: hinge_margin
    plackett_luce   sum_k [logsumexp(r_k..r_K) - r_k]                one term a row; for K = 2 it is bradley_terry, m and p included

The margin is an offset of the log-odds, P(i over j) = sigmoid(z), so that (i, j, m, p) and (j, i, -m, 1 - p) are one loss. A margin or
preference is of two responses: rows with more of them have neither. Bradley-Terry and hinge take all K (K - 1) / 2 ordered pairs of a
row, each with the same weight. Centring adds coef * (r_i + r_j)^2 per pair, for plackett_luce its mean over the row's pairs.

Sources: Bradley and Terry 1952; margin: Llama 2 (arXiv 2307.09288); centring: Eisenstein et al. 2023 (arXiv 2312.09244); Plackett 1975.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import relu, softplus

from ebft_ds.config.sections import RewardSection
from ebft_ds.errors import ConfigError, DataError

PreferenceKind = Literal["bradley_terry", "hinge", "plackett_luce"]


def pairwise_loss(
    chosen: Float[Tensor, " b"],
    rejected: Float[Tensor, " b"],
    *,
    margin: Float[Tensor, " b"] | None = None,
    center_rewards_coefficient: float | None = None,
) -> Float[Tensor, ""]:
    """Bradley-Terry: mean softplus(-(r_c - r_r - margin)) + coef * mean((r_c + r_r)^2), finite at any gap (METHOD section 7).

    Args:
        chosen, rejected: rewards [B], B >= 1. Their difference is taken in float32 or wider.
        margin: [B], default 0.

    Returns:
        A scalar, float32 or wider.

    Raises:
        ValueError: any other shape. [B, 1] against [B] would broadcast to B^2 pairs.
    """
    if chosen.dim() != 1 or not chosen.numel() or rejected.shape != chosen.shape:
        raise ValueError(f"chosen and rejected are rewards [B] with B >= 1, not {list(chosen.shape)} and {list(rejected.shape)}")
    if margin is not None and margin.shape != chosen.shape:
        raise ValueError(f"margin is [B] as the rewards, not {list(margin.shape)} for {list(chosen.shape)}")
    better, worse = _wide(chosen), _wide(rejected)
    gap = better - worse
    loss = softplus(-(gap if margin is None else gap - margin.to(gap.dtype))).mean()
    if center_rewards_coefficient:
        loss = loss + center_rewards_coefficient * (better + worse).square().mean()
    return loss


@dataclass(frozen=True)
class PreferenceLoss:
    """The loss of a run, as sums: every rank divides by the number of terms over all ranks."""

    kind: PreferenceKind = "bradley_terry"
    label_smoothing: float = 0.0
    hinge_margin: float = 1.0
    center_rewards_coefficient: float | None = None

    def __post_init__(self) -> None:
        if self.kind == "plackett_luce" and self.label_smoothing:
            raise ConfigError("label_smoothing is of pairs: it does not work with reward_loss_type: plackett_luce")

    @classmethod
    def of(cls, reward: RewardSection) -> PreferenceLoss:
        """The loss that the recipe asks for."""
        return cls(reward.reward_loss_type, reward.label_smoothing, reward.hinge_margin, reward.center_rewards_coefficient)

    def terms(self, counts: Sequence[int]) -> int:
        """What the sums are over: pairs, or (plackett_luce) rows. `counts`: responses of each row."""
        return len(counts) if self.kind == "plackett_luce" else sum(k * (k - 1) // 2 for k in counts)

    def sums(
        self, rewards: Float[Tensor, " n"], counts: Sequence[int], margins: Sequence[float], preferences: Sequence[float]
    ) -> tuple[Float[Tensor, ""], float]:
        """Sum of the losses of some rows, and their `terms`.

        Args:
            rewards: row by row, best response first; n is the sum of `counts`. Without rows the sum is 0 and has a gradient of zeros:
                a rank without work still takes part in the backward.
            counts: responses of each row, at least 2.
            margins, preferences: one of each per row.

        Raises:
            DataError: a margin, or a preference other than 1, of a row of more than two responses.
            ValueError: lengths that do not fit together.
        """
        if not counts:
            return 0.0 * _wide(rewards).sum(), 0.0
        _check(rewards, counts, margins, preferences)
        values = _wide(rewards)
        pairs = _Pairs.of(counts, values.device)
        if self.kind == "plackett_luce" and max(counts) > 2:
            total = _plackett_luce(values, counts, margins, preferences)
        else:
            z = values[pairs.better] - values[pairs.worse] - _per_pair(margins, pairs, values)
            total = self._pair_losses(z, self._labels(preferences, pairs, values)).sum()
        if self.center_rewards_coefficient:
            squares = (values[pairs.better] + values[pairs.worse]).square()
            if self.kind == "plackett_luce":
                squares = squares / torch.tensor([k * (k - 1) / 2 for k in counts], dtype=values.dtype, device=values.device)[pairs.row]
            total = total + self.center_rewards_coefficient * squares.sum()
        return total, float(self.terms(counts))

    def row(self, rewards: Sequence[float], *, margin: float = 0.0, preference: float = 1.0) -> tuple[float, float]:
        """(loss, terms) of one row in float64, for evaluation."""
        total, terms = self.sums(torch.tensor(rewards, dtype=torch.float64), [len(rewards)], [margin], [preference])
        return float(total), terms

    def _labels(self, preferences: Sequence[float], pairs: _Pairs, like: Tensor) -> Tensor:
        """q of every pair."""
        p = _per_pair(preferences, pairs, like)
        return p * (1.0 - self.label_smoothing) + (1.0 - p) * self.label_smoothing

    def _pair_losses(self, z: Float[Tensor, " pairs"], q: Float[Tensor, " pairs"]) -> Float[Tensor, " pairs"]:
        if self.kind == "hinge":
            return q * relu(self.hinge_margin - z) + (1.0 - q) * relu(self.hinge_margin + z)
        return q * softplus(-z) + (1.0 - q) * softplus(z)


@dataclass(frozen=True)
class _Pairs:
    """All (better, worse) pairs of some rows, as positions in their rewards, and the row of each."""

    better: Int[Tensor, " pairs"]
    worse: Int[Tensor, " pairs"]
    row: Int[Tensor, " pairs"]

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device) -> _Pairs:
        found: list[tuple[int, int, int]] = []
        start = 0
        for row, count in enumerate(counts):
            found += [(start + i, start + j, row) for i in range(count) for j in range(i + 1, count)]
            start += count
        better, worse, row_of = torch.tensor(found, dtype=torch.int64, device=device).unbind(dim=1)
        return cls(better, worse, row_of)


def _wide(rewards: Tensor) -> Tensor:
    """In bf16, 8.01 and 8.02 are equal; their difference must not be taken there."""
    return rewards if rewards.dtype in (torch.float32, torch.float64) else rewards.float()


def _per_pair(values: Sequence[float], pairs: _Pairs, like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[pairs.row]


def _plackett_luce(values: Tensor, counts: Sequence[int], margins: Sequence[float], preferences: Sequence[float]) -> Tensor:
    """Row by row: rows are few in a micro-batch, and their K differ."""
    total = values.new_zeros(())
    for row, count, margin, p in zip(values.split(list(counts)), counts, margins, preferences, strict=True):
        if count == 2:
            z = row[0] - row[1] - margin
            total = total + p * softplus(-z) + (1.0 - p) * softplus(z)
        else:
            total = total + sum(torch.logsumexp(row[k:], dim=0) - row[k] for k in range(count - 1))
    return total


def _check(rewards: Tensor, counts: Sequence[int], margins: Sequence[float], preferences: Sequence[float]) -> None:
    if rewards.dim() != 1 or rewards.numel() != sum(counts) or min(counts) < 2:
        raise ValueError(
            f"rewards have shape {list(rewards.shape)}; rows of {list(counts)} responses need [{sum(counts)}], two or more each"
        )
    if not len(counts) == len(margins) == len(preferences):
        raise ValueError(f"{len(counts)} rows with {len(margins)} margins and {len(preferences)} preferences: one of each per row")
    for row, (count, margin, preference) in enumerate(zip(counts, margins, preferences, strict=True)):
        if count > 2 and (margin != 0.0 or preference != 1.0):
            raise DataError(
                f"row {row} of the batch ranks {count} responses and has margin {margin:g}, preference {preference:g}: "
                "both are of two responses; leave them out, or split the row into pairs"
            )
