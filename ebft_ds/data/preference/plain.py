"""Rows from tf.data, Grain or Arrow as plain JSON types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ebft_ds.data.rows import BadRow


def plain(value: Any) -> Any:
    """Bytes as text, arrays (NumPy or torch) as lists, array scalars as numbers, at any depth. Raises `BadRow` for bytes of no text."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadRow(f"has bytes that are not UTF-8 text ({error.reason} at byte {error.start})") from None
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, np.generic) or hasattr(value, "__array__"):
        return plain(np.asarray(value).tolist())
    return value


def without_nulls(value: Any) -> Any:
    """The value without the null fields that Arrow adds where objects of one column have different fields."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [without_nulls(item) for item in value]
    return value
