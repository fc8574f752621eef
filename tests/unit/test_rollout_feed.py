"""Admission, staleness, re-rolls and resume of the feed, against a stub engine that finishes groups when and in the order a test likes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebft_ds.errors import CheckpointError, RolloutError
from ebft_ds.rollout.feed import RolloutFeed
from ebft_ds.types import Prompt, Rollout, RolloutGroup, RolloutRequest, SamplingSpec, TokenSpan

VOCAB = 20
SAMPLING = SamplingSpec(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, stop_token_ids=[2], seed=0)


class Stream:
    """Row number = index modulo 1000, so that every index is told apart."""

    def prompt(self, index: int) -> Prompt:
        return Prompt(prompt_id=index % 1000, index=index, epoch=index // 1000, token_ids=[1, 3 + index % 7], reference_ids=[4, 2])


def make_request(prompt: Prompt, attempt: int) -> RolloutRequest:
    return RolloutRequest(prompt=prompt, num_samples=2, max_new_tokens=4, sampling=SAMPLING, attempt=attempt)


class StubClient:
    """Holds requests until `finish` is called. A group's first token has the version the engine held at submission."""

    vocab_size = VOCAB

    def __init__(self, version: int = 0) -> None:
        self.policy_version = version
        self.held: dict[int, tuple[RolloutRequest, int]] = {}
        self.log: list[tuple[int, int]] = []
        self._done: list[RolloutGroup] = []

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        for request in requests:
            assert request.prompt.index not in self.held
            self.held[request.prompt.index] = (request, self.policy_version)
            self.log.append((request.prompt.index, request.attempt))

    def cancel(self, indices: Sequence[int]) -> None:
        for index in indices:
            self.held.pop(index, None)

    def finish(self, index: int) -> None:
        request, version = self.held.pop(index)
        self._done.append(make_group(request, version, self.policy_version))

    def finish_all(self) -> None:
        for index in list(self.held):
            self.finish(index)

    def poll(self, timeout: float) -> list[RolloutGroup]:
        done, self._done = self._done, []
        return done


def make_group(request: RolloutRequest, first: int, last: int) -> RolloutGroup:
    spans = [TokenSpan(0, 1, first), TokenSpan(1, 3, last)]
    rollout = Rollout(token_ids=[5, 6, 2], logprobs=[-1.0, -0.5, -0.1], spans=spans, finish_reason="stop")
    return RolloutGroup(prompt=request.prompt, rollouts=[rollout] * request.num_samples, attempt=request.attempt)


def make_feed(client: StubClient, groups_per_step: int = 2, max_staleness: int = 1, num_iterations: int = 1) -> RolloutFeed:
    return RolloutFeed(
        client,
        Stream(),
        groups_per_step=groups_per_step,
        max_staleness=max_staleness,
        make_request=make_request,
        num_iterations=num_iterations,
    )


def indices(groups: list[RolloutGroup]) -> list[int]:
    return [group.prompt.index for group in groups]


def test_synchronous_run_takes_exactly_the_steps_prompts() -> None:
    client = StubClient()
    feed = make_feed(client, groups_per_step=3, max_staleness=0)
    for step in range(4):
        assert feed.top_up(step) == 3
        assert feed.top_up(step) == 0
        assert not feed.ready(step)
        for index in reversed(list(client.held)):
            client.finish(index)
        feed.poll(0.0)
        assert feed.ready(step)
        assert indices(feed.take(step)) == [3 * step, 3 * step + 1, 3 * step + 2]
        assert feed.top_up(step) == 0, "the next step's weights are not in the engine yet"
        assert feed.top_up(step + 1) == 0, "trained, but not pushed"
        client.policy_version = step + 1
    assert feed.stats().dropped == 0
    assert feed.stats().prompts_seen == 12


def test_admission_keeps_s_plus_one_steps_of_groups_at_most() -> None:
    client = StubClient()
    feed = make_feed(client, groups_per_step=2, max_staleness=2)
    assert feed.top_up(0) == 6
    client.finish_all()
    feed.poll(0.0)
    assert indices(feed.take(0)) == [0, 1]
    assert feed.top_up(0) == 0, "the four that wait are for steps 1 and 2; a further one would be too old for step 3"
    client.policy_version = 1
    assert feed.top_up(1) == 2
    assert feed.stats().queue_depth == 4
    assert feed.stats().in_flight == 2


def test_a_batch_that_is_used_again_grows_older_and_lets_rollouts_begin_in_between() -> None:
    client = StubClient()
    feed = make_feed(client, groups_per_step=2, max_staleness=1, num_iterations=3)
    assert feed.top_up(0) == 2, "groups for step 3 would be too old"
    client.finish_all()
    feed.poll(0.0)
    assert indices(feed.take(0, 3)) == [0, 1]
    client.policy_version = 1
    feed.reuse(1)
    assert feed.stats().in_flight == 0, "step 3 would find them two steps old"
    client.policy_version = 2
    feed.reuse(2)
    assert feed.stats().in_flight == 2
    assert (feed.stats().staleness_mean, feed.stats().staleness_max) == (2.0, 2)
    client.finish_all()
    client.policy_version = 3
    feed.poll(0.0)
    assert feed.ready(3)
    assert indices(feed.take(3, 3)) == [2, 3]
    assert feed.stats().staleness_max == 1
    assert feed.stats().prompts_seen == 4


def test_an_engine_that_lags_gets_no_prompt_that_would_come_back_too_old() -> None:
    client = StubClient()
    feed = make_feed(client, groups_per_step=2, max_staleness=1)
    feed.top_up(0)
    client.finish_all()
    feed.poll(0.0)
    feed.take(0)
    feed.take(1)
    assert feed.stats().staleness_max == 1
    assert feed.top_up(2) == 0
    client.policy_version = 2
    assert feed.top_up(2) == 4


def test_a_slow_group_is_dropped_once_and_waited_for_the_second_time() -> None:
    client = StubClient()
    feed = make_feed(client, groups_per_step=1, max_staleness=1)
    dropped_at = trained_at = None
    for step in range(12):
        client.policy_version = step
        feed.top_up(step)
        for index in list(client.held):
            if index != 0 or (dropped_at is None and step == 2):
                client.finish(index)
        feed.poll(0.0)
        if not feed.ready(step):
            assert client.held.keys() == {0}, "only the prompt on its second attempt may hold up a step"
            client.finish(0)
            feed.poll(0.0)
        if feed.stats().dropped == 1 and dropped_at is None:
            dropped_at = step
            client.log.clear()
        if 0 in indices(feed.take(step)):
            trained_at = step
        assert feed.stats().staleness_max <= 1
    assert dropped_at == 2
    assert client.log[0] == (0, 1), "rolled out again before any new prompt"
    assert trained_at is not None
    assert trained_at <= dropped_at + 3
    assert feed.stats().dropped == 1


def test_take_before_ready_is_an_error() -> None:
    feed = make_feed(StubClient())
    feed.top_up(0)
    with pytest.raises(RolloutError, match=r"0 fresh groups of 2 .* 4 in flight"):
        feed.take(0)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_order_and_speed_with_kills_trains_every_prompt_once_and_never_too_old(data: st.DataObject) -> None:
    """An adversary picks what finishes when, how often weights are pushed, and when the run is killed and resumed."""
    per_step = data.draw(st.integers(1, 3), "groups_per_step")
    staleness = data.draw(st.integers(0, 3), "max_staleness")
    push_every = data.draw(st.integers(1, staleness + 1), "push_every")
    iterations = data.draw(st.integers(1, 3), "num_iterations")
    client = StubClient()
    feed = make_feed(client, per_step, staleness, iterations)
    batch_ends = 0
    trained: list[int] = []
    attempts: dict[int, int] = {}
    for step in range(14):
        if step % push_every == 0:
            client.policy_version = step
        if data.draw(st.booleans(), "kill") and step:
            state = msgspec.json.decode(msgspec.json.encode(feed.state_dict()))
            client = StubClient(step)  # a resume pushes the weights before it goes on
            feed = make_feed(client, per_step, staleness, iterations)
            feed.load_state_dict(state)
            batch_ends = step  # and begins with a new batch
        if step < batch_ends:
            feed.reuse(step)
            continue
        for _ in range(100):
            feed.top_up(step)
            stats = feed.stats()
            assert stats.in_flight + stats.queue_depth <= (staleness // iterations + 1) * per_step
            if feed.ready(step):
                break
            assert client.held, "nothing in flight and still not ready: starved"
            client.finish(data.draw(st.sampled_from(sorted(client.held)), "finished"))
            feed.poll(0.0)
        batch_ends = (step // iterations + 1) * iterations
        groups = feed.take(step, batch_ends - step)
        assert len(groups) == per_step
        assert indices(groups) == sorted(indices(groups))
        for group in groups:
            assert group.oldest_version is not None
            assert 0 <= step - group.oldest_version <= staleness
            attempts[group.prompt.index] = group.attempt
        if staleness == 0:
            assert indices(groups) == list(range(len(trained), len(trained) + per_step))
        trained += indices(groups)
        assert feed.stats().staleness_max <= staleness
    assert len(set(trained)) == len(trained), "a prompt was trained twice"
    again = {index for index, _ in feed.state_dict()["again"]}
    assert set(trained) | again == set(range(feed.state_dict()["next_index"])), "a prompt was lost"
    assert not set(trained) & again
    assert feed.stats().prompts_seen == len(trained)


@given(st.integers(1, 3), st.integers(0, 3), st.lists(st.integers(0, 12), min_size=1, max_size=40))
@settings(max_examples=300, deadline=None)
def test_slow_prompts_are_dropped_once_at_most_and_none_starves(per_step: int, staleness: int, durations: list[int]) -> None:
    """Prompt i takes durations[i mod ...] ticks whenever it is rolled out; a step takes one tick, waiting too; a push every step."""
    client = StubClient()
    feed = make_feed(client, per_step, staleness)
    begun: dict[tuple[int, int], int] = {}
    trained: dict[int, int] = {}
    step = 0
    for tick in range(120):
        client.policy_version = step
        feed.top_up(step)
        for index, (request, _) in list(client.held.items()):
            if tick - begun.setdefault((index, request.attempt), tick) >= durations[index % len(durations)]:
                client.finish(index)
        feed.poll(0.0)
        if feed.ready(step):
            trained |= {group.prompt.index: group.attempt for group in feed.take(step)}
            step += 1
    assert max(trained.values()) <= 1
    assert feed.stats().dropped <= sum(trained.values()) + (staleness + 1) * per_step
    unfinished = {index for index, _ in feed.state_dict()["again"]}
    assert all(tick >= 120 - 4 * 13 for (index, _), tick in begun.items() if index in unfinished), "a prompt was left behind"
    assert step >= 120 // 14, "the run stood still"


def test_waiting_groups_are_taken_oldest_first_so_that_none_grows_too_old() -> None:
    client = StubClient()
    feed = make_feed(client, groups_per_step=1, max_staleness=2)
    feed.top_up(0)
    client.finish(2)
    feed.poll(0.0)
    assert indices(feed.take(0)) == [2]
    client.policy_version = 1
    feed.top_up(1)
    client.finish_all()
    feed.poll(0.0)
    assert [indices(feed.take(step)) for step in (1, 2, 3)] == [[0], [1], [3]]
    assert feed.stats().dropped == 0


def test_a_resume_rolls_out_again_in_the_same_order_with_the_same_attempts() -> None:
    client = StubClient()
    feed = make_feed(client, groups_per_step=2, max_staleness=2)
    feed.top_up(0)
    client.finish(4)
    client.finish(1)
    feed.poll(0.0)
    assert indices(feed.take(0)) == [1, 4]
    resumed_client = StubClient(version=1)
    resumed = make_feed(resumed_client, groups_per_step=2, max_staleness=2)
    resumed.load_state_dict(feed.state_dict())
    resumed.top_up(1)
    assert resumed_client.log == [(0, 0), (2, 0), (3, 0), (5, 0), (6, 0), (7, 0)]
    assert resumed.stats().prompts_seen == 2


def test_warm_start_references_are_taken_in_order_and_not_again_after_a_resume() -> None:
    client = StubClient()
    feed = make_feed(client)
    assert [prompt.index for prompt in feed.take_references(3)] == [0, 1, 2]
    resumed = make_feed(client)
    resumed.load_state_dict(feed.state_dict())
    assert resumed.stats().prompts_seen == 3
    assert [prompt.index for prompt in resumed.take_references(2)] == [3, 4]
    client.policy_version = 2
    resumed.top_up(2)
    assert client.log == [(5, 0), (6, 0), (7, 0), (8, 0)]


def test_a_damaged_state_is_refused() -> None:
    state = make_feed(StubClient()).state_dict()
    for again in ([[0, 0]], [[-1, 0]]):
        with pytest.raises(CheckpointError, match="damaged"):
            make_feed(StubClient()).load_state_dict(state | {"again": again})
    feed = make_feed(StubClient())
    feed.top_up(0)
    with pytest.raises(RolloutError, match="before the first prompt"):
        feed.load_state_dict(state)


class EvaluatingClient(StubClient):
    """Finishes everything as soon as it is asked, or nothing."""

    works = True

    def poll(self, timeout: float) -> list[RolloutGroup]:
        if self.works:
            self.finish_all()
        return super().poll(timeout)


def evaluation(count: int) -> list[RolloutRequest]:
    return [make_request(msgspec.structs.replace(Stream().prompt(i), index=-1 - i), 0) for i in range(count)]


def test_evaluation_leaves_the_training_books_alone() -> None:
    client = EvaluatingClient()
    feed = make_feed(client)
    feed.top_up(0)
    before = feed.state_dict()
    assert indices(feed.roll_out(evaluation(3), 10.0)) == [-1, -2, -3]
    assert feed.state_dict() == before
    assert feed.stats().queue_depth == 4, "training groups that arrived meanwhile are kept"
    assert indices(feed.take(0)) == [0, 1]


def test_evaluation_that_does_not_finish_is_an_error_and_is_cancelled() -> None:
    client = EvaluatingClient()
    client.works = False
    feed = make_feed(client)
    with pytest.raises(RolloutError, match=r"0 of 2 prompts done after 0\.05 s"):
        feed.roll_out(evaluation(2), 0.05)
    assert not client.held
    with pytest.raises(RolloutError, match="negative"):
        feed.roll_out([make_request(Stream().prompt(0), 0)], 1.0)


GOOD = make_group(make_request(Stream().prompt(0), 0), 0, 0)
ROLLOUT = GOOD.rollouts[0]
replace = msgspec.structs.replace


@pytest.mark.parametrize(
    ("group", "text"),
    [
        (replace(GOOD, rollouts=[ROLLOUT]), "1 rollouts instead of 2"),
        (replace(GOOD, attempt=1), "attempt 1"),
        (replace(GOOD, prompt=replace(GOOD.prompt, index=77)), "index 77.* not in flight"),
        (replace(GOOD, prompt=replace(GOOD.prompt, index=-1)), "index -1.* not in flight"),
        (replace(GOOD, prompt=replace(GOOD.prompt, reference_ids=[])), "changed"),
        (replace(GOOD, rollouts=[ROLLOUT, replace(ROLLOUT, logprobs=[-1.0])]), "sample 1: 3 tokens but 1 log-probs"),
        (replace(GOOD, rollouts=[replace(ROLLOUT, logprobs=[-1.0, float("nan"), 0.0]), ROLLOUT]), "sample 0: log-prob nan at position 1"),
        (replace(GOOD, rollouts=[replace(ROLLOUT, logprobs=[-1.0, 0.0, float("-inf")]), ROLLOUT]), "log-prob -inf"),
        (replace(GOOD, rollouts=[replace(ROLLOUT, token_ids=[5, VOCAB, 2]), ROLLOUT]), "token id 20 at position 1"),
        (replace(GOOD, rollouts=[replace(ROLLOUT, token_ids=[-1, 3, 2]), ROLLOUT]), "token id -1"),
        (replace(GOOD, rollouts=[replace(ROLLOUT, spans=[TokenSpan(0, 2, 0)]), ROLLOUT]), "spans cover 2 of 3"),
        (replace(GOOD, rollouts=[replace(ROLLOUT, spans=[TokenSpan(1, 3, 0)]), ROLLOUT]), "does not continue at 0"),
    ],
)
def test_a_group_that_is_not_what_was_asked_for_ends_the_run(group: RolloutGroup, text: str) -> None:
    client = StubClient()
    feed = make_feed(client)
    feed.top_up(0)
    client._done.append(group)
    with pytest.raises(RolloutError, match=text):
        feed.poll(0.0)
