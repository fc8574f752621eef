"""Padded arrays of encoded rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ebft_ds.data.chat import eos_id
from ebft_ds.data.preference.encode import EncodedResponses
from ebft_ds.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAIR_KEYS = ("chosen", "rejected")


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """What padding is written with; it decides nothing, since masks say what counts."""
    given: int | None = tokenizer.pad_token_id
    return next(value for value in (given, eos_id(tokenizer), 0) if value is not None)


def rounded_up(width: int, multiple: int | None) -> int:
    """The next multiple; `width` for None. Raises `ConfigError` for a multiple below 1."""
    if multiple is None:
        return width
    if multiple < 1:
        raise ConfigError(f"pad_to_multiple_of {multiple}: it must be 1 or more.")
    return -(-width // multiple) * multiple


def padded(sequences: Sequence[Sequence[int]], *, width: int, pad: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(ids, mask), int64 [N, width], padded on the right."""
    ids = np.full((len(sequences), width), pad, np.int64)
    mask = np.zeros((len(sequences), width), np.int64)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = 1
    return ids, mask


def in_training_order(rows: Sequence[EncodedResponses]) -> list[list[int]]:
    """The best response of every row, then the second one of every row, ... (TRL's order)."""
    most = max(len(row.group) for row in rows)
    return [row.group[place] for place in range(most) for row in rows if place < len(row.group)]


def batch_arrays(rows: Sequence[EncodedResponses], *, width: int, pad: int) -> dict[str, np.ndarray[Any, Any]]:
    """`input_ids`, `attention_mask` [sum of K, width]; for pairs also [B, width] of each side, else `num_responses` [B]."""
    ids, mask = padded(in_training_order(rows), width=width, pad=pad)
    arrays = {"input_ids": ids, "attention_mask": mask}
    counts = [len(row.group) for row in rows]
    if set(counts) == {2}:
        for side, start in zip(PAIR_KEYS, (0, len(rows)), strict=True):
            arrays[f"input_ids_{side}"] = ids[start : start + len(rows)]
            arrays[f"attention_mask_{side}"] = mask[start : start + len(rows)]
    else:
        arrays["num_responses"] = np.array(counts, np.int64)
    return arrays
