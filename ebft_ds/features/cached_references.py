"""A step's references against the cache: what need not be forwarded, where it lies, and what is kept afterwards."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from torch import Tensor

from ebft_ds.features.forwards import Pooling
from ebft_ds.features.reference_cache import KEY_BYTES, ReferenceCache
from ebft_ds.features.scoring_layout import FeatureSequence, ScoringLayout


def feature_recipe(identity: str, pooling: Pooling) -> bytes:
    """What all features of one scorer depend on beside their tokens. `identity`: see FeatureNetwork."""
    return msgspec.msgpack.encode([identity, pooling.layers, pooling.method, pooling.norm])


def reference_key(recipe: bytes, sequence: FeatureSequence) -> bytes:
    """Digest of everything that a reference's feature depends on: no prompt id, so a changed reference of the same row has another."""
    tokens = sequence.tokens
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    digest.update(array("q", [len(recipe), tokens.start, tokens.length, tokens.prompt_start, len(sequence.prompt_ids)]))
    digest.update(recipe)
    digest.update(array("q", sequence.prompt_ids))
    digest.update(array("q", sequence.completion_ids))
    return digest.digest()


@dataclass(frozen=True)
class CachedReferences:
    """Of one step; `CachedReferences()` where there is no cache."""

    holders: dict[int, int] = field(default_factory=dict)
    """Sequence -> the rank that holds its feature; the same on every rank."""
    own: dict[int, Tensor] = field(default_factory=dict)
    """Sequence -> feature, of those that this rank holds."""
    missing: dict[int, bytes] = field(default_factory=dict)
    """Sequence -> key, of those that nobody holds; a key that several groups share is here once."""
    cache: ReferenceCache | None = None

    @classmethod
    def look_up(cls, cache: ReferenceCache, layout: ScoringLayout, recipe: bytes) -> CachedReferences:
        """Collective."""
        keys = [reference_key(recipe, layout.sequences[i]) for i in layout.reference]
        found = dict(zip(layout.reference, zip(keys, cache.locate(keys), strict=True), strict=True))
        holders = {i: rank for i, (_, rank) in found.items() if rank is not None}
        own = {i: cache.get(found[i][0]) for i, rank in holders.items() if rank == cache.rank}
        first = {key: i for i, (key, rank) in reversed(found.items()) if rank is None}
        return cls(holders, own, {i: key for key, i in first.items()}, cache)

    def keep(self, features: Mapping[int, Tensor]) -> None:
        """Puts what was missing and has now been computed on this rank into the cache; broken features are for the scorer to report."""
        for i in sorted(self.missing):
            if self.cache is not None and i in features and bool(features[i].isfinite().all()):
                self.cache.put(self.missing[i], features[i])
