"""The engine interface: token ids in, token ids with log-probs, finish reasons and version stamps out; weights by manifest.

An engine is driven by one thread (`EngineDriver`): `submit`, `cancel`, `step`, `score` and `finish_update` are called by it alone.
`begin_update`, `receive` and `abort_update` may come from another thread while a step runs, so they never touch live weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ebft_ds.rollout.manifest import TensorSpec, WeightManifest
from ebft_ds.rollout.spec import RolloutProcessSpec
from ebft_ds.types import RolloutGroup, RolloutRequest

if TYPE_CHECKING:
    from torch import Tensor


class RolloutEngine(Protocol):
    """What generates. The embedded transformers engine and remote servers stand behind this one interface."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next token will be drawn with."""
        ...

    @property
    def tokens_generated(self) -> int:
        """Grows with every token drawn or scored since the start: the sign of progress."""
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

    def stop(self) -> None:
        """Release everything; may be called twice."""
        ...


def make_engine(spec: RolloutProcessSpec) -> RolloutEngine:
    """The engine that `spec.engine` names, not started; its libraries are imported only here."""
    match spec.engine:
        case "transformers":
            from ebft_ds.rollout.transformers_engine import TransformersEngine

            return TransformersEngine(spec)
