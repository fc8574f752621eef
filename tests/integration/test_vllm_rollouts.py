"""Rollouts through the real rollout process from a real vLLM server on the CPU, kills included."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ebft_ds.errors import RolloutError, WeightSyncError
from ebft_ds.rollout.client import RolloutClient
from ebft_ds.rollout.engine import ServerCounts
from ebft_ds.rollout.manifest import WeightManifest
from ebft_ds.rollout.spec import RolloutProcessSpec, VllmClientSpec
from ebft_ds.sidecar.api import VllmApi
from ebft_ds.sidecar.server import ServerProcess
from ebft_ds.types import Prompt, Rollout, RolloutGroup, RolloutRequest, SamplingSpec
from tests.integration.stub_vllm import StubVllm
from tests.integration.vllm_server import START_SECONDS, group_members, started, tiny_plan

pytestmark = pytest.mark.timeout(900)

RUN = "ebft-rollouts"
TEMPERATURE = 0.7
EOS = 2
T = TypeVar("T")


@pytest.fixture(scope="module")
def server(servable_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of this module's own: tests kill it, and its weights stay those of the checkpoint."""
    with started(tiny_plan(servable_model), tmp_path_factory.mktemp("server") / "server.log") as process:
        yield process


@pytest.fixture(scope="module")
def reference(servable_model: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(servable_model, dtype=torch.float32).eval()
    return model


@pytest.fixture
def clients(server: ServerProcess, servable_model: Path, tmp_path: Path) -> Iterator[Callable[..., RolloutClient]]:
    """Starts rollout processes; the server is labelled with version 0 first."""
    made: list[RolloutClient] = []

    def start(**fields: Any) -> RolloutClient:
        label(server, 0)
        vllm = VllmClientSpec(servers=[server.address], run_token=RUN, **({"reconnect_timeout": START_SECONDS} | fields))
        made.append(
            RolloutClient(
                RolloutProcessSpec(
                    model_name_or_path=str(servable_model),
                    engine="vllm",
                    vllm=vllm,
                    log_path=str(tmp_path / "rollout.log"),
                    heartbeat_interval=0.1,
                )
            )
        )
        made[-1].start()
        return made[-1]

    yield start
    for client in made:
        client.stop()


def on_server(server: ServerProcess, work: Callable[[VllmApi], Awaitable[T]]) -> T:
    async def run() -> T:
        api = VllmApi(server.address)
        try:
            return await work(api)
        finally:
            await api.close()

    return asyncio.run(run())


def label(server: ServerProcess, version: int) -> None:
    on_server(server, lambda api: api.set_weight_version(f"{RUN}:{version}"))


def wait_for_tokens(server: ServerProcess) -> None:
    """Until the server is in the middle of generation. Asked of itself: what the rollout process has heard of it may be old."""

    async def count(api: VllmApi) -> float:
        return await api.tokens_processed(60.0) or 0.0

    before = on_server(server, count)
    wait_until(lambda: on_server(server, count) > before)


def request(index: int, n: int = 2, budget: int = 8, stop: tuple[int, ...] = (EOS,), temperature: float = TEMPERATURE) -> RolloutRequest:
    sampling = SamplingSpec(temperature=temperature, top_p=1.0, top_k=0, min_p=0.0, stop_token_ids=list(stop), seed=1)
    tokens = [1, *range(10, 12 + index % 23), 100 + index % 300]
    return RolloutRequest(
        prompt=Prompt(prompt_id=index, index=index, epoch=0, token_ids=tokens, reference_ids=[3]),
        num_samples=n,
        max_new_tokens=budget,
        sampling=sampling,
    )


def collect(client: RolloutClient, count: int, timeout: float = 300.0) -> dict[int, RolloutGroup]:
    """`count` groups; one that comes twice is a failure."""
    found: dict[int, RolloutGroup] = {}
    deadline = time.monotonic() + timeout
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count}, {client.servers()}"
        for group in client.poll(1.0):
            assert group.prompt.index not in found
            found[group.prompt.index] = group
    assert client.poll(0.0) == []
    return found


def wait_until(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def expected(model: PreTrainedModel, prompt: list[int], rollout: Rollout, temperature: float) -> list[float]:
    """An independent account by one plain forward."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + rollout.token_ids]), use_cache=False).logits[0].float()
    table = torch.log_softmax(logits / temperature, dim=-1)
    return [float(table[len(prompt) - 1 + i, token]) for i, token in enumerate(rollout.token_ids)]


def check_genuine(model: PreTrainedModel, requests: list[RolloutRequest], found: dict[int, RolloutGroup]) -> None:
    """Every group is what was asked for, and every token and log-prob is the model's."""
    assert sorted(found) == sorted(one.prompt.index for one in requests)
    for one in requests:
        group = found[one.prompt.index]
        assert (group.prompt, group.attempt, len(group.rollouts)) == (one.prompt, one.attempt, one.num_samples)
        for rollout in group.rollouts:
            wanted = expected(model, one.prompt.token_ids, rollout, one.sampling.temperature)
            assert rollout.logprobs == pytest.approx(wanted, abs=1e-4)
            assert rollout.spans[-1].end == len(rollout.token_ids) > 0


def test_the_process_is_told_of_versions_and_takes_no_weights(tmp_path: Path) -> None:
    """Over a stub: the loop learns of confirmed versions, pushes into the process are refused, server counts come with heartbeats."""
    (tmp_path / "config.json").write_text('{"vocab_size": 500}')
    stub = StubVllm(f"{RUN}:5")
    client = RolloutClient(
        RolloutProcessSpec(
            model_name_or_path=str(tmp_path),
            engine="vllm",
            vllm=VllmClientSpec(servers=[stub.address], run_token=RUN),
            initial_version=5,
            rollout_loop="tests.integration.rollout_loops:ShoutingLoop",
            rollout_loop_kwargs={"token": 3},
            log_path=str(tmp_path / "rollout.log"),
            heartbeat_interval=0.05,
        )
    )
    try:
        client.start()
        assert (client.policy_version, client.vocab_size, client.expected_weights) == (5, 500, [])
        wait_until(lambda: client.servers() == ServerCounts(total=1, usable=1, stale=0, unreachable=0, outstanding=0))
        with pytest.raises(WeightSyncError, match="push to the servers"):
            client.begin_update(WeightManifest(6, []))
        client.expect_version(6)
        assert (client.policy_version, client.state_dict()["version"]) == (5, None)
        stub.version = f"{RUN}:6"
        client.confirm_version(6)
        assert (client.policy_version, client.state_dict()["version"]) == (6, 6)
        client.submit([request(0)])
        assert [span.policy_version for span in collect(client, 1)[0].rollouts[0].spans if span.sampled] == [6]
        stub.version = "default"
        wait_until(lambda: (counts := client.servers()) is not None and counts.stale == 1)
    finally:
        client.stop()
        stub.close()


def test_logprobs_are_the_models_at_temperature(
    clients: Callable[..., RolloutClient], reference: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts longer than a cache block and shorter ones; the environment's proxy does not matter to a local server."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    client = clients()
    requests = [request(i, n=4, budget=10 + i) for i in (0, 3, 9, 17, 22)] + [request(40, temperature=1.3), request(41, temperature=0.1)]
    client.submit(requests)
    found = collect(client, len(requests))
    check_genuine(reference, requests, found)
    assert {span.policy_version for group in found.values() for rollout in group.rollouts for span in rollout.spans} == {0}


def test_samples_differ_and_a_rerun_is_equal(clients: Callable[..., RolloutClient]) -> None:
    client = clients()
    requests = [request(i, n=4, budget=20) for i in range(4)]
    runs: list[dict[int, RolloutGroup]] = []
    for _ in range(2):
        client.submit(requests)
        runs.append(collect(client, 4))
    for index in range(4):
        first, again = (run[index].rollouts for run in runs)
        assert [rollout.token_ids for rollout in first] == [rollout.token_ids for rollout in again]
        for a, b in zip(first, again, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
        assert len({tuple(rollout.token_ids) for rollout in first}) == 4


def test_budgets_are_per_prompt_and_only_our_stop_ids_stop(clients: Callable[..., RolloutClient]) -> None:
    client = clients()
    some = tuple(range(3, 512, 9))
    client.submit(
        [
            request(0, n=3, budget=5, stop=()),
            request(1, n=2, budget=200, stop=(), temperature=2.0),
            request(2, n=2, budget=9, stop=tuple(range(512))),
            request(3, n=8, budget=60, stop=some),
        ]
    )
    found = collect(client, 4)
    ends = {index: [(len(r.token_ids), r.finish_reason) for r in group.rollouts] for index, group in found.items()}
    assert ends[0] == [(5, "length")] * 3
    assert ends[1] == [(200, "length")] * 2  # whatever was sampled, EOS included, which is no stop id here
    assert ends[2] == [(1, "stop")] * 2
    assert any(reason == "stop" and length > 1 for length, reason in ends[3])
    for rollout in found[3].rollouts:
        assert not set(rollout.token_ids[:-1]) & set(some)
        assert (rollout.token_ids[-1] in some) == (rollout.finish_reason == "stop")  # the stop id is part of the completion


def test_eos_goes_on_unless_it_is_a_stop_id(clients: Callable[..., RolloutClient]) -> None:
    client = clients()
    client.submit([request(i, n=16, budget=100, stop=(), temperature=2.0) for i in range(2)])
    rollouts = [rollout for group in collect(client, 2).values() for rollout in group.rollouts]
    assert any(EOS in rollout.token_ids[:-1] for rollout in rollouts)
    assert {len(rollout.token_ids) for rollout in rollouts} == {100}


def test_sixty_four_requests_at_once_come_back_once_each(clients: Callable[..., RolloutClient], reference: PreTrainedModel) -> None:
    client = clients()
    requests = [request(i, n=2, budget=4 + i % 13) for i in range(64)]
    client.submit(requests)
    check_genuine(reference, requests, collect(client, 64))


def test_a_request_frozen_by_a_pause_goes_on_with_both_versions(
    clients: Callable[..., RolloutClient], server: ServerProcess, reference: PreTrainedModel
) -> None:
    client = clients()
    requests = [request(i, n=4, budget=220, stop=()) for i in range(32)]  # eight times what the server runs at once
    client.submit(requests)
    wait_for_tokens(server)
    client.expect_version(1)

    async def relabel(api: VllmApi) -> None:
        await api.pause("keep", 30.0)
        await api.set_weight_version(f"{RUN}:1")
        await api.resume(30.0)

    on_server(server, relabel)
    client.confirm_version(1)
    assert client.policy_version == 1
    found = collect(client, 32)
    check_genuine(reference, requests, found)
    versions = {tuple(span.policy_version for span in rollout.spans) for group in found.values() for rollout in group.rollouts}
    assert (0, 1) in versions
    assert versions <= {(0,), (0, 1), (1,)}
    client.submit([request(9)])
    assert {span.policy_version for rollout in collect(client, 1)[9].rollouts for span in rollout.spans} == {1}


def test_a_request_that_the_server_would_cut_is_refused(clients: Callable[..., RolloutClient]) -> None:
    client = clients()
    client.submit([request(0, budget=255)])
    with pytest.raises(RolloutError, match="exceed the servers' context of 256"):
        collect(client, 1, timeout=30.0)


def test_a_killed_rollout_process_is_an_error_and_leaves_the_server_usable(
    clients: Callable[..., RolloutClient], server: ServerProcess, reference: PreTrainedModel
) -> None:
    client = clients()
    client.submit([request(i, n=8, budget=220, stop=()) for i in range(20)])
    wait_for_tokens(server)
    began = time.monotonic()
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(RolloutError, match=r"the rollout process is gone \(killed by SIGKILL\)"):
        collect(client, 20, timeout=30.0)
    assert time.monotonic() - began < 15.0
    requests = [request(i) for i in range(4)]
    other = clients()
    other.submit(requests)
    check_genuine(reference, requests, collect(other, 4))


def test_a_frozen_core_behind_a_healthy_front_is_noticed(clients: Callable[..., RolloutClient], server: ServerProcess) -> None:
    client = clients(reconnect_timeout=4.0)
    pid = server.pid()
    assert pid is not None
    cores = [process for process in group_members(pid) if "EngineCore" in " ".join(process.cmdline())]
    assert len(cores) == 1
    client.submit([request(i, n=8, budget=220, stop=()) for i in range(32)])
    wait_for_tokens(server)
    cores[0].suspend()
    try:
        assert on_server(server, lambda api: api.healthy(10.0))
        with pytest.raises(RolloutError, match=r"no vLLM server has answered for 4 s.*weight_info: no answer"):
            collect(client, 32, timeout=60.0)
    finally:
        cores[0].resume()
    on_server(server, lambda api: api.weight_version(60.0))


def test_a_killed_server_that_comes_back_loses_no_prompt(
    clients: Callable[..., RolloutClient], server: ServerProcess, reference: PreTrainedModel
) -> None:
    """SIGKILL to everything of the server in the middle of generation. Back with base weights and no label, it gets no request until
    it is labelled again; then every prompt comes back exactly once, with the model's own tokens."""
    client = clients()
    requests = [request(i, n=4, budget=16 + 20 * (i % 10), stop=()) for i in range(24)]
    client.submit(requests)
    found = {group.prompt.index: group for group in client.poll(60.0)}
    assert 0 < len(found) < 24
    pid = server.pid()
    assert pid is not None
    os.killpg(pid, signal.SIGKILL)
    wait_until(lambda: (counts := client.servers()) is not None and counts.unreachable == 1)
    found |= {group.prompt.index: group for group in client.poll(0.0)}
    assert len(found) < 24
    server.start()
    server.wait_ready(START_SECONDS)
    wait_until(lambda: (counts := client.servers()) is not None and counts.stale == 1)
    assert client.poll(1.0) == []
    label(server, 0)
    rest = collect(client, 24 - len(found))
    assert not set(rest) & set(found)
    check_genuine(reference, requests, found | rest)
