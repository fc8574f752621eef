"""Functions that Grain and tf.data (tfds) pipelines call on preference rows: NumPy arrays in a fixed width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from ebft_ds.data.preference.arrays import PAIR_KEYS, batch_arrays, pad_id, padded, rounded_up
from ebft_ds.data.preference.collator import encode_batch
from ebft_ds.data.preference.encode import EncodedResponses, RewardEncoder
from ebft_ds.data.preference.fields import PreferenceFields
from ebft_ds.data.preference.recipe import RewardEncoding
from ebft_ds.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class CollectFunction:
    """Raw or tokenised rows (texts also as bytes, ids also as arrays) to arrays, padded on the right to `max_sequence_length`
    (to the next multiple of `pad_to_multiple_of`), so that all have one shape.

    One row gives `input_ids_chosen`, `attention_mask_chosen`, `input_ids_rejected`, `attention_mask_rejected` [T] (other numbers of
    responses: `input_ids`, `attention_mask` [K, T]), for Grain to batch; a list of rows gives the keys of `RewardCollator` as arrays.
    `margin` and `preference`, float32, are always there.
    """

    def __init__(
        self,
        processing_class: PreTrainedTokenizerBase,
        encoding: RewardEncoding,
        fields: PreferenceFields,
        pad_to_multiple_of: int | None = None,
    ) -> None:
        """Raises `ConfigError` for a `pad_to_multiple_of` below 1."""
        self._fields = fields
        self._width = rounded_up(encoding.max_length, pad_to_multiple_of)
        self._pad = pad_id(processing_class)
        self.encoder = RewardEncoder(processing_class, encoding)

    def __call__(self, rows: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """Raises `DataError` for a bad row."""
        if isinstance(rows, Mapping):
            return self._one(encode_batch([rows], self.encoder, self._fields)[0])
        encoded = encode_batch(rows, self.encoder, self._fields)
        arrays = batch_arrays(encoded, width=self._width, pad=self._pad)
        arrays["margin"] = np.array([row.margin for row in encoded], np.float32)
        arrays["preference"] = np.array([row.preference for row in encoded], np.float32)
        return arrays

    def _one(self, row: EncodedResponses) -> dict[str, np.ndarray[Any, Any]]:
        ids, mask = padded(row.group, width=self._width, pad=self._pad)
        arrays: dict[str, np.ndarray[Any, Any]] = {"input_ids": ids, "attention_mask": mask}
        if len(row.group) == 2:
            arrays = {}
            for place, side in enumerate(PAIR_KEYS):
                arrays[f"input_ids_{side}"], arrays[f"attention_mask_{side}"] = ids[place], mask[place]
        arrays["margin"], arrays["preference"] = np.array(row.margin, np.float32), np.array(row.preference, np.float32)
        return arrays


def grain_collect_function(
    processing_class: PreTrainedTokenizerBase,
    max_sequence_length: int,
    truncation_mode: Literal["keep_end", "keep_start"] = "keep_end",
    *,
    encoding: RewardEncoding | None = None,
    fields: PreferenceFields | None = None,
    pad_to_multiple_of: int | None = None,
) -> CollectFunction:
    """For `dataset.map(f)`, one row at a time, or `dataset.batch(n, batch_fn=f)`.

    The recipe is `encoding` with these two settings; every row is kept, since Grain counts on one result a row.
    Raises `ConfigError` for another truncation mode, or a `pad_to_multiple_of` below 1.
    """
    if truncation_mode not in ("keep_end", "keep_start"):
        raise ConfigError(f"truncation_mode {truncation_mode!r}: a collect function takes keep_end or keep_start.")
    settings: dict[str, Any] = {
        "max_length": max_sequence_length,
        "truncation_mode": truncation_mode,
        "identical_pairs": "keep",
        "empty_responses": "keep",
    }
    base = encoding or RewardEncoding(max_length=max_sequence_length)
    recipe = RewardEncoding(**{**msgspec.structs.asdict(base), **settings})
    return CollectFunction(processing_class, recipe, fields or PreferenceFields(), pad_to_multiple_of)


def tfds_collect_function(
    processing_class: PreTrainedTokenizerBase,
    max_sequence_length: int,
    truncation_mode: Literal["keep_end", "keep_start"] = "keep_end",
    *,
    encoding: RewardEncoding | None = None,
    fields: PreferenceFields | None = None,
    pad_to_multiple_of: int | None = None,
) -> CollectFunction:
    """For rows as `tfds.as_numpy` yields them, a list of them or one; otherwise as `grain_collect_function`."""
    return grain_collect_function(
        processing_class,
        max_sequence_length,
        truncation_mode,
        encoding=encoding,
        fields=fields,
        pad_to_multiple_of=pad_to_multiple_of,
    )
