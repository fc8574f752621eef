"""Rows that are tokens already: ids without padding, or padded on either side with a mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ebft_ds.data.preference.fields import TOKENISED, TOKENISED_PADDED
from ebft_ds.data.rows import BadRow, type_name


def tokenised_responses(given: Mapping[str, Any]) -> list[list[int]] | None:
    """Ids of chosen and rejected; None if the row has no such column. Raises `BadRow` for columns that make no sense."""
    for columns in (TOKENISED, TOKENISED_PADDED):
        present = [ids for ids, _ in columns if ids in given]
        if len(present) == 1:
            missing = next(ids for ids, _ in columns if ids not in given)
            raise BadRow(f"has {present[0]}, but no {missing}")
        unmasked = next((ids for ids, mask in columns if ids in given and mask is not None and mask not in given), None)
        if unmasked is not None:
            raise BadRow(f"has {unmasked} without its attention_mask, so that padding could not be told from tokens; unpadded: chosen_ids")
        if present:
            return [_unpadded(given[ids], ids, None if mask is None else given.get(mask), mask) for ids, mask in columns]
    return None


def _unpadded(ids: Any, name: str, mask: Any, mask_name: str | None) -> list[int]:
    """The ids where the mask is 1, wherever the padding stands; pad ids decide nothing, since they may be the end token."""
    tokens = _integers(ids, name)
    if mask is not None:
        booleans = isinstance(mask, list) and all(isinstance(one, bool) for one in mask)
        kept = _integers([int(one) for one in mask] if booleans else mask, str(mask_name))
        if not set(kept) <= {0, 1}:
            raise BadRow(f"has {mask_name} with values other than 0 and 1")
        if len(kept) != len(tokens):
            raise BadRow(f"has {len(tokens)} {name}, but {len(kept)} values in {mask_name}")
        tokens = [token for token, one in zip(tokens, kept, strict=True) if one]
    if not tokens:
        raise BadRow(f"has {name} without any token")
    return tokens


def _integers(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value):
        raise BadRow(f"has {name} that are a {type_name(value)}; they must be a list of integers from 0")
    return value
