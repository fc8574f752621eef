"""Pushes to real vLLM servers over gloo and by files: what the server then computes, and what happens when a push goes wrong."""

from __future__ import annotations

import math
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from ebft_ds.errors import RolloutError, WeightSyncError
from ebft_ds.rollout.manifest import TensorSpec, WeightManifest
from ebft_ds.sidecar.address import ServerAddress
from ebft_ds.sidecar.api import Choice, VllmApi
from ebft_ds.sidecar.control import ControlLoop
from ebft_ds.sidecar.gloo_group import serve_store
from ebft_ds.sidecar.push_ops import Abort, Announce, Apply, DiskWay, GlooWay, Op, Reply, Status
from ebft_ds.sidecar.server import ServerProcess
from ebft_ds.sidecar.versions import VersionNames, new_run_token
from ebft_ds.sync.transports import disk
from ebft_ds.sync.transports.disk import DiskTransport
from ebft_ds.sync.transports.gloo import GlooTransport
from ebft_ds.sync.transports.servers import ServerTransport
from tests.integration.policies import Named, Policy, in_buckets, manifest_of

WAYS = ["gloo", "disk"]
TIMEOUT = 60.0
LONG_PROMPT = [1, *(5 + (7 * i) % 400 for i in range(180))]
"""Longer than one cache block (128 tokens on CPU)."""
SHORT_PROMPT = [1, 40, 77, 12, 300, 9, 120, 33]


@pytest.fixture(scope="module")
def control() -> Iterator[ControlLoop]:
    loop = ControlLoop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def policy(servable_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return Policy(servable_model, tmp_path_factory.mktemp("saved"))


Make = Callable[..., ServerTransport]


@pytest.fixture
def transport(control: ControlLoop, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Make]:
    """Transports to some addresses, of a run of their own each."""
    made: list[ServerTransport] = []

    def make(way: str, *addresses: ServerAddress, names: VersionNames | None = None) -> ServerTransport:
        run = names or VersionNames(new_run_token())
        if way == "gloo":
            made.append(GlooTransport(addresses, run, control))
        else:
            made.append(DiskTransport(addresses, run, control, sync_dir=tmp_path / "pushes"))
        return made[-1]

    yield make
    for one in made:
        one.close()


def gap(control: ControlLoop, address: ServerAddress, policy: Policy) -> float:
    """Largest difference between server and policy, on prompt log-probs and on what is sampled after a prompt that may be cached."""
    api = control.api(address)
    prompt = torch.tensor(control.run(api.prompt_logprobs(SHORT_PROMPT)))
    found = float((prompt - policy.log_probs(SHORT_PROMPT)).abs().max())
    answer = control.run(generate(api, LONG_PROMPT, max_tokens=4))
    sampled = torch.tensor(log_probs_of(answer))
    wanted = policy.log_probs([*LONG_PROMPT, *answer.token_ids])[-len(sampled) :]
    return max(found, float((sampled - wanted).abs().max()))


async def generate(api: VllmApi, prompt: list[int], *, max_tokens: int, seed: int = 0) -> Choice:
    params = {"max_tokens": max_tokens, "temperature": 1.0, "seed": seed, "logprobs": 0, "detokenize": False, "ignore_eos": True}
    answer = await api.generate(prompt, params, request_id=f"t-{secrets.token_hex(4)}", model=None, timeout=TIMEOUT)
    return answer.choices[0]


def log_probs_of(choice: Choice) -> list[float]:
    assert choice.logprobs is not None
    return [token.logprob for token in choice.logprobs.content or []]


def push(transport: ServerTransport, version: int, tensors: Named, *, complete: bool = False) -> float:
    result = transport.push(manifest_of(version, tensors, complete=complete), in_buckets(tensors), TIMEOUT)
    assert (result.confirmed, result.lost) == (1, 0)
    return result.pause_seconds


@pytest.fixture
def pushed(vllm_server: ServerProcess, transport: Make, policy: Policy, control: ControlLoop) -> ServerTransport:
    """A gloo transport whose run the server belongs to, and a policy that it holds as version 1."""
    made = transport("gloo", vllm_server.address)
    push(made, 1, policy.tensors(), complete=True)
    assert gap(control, vllm_server.address, policy) < 1e-4
    return made


@pytest.mark.parametrize("way", WAYS)
def test_the_server_computes_what_was_pushed(
    way: str, vllm_server: ServerProcess, transport: Make, policy: Policy, control: ControlLoop
) -> None:
    made = transport(way, vllm_server.address)
    parts = [(), ("layers.1.self_attn", "layers.2.mlp", "model.norm"), ("embed_tokens",), ("layers.0.self_attn.o_proj", "layernorm")]
    for version in range(1, 11):
        control.run(generate(control.api(vllm_server.address), LONG_PROMPT, max_tokens=1))  # its blocks are cached by the old weights
        chosen = parts[version % len(parts)] if version > 1 else ()
        policy.move(*chosen)
        assert gap(control, vllm_server.address, policy) > 1e-3, "the push must make a difference"
        pause = push(made, version, policy.tensors(*chosen), complete=not chosen)
        assert 0 < pause < TIMEOUT
        assert gap(control, vllm_server.address, policy) < 1e-4
        assert not made.stale(version)
        assert made.stale(version - 1)
        [scored] = made.score(SHORT_PROMPT, 1.0, TIMEOUT)
        assert torch.allclose(torch.tensor(scored), policy.log_probs(SHORT_PROMPT), atol=1e-4)


def test_requests_in_flight_carry_the_versions_that_sampled_them(
    vllm_server: ServerProcess, transport: Make, policy: Policy, control: ControlLoop, servable_model: Path, tmp_path: Path
) -> None:
    names = VersionNames(new_run_token())
    made = transport("gloo", vllm_server.address, names=names)
    api = control.api(vllm_server.address)
    old = {1: policy.tensors()}
    push(made, 1, old[1], complete=True)
    by_version: dict[int, torch.nn.Module] = {}
    mixed = 0
    for round_number in range(10):
        requests: list[Future[Choice]] = [
            control.start(generate(api, SHORT_PROMPT[: 3 + i], max_tokens=200, seed=100 * round_number + i)) for i in range(6)
        ]
        for _ in range(2):
            policy.move()
            version = len(old) + 1
            old[version] = policy.tensors()
            push(made, version, old[version], complete=True)
        for i, future in enumerate(requests):
            choice = future.result(TIMEOUT)
            assert choice.finish_reason == "length"
            assert len(choice.token_ids) == 200
            spans = choice.weight_versions or []
            assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
            assert spans[-1].end == 200
            mixed += len(spans) > 1
            ids = SHORT_PROMPT[: 3 + i] + choice.token_ids
            for span in spans:
                number = names.version(span.version)
                assert number is not None
                sampler = by_version.setdefault(number, _model_of(servable_model, tmp_path, old[number]))
                with torch.no_grad():
                    logits = sampler(torch.tensor([ids])).logits[0, 2 + i : -1]
                wanted = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0]
                found = torch.tensor(log_probs_of(choice))
                difference = (found - wanted)[span.start : span.end].abs().max()
                assert difference < 1e-3, f"tokens {span.start}-{span.end} are not version {number}'s"
        if mixed >= 3:
            return
    pytest.fail("no request was in flight over a push")


def _model_of(folder: Path, scratch: Path, tensors: Named) -> torch.nn.Module:
    fresh = Policy(folder, scratch / secrets.token_hex(4))
    fresh.model.load_state_dict(dict(tensors), strict=False)
    return fresh.model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: [(n.replace("model.norm", "base_model.model.norm"), x) for n, x in t], "has no 'base_model.model.norm.weight'"),
        (lambda t: [(n, x[:-1] if n == "model.norm.weight" else x) for n, x in t], r"model.norm.weight has shape \[63\]"),
        (lambda t: [(n, x.half() if n == "model.norm.weight" else x) for n, x in t], "model.norm.weight is float16"),
        (
            lambda t: [(n, x) for n, x in t if "layers.2.mlp.up_proj" not in n],
            "gate_up_proj only in part: .*gate_proj.* came, missing: .*up_proj",
        ),
        (lambda t: [(n, x) for n, x in t if n != "model.norm.weight"], "leaves out model.norm.weight"),
        (lambda t: [*t, ("lm_head.weight", dict(t)["model.embed_tokens.weight"])], "has no 'lm_head.weight'"),
    ],
)
def test_a_push_that_does_not_fit_is_refused_before_it_moves(
    change: Callable[[Named], Named],
    message: str,
    pushed: ServerTransport,
    vllm_server: ServerProcess,
    policy: Policy,
    control: ControlLoop,
) -> None:
    before = control.run(control.api(vllm_server.address).prompt_logprobs(SHORT_PROMPT))
    tensors = change(policy.tensors())
    gathered = []

    def buckets() -> Iterator[Named]:
        gathered.append(1)
        yield tensors

    with pytest.raises(WeightSyncError, match=message):
        pushed.push(manifest_of(2, tensors, complete=True), buckets(), TIMEOUT)
    assert not gathered, "nothing is gathered for a refused push"
    assert control.run(control.api(vllm_server.address).prompt_logprobs(SHORT_PROMPT)) == before
    assert not pushed.stale(1)
    push(pushed, 2, policy.tensors())
    assert gap(control, vllm_server.address, policy) < 1e-4


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", ["gather fails", "too few", "not announced", "other shape"])
def test_a_push_that_breaks_on_the_way_leaves_the_old_weights(
    way: str, fault: str, pushed: ServerTransport, vllm_server: ServerProcess, transport: Make, policy: Policy, control: ControlLoop
) -> None:
    made = transport(way, vllm_server.address, names=pushed.names)
    tensors = policy.tensors()

    def buckets() -> Iterator[Named]:
        yield tensors[:5]
        match fault:
            case "gather fails":
                raise RolloutError("the gather fails")
            case "too few":
                return
            case "not announced":
                yield [("other", tensors[5][1])]
            case "other shape":
                yield [(tensors[5][0], tensors[5][1].repeat(2, *[1] * (tensors[5][1].dim() - 1)))]

    started = time.monotonic()
    expected = RolloutError if fault == "gather fails" else WeightSyncError
    with pytest.raises(expected, match=r"gather fails|were not sent|not announced|announced was"):
        made.push(manifest_of(2, tensors, complete=True), buckets(), TIMEOUT)
    assert time.monotonic() - started < TIMEOUT / 2
    assert gap(control, vllm_server.address, policy) < 1e-4
    assert not made.stale(1)
    policy.move()
    push(made, 2, policy.tensors(), complete=True)
    assert gap(control, vllm_server.address, policy) < 1e-4


def test_a_damaged_file_is_refused_and_the_next_push_works(
    pushed: ServerTransport,
    vllm_server: ServerProcess,
    transport: Make,
    policy: Policy,
    control: ControlLoop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = transport("disk", vllm_server.address, names=pushed.names)
    write = disk.write_durably

    def damaging(path: Path, chunks: Any) -> tuple[int, str]:
        size, digest = write(path, chunks)
        if path.name == "bucket-00001.safetensors":
            content = bytearray(path.read_bytes())
            content[-1] ^= 255
            path.write_bytes(content)
        return size, digest

    tensors = policy.tensors()
    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_durably", damaging)
        with pytest.raises(WeightSyncError, match=r"bucket-00001\.safetensors: its checksum"):
            made.push(manifest_of(2, tensors, complete=True), in_buckets(tensors), TIMEOUT)
    assert gap(control, vllm_server.address, policy) < 1e-4
    push(made, 2, tensors)
    made.close()
    assert not list((tmp_path / "pushes").iterdir()), "no file outlives the run"


@pytest.mark.parametrize("way", WAYS)
def test_at_most_two_buckets_exist(way: str, vllm_server: ServerProcess, transport: Make, policy: Policy) -> None:
    made = transport(way, vllm_server.address)
    source = policy.tensors()
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def buckets() -> Iterator[Named]:
        nonlocal most
        for part in in_buckets(source, 4):
            bucket = [(name, tensor.clone()) for name, tensor in part]
            alive.append(weakref.ref(bucket[0][1]))
            most = max(most, sum(ref() is not None for ref in alive))
            yield bucket
            del bucket

    made.push(manifest_of(1, source, complete=True), buckets(), TIMEOUT)
    assert most == 2, "one on its way, one being gathered"
    assert not any(ref() is not None for ref in alive)


def test_servers_that_do_not_answer_are_left_out(vllm_server: ServerProcess, transport: Make, policy: Policy, control: ControlLoop) -> None:
    with socket.socket() as closed, socket.socket() as silent:
        closed.bind(("127.0.0.1", 0))
        silent.bind(("127.0.0.1", 0))
        silent.listen(5)
        gone, mute = (ServerAddress(f"http://127.0.0.1:{s.getsockname()[1]}", "k") for s in (closed, silent))
        made = transport("gloo", gone, vllm_server.address, mute)
        made.look_seconds = 1.0
        policy.move()
        tensors = policy.tensors()
        result = made.push(manifest_of(3, tensors, complete=True), in_buckets(tensors), TIMEOUT)
        assert (result.confirmed, result.lost) == (1, 2)
        assert not made.stale(3)
        assert len(made.score(SHORT_PROMPT, 1.0, TIMEOUT)) == 1
        assert gap(control, vllm_server.address, policy) < 1e-4
        lonely = transport("disk", gone)
        with pytest.raises(RolloutError, match="no rollout server answers"):
            lonely.push(manifest_of(3, tensors, complete=True), in_buckets(tensors), TIMEOUT)
        with pytest.raises(RolloutError, match="no rollout server answers"):
            lonely.stale(3)


def test_a_version_without_new_weights_is_a_new_label(
    pushed: ServerTransport, vllm_server: ServerProcess, transport: Make, control: ControlLoop, policy: Policy
) -> None:
    result = pushed.push(WeightManifest(2, [], complete=False), (), TIMEOUT)
    assert (result.confirmed, result.lost, result.pause_seconds) == (1, 0, 0.0)
    assert not pushed.stale(2)
    pushed.push(WeightManifest(3, [], complete=False), (), TIMEOUT)
    assert control.run(control.api(vllm_server.address).weight_version()) == pushed.names.name(3)
    stranger = transport("gloo", vllm_server.address)
    assert stranger.stale(3)
    with pytest.raises(WeightSyncError, match="complete push"):
        stranger.push(WeightManifest(4, [], complete=False), (), TIMEOUT)
    tensors = policy.tensors("model.norm")
    with pytest.raises(WeightSyncError, match="not weights of this run"):
        stranger.push(manifest_of(4, tensors, complete=False), in_buckets(tensors), TIMEOUT)
    push(stranger, 4, policy.tensors(), complete=True)
    assert not stranger.stale(4)
    assert pushed.stale(3)


# A trainer that dies or falls silent is played here by hand.


def ask(control: ControlLoop, address: ServerAddress, op: Op) -> Reply:
    [reply] = control.run(control.api(address).push_op(op, TIMEOUT))
    return reply


def until_ended(control: ControlLoop, address: ServerAddress, push_id: str) -> Reply:
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        reply = ask(control, address, Status(push_id))
        if reply.state != "receiving":
            return reply
        time.sleep(0.05)
    raise AssertionError("the receiver never ended")


@pytest.mark.parametrize("way", WAYS)
def test_a_silent_trainer_is_given_up_and_another_one_may_push(
    way: str, pushed: ServerTransport, vllm_server: ServerProcess, policy: Policy, control: ControlLoop, tmp_path: Path
) -> None:
    address = vllm_server.address
    store = serve_store("127.0.0.1", 5.0)
    where = GlooWay("127.0.0.1", store.port, 2) if way == "gloo" else DiskWay(str(tmp_path))
    manifest = manifest_of(2, policy.tensors(), complete=True)
    assert ask(control, address, Announce("silent", manifest, 1.5, where)).state == "receiving"
    reply = until_ended(control, address, "silent")
    assert reply.state == "failed"
    assert "within 1.5 s" in str(reply.error) or "did not come together" in str(reply.error)
    assert ask(control, address, Apply("silent")).error is not None
    assert ask(control, address, Status("silent")).state == "failed"
    assert gap(control, address, policy) < 1e-4
    push(pushed, 2, policy.tensors())


def test_a_trainer_that_dies_in_the_middle_of_a_push(
    pushed: ServerTransport, vllm_server: ServerProcess, policy: Policy, control: ControlLoop
) -> None:
    address = vllm_server.address
    store = serve_store("127.0.0.1", 30.0)
    way = GlooWay("127.0.0.1", store.port, 2)
    keys = store.num_keys()
    assert ask(control, address, Announce("dying", manifest_of(2, policy.tensors(), complete=True), 30.0, way)).error is None
    limit = time.monotonic() + 20
    while store.num_keys() == keys:  # until the receiver has come: one that finds nobody would knock until the time is over
        assert time.monotonic() < limit
        time.sleep(0.05)
    del store  # as the death of its process
    started = time.monotonic()
    reply = until_ended(control, address, "dying")
    assert (reply.state, time.monotonic() - started < 25) == ("failed", True)
    push(pushed, 2, policy.tensors())  # without an abort of the dead one
    assert ask(control, address, Status("dying")).state == "none"


def test_ops_of_an_unknown_push_change_nothing(pushed: ServerTransport, vllm_server: ServerProcess, control: ControlLoop) -> None:
    for op in (Status("?"), Apply("?"), Abort("?")):
        assert ask(control, vllm_server.address, op) == Reply("none")
    assert not pushed.stale(1)


def test_a_manifest_entry_of_another_dtype_is_no_crash(vllm_server: ServerProcess, control: ControlLoop) -> None:
    odd = WeightManifest(1, [TensorSpec("model.norm.weight", "float8", [64])], complete=False)
    reply = ask(control, vllm_server.address, Announce("odd", odd, 5.0, DiskWay("/nowhere")))
    assert reply.state == "failed"
    assert "float8" in str(reply.error)
    assert math.isfinite(sum(control.run(control.api(vllm_server.address).prompt_logprobs(SHORT_PROMPT))))
