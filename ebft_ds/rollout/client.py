"""Rank 0's end of the rollout process (interface; the body follows in the next commit)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ebft_ds.rollout.loop import LoopHealth
from ebft_ds.rollout.manifest import TensorSpec, WeightManifest
from ebft_ds.rollout.spec import RolloutProcessSpec
from ebft_ds.types import RolloutGroup, RolloutRequest

if TYPE_CHECKING:
    from torch import Tensor


class RolloutClient:
    """Starts, feeds, updates, watches and ends the rollout process. Every call raises RolloutError once the process is lost."""

    def __init__(self, spec: RolloutProcessSpec) -> None:
        self.spec = spec

    def start(self) -> None:
        """Spawn and wait until ready. Call it from a thread that lives as long as the run: the kernel ties the child to that thread."""
        raise NotImplementedError

    @property
    def policy_version(self) -> int:
        """Version of the last confirmed push (initially spec.initial_version)."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        raise NotImplementedError

    @property
    def expected_weights(self) -> list[TensorSpec]:
        """Names, dtypes and shapes of a complete push, as the engine reported them when it became ready."""
        raise NotImplementedError

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        raise NotImplementedError

    def cancel(self, indices: Sequence[int]) -> None:
        raise NotImplementedError

    def poll(self, timeout: float) -> list[RolloutGroup]:
        """Groups that have arrived, waiting up to `timeout` seconds for the first."""
        raise NotImplementedError

    def begin_update(self, manifest: WeightManifest) -> None:
        """Raises WeightSyncError with the engine's reason if it refuses; the client stays usable."""
        raise NotImplementedError

    def send_bucket(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Send and wait until staged. Generation goes on meanwhile."""
        raise NotImplementedError

    def finish_update(self, timeout: float) -> int:
        """Switch to the staged weights; returns the confirmed version."""
        raise NotImplementedError

    def abort_update(self) -> None:
        raise NotImplementedError

    def score(self, token_ids: Sequence[int], temperature: float, timeout: float) -> list[float]:
        """Log-probs of token_ids[1:] by the engine."""
        raise NotImplementedError

    def health(self) -> LoopHealth:
        """From the last heartbeat."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        """Idempotent; also registered with atexit."""
        raise NotImplementedError
