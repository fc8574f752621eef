"""The engine interfaces: what every engine does (token ids in; token ids with log-probs, finish reasons and version stamps out), and
the two ways to new weights: an engine that receives them, or one over servers that are updated behind its back.

An engine is driven by one thread (`EngineDriver`): everything is called by it alone, but for `begin_update`, `receive` and
`abort_update`: they may come from another thread while a step runs, so they never touch live weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

from ebft_ds.rollout.manifest import TensorSpec, WeightManifest
from ebft_ds.rollout.spec import RolloutProcessSpec
from ebft_ds.types import RolloutGroup, RolloutRequest

if TYPE_CHECKING:
    from torch import Tensor


class ServerCounts(msgspec.Struct, frozen=True):
    """Servers behind an engine, by state."""

    total: int
    usable: int
    """Answer, and hold the current version (or the one being pushed)."""
    stale: int
    """Answer, and hold other weights: restarted, replaced, never updated. They get no request until they hold the right ones."""
    unreachable: int
    """Do not answer, or not like a vLLM server that lets us in."""
    outstanding: int = 0
    """Requests in flight at all of them."""


class RolloutEngine(Protocol):
    """What generates. The embedded transformers engine and remote servers stand behind this one interface."""

    @property
    def policy_version(self) -> int:
        """Version of the weights last confirmed: the one that the next token is drawn with (at the oldest)."""
        ...

    @property
    def tokens_generated(self) -> int:
        """Grows with every token drawn or scored since the start, and with other proof that work goes on: the sign of progress."""
        ...

    @property
    def has_work(self) -> bool:
        """True while a submitted request is unfinished."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of ids the model can produce."""
        ...

    def start(self) -> None:
        """Load or connect; blocks until requests can be taken. Raises ModelError or RolloutError."""
        ...

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue requests, in order. Raises RolloutError for one that cannot be served whole; nothing is ever cut."""
        ...

    def cancel(self, indices: Sequence[int]) -> None:
        """Forget the unfinished requests of these prompt indices; unknown ones are ignored."""
        ...

    def step(self) -> list[RolloutGroup]:
        """Advance a little (one token per sequence, or a short wait) and return the groups that are now complete."""
        ...

    def stop(self) -> None:
        """Release everything; may be called twice."""
        ...


@runtime_checkable
class WeightReceiver(Protocol):
    """An engine that holds the weights itself and takes them from rank 0 by manifest."""

    def score(self, token_ids: Sequence[int], temperature: float) -> list[float]:
        """Log-probs of `token_ids[1:]`, each given all before it, at this temperature and without filters (len - 1 values)."""
        ...

    def expected_weights(self) -> list[TensorSpec]:
        """Names, dtypes and shapes that a complete push must bring; tied weights once."""
        ...

    def begin_update(self, manifest: WeightManifest) -> None:
        """Announce a push. Raises WeightSyncError, weights untouched, if the manifest does not fit the model."""
        ...

    def receive(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Stage a bucket. Raises WeightSyncError, weights untouched, for a tensor that was not announced like this."""
        ...

    def finish_update(self, version: int) -> None:
        """Switch to the staged weights between two tokens and recompute caches.

        Raises WeightSyncError, weights untouched and the update over, if a tensor is missing or the version is another one.
        """
        ...

    def abort_update(self) -> None:
        """Drop what was staged; the old weights stay. Harmless without an update."""
        ...


@runtime_checkable
class VersionFollower(Protocol):
    """An engine over servers that rank 0 brings to a version itself; the engine is only told which one."""

    def expect_version(self, version: int) -> None:
        """A push of `version` begins: its tokens are taken beside those of the current version."""
        ...

    def confirm_version(self, version: int) -> None:
        """The push is over: `policy_version` is `version`, and new requests go only to servers that report it.

        Older tokens of this run, in requests that were in flight, stay valid: the feed judges their age.
        """
        ...

    def servers(self) -> ServerCounts:
        """How the servers are doing, by the last look at each."""
        ...


def make_engine(spec: RolloutProcessSpec) -> RolloutEngine:
    """The engine that `spec.engine` names, not started; its libraries are imported only here."""
    match spec.engine:
        case "transformers":
            from ebft_ds.rollout.transformers_engine import TransformersEngine

            return TransformersEngine(spec)
        case "vllm":
            from ebft_ds.rollout.vllm_engine import VllmEngine

            return VllmEngine(spec)
