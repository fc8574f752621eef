"""What a forward is estimated to cost: a part per token, and a part per pair of tokens that attend to each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ebft_ds.errors import ConfigError

Counts = npt.NDArray[np.int64]

UNITS_PER_TOKEN = 256
"""Costs are summed as integers of 1/256 token: a sum of floats depends on its order and on the processor, and all ranks must come to
the same plan."""


@dataclass(frozen=True)
class TokenCost:
    """Cost of t tokens with p (query, key) pairs, in tokens: t + per_pair * p."""

    per_pair: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.per_pair < float("inf"):
            raise ConfigError(f"the cost of an attention pair is {self.per_pair}: it must be finite and not negative")

    @classmethod
    def of_model(cls, *, attention_width: int, layer_parameters: int) -> TokenCost:
        """From the operations of one layer: 2 per parameter and token, 4 * attention_width per pair (scores, then weighted values).

        Args:
            attention_width: query heads * head dimension.
            layer_parameters: of one block; of a mixture of experts those that one token uses.
        """
        if attention_width < 1 or layer_parameters < 1:
            raise ConfigError(f"a layer of {layer_parameters} parameters with attention width {attention_width} has no cost")
        return cls(4.0 * attention_width / (2.0 * layer_parameters))

    def units(self, tokens: Counts, pairs: Counts) -> Counts:
        """int64, in 1/256 token."""
        units: Counts = np.rint((tokens + self.per_pair * pairs) * UNITS_PER_TOKEN).astype(np.int64)
        return units


TOKENS_ONLY = TokenCost()


def causal_pairs(tokens: Counts) -> Counts:
    """(query, key) pairs within sequences of so many tokens."""
    return tokens * (tokens + 1) // 2


def branch_pairs(prompt_tokens: Counts, branch_tokens: Counts) -> Counts:
    """Pairs whose query lies in a branch behind a prompt."""
    return branch_tokens * prompt_tokens + causal_pairs(branch_tokens)
