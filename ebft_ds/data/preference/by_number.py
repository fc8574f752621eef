"""Rows of a source with random access, in a seeded order, epoch after epoch."""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ebft_ds.data.file_rows import UnreadableRow
from ebft_ds.data.preference.fields import PreferenceFields
from ebft_ds.data.preference.plain import plain
from ebft_ds.data.preference.rows import validate_preference_row
from ebft_ds.data.rows import BadRow
from ebft_ds.data.sources import RowTable
from ebft_ds.errors import DataError

logger = logging.getLogger(__name__)

PROBED_ROWS = 64
"""Rows that the fingerprint of a source looks at: all of them would have to be read."""


class RowSelection:
    """Some rows of a table, under their own numbers."""

    def __init__(self, table: RowTable, numbers: Sequence[int]) -> None:
        self._table = table
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def row(self, number: int) -> Any:
        return self._table.row(number)

    def where(self, number: int) -> str:
        return self._table.where(number)


class NumberedRows:
    """Training order over a table: each epoch is a permutation that depends on (seed, epoch) alone, made when it is needed.

    `eval_holdout` rows drawn by the seed are no training rows; nor are rows with the prompt of a held-out one, which are passed over
    when their turn comes.
    """

    def __init__(self, table: RowTable, *, fields: PreferenceFields, seed: int, shuffle: bool, max_rows: int | None, holdout: int) -> None:
        """Reads no row. Raises `DataError` if no training row would remain."""
        self._table = table
        self._fields = fields
        self._seed, self._shuffle = seed, shuffle
        self._count = len(table) if max_rows is None else min(max_rows, len(table))
        if self._count <= holdout:
            raise DataError(f"eval_holdout {holdout} leaves no training row of the {self._count} of {table.name}.")
        drawn = random.Random(f"held-out rows, seed {seed}").sample(range(self._count), holdout)
        self.held_out = RowSelection(table, sorted(drawn))
        self._order: tuple[int, np.ndarray[Any, np.dtype[np.int64]]] | None = None
        self._held_out_prompts: frozenset[str] | None = None
        self.position = 0
        self.duplicates = 0
        """Rows passed over because their prompt is held out."""

    @property
    def rows(self) -> int:
        return self._count - len(self.held_out)

    @property
    def epoch(self) -> float:
        return self.position / self.rows

    def where(self, number: int) -> str:
        return self._table.where(number)

    def take(self, count: int) -> list[tuple[int, Any]]:
        taken: list[tuple[int, Any]] = []
        passed_over = 0
        while len(taken) < count:
            number = self._number(self.position)
            self.position += 1
            row = self._table.row(number)
            if self._is_held_out(row):
                self.duplicates += 1
                passed_over += 1
                if passed_over >= self.rows:
                    raise DataError(f"{self._table.name}: every training row has the prompt of a held-out one; lower eval_holdout.")
                continue
            passed_over = 0
            taken.append((number, row))
        return taken

    def look(self, count: int) -> list[tuple[int, Any]]:
        """As `PreferenceReader.look`; at most an epoch."""
        position, duplicates = self.position, self.duplicates
        try:
            return self.take(min(count, self.rows))
        finally:
            self.position, self.duplicates = position, duplicates

    def _number(self, position: int) -> int:
        epoch, offset = divmod(position, self.rows)
        if self._order is None or self._order[0] != epoch:
            numbers = np.delete(np.arange(self._count), np.array(self.held_out.numbers, dtype=np.int64))
            if self._shuffle:
                generator = random.Random(f"preference order, seed {self._seed}, epoch {epoch}")
                # 64 random bits a row and a stable sort: the same on every machine, and fast for millions of rows
                keys = np.frombuffer(generator.randbytes(8 * len(numbers)), dtype="<u8")
                numbers = numbers[np.argsort(keys, kind="stable")]
            self._order = (epoch, numbers)
        return int(self._order[1][offset])

    def _is_held_out(self, row: Any) -> bool:
        if not len(self.held_out):
            return False
        if self._held_out_prompts is None:
            keys = [self._prompt_key(self.held_out.row(number)) for number in self.held_out.numbers]
            self._held_out_prompts = frozenset(key for key in keys if key is not None)
        return self._prompt_key(row) in self._held_out_prompts

    def _prompt_key(self, row: Any) -> str | None:
        """What two rows have in common if they ask the same; None for rows without a prompt, and for bad ones."""
        try:
            prompt = validate_preference_row(row, self._fields).prompt
        except BadRow:
            return None
        return None if prompt is None else json.dumps(prompt, sort_keys=True, default=str)

    def identity(self) -> dict[str, Any]:
        """What must not change between saving and resuming."""
        return {
            "kind": "numbered",
            "rows": self.rows,
            "held_out": len(self.held_out),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "fingerprint": self._fingerprint,
        }

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for number in np.linspace(0, self._count - 1, min(self._count, PROBED_ROWS), dtype=np.int64).tolist():
            row = self._table.row(number)
            known = {k: row[k] for k in sorted(self._fields.known & set(row))} if isinstance(row, dict) else str(row)
            digest.update(json.dumps([number, _printable(known)], sort_keys=True, default=str).encode())
        return digest.hexdigest()

    def progress(self) -> dict[str, Any]:
        return {"position": self.position}

    def restore(self, state: dict[str, Any]) -> None:
        self.position = int(state["position"])


def _printable(row: Any) -> Any:
    try:
        return row.reason if isinstance(row, UnreadableRow) else plain(row)
    except BadRow as problem:
        return str(problem)
