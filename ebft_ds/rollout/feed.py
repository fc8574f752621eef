"""The rollout feed on rank 0: which prompts are in flight, what is fresh enough to train on, what must be rolled out again.

Pure bookkeeping over a client; METHOD section 5 in three rules. With S = max_staleness, t the next step to be fed (its number is the
trainer's policy version), e the version that the engine holds, and m = num_iterations steps from one feeding to the next:

- Admission. At most ((S - (t - e)) // m + 1) * groups_per_step groups are in flight or waiting: never more than
  (S // m + 1) groups_per_step, fewer while the engine lags, because a prompt submitted beyond that could only come back too old.
  S = 0 thus submits nothing before the step's weights are in the engine.
- Guard. Groups are taken oldest first; one whose oldest sampled token would be older than S is dropped, counted, and its prompt
  rolled out again (attempt + 1) before any new one. The guard looks at the first step on a group; in the following ones it is older.
- No starvation. A prompt that was dropped once goes first and is waited for: no step starts after which the second attempts still in
  flight could not all be trained in time. With a push every step no prompt is dropped twice, however slow it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from ebft_ds.errors import CheckpointError, RolloutError
from ebft_ds.rollout.check import check_group
from ebft_ds.types import PolicyVersion, Prompt, RolloutGroup, RolloutRequest


class RolloutPort(Protocol):
    """What the feed needs of a client."""

    @property
    def policy_version(self) -> PolicyVersion: ...
    @property
    def vocab_size(self) -> int: ...
    def submit(self, requests: Sequence[RolloutRequest]) -> None: ...
    def cancel(self, indices: Sequence[int]) -> None: ...
    def poll(self, timeout: float) -> list[RolloutGroup]: ...


class PromptSource(Protocol):
    """The prompt stream: random access, the same on every rank and after every resume."""

    def prompt(self, index: int) -> Prompt: ...


MakeRequest = Callable[[Prompt, int], RolloutRequest]
"""(prompt, attempt) -> what to ask the engine for."""


class FeedStats(msgspec.Struct, frozen=True):
    """Counters for the log; `staleness_*` concern the groups taken last, the other counts the whole run."""

    dropped: int
    queue_depth: int
    """Finished groups that wait to be taken."""
    in_flight: int
    staleness_mean: float
    staleness_max: int
    prompts_seen: int
    """Groups handed out for training."""


class _InFlight(msgspec.Struct, frozen=True):
    request: RolloutRequest
    engine_version: PolicyVersion
    """Held by the engine at submission: no token of the group is older."""


class RolloutFeed:
    """Admission, staleness and resume of the training rollouts; also runs evaluation prompts past them."""

    def __init__(
        self,
        client: RolloutPort,
        stream: PromptSource,
        *,
        groups_per_step: int,
        max_staleness: int,
        make_request: MakeRequest,
        num_iterations: int = 1,
    ) -> None:
        self._client = client
        self._stream = stream
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._make_request = make_request
        self._num_iterations = num_iterations
        self._next_index = 0
        self._next_step: PolicyVersion = 0
        self._again: list[tuple[int, int]] = []
        """(index, attempt) to submit before any new prompt, in this order."""
        self._in_flight: dict[int, _InFlight] = {}
        self._waiting: dict[int, RolloutGroup] = {}
        self._evaluation: dict[int, RolloutRequest] = {}
        self._evaluated: dict[int, RolloutGroup] = {}
        self._dropped = 0
        self._prompts_seen = 0
        self._trained: list[PolicyVersion] = []
        """Oldest versions of the groups taken last."""
        self._trained_at: PolicyVersion = 0

    def top_up(self, version: PolicyVersion) -> int:
        """Submit as many prompts as admission allows at trainer version `version`; returns how many. Never blocks."""
        step = self._step(version)
        self._drop_stale(step)
        engine_version = self._client.policy_version
        capacity = ((self._max_staleness - (step - engine_version)) // self._num_iterations + 1) * self._groups_per_step
        room = capacity - len(self._in_flight) - len(self._waiting)
        requests = [self._next_request() for _ in range(max(0, room))]
        for request in requests:
            self._in_flight[request.prompt.index] = _InFlight(request, engine_version)
        if requests:
            self._client.submit(requests)
        return len(requests)

    def poll(self, timeout: float) -> int:
        """Take in what has arrived, waiting up to `timeout` seconds for the first group; returns how many came.

        Raises:
            RolloutError: the client's, or a group that is not what was asked for.
        """
        groups = self._client.poll(timeout)
        for group in groups:
            self._take_in(group)
        return len(groups)

    def ready(self, version: PolicyVersion) -> bool:
        """True when `take(version)` can hand out a full step without making a prompt on its second attempt too old."""
        step = self._step(version)
        self._drop_stale(step)
        if len(self._waiting) < self._groups_per_step:
            return False
        return not self._would_starve(step)

    def take(self, version: PolicyVersion, steps: int = 1) -> list[RolloutGroup]:
        """The groups_per_step groups of this step and of `steps - 1` further ones (`reuse`), in order of prompt.index.

        Raises:
            RolloutError: called before `ready(version)`.
        """
        if not self.ready(version):
            raise RolloutError(
                f"step {version}: {len(self._waiting)} fresh groups of {self._groups_per_step} are there and "
                f"{len(self._in_flight)} in flight; take() came before ready()"
            )
        chosen = self._choose()
        for group in chosen:
            del self._waiting[group.prompt.index]
        self._trained = [oldest for group in chosen if (oldest := group.oldest_version) is not None]
        self._trained_at = version
        self._next_step = version + steps
        self._prompts_seen += len(chosen)
        return sorted(chosen, key=lambda group: group.prompt.index)

    def reuse(self, version: PolicyVersion) -> None:
        """A further step on the groups taken last, which are older by now. Never blocks; newer weights may let new prompts in."""
        self._trained_at = version
        self.poll(0.0)
        self.top_up(version)

    def roll_out(self, requests: Sequence[RolloutRequest], timeout: float) -> list[RolloutGroup]:
        """Run evaluation requests (negative indices) and return their groups in the order of the requests.

        Training groups that arrive meanwhile are kept as usual.

        Raises:
            RolloutError: an index that is not negative or not unique; not done within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        self.begin_evaluation(requests)
        try:
            while self.evaluation_pending:
                left = deadline - time.monotonic()
                if left <= 0:
                    done = len(requests) - self.evaluation_pending
                    raise RolloutError(f"evaluation rollouts: {done} of {len(requests)} prompts done after {timeout:g} s")
                self.poll(min(left, 1.0))
        finally:
            groups = self.end_evaluation()
        return groups

    def begin_evaluation(self, requests: Sequence[RolloutRequest]) -> None:
        """Submit evaluation requests (distinct negative indices); `poll` then takes their groups in."""
        indices = [request.prompt.index for request in requests]
        if len(set(indices)) != len(indices) or any(index >= 0 for index in indices):
            raise RolloutError(f"evaluation prompts need distinct negative indices, got {indices}")
        self._evaluation = {request.prompt.index: request for request in requests}
        self._evaluated = {}
        self._client.submit(requests)

    @property
    def evaluation_pending(self) -> int:
        """Evaluation prompts not yet back."""
        return len(self._evaluation) - len(self._evaluated)

    def end_evaluation(self) -> list[RolloutGroup]:
        """The groups that came, in the order of the requests; what is still under way is cancelled."""
        missing = [index for index in self._evaluation if index not in self._evaluated]
        groups = [self._evaluated[index] for index in self._evaluation if index in self._evaluated]
        self._evaluation, self._evaluated = {}, {}
        if missing:
            self._client.cancel(missing)
        return groups

    def take_references(self, count: int) -> list[Prompt]:
        """The next `count` prompts of the stream for a step on their references alone (warm start); they count as trained."""
        prompts = [self._stream.prompt(self._next_index + i) for i in range(count)]
        self._next_index += count
        self._prompts_seen += count
        return prompts

    def stats(self) -> FeedStats:
        """Counters for the log."""
        ages = [self._trained_at - oldest for oldest in self._trained]
        return FeedStats(
            dropped=self._dropped,
            queue_depth=len(self._waiting),
            in_flight=len(self._in_flight),
            staleness_mean=sum(ages) / len(ages) if ages else 0.0,
            staleness_max=max(ages, default=0),
            prompts_seen=self._prompts_seen,
        )

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs: groups taken count as trained, everything else submitted is rolled out again, oldest prompt first."""
        outstanding = [(index, flight.request.attempt) for index, flight in self._in_flight.items()]
        outstanding += [(index, group.attempt) for index, group in self._waiting.items()]
        return {
            "next_index": self._next_index,
            "again": [list(pair) for pair in sorted(outstanding + self._again)],
            "dropped": self._dropped,
            "prompts_seen": self._prompts_seen,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict` into a fresh feed. Raises CheckpointError if the numbers cannot belong together."""
        if self._in_flight or self._waiting or self._next_index:
            raise RolloutError("the feed's state must be loaded before the first prompt is submitted")
        again = [(int(index), int(attempt)) for index, attempt in state["again"]]
        next_index = int(state["next_index"])
        if len({index for index, _ in again}) != len(again) or any(not 0 <= index < next_index for index, _ in again):
            raise CheckpointError(f"rollout feed state is damaged: prompts to roll out again {again} against next prompt {next_index}")
        self._again = again
        self._next_index = next_index
        self._dropped = int(state["dropped"])
        self._prompts_seen = int(state["prompts_seen"])

    def _step(self, version: PolicyVersion) -> PolicyVersion:
        """The step that the next `take` feeds: from `take(t)` on, groups are gathered for the first step that will not reuse them."""
        return max(version, self._next_step)

    def _next_request(self) -> RolloutRequest:
        if self._again:
            index, attempt = self._again.pop(0)
        else:
            index, attempt = self._next_index, 0
            self._next_index += 1
        return self._make_request(self._stream.prompt(index), attempt)

    def _take_in(self, group: RolloutGroup) -> None:
        index = group.prompt.index
        if index in self._in_flight:
            check_group(group, self._in_flight[index].request, self._client.vocab_size)
            del self._in_flight[index]
            self._waiting[index] = group
        elif index in self._evaluation and index not in self._evaluated:
            check_group(group, self._evaluation[index], self._client.vocab_size)
            self._evaluated[index] = group
        else:
            raise RolloutError(f"a rollout group came back for prompt {group.prompt.prompt_id} (index {index}), which is not in flight")

    def _choose(self) -> list[RolloutGroup]:
        return sorted(self._waiting.values(), key=_urgency)[: self._groups_per_step]

    def _would_starve(self, step: PolicyVersion) -> bool:
        """Would a step now leave a second attempt in flight without room before its last step (the version it was begun with + S)?

        k steps have room for (k // num_iterations) * groups_per_step groups, taken earliest last step first. Only groups in flight count
        as a reason to wait: for those waiting would change something.
        """
        chosen = {group.prompt.index for group in self._choose()}
        in_flight = [flight.engine_version + self._max_staleness for flight in self._in_flight.values() if flight.request.attempt > 0]
        waiting = [
            oldest + self._max_staleness
            for index, group in self._waiting.items()
            if group.attempt > 0 and index not in chosen and (oldest := group.oldest_version) is not None
        ]
        return any(
            sum(other <= last_step for other in (*in_flight, *waiting)) > (last_step - step) // self._num_iterations * self._groups_per_step
            for last_step in in_flight
        )

    def _drop_stale(self, step: PolicyVersion) -> None:
        stale = [
            index
            for index, group in self._waiting.items()
            if (oldest := group.oldest_version) is not None and step - oldest > self._max_staleness
        ]
        for index in stale:
            group = self._waiting.pop(index)
            self._again.append((index, group.attempt + 1))
            self._dropped += 1
        self._again.sort()


def _urgency(group: RolloutGroup) -> tuple[int, float, int]:
    """Prompts dropped before go first, then the oldest tokens, then stream order."""
    oldest = group.oldest_version
    return (-group.attempt, float("inf") if oldest is None else oldest, group.prompt.index)
