"""The transport interface: how the tensors of one push get from rank 0 into rollout engines.

`WeightSync` (all ranks) walks the merged-weight source in lockstep; the transport (rank 0 alone) drains the buckets and holds at most
two of them. It sees complete tensors with checkpoint names and never takes part in a collective of the trainer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ebft_ds.rollout.manifest import WeightManifest

Bucket = Sequence[tuple[str, Tensor]]
"""Named tensors in the manifest's dtype, contiguous. They stay valid until the transport asks for the bucket after the next."""


@dataclass(frozen=True)
class PushResult:
    """What a push did on the receiving side."""

    pause_seconds: float
    """Longest time that generation stood still on an engine."""
    confirmed: int
    """Engines that hold the new weights now."""
    lost: int = 0
    """Engines that could not be reached; they get no request until a later push has reached them."""


class WeightTransport(Protocol):
    """One way to push. All methods run on rank 0's main thread and return or raise within the given timeout."""

    @property
    def probe_temperature(self) -> float | None:
        """Temperature at which `score` scores; None: any that is asked for."""
        ...

    def stale(self, version: int) -> bool:
        """Is an engine found that answers and does not hold `version` (restarted, replaced, never updated)?

        Engines that do not answer do not count while another one does. Raises RolloutError when none answers.
        """
        ...

    def push(self, manifest: WeightManifest, buckets: Iterable[Bucket], timeout: float) -> PushResult:
        """Announce, send every bucket, switch, and wait for confirmations.

        Raises:
            WeightSyncError: an engine refused (its reason in the message) or did not confirm in time; it serves on with what it had.
            RolloutError: no engine is left.
        """
        ...

    def score(self, token_ids: Sequence[int], temperature: float, timeout: float) -> list[list[float]]:
        """Log-probs of token_ids[1:] by every confirmed engine: one list an engine."""
        ...

    def close(self) -> None:
        """Release connections and files; may be called twice."""
        ...
