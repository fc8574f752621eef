"""Which rank forwards which sequence in which micro-batch. Pure and deterministic; every rank computes the same plan.

ZeRO-3 forwards are collectives: every rank must run the same number of them. So a plan gives every rank the same number of
micro-batches; a rank with less work gets empty ones, for which the caller runs a dummy forward of zero weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ebft_ds.errors import ConfigError
from ebft_ds.packing.rows import RowStyle


@dataclass(frozen=True)
class PlannedSequence:
    """One sequence to forward. `group` ties sequences of one prompt, which should stay on one rank. Lengths in tokens."""

    group: int
    prompt_length: int
    branch_length: int

    @property
    def length(self) -> int:
        return self.prompt_length + self.branch_length


@dataclass(frozen=True)
class Plan:
    """`ranks[r][m]` lists the indices (into the planned sequences) of rank r's micro-batch m; equally many m for all r."""

    ranks: list[list[list[int]]]

    @property
    def micro_batches(self) -> int:
        return len(self.ranks[0])

    def owner_of(self) -> dict[int, int]:
        """Sequence index -> rank."""
        return {i: r for r, batches in enumerate(self.ranks) for batch in batches for i in batch}


def plan_micro_batches(
    sequences: Sequence[PlannedSequence],
    world_size: int,
    *,
    style: RowStyle = "padded",
    token_budget: int | None = None,
    max_sequences: int | None = None,
) -> Plan:
    """Balances tokens over ranks, keeps groups whole where it can, and cuts each rank's share into micro-batches.

    Groups go, longest first, to the least loaded rank. A group is split when there are fewer groups than ranks, or when it
    alone holds more than a rank's fair share and a half. A micro-batch holds at most `token_budget` tokens as padded (rows x
    longest row) and at most `max_sequences` rows; a single sequence over the token budget is an error. Without any sequence
    every rank gets one empty micro-batch: an optimizer step must follow a backward, even when nothing is left to train.
    """
    for i, sequence in enumerate(sequences):
        if token_budget is not None and sequence.length > token_budget:
            raise ConfigError(f"sequence {i} has {sequence.length} tokens, over scoring_token_budget={token_budget}: raise the budget")
    shares: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for unit in _units(sequences, world_size):
        target = min(range(world_size), key=lambda r: (loads[r], r))
        shares[target].extend(unit)
        loads[target] += sum(sequences[i].length for i in unit)
    cut = [_cut(sorted(share), sequences, token_budget, max_sequences) for share in shares]
    count = max(1, *(len(batches) for batches in cut))
    return Plan([batches + [[] for _ in range(count - len(batches))] for batches in cut])


def _units(sequences: Sequence[PlannedSequence], world_size: int) -> list[list[int]]:
    """What is placed at once: whole groups, or single sequences of groups that must be split. Longest first."""
    groups: dict[int, list[int]] = {}
    for i, sequence in enumerate(sequences):
        groups.setdefault(sequence.group, []).append(i)
    total = sum(s.length for s in sequences)
    split_all = len(groups) < world_size
    units: list[list[int]] = []
    for members in groups.values():
        tokens = sum(sequences[i].length for i in members)
        if split_all or tokens * world_size > 1.5 * total:
            units.extend([i] for i in members)
        else:
            units.append(members)
    return sorted(units, key=lambda unit: (-sum(sequences[i].length for i in unit), unit[0]))


def _cut(share: list[int], sequences: Sequence[PlannedSequence], token_budget: int | None, max_sequences: int | None) -> list[list[int]]:
    """First fit over sequences by falling length, so that rows of like length share a micro-batch and padding stays small."""
    batches: list[list[int]] = []
    widths: list[int] = []
    for i in sorted(share, key=lambda i: (-sequences[i].length, i)):
        length = sequences[i].length
        for b, batch in enumerate(batches):
            fits_rows = max_sequences is None or len(batch) < max_sequences
            fits_tokens = token_budget is None or (len(batch) + 1) * max(widths[b], length) <= token_budget
            if fits_rows and fits_tokens:
                batch.append(i)
                break
        else:
            batches.append([i])
            widths.append(length)
    return batches
