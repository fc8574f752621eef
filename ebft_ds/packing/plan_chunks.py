"""Chunks: sequences of one group that stay together. Columns again, so that a hundred thousand groups are no hundred thousand objects."""

from __future__ import annotations

from ebft_ds.packing.plan_bins import costliest_first, pack
from ebft_ds.packing.plan_groups import GroupTable


class Chunks:
    """A growing list of chunks, each known by its number. The first G are the whole groups.

    A chunk over the budget stands for the parts it is cut into: they stay on one rank, but not in one micro-batch.
    """

    def __init__(self, table: GroupTable, token_budget: int | None) -> None:
        self.token_budget = token_budget
        self._table = table
        self._sequences: list[int] = table.members.tolist()
        self._starts: list[int] = table.starts[:-1].tolist()
        self._ends: list[int] = table.starts[1:].tolist()
        self.whole_groups = range(len(self._starts))
        self.groups = list(self.whole_groups)
        self.tokens: list[int] = table.tokens.tolist()
        self.costs: list[int] = table.costs.tolist()
        """With the shared prompt; of a chunk over the budget, with the prompts of all its parts."""
        self._parts: dict[int, list[int]] = {}
        if token_budget is not None:
            for chunk in (table.tokens > token_budget).nonzero()[0].tolist():
                self._part(chunk)

    def members(self, *chunks: int) -> list[int]:
        """Sequence indices, chunk by chunk, rising in each."""
        found: list[int] = []
        for chunk in chunks:
            found += self._sequences[self._starts[chunk] : self._ends[chunk]]
        return found

    def parts(self, chunk: int) -> list[int]:
        """What goes into micro-batches: the chunk itself if it fits the budget or is a single sequence."""
        return self._parts.get(chunk, [chunk])

    def split(self, chunk: int, most: float) -> tuple[int, int] | None:
        """(piece that costs at most `most`, rest), costliest sequences into the piece first; None if it cannot hold a single one."""
        members = self.members(chunk)
        costs = self._table.own_costs[members].tolist()
        room = most - int(self._table.once_costs[self.groups[chunk]])
        while taken := _taken(costs, room):
            piece = self._add(self.groups[chunk], [members[i] for i in taken])
            if len(taken) < len(members) and self.costs[piece] <= most:
                kept = set(taken)
                return piece, self._add(self.groups[chunk], [member for i, member in enumerate(members) if i not in kept])
            # Over the budget, the piece repeats its prompt.
            room = min(room - (self.costs[piece] - most), sum(costs[i] for i in taken) - 1)
        return None

    def merged(self, chunks: list[int]) -> list[int]:
        """The same sequences with one chunk a group, in the order of the groups' first chunks; new ones may be over the budget."""
        if len({self.groups[chunk] for chunk in chunks}) == len(chunks):
            return chunks
        by_group: dict[int, list[int]] = {}
        for chunk in chunks:
            by_group.setdefault(self.groups[chunk], []).append(chunk)
        return [same[0] if len(same) == 1 else self._join(same) for same in by_group.values()]

    def _join(self, chunks: list[int]) -> int:
        return self._add(self.groups[chunks[0]], sorted(self.members(*chunks)))

    def _add(self, group: int, members: list[int]) -> int:
        chunk = self._append(group, members)
        self._part(chunk)
        return chunk

    def _append(self, group: int, members: list[int]) -> int:
        self._starts.append(len(self._sequences))
        self._sequences.extend(members)
        self._ends.append(len(self._sequences))
        self.groups.append(group)
        self.tokens.append(int(self._table.once_tokens[group] + self._table.own_tokens[members].sum()))
        self.costs.append(int(self._table.once_costs[group] + self._table.own_costs[members].sum()))
        return len(self.groups) - 1

    def _part(self, chunk: int) -> None:
        """Cuts a chunk over the budget into as few parts of like cost as the budget allows."""
        if self.token_budget is None or self.tokens[chunk] <= self.token_budget or self._ends[chunk] - self._starts[chunk] == 1:
            return
        group, members = self.groups[chunk], self.members(chunk)
        tokens, costs = self._table.own_tokens[members].tolist(), self._table.own_costs[members].tolist()
        bins = pack(costs, tokens, self.token_budget - int(self._table.once_tokens[group]))
        self._parts[chunk] = [self._append(group, [members[i] for i in sorted(bin_)]) for bin_ in bins]
        self.costs[chunk] = sum(self.costs[part] for part in self._parts[chunk])


def _taken(costs: list[int], room: float) -> list[int]:
    """Costliest first, what fits; rising positions."""
    taken: list[int] = []
    for i in costliest_first(costs):
        if costs[i] <= room:
            room -= costs[i]
            taken.append(i)
    return sorted(taken)
