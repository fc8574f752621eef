"""What a step's loss is divided by: counts over all ranks and micro-batches (METHOD section 4)."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from ebft_ds.errors import ConfigError


@dataclass(frozen=True)
class LossDenominators:
    """Counts of one optimizer step. Count each part of a batch once, add the parts with `+` (or all-reduce the three counts)."""

    tokens: int
    """Trained completion tokens."""
    sequences: int
    """Completions with at least one trained token."""
    rows: int
    """All completions of the step, those without trained tokens included; dummies are not."""
    max_completion_length: int
    """The run's token budget per completion; the same in every part."""

    @classmethod
    def count(
        cls,
        mask: Bool[Tensor, "b t"] | Float[Tensor, "b t"],
        max_completion_length: int,
        *,
        real_rows: Bool[Tensor, " b"] | None = None,
    ) -> LossDenominators:
        """Count a micro-batch from its mask of trained tokens (nonzero at them).

        Args:
            real_rows: False for the padding rows of a lockstep plan, whose mask is empty; default: every row is real.
        """
        trained = mask.bool()
        rows = trained.shape[0] if real_rows is None else int(real_rows.sum())
        return cls(int(trained.sum()), int(trained.any(dim=1).sum()), rows, max_completion_length)

    def __add__(self, other: LossDenominators) -> LossDenominators:
        """Counts of two disjoint parts of the same step.

        Raises:
            ConfigError: parts of runs with different max_completion_length.
        """
        if self.max_completion_length != other.max_completion_length:
            raise ConfigError(
                f"max_completion_length differs between parts of a step: {self.max_completion_length} and {other.max_completion_length}"
            )
        return LossDenominators(
            self.tokens + other.tokens, self.sequences + other.sequences, self.rows + other.rows, self.max_completion_length
        )
