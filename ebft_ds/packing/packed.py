"""Packed rows: [prompt | branch 1 | branch 2 | ...] of one or more groups in a single row without padding.

Position ids of every branch continue from its prompt, and a branch sees its prompt and itself only: the numbers are those of
separate sequences, while the prompt is computed once. Nothing but attention looks at other tokens, so the layout is a matter of
the attention alone, which gets it as an object (`PackedAttention`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ebft_ds.errors import ModelError
from ebft_ds.packing.rows import Place, RowBatch, RowSequence


@dataclass(frozen=True)
class PackedGroup:
    """A prompt [start, start + prompt_length) and its branches, which follow it without a gap.

    A sequence that shares its prompt with no other is a group without branches: all of it is prompt.
    """

    start: int
    prompt_length: int
    branch_lengths: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return self.prompt_length + sum(self.branch_lengths)


@dataclass(frozen=True)
class PackedLayout:
    """The groups of one row, in order, without gaps."""

    groups: tuple[PackedGroup, ...]

    @property
    def length(self) -> int:
        return sum(group.length for group in self.groups)

    def position_ids(self) -> Tensor:
        """int64 [T]: every branch continues from its prompt."""
        pieces: list[Tensor] = []
        for group in self.groups:
            pieces.append(torch.arange(group.prompt_length))
            pieces.extend(torch.arange(group.prompt_length, group.prompt_length + length) for length in group.branch_lengths)
        return torch.cat(pieces)

    def segments(self) -> tuple[Tensor, Tensor]:
        """(group [T], branch [T]) of every token, int64; branch 0 is the prompt."""
        groups: list[Tensor] = []
        branches: list[Tensor] = []
        for g, group in enumerate(self.groups):
            for b, length in enumerate((group.prompt_length, *group.branch_lengths)):
                groups.append(torch.full((length,), g))
                branches.append(torch.full((length,), b))
        return torch.cat(groups), torch.cat(branches)


class PackedAttention(Protocol):
    """The attention of one packed row, in every block. Made once a row, so that masks are made once."""

    layout: PackedLayout

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None,
        dropout: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """query [1, Hq, T, D], key and value [1, Hkv, T, D] (Hq a multiple of Hkv) -> [1, T, Hq, D]. Differentiable.

        A query sees the keys of its prompt and of its own branch up to itself, of these with `sliding_window` w only positions within
        w - 1 before its own. `softcap` c: scores become c * tanh(scores / c).
        """
        ...


@dataclass(frozen=True)
class PackedRow:
    """One packed row, [1, T]."""

    input_ids: Tensor
    position_ids: Tensor
    attention: PackedAttention
    served: set[int]
    """Blocks whose attention went through `attention`."""

    @property
    def real_tokens(self) -> int:
        return self.input_ids.numel()

    def body_inputs(self) -> dict[str, Any]:
        self.served.clear()  # a row may be forwarded again, by another network
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            # Four dimensions: the model takes it for a finished mask and makes none of [T, T]. Ours never reads it.
            "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.input_ids.device),
            "packed_row": self,
        }

    def check_forward(self, num_blocks: int) -> None:
        if self.served != set(range(num_blocks)):
            raise ModelError(
                f"the packed attention was used in blocks {sorted(self.served)} of {num_blocks}, so sequences of one row would have seen "
                "each other: this model does not take another attention. Set packing: padded"
            )


def packed_layout(sequences: Sequence[RowSequence], *, share: bool) -> tuple[PackedLayout, list[Place]]:
    """The layout of neighbours of one group behind one prompt (`share`), or of whole sequences, and each sequence's place."""
    groups: list[PackedGroup] = []
    places: list[Place] = []
    start = 0
    for members in _runs(sequences, share=share):
        prompt_length = len(members[0].prompt_ids)
        lengths = [len(s.completion_ids) for s in members]
        alone = len(members) == 1
        group = PackedGroup(start, prompt_length + (lengths[0] if alone else 0), () if alone else tuple(lengths))
        branch = start + prompt_length
        for length in lengths:
            places.append(Place(start, prompt_length, branch, length))
            branch += length
        groups.append(group)
        start += group.length
    return PackedLayout(tuple(groups)), places


def packed_batch(
    sequences: Sequence[RowSequence],
    attention: Callable[[PackedLayout], PackedAttention],
    *,
    share: bool,
    device: torch.device | str = "cpu",
) -> RowBatch:
    """All sequences in one row; without any the dummy of one token. `attention` makes the attention of the layout."""
    if not sequences:
        layout = PackedLayout((PackedGroup(0, 1),))
        places: list[Place] = []
        ids = torch.zeros(1, dtype=torch.int64)
    else:
        layout, places = packed_layout(sequences, share=share)
        tokens: list[int] = []
        for members in _runs(sequences, share=share):
            tokens.extend(members[0].prompt_ids)
            for s in members:
                tokens.extend(s.completion_ids)
        ids = torch.tensor(tokens, dtype=torch.int64)
    row = PackedRow(ids[None].to(device), layout.position_ids()[None].to(device), attention(layout), set())
    return RowBatch(row, places, sum(len(s.prompt_ids) + len(s.completion_ids) for s in sequences))


def _runs(sequences: Sequence[RowSequence], *, share: bool) -> list[list[RowSequence]]:
    """Neighbours of one group and one prompt together."""
    runs: list[list[RowSequence]] = []
    for s in sequences:
        last = runs[-1][0] if runs else None
        if share and last is not None and last.group == s.group and list(last.prompt_ids) == list(s.prompt_ids):
            runs[-1].append(s)
        else:
            runs.append([s])
    return runs
