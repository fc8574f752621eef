"""Features of references, kept while the feature network is frozen, so that a reference is forwarded once and not in every epoch.

Each vector lives on the rank that computed it, and each rank knows only what it holds: memory on a rank is bounded by the limit,
whatever the number of ranks. Before a step is planned the ranks tell each other, one number a group, who holds what.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ebft_ds.collectives import Collectives
from ebft_ds.errors import CheckpointError

logger = logging.getLogger(__name__)

KEY_BYTES = 16
_STATE = ("keys", "widths", "values")


class _Entry(NamedTuple):
    feature: Tensor
    used: int
    """When, by the cache's own clock."""


class ReferenceCache:
    """Least recently used references go first. Holds whatever it is given bit for bit (float32, CPU).

    Scorers with other poolings may share one: their keys differ.

    Args:
        limit_mb: most memory of the features on this rank, in MiB. Bookkeeping, about 0.7 kB a reference, comes on top, and what
            went since the last `mark`.
    """

    def __init__(self, limit_mb: float, collectives: Collectives | None = None) -> None:
        self.limit_bytes = int(limit_mb * 2**20)
        self.held_bytes = 0
        self._collectives = collectives or Collectives()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        """Least recently used first."""
        self._clock = 0
        self._before: dict[bytes, _Entry | None] = {}
        """What has changed since the last mark, as it was then; None: not held."""

    @property
    def rank(self) -> int:
        return self._collectives.rank

    def __len__(self) -> int:
        """References that this rank holds."""
        return len(self._entries)

    def locate(self, keys: Sequence[bytes]) -> list[int | None]:
        """Collective, with the same keys on every rank: the rank that holds each, or None. What is found counts as used."""
        rank = self.rank
        holders = self._collectives.max_ints([rank if key in self._entries else -1 for key in keys])
        for key, holder in zip(keys, holders, strict=True):
            if holder == rank:
                self._set(key, self._entries[key].feature)
        return [None if holder < 0 else holder for holder in holders]

    def get(self, key: bytes) -> Tensor:
        """[D], of a key that this rank holds; not to be changed."""
        return self._entries[key].feature

    def put(self, key: bytes, feature: Tensor) -> None:
        """Keeps a copy of `feature` [D] on this rank, as the most recently used. One that is larger than the limit is not kept."""
        self._drop(key)
        if 4 * feature.numel() <= self.limit_bytes:
            # A copy: a view would keep its whole micro-batch alive.
            self._set(key, feature.detach().to("cpu", torch.float32, copy=True))
        while self.held_bytes > self.limit_bytes:
            self._drop(next(iter(self._entries)))

    def _set(self, key: bytes, feature: Tensor) -> None:
        self._drop(key)
        self._clock += 1
        self._entries[key] = _Entry(feature, self._clock)
        self.held_bytes += feature.nbytes

    def _drop(self, key: bytes) -> None:
        gone = self._entries.pop(key, None)
        self._before.setdefault(key, gone)
        self.held_bytes -= 0 if gone is None else gone.feature.nbytes

    def mark(self) -> None:
        """Remembers this state: an interrupted step is repeated after a resume, and must then find what it found the first time."""
        self._before.clear()

    def rewind(self) -> None:
        """Back to the last mark (or to the beginning)."""
        entries = {key: entry for key, entry in self._entries.items() if key not in self._before}
        entries |= {key: entry for key, entry in self._before.items() if entry is not None}
        self._entries = OrderedDict(sorted(entries.items(), key=lambda item: item[1].used))
        self.held_bytes = sum(entry.feature.nbytes for entry in entries.values())
        self.mark()

    def clear(self) -> None:
        """Forgets everything; this counts as a mark."""
        self._entries.clear()
        self.held_bytes = 0
        self.mark()

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's content, least recently used first: keys (uint8 [N, 16]), widths (int64 [N]) and values (float32 [sum of widths])."""
        features = [entry.feature for entry in self._entries.values()]
        keys = torch.frombuffer(bytearray(b"".join(self._entries)), dtype=torch.uint8) if features else torch.empty(0, dtype=torch.uint8)
        return {
            "keys": keys.view(-1, KEY_BYTES),
            "widths": torch.tensor([feature.numel() for feature in features], dtype=torch.int64),
            "values": torch.cat(features) if features else torch.empty(0),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Replaces the content of this rank; this counts as a mark. Under a smaller limit than it was saved with, the least recently used
        are left out.

        Raises:
            CheckpointError: this is not what `state_dict` returns.
        """
        if problem := _problem(state):
            raise CheckpointError(f"the saved cache of reference features does not fit: {problem}. Start with another checkpoint")
        self.clear()
        raw = state["keys"].numpy().tobytes()
        keys = [raw[start : start + KEY_BYTES] for start in range(0, len(raw), KEY_BYTES)]
        for key, feature in zip(keys, state["values"].split(state["widths"].tolist()), strict=True):
            self.put(key, feature)
        self.mark()
        if len(self) < len(keys):
            logger.info("reference cache: %d of %d saved references fit the limit", len(self), len(keys))


def _problem(state: dict[str, Tensor]) -> str | None:
    if set(state) != set(_STATE):
        return f"it holds {sorted(state)} instead of {sorted(_STATE)}"
    keys, widths, values = (state[name] for name in _STATE)
    if (keys.dtype, widths.dtype, values.dtype) != (torch.uint8, torch.int64, torch.float32):
        return f"its types are {keys.dtype}, {widths.dtype} and {values.dtype}"
    if keys.shape != (len(widths), KEY_BYTES) or widths.ndim != 1 or values.shape != (int(widths.sum()),) or bool((widths <= 0).any()):
        return f"its shapes are {tuple(keys.shape)}, {tuple(widths.shape)} and {tuple(values.shape)}"
    return None
