"""Batches of a data collator, as encoded rows again; a collator may be a user's own, so everything about them is checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ebft_ds.data.preference.arrays import PAIR_KEYS
from ebft_ds.data.preference.encode import EncodedResponses
from ebft_ds.data.preference.truncate import common_prefix
from ebft_ds.errors import DataError

Array = np.ndarray[Any, Any]


def rows_of_batch(batch: Mapping[str, Any], *, vocab_size: int | None = None) -> list[EncodedResponses]:
    """What a data collator gave (tensors, arrays or lists), as rows: sequences by their masks, whatever the padding side.

    Takes the keys of `RewardCollator`: both sides of pairs, or `input_ids` and `attention_mask` in training order with
    `num_responses` unless all rows are pairs; `margin`, `preference` and `subset` where they are.
    Raises `DataError` for keys that are missing, shapes that do not fit, an empty sequence, ids below 0 or from `vocab_size` on, a margin
    that is not finite, a preference outside [0, 1], or either of them for a row that is no pair (0 and 1 stand for none).
    """
    keys = [key for key in batch if key.startswith(("input_ids", "attention_mask")) or key == "num_responses"]
    values = {key: _array(batch[key], key) for key in keys}
    if all(f"input_ids_{side}" in values for side in PAIR_KEYS):
        sides = [_sequences(values, f"_{side}", vocab_size) for side in PAIR_KEYS]
        if len(sides[0]) != len(sides[1]):
            raise DataError(f"The data collator gave {len(sides[0])} chosen and {len(sides[1])} rejected responses.")
        groups = [list(pair) for pair in zip(*sides, strict=True)]
    elif "input_ids" in values:
        groups = _groups(_sequences(values, "", vocab_size), values.get("num_responses"))
    else:
        raise DataError(
            f"The data collator gave {', '.join(batch) or 'nothing'}; it must give input_ids_chosen and input_ids_rejected"
            " (or input_ids), with their attention masks, as RewardCollator does."
        )
    numbers = [_numbers(batch, name, groups, missing) for name, missing in (("margin", 0.0), ("preference", 1.0))]
    for row, preference in enumerate(numbers[1]):
        if not 0.0 <= preference <= 1.0:
            raise DataError(
                f"Row {row} of the data collator's batch has a preference of {preference}; it is a probability between 0 and 1."
            )
    subsets = _per_row(batch, "subset", len(groups), None)
    for row, subset in enumerate(subsets):
        if not isinstance(subset, (str, type(None))):
            raise DataError(
                f"Row {row} of the data collator's batch has a subset that is a {type(subset).__name__}; it is a string or None."
            )
    return [
        EncodedResponses(group, common_prefix(group), margin, preference, subset, row)
        for row, (group, margin, preference, subset) in enumerate(zip(groups, *numbers, subsets, strict=True))
    ]


def _array(value: Any, key: str) -> Array:
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:  # lists of different lengths, tensors on a device or with gradients
        raise DataError(f"{key} of the data collator's batch is no array: {error}") from error


def _sequences(values: Mapping[str, Array], suffix: str, vocab_size: int | None) -> list[list[int]]:
    name, ids, mask = f"input_ids{suffix}", values[f"input_ids{suffix}"], values.get(f"attention_mask{suffix}")
    if mask is None or mask.shape != ids.shape or ids.ndim != 2:
        shape = "none" if mask is None else list(mask.shape)
        raise DataError(f"{name} {list(ids.shape)} must be [rows, tokens] with an attention_mask{suffix} of that shape, not {shape}.")
    if not np.issubdtype(ids.dtype, np.integer):
        raise DataError(f"{name} of the data collator's batch holds {ids.dtype}; token ids are integers.")
    kept = mask.astype(bool)
    empty = np.flatnonzero(~kept.any(axis=1))
    if len(empty):
        raise DataError(f"Row {empty[0]} of attention_mask{suffix} keeps no token.")
    wrong = kept & ((ids < 0) | (ids >= (np.iinfo(ids.dtype).max if vocab_size is None else vocab_size)))
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        limit = "ids begin at 0" if vocab_size is None else f"the model knows 0 to {vocab_size - 1}"
        raise DataError(f"Row {row} of {name} has the token {ids[row, column]}; {limit}.")
    return [row[counts].tolist() for row, counts in zip(ids, kept, strict=True)]


def _groups(sequences: list[list[int]], num_responses: Array | None) -> list[list[list[int]]]:
    counts = [2] * (len(sequences) // 2) if num_responses is None else num_responses.tolist()
    whole = isinstance(counts, list) and all(isinstance(count, int) for count in counts)
    if not whole or sum(counts) != len(sequences) or min(counts, default=0) < 2:
        raise DataError(f"{len(sequences)} sequences of input_ids are not the responses of rows with {counts or 'two'} responses each.")
    groups: list[list[list[int]]] = [[] for _ in counts]
    places = ((place, row) for place in range(max(counts)) for row, count in enumerate(counts) if place < count)
    for (_, row), sequence in zip(places, sequences, strict=True):
        groups[row].append(sequence)
    return groups


def _numbers(batch: Mapping[str, Any], name: str, groups: list[list[list[int]]], missing: float) -> list[float]:
    """One finite number a row; `missing` for rows that are no pairs."""
    values = _per_row(batch, name, len(groups), missing)
    for row, (value, group) in enumerate(zip(values, groups, strict=True)):
        where = f"Row {row} of the data collator's batch has a {name}"
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise DataError(f"{where} that is {value!r}; it must be a finite number.")
        if len(group) != 2 and value != missing:
            raise DataError(f"{where} of {value} beside {len(group)} responses; it is of a pair.")
    return [float(value) for value in values]


def _per_row(batch: Mapping[str, Any], key: str, count: int, missing: Any) -> list[Any]:
    value = batch.get(key)
    if value is None:
        return [missing] * count
    values = value if isinstance(value, (list, tuple)) else _array(value, key).tolist()
    if not isinstance(values, (list, tuple)) or len(values) != count:
        given = len(values) if isinstance(values, (list, tuple)) else 1
        raise DataError(f"The data collator gave {given} values of {key} for {count} rows.")
    return [one.item() if isinstance(one, np.generic) or _is_scalar_tensor(one) else one for one in values]


def _is_scalar_tensor(value: Any) -> bool:
    return hasattr(value, "__array__") and getattr(value, "ndim", None) == 0
