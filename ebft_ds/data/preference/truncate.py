"""Over-long rows (METHOD.md section 7): every response of a row loses the same tokens of the prompt where that is possible."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import msgspec


class Cut(msgspec.Struct, frozen=True):
    """Responses of one row within the limit."""

    group: list[list[int]]
    responses_cut: int
    """Responses that lost tokens behind the common prefix."""
    end_restored: int


def common_prefix(group: Sequence[Sequence[int]]) -> int:
    """Tokens that all sequences begin with, at most all but one of the shortest."""
    first, most = group[0], min(map(len, group)) - 1
    for at in range(most):
        if any(other[at] != first[at] for other in group[1:]):
            return at
    return most


def truncate(group: list[list[int]], max_length: int, mode: Literal["keep_end", "keep_start"], end_ids: Collection[int]) -> Cut:
    """`keep_end` takes tokens from the beginning of the common prefix, the same number for all; where that is not enough, the prefix
    goes and each over-long sequence loses its own beginning. `keep_start` cuts the end, and a sequence's own last token takes the last
    place if it is one of `end_ids`.
    """
    prefix = common_prefix(group)
    if mode == "keep_end":
        shared = min(prefix, max(map(len, group)) - max_length)
        rest = [ids[shared:] for ids in group]
        return Cut([ids[-max_length:] for ids in rest], sum(len(ids) > max_length for ids in rest), 0)
    cut = [ids[:max_length] for ids in group]
    restored = 0
    for ids, before in zip(cut, group, strict=True):
        if len(before) > max_length and before[-1] in end_ids:
            ids[-1] = before[-1]
            restored += 1
    return Cut(cut, sum(len(ids) > max_length for ids in group), restored)
