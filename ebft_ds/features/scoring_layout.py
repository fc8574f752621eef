"""The distinct sequences of a step's groups whose features are wanted, and which sample has which of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ebft_ds.errors import DataError
from ebft_ds.features.eos import FeatureEos, feature_span
from ebft_ds.features.spans import TokenRange
from ebft_ds.types import RolloutGroup


@dataclass(frozen=True)
class FeatureSequence:
    """A prompt and as much of a completion or reference as its feature depends on, and the tokens that the feature is taken from."""

    group: int
    prompt_ids: list[int]
    completion_ids: list[int]
    tokens: TokenRange


@dataclass(frozen=True)
class ScoringLayout:
    """Sequences in group order, a group's reference before its completions."""

    sequences: list[FeatureSequence]
    reference: list[int]
    """Group -> sequence of its reference."""
    completion: list[list[int | None]]
    """Group, sample -> sequence (shared by equal completions, maybe the reference's), None for an empty one."""

    def members(self, group: int) -> range:
        """The group's sequences."""
        end = self.reference[group + 1] if group + 1 < len(self.reference) else len(self.sequences)
        return range(self.reference[group], end)

    def mask(self) -> Tensor:
        """bool [G, n]: completions with a feature."""
        return torch.tensor([[i is not None for i in row] for row in self.completion])


def scoring_layout(groups: Sequence[RolloutGroup], eos_ids: Collection[int], which: FeatureEos) -> ScoringLayout:
    """What must be scored of these groups.

    Raises:
        DataError: a reference without a token, naming its prompt.
    """
    sequences: list[FeatureSequence] = []
    references: list[int] = []
    completions: list[list[int | None]] = []
    for g, group in enumerate(groups):
        distinct = _DistinctSequences(g, group.prompt.token_ids, len(sequences), [], {})
        reference = distinct.add(group.prompt.reference_ids, eos_ids, which)
        if reference is None:
            raise DataError(f"prompt {group.prompt.prompt_id} has an empty reference: nothing to match")
        references.append(reference)
        completions.append([distinct.add(rollout.token_ids, eos_ids, which) for rollout in group.rollouts])
        sequences.extend(distinct.sequences)
    return ScoringLayout(sequences, references, completions)


@dataclass(frozen=True)
class _DistinctSequences:
    """One group's sequences, each once.

    Equal completions share one feature vector: two forwards of the same tokens would differ by rounding, and whitening would blow that
    difference up into a signal. Equal in the tokens that the feature depends on: under `exclude`, one that was cut just before its EOS
    is the same as one that was not.
    """

    group: int
    prompt_ids: list[int]
    offset: int
    sequences: list[FeatureSequence]
    known: dict[tuple[int, ...], int]

    def add(self, ids: list[int], eos_ids: Collection[int], which: FeatureEos) -> int | None:
        """Number of the sequence with this completion; None without a feature."""
        span = feature_span(len(self.prompt_ids), ids, eos_ids, which)
        if span is None:
            return None
        seen = ids[: max(sum(span) - len(self.prompt_ids), 0)]
        key = tuple(seen)
        if key not in self.known:
            self.known[key] = self.offset + len(self.sequences)
            # Only an end token under `exclude`: the feature is the prompt's last, and the branch keeps a token so that it is none.
            self.sequences.append(FeatureSequence(self.group, self.prompt_ids, seen or ids[:1], TokenRange(*span)))
        return self.known[key]
