"""Rank 0's end of the rollout process: starts, feeds, updates, watches and ends it. No torch.distributed in here."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from typing import Any

import msgspec
from torch import Tensor

from ebft_ds.errors import RolloutError, WeightSyncError
from ebft_ds.rollout import messages
from ebft_ds.rollout.child import Child
from ebft_ds.rollout.engine import ServerCounts
from ebft_ds.rollout.link import Link
from ebft_ds.rollout.loop import LoopHealth
from ebft_ds.rollout.manifest import TensorSpec, WeightManifest
from ebft_ds.rollout.spec import RolloutProcessSpec
from ebft_ds.rollout.tensors import to_bytes
from ebft_ds.types import PolicyVersion, RolloutGroup, RolloutRequest

STOP_GRACE_SECONDS = 5.0


class RolloutClient:
    """Every call raises RolloutError, with the cause and the log's tail, once the process is lost: dead, failed, or silent too long."""

    def __init__(self, spec: RolloutProcessSpec) -> None:
        self.spec = spec
        self._link_or_none: Link | None = None
        self._ready: messages.Ready | None = None
        self._version: PolicyVersion = spec.initial_version
        self._open_update: WeightManifest | None = None

    def start(self) -> None:
        """Spawn the process and wait until it takes requests.

        Call it from a thread that lives as long as the run: the kernel kills the process when that thread ends.

        Raises:
            RolloutError: not ready within `start_timeout`, or it died; ConfigError, ModelError: what it found wrong.
        """
        if self._link_or_none is not None:
            raise RolloutError("the rollout process is already started")
        self._link_or_none = Link(Child(self.spec.log_path, self.spec.threads), self.spec)
        atexit.register(self.stop)
        try:
            self._ready = self._link.wait_ready(self.spec.start_timeout)
        except BaseException:
            self.stop()
            raise
        self._version = self._ready.version

    @property
    def policy_version(self) -> PolicyVersion:
        """Version of the last confirmed push (at first `spec.initial_version`)."""
        return self._version

    @property
    def vocab_size(self) -> int:
        """Ids that the engine can produce lie below it."""
        return self._started.vocab_size

    @property
    def expected_weights(self) -> list[TensorSpec]:
        """Names, dtypes and shapes of a complete push, as the embedded engine reported them; empty for vLLM servers."""
        return self._started.expected_weights

    @property
    def pid(self) -> int:
        """Process id of the rollout process."""
        return self._link.child.pid

    def check(self) -> None:
        """Raise if the process is lost; cheap enough for every micro-batch."""
        self._link.check()

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue requests, in order."""
        self._link.submit(list(requests))

    def cancel(self, indices: Sequence[int]) -> None:
        """Forget requests; a group that is already on its way is dropped here."""
        self._link.cancel(list(indices))

    def poll(self, timeout: float) -> list[RolloutGroup]:
        """Groups that have arrived, waiting up to `timeout` seconds for the first."""
        return self._link.poll(timeout)

    def begin_update(self, manifest: WeightManifest) -> None:
        """Announce a push.

        Raises:
            WeightSyncError: refused, with the engine's reason; the old weights serve on and the client stays usable.
        """
        self._request(messages.BeginUpdate(self._link.new_id(), manifest), self.spec.timeout)
        self._open_update = manifest

    def send_bucket(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Send named tensors and wait until they are staged; generation goes on meanwhile. Raises like begin_update."""
        specs, payload = to_bytes(tensors)
        self._request(messages.Bucket(self._link.new_id(), specs), self.spec.timeout, payload)

    def finish_update(self, timeout: float) -> PolicyVersion:
        """Have the engine switch to what was sent, and return the version that it confirms.

        Raises:
            WeightSyncError: refused (a tensor is missing), or not confirmed within `timeout` seconds.
        """
        if self._open_update is None:
            raise WeightSyncError("finish_update without begin_update")
        version = self._open_update.version
        self._open_update = None
        self._request(messages.FinishUpdate(self._link.new_id(), version), timeout)
        self._version = version
        return version

    def abort_update(self, timeout: float | None = None) -> None:
        """Drop what was sent; the old weights serve on."""
        self._open_update = None
        self._request(messages.AbortUpdate(self._link.new_id()), self.spec.timeout if timeout is None else timeout)

    def expect_version(self, version: PolicyVersion) -> None:
        """Before a push of `version` to vLLM servers: its tokens are taken from now on, beside those of the current version."""
        self._request(messages.ExpectVersion(self._link.new_id(), version), self.spec.timeout)

    def confirm_version(self, version: PolicyVersion) -> None:
        """After the push: `policy_version` is `version`, the loop is told, and new requests go only to servers that report it.

        Older tokens of this run, in requests that were in flight, stay valid. Needs no `expect_version` before it.
        """
        self._request(messages.ConfirmVersion(self._link.new_id(), version), self.spec.timeout)
        self._version = version

    def servers(self) -> ServerCounts | None:
        """How the engine's servers are doing, from the last heartbeat; None without servers, or before the first heartbeat."""
        return self._link.servers()

    def score(self, token_ids: Sequence[int], temperature: float, timeout: float) -> list[float]:
        """Log-probs of token_ids[1:] by the engine at this temperature, without filters (for the probe)."""
        value = self._request(messages.Score(self._link.new_id(), list(token_ids), temperature), timeout)
        return msgspec.convert(value, list[float])

    def health(self) -> LoopHealth:
        """The loop's own account, from the last heartbeat."""
        return self._link.health()

    def state_dict(self) -> dict[str, Any]:
        """The loop's state, for a checkpoint."""
        return msgspec.convert(self._request(messages.GetState(self._link.new_id()), self.spec.timeout), dict[str, Any])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give a loop its state back."""
        self._request(messages.LoadState(self._link.new_id(), state), self.spec.timeout)

    def stop(self) -> None:
        """End the process: asked first, then TERM, then KILL of its group. May be called again, and is at interpreter exit."""
        if self._link_or_none is not None:
            self._link_or_none.stop(STOP_GRACE_SECONDS)
        atexit.unregister(self.stop)

    @property
    def _link(self) -> Link:
        if self._link_or_none is None:
            raise RolloutError("the rollout process is not started")
        return self._link_or_none

    @property
    def _started(self) -> messages.Ready:
        if self._ready is None:
            raise RolloutError("the rollout process is not started")
        return self._ready

    def _request(self, message: Any, timeout: float, payload: Sequence[memoryview] = ()) -> Any:
        try:
            return self._link.request(message, timeout, payload)
        except WeightSyncError:
            self._open_update = None
            raise
