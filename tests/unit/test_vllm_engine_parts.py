"""Parts of the vLLM engine by themselves: answers, versions, seeds, pace, deadlines."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebft_ds.rollout.pacing import START_LIMIT, Pacer
from ebft_ds.rollout.vllm_answer import ForeignVersion, UnusableAnswer, to_rollouts
from ebft_ds.rollout.vllm_deadlines import Deadlines
from ebft_ds.rollout.vllm_job import Job
from ebft_ds.rollout.vllm_request import group_seed, sampling_params
from ebft_ds.rollout.vllm_versions import VersionBook
from ebft_ds.sidecar.api import Choice, ChoiceLogprobs, GenerateAnswer, TokenLogprob, VersionSpan
from ebft_ds.sidecar.versions import VersionNames
from ebft_ds.types import Prompt, RolloutRequest, SamplingSpec

VOCAB = 50
STOP = 3


def request(n: int, budget: int) -> RolloutRequest:
    sampling = SamplingSpec(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, stop_token_ids=[STOP], seed=1)
    return RolloutRequest(Prompt(5, 5, 0, [1, 2], [3]), num_samples=n, max_new_tokens=budget, sampling=sampling)


@st.composite
def choices(draw: st.DrawFn, budget: int, index: int) -> Choice:
    """A whole completion: stopped or of full length, with the versions of its tokens in order."""
    stopped = draw(st.booleans())
    length = draw(st.integers(1, budget)) if stopped else budget
    tokens = draw(st.lists(st.integers(4, VOCAB - 1), min_size=length, max_size=length))
    if stopped:
        tokens[-1] = STOP
    versions = sorted(draw(st.lists(st.integers(0, 4), min_size=length, max_size=length)))
    spans: list[VersionSpan] = []
    for position, version in enumerate(versions):
        new = draw(st.booleans()) or not spans or spans[-1].version != str(version)
        start = position if new else spans.pop().start
        spans.append(VersionSpan(str(version), start, position + 1))
    logprobs = draw(st.lists(st.floats(-50.0, 0.0), min_size=length, max_size=length))
    return Choice(
        index=index,
        token_ids=tokens,
        finish_reason="stop" if stopped else "length",
        stop_reason=STOP if stopped else None,
        logprobs=ChoiceLogprobs([TokenLogprob(*pair) for pair in zip(tokens, logprobs, strict=True)]),
        weight_versions=spans,
    )


@st.composite
def answers(draw: st.DrawFn) -> tuple[RolloutRequest, list[Choice]]:
    budget = draw(st.integers(1, 12))
    n = draw(st.integers(1, 4))
    return request(n, budget), [draw(choices(budget, index)) for index in range(n)]


@given(answers(), st.randoms())
def test_a_whole_answer_becomes_rollouts(pair: tuple[RolloutRequest, list[Choice]], random: Any) -> None:
    asked, found = pair
    shuffled = random.sample(found, len(found))
    rollouts = to_rollouts(GenerateAnswer(shuffled), asked, vocab_size=VOCAB, version_of=int)
    assert [rollout.token_ids for rollout in rollouts] == [choice.token_ids for choice in found]
    for rollout, choice in zip(rollouts, found, strict=True):
        assert choice.logprobs is not None
        assert rollout.logprobs == [entry.logprob for entry in choice.logprobs.content or []]
        assert rollout.finish_reason == choice.finish_reason
        per_token = [int(span.version) for span in choice.weight_versions or [] for _ in range(span.start, span.end)]
        assert [span.policy_version for span in rollout.spans for _ in range(span.start, span.end)] == per_token
        assert [span.start for span in rollout.spans] == [0, *(span.end for span in rollout.spans[:-1])]
        assert all(a.policy_version != b.policy_version for a, b in itertools.pairwise(rollout.spans))
        assert rollout.sampled_mask == [True] * len(choice.token_ids)


def lose_token(choice: dict[str, Any], at: int) -> None:
    del choice["token_ids"][at]


def lose_logprob(choice: dict[str, Any], at: int) -> None:
    del choice["logprobs"]["content"][at]


def swap_logprob(choice: dict[str, Any], at: int) -> None:
    choice["logprobs"]["content"][at]["token_id"] += 1


def break_logprob(choice: dict[str, Any], at: int) -> None:
    choice["logprobs"]["content"][at]["logprob"] = (float("nan"), float("-inf"), -9999.0)[at % 3]


def leave_vocabulary(choice: dict[str, Any], at: int) -> None:
    choice["token_ids"][at] = choice["logprobs"]["content"][at]["token_id"] = VOCAB + at


def other_reason(choice: dict[str, Any], at: int) -> None:
    choice["finish_reason"] = {"stop": "length", "length": "stop"}[choice["finish_reason"]]


def abort(choice: dict[str, Any], at: int) -> None:
    choice["finish_reason"] = "abort"


def lose_span(choice: dict[str, Any], at: int) -> None:
    del choice["weight_versions"][at % len(choice["weight_versions"])]


def shift_span(choice: dict[str, Any], at: int) -> None:
    choice["weight_versions"][at % len(choice["weight_versions"])]["end"] += 1


def no_content(choice: dict[str, Any], at: int) -> None:
    choice["logprobs"] = None


DAMAGES = [lose_token, lose_logprob, swap_logprob, break_logprob, leave_vocabulary, other_reason, abort, lose_span, shift_span, no_content]


@given(answers(), st.sampled_from(DAMAGES), st.data())
def test_a_damaged_answer_never_does(pair: tuple[RolloutRequest, list[Choice]], damage: Any, data: st.DataObject) -> None:
    asked, found = pair
    raw = msgspec.to_builtins(GenerateAnswer(found))
    choice = raw["choices"][data.draw(st.integers(0, len(found) - 1))]
    damage(choice, data.draw(st.integers(0, len(choice["token_ids"]) - 1)))
    with pytest.raises(UnusableAnswer, match="sample"):
        to_rollouts(msgspec.convert(raw, GenerateAnswer), asked, vocab_size=VOCAB, version_of=int)


def test_seeds_of_different_groups_stay_apart() -> None:
    """vLLM adds the sample's number to a group's seed."""
    groups = [(seed, index, attempt) for seed in (0, 1, 42) for index in range(-200, 2000) for attempt in (0, 1)]
    seeds = sorted(group_seed(*group) for group in groups)
    assert seeds[0] >= 0
    assert seeds[-1] < 2**62
    assert min(b - a for a, b in itertools.pairwise(seeds)) > 4096
    assert group_seed(1, 2, 3) == group_seed(1, 2, 3)


def test_stop_ids_that_the_model_cannot_produce_are_left_out() -> None:
    """vLLM refuses a request with them."""
    sampling = SamplingSpec(temperature=1.0, top_p=1.0, top_k=7, min_p=0.1, stop_token_ids=[2, VOCAB, VOCAB + 9], seed=1)
    params = sampling_params(RolloutRequest(Prompt(5, 5, 0, [1], [3]), 2, 4, sampling), vocab_size=VOCAB)
    assert params["stop_token_ids"] == [2]
    assert params["top_k"] == 7
    assert params["min_p"] == 0.1


def test_versions_that_were_never_announced_are_foreign() -> None:
    book = VersionBook(VersionNames("run"), 3)
    assert book.taken("run:3", asked=3, oldest=3) == 3
    for name in ("default", "", "run", "run:", "run:-3", "run:4", "other:3", "run:3:3"):
        with pytest.raises(ForeignVersion):
            book.taken(name, asked=3, oldest=3)
    book.expect(4)
    assert book.taken("run:4", asked=3, oldest=3) == 4
    book.confirm(4)
    assert (book.current, book.incoming) == (4, None)
    assert book.taken("run:3", asked=3, oldest=3) == 3
    with pytest.raises(ForeignVersion):
        book.taken("run:3", asked=4, oldest=4)


def test_a_server_is_asked_for_the_current_version_before_the_incoming_one() -> None:
    book = VersionBook(VersionNames("run"), 3, adapter_alias="alias")
    assert book.held("default", {"model": 10, "alias-v4": None}) is None
    book.expect(4)
    assert book.held("default", {"model": 10, "alias-v4": None}) == 4
    assert book.held("run:0", {"alias-v3": None, "alias-v4": None}) == 3
    assert book.held("other:0", {"alias-v3": None, "alias-v4": None}) is None
    assert book.model(4) == "alias-v4"
    assert book.taken("run:0", asked=4, oldest=3) == 4


def pace(pacer: Pacer, seconds_per_token: Any, answers: int) -> None:
    """A server that is kept full."""
    for _ in range(answers):
        pacer.answered(pacer.limit, 10 * seconds_per_token(pacer.limit), 10)


def test_the_pace_rises_while_a_token_takes_no_longer() -> None:
    pacer = Pacer()
    pace(pacer, lambda limit: 0.02, 5000)
    assert pacer.limit >= 2048


def test_the_pace_stays_where_more_brings_no_more() -> None:
    """A server that works on 64 at once, and queues the others."""
    pacer = Pacer()
    pace(pacer, lambda limit: 0.02 * max(1.0, limit / 64), 1000)
    assert 64 <= pacer.limit <= 256


def test_the_pace_is_not_raised_by_requests_that_it_does_not_hold_back() -> None:
    pacer = Pacer()
    for _ in range(1000):
        pacer.answered(3, 0.2, 10)
    assert pacer.limit == START_LIMIT


@given(st.integers(1, 200), st.lists(st.booleans(), max_size=400))
def test_the_pace_stays_within_its_bounds(cap: int, events: list[bool]) -> None:
    pacer = Pacer(cap)
    for good in events:
        before = pacer.limit
        if good:
            pacer.answered(pacer.limit, 0.5, 10)
        else:
            pacer.overloaded()
            assert pacer.limit == max(1, before // 2)
        assert 1 <= pacer.limit <= cap


def test_failures_alone_are_counted_apart() -> None:
    job = Job(request(1, 4))
    for _ in range(3):
        job.failed(answers=7)
    assert (job.failures, job.failures_alone) == (3, 3)
    assert job.hopeless(2)
    assert not job.hopeless(3)
    job.failed(answers=8)  # others got through since
    assert (job.failures, job.failures_alone) == (4, 1)
    assert not job.hopeless(3)
    for answers in range(9, 9 + 13):
        job.failed(answers)
    assert job.hopeless(3)
    assert job.pause < 1.0


def test_deadlines_count_only_what_nobody_else_watches() -> None:
    deadlines = Deadlines(unreachable=10.0, unusable=100.0, now=0.0)
    assert deadlines.overdue(["unreachable"], pending=False, now=50.0) is None
    assert deadlines.overdue(["unreachable"], pending=True, now=59.0) is None
    assert "answered for 10 s" in (deadlines.overdue(["unreachable"], pending=True, now=61.0) or "")
    assert deadlines.overdue(["unreachable", "usable"], pending=True, now=62.0) is None
    assert deadlines.overdue(["unreachable", "stale"], pending=True, now=161.0) is None
    assert "held the run's weights for 100 s" in (deadlines.overdue(["stale"], pending=True, now=163.0) or "")
    deadlines.push_began(now=200.0)
    assert deadlines.pushing(now=299.0)
    assert deadlines.overdue(["unreachable"], pending=True, now=299.0) is None
    assert deadlines.overdue(["unreachable"], pending=True, now=311.0) is not None  # a push that was given up without a word
    deadlines.push_ended(now=400.0)
    assert deadlines.overdue(["unreachable"], pending=True, now=409.0) is None


def test_the_engine_needs_no_torch() -> None:
    """The process that hosts it stays small and starts fast."""
    code = (
        "import sys, ebft_ds.rollout.host, ebft_ds.rollout.vllm_engine; sys.exit(str(sorted({'torch', 'transformers'} & set(sys.modules))))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stderr.strip() == "[]"
