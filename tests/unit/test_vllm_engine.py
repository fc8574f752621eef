"""The vLLM engine against a stub server that fails on purpose. What a real server does is in tests/integration/test_vllm_rollouts.py."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ebft_ds.errors import ConfigError, ModelError, RolloutError
from ebft_ds.rollout import vllm_dispatch, vllm_job, vllm_server
from ebft_ds.rollout.spec import RolloutProcessSpec, VllmClientSpec
from ebft_ds.rollout.vllm_engine import VllmEngine
from ebft_ds.types import Prompt, RolloutGroup, RolloutRequest, SamplingSpec
from tests.integration.stub_vllm import VOCAB, Behaviour, StubVllm, after, altered, garbage, hang, held, reset, status, well

RUN = "ebft-test"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "LOOK_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(vllm_server, "LOOK_SECONDS", 1.0)
    monkeypatch.setattr(vllm_server, "PROBE_SECONDS", 1.0)
    monkeypatch.setattr(vllm_server, "COOL_SECONDS", 0.02)
    monkeypatch.setattr(vllm_job, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(vllm_dispatch, "GUARD_SECONDS", 0.02)


@pytest.fixture
def stubs() -> Iterator[Callable[..., StubVllm]]:
    made: list[StubVllm] = []

    def make(version: str = f"{RUN}:0", **fields: Any) -> StubVllm:
        made.append(StubVllm(version, **fields))
        return made[-1]

    yield make
    for stub in made:
        stub.close()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Callable[..., VllmEngine]]:
    (tmp_path / "config.json").write_text(f'{{"vocab_size": {VOCAB}}}')
    made: list[VllmEngine] = []

    def make(*stubs: StubVllm, timeout: float = 60.0, initial_version: int = 0, **fields: Any) -> VllmEngine:
        client = VllmClientSpec(servers=[stub.address for stub in stubs], run_token=RUN, **({"reconnect_timeout": 5.0} | fields))
        made.append(
            VllmEngine(
                RolloutProcessSpec(
                    model_name_or_path=str(tmp_path),
                    engine="vllm",
                    vllm=client,
                    timeout=timeout,
                    initial_version=initial_version,
                    log_path="unused",
                )
            )
        )
        made[-1].start()
        return made[-1]

    yield make
    for engine in made:
        engine.stop()


def request(index: int, n: int = 2, budget: int = 6, **fields: Any) -> RolloutRequest:
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 0, "min_p": 0.0, "stop_token_ids": [2, 900], "seed": 5} | fields
    prompt = Prompt(prompt_id=index + 100, index=index, epoch=0, token_ids=[1, 9, 4 + index % 50], reference_ids=[3, 2])
    return RolloutRequest(prompt=prompt, num_samples=n, max_new_tokens=budget, sampling=SamplingSpec(**sampling))


def finish(engine: VllmEngine, *requests: RolloutRequest, timeout: float = 20.0) -> dict[int, RolloutGroup]:
    """Submit and step until all are back, each once."""
    engine.submit(requests)
    found: list[RolloutGroup] = []
    deadline = time.monotonic() + timeout
    while engine.has_work and time.monotonic() < deadline:
        found += engine.step()
    assert not engine.has_work
    by_index = {group.prompt.index: group for group in found}
    assert len(by_index) == len(found)
    return by_index


def step_until(engine: VllmEngine, condition: Callable[[], bool], timeout: float = 10.0) -> list[RolloutGroup]:
    found: list[RolloutGroup] = []
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        found += engine.step()
    return found


def collect(engine: VllmEngine, count: int) -> dict[int, RolloutGroup]:
    found: dict[int, RolloutGroup] = {}
    deadline = time.monotonic() + 10.0
    while len(found) < count:
        assert time.monotonic() < deadline
        found |= {group.prompt.index: group for group in engine.step()}
    return found


def failure(engine: VllmEngine, timeout: float = 10.0) -> str:
    """The message of the error that the engine ends with."""
    deadline = time.monotonic() + timeout

    def run() -> None:
        while time.monotonic() < deadline:
            engine.step()

    with pytest.raises(RolloutError) as caught:
        run()
    return str(caught.value)


def spans(group: RolloutGroup) -> list[list[tuple[int, int, int]]]:
    return [[(span.start, span.end, span.policy_version) for span in rollout.spans] for rollout in group.rollouts]


def test_every_sampling_field_is_said(stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]) -> None:
    stub = stubs()
    finish(engines(stub), request(3, n=4, budget=11))
    body = stub.requests[0]
    seed = body["sampling_params"].pop("seed")
    assert 0 <= seed < 2**62
    assert body == {
        "request_id": f"{RUN}-3-0-1",
        "token_ids": [1, 9, 7],
        "stream": False,
        "sampling_params": {
            "n": 4,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": -1,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "watermarking": False,
            "max_tokens": 11,
            "min_tokens": 0,
            "stop_token_ids": [2],
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
        },
    }


def test_samples_come_in_the_order_of_their_index(stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]) -> None:
    stub = stubs()
    stub.next += [well, altered(lambda answer: answer["choices"].reverse())]
    engine = engines(stub)
    plain = finish(engine, request(0, n=3))[0]
    assert finish(engine, request(0, n=3))[0].rollouts == plain.rollouts
    assert len({tuple(rollout.token_ids) for rollout in plain.rollouts}) == 3


def change_first(**fields: Any) -> Behaviour:
    return altered(lambda answer: answer["choices"][0].update(fields))


def cut(name: str) -> Behaviour:
    """The first sample without its last entry of `name`."""

    def change(answer: dict[str, Any]) -> None:
        found = answer["choices"][0][name]
        (found["content"] if name == "logprobs" else found).pop()

    return altered(change)


def logprob(value: float) -> Behaviour:
    return altered(lambda answer: answer["choices"][1]["logprobs"]["content"][2].update(logprob=value))


def span(*found: tuple[str, int, int]) -> Behaviour:
    return change_first(weight_versions=[{"version": version, "start": start, "end": end} for version, start, end in found])


def end_with_stop(answer: dict[str, Any]) -> None:
    """A stop id in the middle, as if the server went on behind it."""
    choice = answer["choices"][0]
    choice["token_ids"][2] = choice["logprobs"]["content"][2]["token_id"] = 2


FAULTS: dict[str, Behaviour] = {
    "500": status(500),
    "502": status(502),
    "503": status(503),
    "429": status(429),
    "401": status(401),
    "reset in the middle of an answer": reset,
    "no JSON": garbage,
    "a sample too few": altered(lambda answer: answer["choices"].pop()),
    "a sample twice": altered(lambda answer: answer["choices"][1].update(index=0)),
    "no log-probs": change_first(logprobs=None),
    "a log-prob too few": cut("logprobs"),
    "a token too few": cut("token_ids"),
    "NaN as vLLM writes it": logprob(-9999.0),
    "a log-prob that is null": altered(lambda answer: answer["choices"][1]["logprobs"]["content"][2].update(logprob=None)),
    "a token outside the vocabulary": altered(lambda answer: answer["choices"][0].update(token_ids=[VOCAB] * 6)),
    "aborted": change_first(finish_reason="abort"),
    "aborted before the first token": change_first(finish_reason="abort", token_ids=[], logprobs={"content": []}, weight_versions=[]),
    "an error as the finish reason": change_first(finish_reason="error"),
    "repetition as the finish reason": change_first(finish_reason="repetition"),
    "stop without a stop id": change_first(finish_reason="stop"),
    "a stop id in the middle": altered(end_with_stop),
    "no version": change_first(weight_versions=None),
    "a gap between versions": span((f"{RUN}:0", 0, 2), (f"{RUN}:0", 3, 6)),
    "versions that end early": span((f"{RUN}:0", 0, 5)),
    "a restarted server's version": span(("default", 0, 6)),
    "another run's version": span(("ebft-other:0", 0, 6)),
    "a version that was never announced": span((f"{RUN}:0", 0, 4), (f"{RUN}:1", 4, 6)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_answer_is_asked_for_again(name: str, stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]) -> None:
    stub = stubs()
    engine = engines(stub)
    wanted = finish(engine, request(7))[7]
    stub.next.append(FAULTS[name])
    assert finish(engine, request(7))[7].rollouts == wanted.rollouts
    first, faulty, again = stub.requests
    assert faulty["request_id"] != again["request_id"]
    assert faulty["sampling_params"] == again["sampling_params"] == first["sampling_params"]


def test_faults_without_end_end_the_engine(stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]) -> None:
    stub = stubs()
    stub.always = logprob(-9999.0)
    engine = engines(stub, request_retries=3)
    engine.submit([request(7)])
    message = failure(engine)
    assert "prompt 107 (index 7, attempt 0): 4 attempts failed" in message
    assert "log-prob -9999.0 at position 2" in message
    assert len(stub.requests) == 4


def test_a_request_that_always_fails_ends_the_engine_even_while_others_get_through(
    stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]
) -> None:
    async def one_is_cursed(stub: StubVllm, received: Any, body: dict[str, Any]) -> Any:
        return await (status(500) if body["token_ids"] == [1, 9, 4] else well)(stub, received, body)

    stub = stubs()
    stub.always = one_is_cursed
    engine = engines(stub, request_retries=1)
    engine.submit([request(0)])
    deadline = time.monotonic() + 20.0

    def keep_others_coming() -> None:
        index = 0
        while time.monotonic() < deadline:
            index += 1
            engine.submit([request(index % 49 + 1 + 50 * index)])
            engine.step()

    with pytest.raises(RolloutError, match=r"prompt 100 \(index 0.*attempts failed"):
        keep_others_coming()


def test_a_refused_request_ends_the_engine_at_once(stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]) -> None:
    stub = stubs()
    stub.always = status(400)
    engine = engines(stub)
    engine.submit([request(7)])
    message = failure(engine)
    assert "prompt 107" in message
    assert "the stub says 400" in message
    assert len(stub.requests) == 1


def test_a_server_without_the_token_route_is_named(stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]) -> None:
    stub = stubs()
    stub.always = status(404)
    engine = engines(stub)
    engine.submit([request(7)])
    assert "--enable-scale-out" in failure(engine)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (request(0, budget=254), "3 prompt tokens and up to 254 new ones exceed the servers' context of 256"),
        (request(0, n=0), "needs a prompt"),
        (request(0, temperature=0.001), "outside vLLM's range"),
        (request(0, temperature=2.5), "outside vLLM's range"),
        (RolloutRequest(Prompt(5, 0, 0, [1, VOCAB], [3]), 1, 4, request(0).sampling), f"vocabulary of {VOCAB}"),
    ],
)
def test_what_a_server_would_cut_or_change_is_not_sent(
    bad: RolloutRequest, text: str, stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]
) -> None:
    stub = stubs()
    with pytest.raises(RolloutError, match=text):
        engines(stub).submit([bad])
    assert stub.requests == []


def test_one_index_is_in_flight_once(stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]) -> None:
    stub = stubs()
    stub.always = held
    engine = engines(stub)
    engine.submit([request(1)])
    with pytest.raises(RolloutError, match="already in flight"):
        engine.submit([request(1)])


def test_a_server_with_other_weights_gets_no_request(stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]) -> None:
    """`default` is what a server reports that nobody has labelled: never taken for the initial version."""
    right, fresh, foreign, newer = stubs(), stubs("default"), stubs("ebft-other:0"), stubs(f"{RUN}:1")
    engine = engines(fresh, foreign, right, newer)
    assert len(finish(engine, *[request(i) for i in range(12)])) == 12
    assert (len(right.requests), fresh.requests, foreign.requests, newer.requests) == (12, [], [], [])
    counts = engine.servers()
    assert (counts.total, counts.usable, counts.stale, counts.unreachable) == (4, 1, 3, 0)


def test_requests_wait_until_the_server_is_labelled(stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]) -> None:
    stub = stubs("default")
    engine = engines(stub)
    engine.submit([request(0)])
    step_until(engine, lambda: engine.servers().stale == 1)
    assert engine.step() == []
    stub.version = f"{RUN}:0"
    assert [group.prompt.index for group in step_until(engine, lambda: not engine.has_work)] == [0]


def test_requests_follow_the_confirmed_version(stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]) -> None:
    pushed, lost = stubs(), stubs()
    engine = engines(pushed, lost)
    engine.expect_version(1)
    pushed.version = f"{RUN}:1"
    found = finish(engine, *[request(i) for i in range(8)])
    assert {span[2] for group in found.values() for one in spans(group) for span in one} == {0, 1}  # both serve while the push is open
    assert engine.policy_version == 0
    engine.confirm_version(1)
    assert engine.policy_version == 1
    before = len(lost.requests)
    found = finish(engine, *[request(i) for i in range(8)])
    assert {span[2] for group in found.values() for one in spans(group) for span in one} == {1}
    assert len(lost.requests) == before
    lost.version = f"{RUN}:1"
    step_until(engine, lambda: engine.servers().usable == 2)


def test_a_request_sent_after_a_push_takes_no_older_tokens(stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]) -> None:
    stub = stubs()
    stub.always = held
    engine = engines(stub)
    engine.submit([request(0), request(1)])
    step_until(engine, lambda: stub.in_flight == 2)
    engine.expect_version(1)
    stub.version = f"{RUN}:1"
    engine.confirm_version(1)
    stub.always = well
    stub.next.append(span((f"{RUN}:0", 0, 2), (f"{RUN}:1", 2, 6)))
    engine.submit([request(2)])
    new = collect(engine, 1)
    assert spans(new[2])[0] == [(0, 6, 1)]  # sent after the push: the first answer, half old, was thrown away
    stub.gate.set()
    assert sorted(collect(engine, 2)) == [0, 1]


def test_old_tokens_of_a_request_that_was_in_flight_are_kept(stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]) -> None:
    async def half_and_half(stub: StubVllm, received: Any, body: dict[str, Any]) -> Any:
        await held(stub, received, body)
        return await span((f"{RUN}:0", 0, 2), (f"{RUN}:1", 2, 4), (f"{RUN}:2", 4, 6))(stub, received, body)

    stub = stubs()
    stub.next.append(half_and_half)
    engine = engines(stub)
    engine.submit([request(0)])
    step_until(engine, lambda: stub.in_flight == 1)
    for version in (1, 2):
        engine.expect_version(version)
        stub.version = f"{RUN}:{version}"
        engine.confirm_version(version)
    stub.gate.set()
    found = step_until(engine, lambda: not engine.has_work)
    assert spans(found[0])[0] == [(0, 2, 0), (2, 4, 1), (4, 6, 2)]
    assert len(stub.requests) == 1


def test_a_server_restarted_with_base_weights_is_noticed(stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]) -> None:
    """Requests in flight break, the server comes back with its own weights, and waits until the trainer has pushed again."""
    stub = stubs(f"{RUN}:3")
    stub.always = held
    engine = engines(stub, initial_version=3)
    engine.submit([request(i) for i in range(5)])
    step_until(engine, lambda: stub.in_flight == 5)
    stub.down()
    step_until(engine, lambda: engine.servers().unreachable == 1)
    stub.version = "default"
    stub.always = well
    stub.up()
    step_until(engine, lambda: engine.servers().stale == 1)
    assert len(stub.requests) == 5
    stub.version = f"{RUN}:3"
    found = step_until(engine, lambda: not engine.has_work)
    assert sorted(group.prompt.index for group in found) == [0, 1, 2, 3, 4]
    assert all(spans(group) == [[(0, 6, 3)]] * 2 for group in found)


def test_a_dead_server_leaves_its_requests_to_the_others(stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]) -> None:
    dying, other = stubs(), stubs()
    dying.always = held
    engine = engines(dying, other)
    engine.submit([request(i) for i in range(10)])
    step_until(engine, lambda: dying.in_flight >= 3)
    dying.down()
    found = step_until(engine, lambda: not engine.has_work)
    step_until(engine, lambda: engine.servers().unreachable == 1)
    assert len(finish(engine, *[request(20 + i) for i in range(10)])) + len(found) >= 10
    dying.always = well
    dying.up()
    step_until(engine, lambda: engine.servers().usable == 2)
    before = len(dying.requests)
    finish(engine, *[request(40 + i) for i in range(10)])
    assert len(dying.requests) > before


def test_no_server_for_too_long_ends_the_engine(stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]) -> None:
    one, two = stubs(), stubs()
    engine = engines(one, two, reconnect_timeout=0.5)
    one.down()
    two.down()
    engine.submit([request(0)])
    began = time.monotonic()
    message = failure(engine)
    assert time.monotonic() - began < 5.0
    assert "no vLLM server has answered for 0.5 s (vllm_reconnect_timeout), with 1 prompts pending" in message
    assert one.address.url in message
    assert two.address.url in message


def test_an_idle_engine_does_not_mind(stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]) -> None:
    stub = stubs()
    engine = engines(stub, reconnect_timeout=0.2)
    stub.down()
    step_until(engine, lambda: engine.servers().unreachable == 1)
    end = time.monotonic() + 0.6
    step_until(engine, lambda: time.monotonic() > end)
    stub.up()
    assert len(finish(engine, request(0))) == 1


def test_a_dead_core_behind_a_healthy_front_is_no_server(
    stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "LOOK_SECONDS", 0.1)
    stub = stubs()
    stub.always = hang
    engine = engines(stub, reconnect_timeout=0.6)
    engine.submit([request(0)])
    step_until(engine, lambda: stub.in_flight == 1)
    stub.look = hang
    assert "no vLLM server has answered" in failure(engine)


def test_weights_that_never_come_end_the_engine(stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]) -> None:
    stub = stubs("default")
    engine = engines(stub, timeout=0.5, reconnect_timeout=0.1)
    engine.submit([request(0)])
    message = failure(engine)
    assert "no vLLM server has held the run's weights for 0.45 s" in message
    assert f"holds 'default' and not '{RUN}:0'" in message


def test_during_a_push_a_server_may_be_silent(stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]) -> None:
    stub = stubs()
    stub.always = held
    engine = engines(stub, reconnect_timeout=0.2)
    engine.submit([request(0)])
    step_until(engine, lambda: stub.in_flight == 1)
    engine.expect_version(1)
    stub.look = status(500)
    step_until(engine, lambda: engine.servers().unreachable == 1)
    end = time.monotonic() + 0.6
    step_until(engine, lambda: time.monotonic() > end)
    stub.look, stub.version = None, f"{RUN}:1"
    step_until(engine, lambda: engine.servers().usable == 1)
    engine.confirm_version(1)
    stub.gate.set()
    assert len(step_until(engine, lambda: not engine.has_work)) == 1
    assert len(stub.requests) == 1


def test_requests_at_a_silent_server_go_elsewhere(
    stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "LOOK_SECONDS", 0.1)
    silent, other = stubs(), stubs()
    silent.always = hang
    engine = engines(silent, other, reconnect_timeout=0.3)
    engine.submit([request(i) for i in range(6)])
    step_until(engine, lambda: silent.in_flight == 3)
    silent.look = hang
    step_until(engine, lambda: not engine.has_work)
    step_until(engine, lambda: silent.broken_off >= 3)


def test_a_request_without_an_answer_in_time_is_sent_again(stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]) -> None:
    stub = stubs()
    stub.next.append(hang)
    engine = engines(stub, request_timeout=0.3)
    assert len(finish(engine, request(0))) == 1
    probe = [body for body in stub.requests if body["request_id"].startswith("alive-")]
    assert len(probe) == 1  # its count of tokens stood still: one token had to show that it works
    assert len(stub.requests) == 3


def test_a_server_that_answers_but_generates_nothing_is_lost(stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]) -> None:
    stub = stubs()
    stub.always = hang
    engine = engines(stub, request_timeout=0.2, reconnect_timeout=1.5)
    engine.submit([request(0)])
    assert "no vLLM server has answered for 1.5 s" in failure(engine)


def test_signs_of_life_are_tokens_worked_on(stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]) -> None:
    """A slow server is not dead: its count of tokens moves. One that stands still (paused for good) gives no sign."""
    stub = stubs()
    stub.always = held
    engine = engines(stub)
    engine.submit([request(0)])
    step_until(engine, lambda: stub.in_flight == 1)
    for _ in range(3):
        before = engine.tokens_generated
        stub.tokens = (stub.tokens or 0) + 5
        step_until(engine, lambda: engine.tokens_generated > before)  # noqa: B023
    before = engine.tokens_generated
    end = time.monotonic() + 0.5
    step_until(engine, lambda: time.monotonic() > end)
    assert engine.tokens_generated == before
    stub.gate.set()
    step_until(engine, lambda: not engine.has_work)
    assert engine.tokens_generated == before + 12


def test_without_statistics_a_core_that_answers_is_a_sign_of_life(
    stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]
) -> None:
    stub = stubs()
    stub.always, stub.tokens = held, None
    engine = engines(stub)
    engine.submit([request(0)])
    step_until(engine, lambda: engine.tokens_generated >= 2)
    stub.look = status(500)
    step_until(engine, lambda: engine.servers().unreachable == 1)
    before = engine.tokens_generated
    end = time.monotonic() + 0.3
    step_until(engine, lambda: time.monotonic() > end)
    assert engine.tokens_generated == before
    stub.gate.set()
    step_until(engine, lambda: not engine.has_work)


def test_a_server_that_fails_at_once_does_not_draw_everything(stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]) -> None:
    broken, good = stubs(), stubs()
    broken.always = status(500)
    good.always = after(0.02)
    engine = engines(broken, good, max_concurrency=2)
    assert len(finish(engine, *[request(i) for i in range(40)])) == 40
    assert len(broken.requests) < 40


def test_load_is_balanced_by_outstanding_samples(stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]) -> None:
    slow, fast = stubs(), stubs()
    slow.always, fast.always = after(0.3), after(0.01)
    engine = engines(slow, fast, max_concurrency=4)
    assert len(finish(engine, *[request(i) for i in range(60)])) == 60
    assert slow.most_in_flight <= 4
    assert fast.most_in_flight <= 4
    assert len(fast.requests) > 2 * len(slow.requests) > 0


def test_a_big_group_counts_for_more(stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]) -> None:
    one, two = stubs(), stubs()
    one.always = two.always = held
    engine = engines(one, two)
    engine.submit([request(0, n=8), *[request(i, n=1) for i in range(1, 9)]])
    step_until(engine, lambda: one.in_flight + two.in_flight == 9)
    assert {one.in_flight, two.in_flight} == {1, 8}
    one.gate.set()
    two.gate.set()
    step_until(engine, lambda: not engine.has_work)


def test_more_than_a_thousand_requests_at_once(
    stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than aiohttp's own limit of connections and than the usual limit of open files."""
    monkeypatch.setattr(vllm_server, "LOOK_SECONDS", 30.0)
    stub = stubs()
    stub.always = held
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    engine = engines(stub, reconnect_timeout=60.0)
    for server in engine._started.servers:
        server.pacer.limit = 4000
    engine.submit([request(i, n=1) for i in range(1200)])
    step_until(engine, lambda: stub.in_flight == 1200, timeout=120.0)
    stub.gate.set()
    assert len(step_until(engine, lambda: not engine.has_work, timeout=120.0)) == 1200


def test_cancelled_requests_are_dropped_and_broken_off(stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]) -> None:
    stub = stubs()
    stub.always = held
    engine = engines(stub, max_concurrency=2)
    engine.submit([request(i) for i in range(4)])
    step_until(engine, lambda: stub.in_flight == 2)
    engine.cancel([0, 3, 99])
    step_until(engine, lambda: stub.broken_off == 1)
    engine.submit([request(0, budget=9)])  # under the same index: another request
    stub.gate.set()
    found = {group.prompt.index: group for group in step_until(engine, lambda: not engine.has_work)}
    assert sorted(found) == [0, 1, 2]
    assert len(found[0].rollouts[0].token_ids) == 9
    assert engine.servers().outstanding == 0


def test_a_proxy_in_the_environment_is_ignored(
    stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert len(finish(engines(stubs()), request(0))) == 1


def test_adapters_are_asked_for_by_name(stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]) -> None:
    """The whole answer has the adapter's version, whatever the base is labelled; a server without it waits."""
    stub = stubs("default")
    stub.adapters = {"policy-v0"}
    engine = engines(stub, adapter_alias="policy")
    assert spans(finish(engine, request(0))[0]) == [[(0, 6, 0)]] * 2
    engine.expect_version(1)
    stub.adapters.add("policy-v1")
    engine.confirm_version(1)
    assert spans(finish(engine, request(1))[1]) == [[(0, 6, 1)]] * 2
    assert [body["model"] for body in stub.requests] == ["policy-v0", "policy-v1"]
    stub.next.append(status(404))  # restarted since the last look
    stub.adapters.clear()
    engine.submit([request(2)])
    step_until(engine, lambda: engine.servers().stale == 1)
    stub.adapters.add("policy-v1")
    assert [spans(group) for group in step_until(engine, lambda: not engine.has_work)] == [[[(0, 6, 1)]] * 2]


def test_an_adapter_on_foreign_weights_is_not_taken(stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]) -> None:
    stub = stubs("ebft-other:4")
    stub.adapters = {"policy-v0"}
    engine = engines(stub, adapter_alias="policy", timeout=0.5)
    engine.submit([request(0)])
    assert "holds 'ebft-other:4' and not 'policy-v0'" in failure(engine)
    assert stub.requests == []


def test_no_server_at_the_start_is_an_error(stubs: Callable[..., StubVllm], engines: Callable[..., VllmEngine]) -> None:
    stub = stubs()
    stub.down()
    with pytest.raises(RolloutError, match=r"no vLLM server answers after 0\.3 s.*Cannot connect"):
        engines(stub, reconnect_timeout=0.3)


def test_a_specification_that_cannot_work_is_refused(tmp_path: Path, stubs: Callable[..., StubVllm]) -> None:
    with pytest.raises(ConfigError, match="at least one server"):
        VllmEngine(RolloutProcessSpec(model_name_or_path="x", engine="vllm", log_path="unused"))
    client = VllmClientSpec(servers=[stubs().address], run_token=RUN)
    engine = VllmEngine(RolloutProcessSpec(model_name_or_path=str(tmp_path / "nothing"), engine="vllm", vllm=client, log_path="unused"))
    with pytest.raises(ModelError, match="cannot read the configuration"):
        engine.start()
    engine.stop()
