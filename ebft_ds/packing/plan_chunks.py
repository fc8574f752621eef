"""Chunks: sequences of one group that stay together. Columns again, so that a hundred thousand groups are no hundred thousand objects."""

from __future__ import annotations

from ebft_ds.packing.plan_bins import pack
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

    def size(self, chunk: int) -> int:
        """Sequences in it."""
        return self._ends[chunk] - self._starts[chunk]

    def once_cost(self, chunk: int) -> int:
        """Cost of the prompt."""
        return int(self._table.once_costs[self.groups[chunk]])

    def parts(self, chunk: int) -> list[int]:
        """What goes into micro-batches: the chunk itself if it fits the budget or is a single sequence."""
        return self._parts.get(chunk, [chunk])

    def cut(self, chunk: int, at_least: int) -> list[int]:
        """The chunk in as few new chunks of like cost as the budget allows, but at least so many (or as many as it has sequences)."""
        members = self.members(chunk)
        tokens, costs = self._table.own_tokens[members].tolist(), self._table.own_costs[members].tolist()
        capacity = sum(tokens) if self.token_budget is None else self.token_budget - int(self._table.once_tokens[self.groups[chunk]])
        bins = pack(costs, tokens, capacity, at_least=min(at_least, len(members)))
        return [self._add(self.groups[chunk], [members[i] for i in sorted(bin_)]) for bin_ in bins if bin_]

    def merged(self, chunks: list[int]) -> list[int]:
        """The same sequences with one chunk a group, in the order of the groups' first chunks; new ones may be over the budget."""
        if len({self.groups[chunk] for chunk in chunks}) == len(chunks):
            return chunks
        by_group: dict[int, list[int]] = {}
        for chunk in chunks:
            by_group.setdefault(self.groups[chunk], []).append(chunk)
        return [same[0] if len(same) == 1 else self._join(same) for same in by_group.values()]

    def _join(self, chunks: list[int]) -> int:
        joined = self._add(self.groups[chunks[0]], sorted(self.members(*chunks)))
        self._part(joined)
        return joined

    def _add(self, group: int, members: list[int]) -> int:
        self._starts.append(len(self._sequences))
        self._sequences.extend(members)
        self._ends.append(len(self._sequences))
        self.groups.append(group)
        self.tokens.append(int(self._table.once_tokens[group] + self._table.own_tokens[members].sum()))
        self.costs.append(int(self._table.once_costs[group] + self._table.own_costs[members].sum()))
        return len(self.groups) - 1

    def _part(self, chunk: int) -> None:
        if self.token_budget is not None and self.tokens[chunk] > self.token_budget and self.size(chunk) > 1:
            self._parts[chunk] = self.cut(chunk, 1)
            self.costs[chunk] = sum(self.costs[part] for part in self._parts[chunk])
