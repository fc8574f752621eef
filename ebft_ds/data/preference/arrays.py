"""Padded arrays of encoded rows, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ebft_ds.data.chat import eos_id
from ebft_ds.data.preference.encode import EncodedResponses
from ebft_ds.data.preference.truncate import common_prefix
from ebft_ds.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAIR_KEYS = ("chosen", "rejected")


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """What padding is written with; it decides nothing, since masks say what counts."""
    given: int | None = tokenizer.pad_token_id
    return next(value for value in (given, eos_id(tokenizer), 0) if value is not None)


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


def rows_of_batch(batch: Mapping[str, Any]) -> list[EncodedResponses]:
    """What a data collator gave (tensors, arrays or lists), as rows: sequences by their masks, whatever the padding side.

    Takes the keys of `RewardCollator`: both sides of pairs, or `input_ids` and `attention_mask` in training order with
    `num_responses` unless all rows are pairs; `margin`, `preference` and `subset` where they are.
    Raises `DataError` for keys that are missing, or shapes that do not fit.
    """
    values = {key: np.asarray(value) for key, value in batch.items() if key.startswith(("input_ids", "attention_mask", "num_resp"))}
    if all(f"input_ids_{side}" in values for side in PAIR_KEYS):
        sides = [_sequences(values, f"_{side}") for side in PAIR_KEYS]
        if len(sides[0]) != len(sides[1]):
            raise DataError(f"The data collator gave {len(sides[0])} chosen and {len(sides[1])} rejected responses.")
        groups = [list(pair) for pair in zip(*sides, strict=True)]
    elif "input_ids" in values:
        groups = _groups(_sequences(values, ""), values.get("num_responses"))
    else:
        raise DataError(
            f"The data collator gave {', '.join(batch) or 'nothing'}; it must give input_ids_chosen and input_ids_rejected"
            " (or input_ids), with their attention masks, as RewardCollator does."
        )
    count = len(groups)
    margins, preferences = _per_row(batch, "margin", count, 0.0), _per_row(batch, "preference", count, 1.0)
    subsets = _per_row(batch, "subset", count, None)
    return [
        EncodedResponses(group, common_prefix(group), float(margins[i]), float(preferences[i]), subsets[i], i)
        for i, group in enumerate(groups)
    ]


def _sequences(values: Mapping[str, np.ndarray[Any, Any]], suffix: str) -> list[list[int]]:
    ids, mask = values[f"input_ids{suffix}"], values.get(f"attention_mask{suffix}")
    if mask is None or mask.shape != ids.shape or ids.ndim != 2:
        shape = "none" if mask is None else list(mask.shape)
        raise DataError(
            f"input_ids{suffix} {list(ids.shape)} must be [rows, tokens] with an attention_mask{suffix} of that shape, not {shape}."
        )
    found = [row[kept.astype(bool)].tolist() for row, kept in zip(ids, mask, strict=True)]
    if not all(found):
        raise DataError(f"Row {[bool(row) for row in found].index(False)} of attention_mask{suffix} keeps no token.")
    return found


def _groups(sequences: list[list[int]], num_responses: np.ndarray[Any, Any] | None) -> list[list[list[int]]]:
    counts = [2] * (len(sequences) // 2) if num_responses is None else num_responses.tolist()
    if sum(counts) != len(sequences) or min(counts, default=0) < 2:
        raise DataError(f"{len(sequences)} sequences of input_ids are not the responses of rows with {counts or 'two'} responses each.")
    groups: list[list[list[int]]] = [[] for _ in counts]
    places = ((place, row) for place in range(max(counts)) for row, count in enumerate(counts) if place < count)
    for (_, row), sequence in zip(places, sequences, strict=True):
        groups[row].append(sequence)
    return groups


def _per_row(batch: Mapping[str, Any], key: str, count: int, missing: Any) -> list[Any]:
    value = batch.get(key)
    if value is None:
        return [missing] * count
    values = list(value) if isinstance(value, (list, tuple)) else np.asarray(value).tolist()
    if len(values) != count:
        raise DataError(f"The data collator gave {len(values)} values of {key} for {count} rows.")
    return values
