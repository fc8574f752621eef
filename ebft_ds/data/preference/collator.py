"""RewardCollator: preference rows to padded tensors, for a torch DataLoader or anything else that has rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ebft_ds.data.preference.arrays import batch_arrays, pad_id, rounded_up
from ebft_ds.data.preference.encode import EncodedResponses, RewardEncoder, Skipped
from ebft_ds.data.preference.fields import PreferenceFields
from ebft_ds.data.preference.plain import plain
from ebft_ds.data.preference.recipe import RewardEncoding, TruncationMode
from ebft_ds.data.preference.rows import validate_preference_row
from ebft_ds.data.rows import BadRow
from ebft_ds.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RewardCollator:
    """Raw or tokenised preference rows to one batch.

    Gives `input_ids` and `attention_mask`, int64 [sum of K, T], padded on the right: the best response of every row, then the second
    one of every row, ...; for pairs also `input_ids_chosen`, `attention_mask_chosen`, `input_ids_rejected`, `attention_mask_rejected`
    [B, T], else `num_responses` [B]. `margin` and `preference` float32 [B] and `subset` (a list) where any row has one.
    """

    def __init__(
        self,
        processing_class: PreTrainedTokenizerBase,
        max_length: int = 1024,
        truncation_mode: TruncationMode = "keep_end",
        pad_to_multiple_of: int | None = None,
        *,
        encoding: RewardEncoding | None = None,
        fields: PreferenceFields | None = None,
        remove_unused_columns: bool = True,
    ) -> None:
        """`encoding` replaces `max_length` and `truncation_mode`; without it identical pairs are kept.

        `pad_to_multiple_of`: T is a multiple of it; it may then exceed `max_length`. `remove_unused_columns: False`: columns that no
        field names are passed on as lists, as plain JSON types.
        Raises `ConfigError` for a `pad_to_multiple_of` below 1.
        """
        self._fields = fields or PreferenceFields()
        rounded_up(1, pad_to_multiple_of)
        recipe = encoding or RewardEncoding(max_length=max_length, truncation_mode=truncation_mode, identical_pairs="keep")
        self.encoder = RewardEncoder(processing_class, recipe)
        """Counts what it leaves out and cuts; each worker process of a DataLoader has its own."""
        self._multiple = pad_to_multiple_of
        self._keeps_others = not remove_unused_columns
        self._pad = pad_id(processing_class)

    def __call__(self, rows: Sequence[Mapping[str, Any]] | Mapping[str, Any]) -> dict[str, Any]:
        """A list of rows, or one row. Raises `DataError` for a bad row, or if the recipe leaves every row out."""
        given: Sequence[Mapping[str, Any]] = [rows] if isinstance(rows, Mapping) else rows
        encoded = encode_batch(given, self.encoder, self._fields)
        width = max(len(ids) for row in encoded for ids in row.group)
        arrays = batch_arrays(encoded, width=rounded_up(width, self._multiple), pad=self._pad)
        batch: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
        kept = [given[row.row] for row in encoded]
        for name, values in (
            (self._fields.margin, [row.margin for row in encoded]),
            (self._fields.preference, [row.preference for row in encoded]),
        ):
            if any(row.get(name) is not None for row in kept):
                batch["margin" if name == self._fields.margin else "preference"] = torch.tensor(values, dtype=torch.float32)
        if any(row.subset is not None for row in encoded):
            batch["subset"] = [row.subset for row in encoded]
        if self._keeps_others:
            others = dict.fromkeys(key for row in kept for key in row if key not in self._fields.known)
            batch.update(
                {key: [_plain_column(given[row.row].get(key), key, row.row) for row in encoded] for key in others if key not in batch}
            )
        return batch


def _plain_column(value: Any, key: str, place: int) -> Any:
    try:
        return plain(value)
    except BadRow as problem:
        raise DataError(f"row {place + 1} of the batch {problem} in {key}; remove_unused_columns leaves it out.") from problem


def encode_batch(rows: Sequence[Mapping[str, Any]], encoder: RewardEncoder, fields: PreferenceFields) -> list[EncodedResponses]:
    """The rows that the recipe keeps; `row` is the place in the batch. Raises `DataError` for a bad row, or if none is kept."""
    encoded: list[EncodedResponses] = []
    reasons: list[str] = []
    for place, row in enumerate(rows):
        where = f"row {place + 1} of the batch"
        try:
            result = encoder.encode(validate_preference_row(row, fields), number=place, where=where)
        except BadRow as problem:
            raise DataError(f"{where} {problem}.") from problem
        if isinstance(result, Skipped):
            if result.is_bad:
                raise DataError(f"{where} {result.reason}.")
            reasons.append(result.reason)
        else:
            encoded.append(result)
    if not encoded:
        raise DataError(f"The encoding recipe leaves out every row of the batch ({', '.join(dict.fromkeys(reasons)) or 'it has none'}).")
    return encoded
