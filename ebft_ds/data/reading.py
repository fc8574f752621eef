"""Failures of files, Arrow and the network while rows are read, as `DataError`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ebft_ds.errors import DataError, EbftError

READ_FAILURES = (OSError, ValueError, RuntimeError, KeyError, TypeError, EOFError)
"""What datasets, pyarrow and the network raise while rows arrive."""


@contextmanager
def failures_are_data_errors(what: Callable[[], str]) -> Iterator[None]:
    """Raises `DataError` for what reading raises; `what()` says what cannot be read. Errors of this package pass as they are."""
    try:
        yield
    except EbftError:
        raise
    except READ_FAILURES as error:
        raise DataError(f"{what()} cannot be read: {error or type(error).__name__}") from error
