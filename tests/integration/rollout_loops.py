"""Rollout loops for tests/integration/test_rollout_process.py, loaded inside the rollout process by `rollout_loop`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import Any

import msgspec

from ebft_ds.rollout.loop import EBFTRolloutLoop, LoopContext, LoopHealth
from ebft_ds.types import Rollout, RolloutGroup, RolloutRequest


class ShoutingLoop(EBFTRolloutLoop):
    """Appends a fixed, unsampled token to every completion, keeps a count as state, remembers the version it was told."""

    def __init__(self, context: LoopContext, token: int) -> None:
        super().__init__(context)
        self._token = token
        self._state: dict[str, Any] = {"groups": 0, "version": None}

    def groups(self) -> list[RolloutGroup]:
        found = super().groups()
        self._state["groups"] += len(found)
        return [msgspec.structs.replace(group, rollouts=[self._shout(rollout) for rollout in group.rollouts]) for group in found]

    def set_policy_version(self, version: int) -> None:
        self._state["version"] = version

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state

    def _shout(self, rollout: Rollout) -> Rollout:
        last = rollout.spans[-1]
        added = msgspec.structs.replace(last, start=last.end, end=last.end + 1, sampled=False)
        return msgspec.structs.replace(
            rollout, token_ids=[*rollout.token_ids, self._token], logprobs=[*rollout.logprobs, 0.0], spans=[*rollout.spans, added]
        )


class RaisingLoop(EBFTRolloutLoop):
    """Fails on its first request."""

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        raise KeyError("the judge has left the building")


class SilentLoop(EBFTRolloutLoop):
    """Takes requests and does nothing."""

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        pass


class HangingLoop(EBFTRolloutLoop):
    """Never comes back from groups()."""

    def groups(self) -> list[RolloutGroup]:
        subprocess.run(["sleep", "1000"], check=True)
        return []


class QuittingLoop(EBFTRolloutLoop):
    """Ends the process without a word."""

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        print("about to quit", flush=True)
        os._exit(9)


class WorkingLoop(EBFTRolloutLoop):
    """Never finishes anything, but reports progress: slow, not dead."""

    _calls = 0

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        pass

    def health(self) -> LoopHealth:
        self._calls += 1
        return LoopHealth(progress=self._calls, pending=1)


class LacksMethods:
    """Not a loop."""

    def __init__(self, context: LoopContext) -> None: ...
    def start(self) -> None: ...
    def submit(self, requests: Sequence[RolloutRequest]) -> None: ...
