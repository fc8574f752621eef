"""The real rollout process: spawned, fed, updated, killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from ebft_ds.errors import ConfigError, ModelError, RolloutError, WeightSyncError
from ebft_ds.rollout.client import RolloutClient
from ebft_ds.rollout.manifest import TensorSpec, WeightManifest
from ebft_ds.rollout.spec import RolloutProcessSpec
from ebft_ds.types import Prompt, RolloutGroup, RolloutRequest, SamplingSpec

VOCAB = 61
LOOPS = "tests.integration.rollout_loops"
PROMPT = [1, 9, 4, 30]


def make_model(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.15,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(0).save_pretrained(folder)
    return folder


@pytest.fixture
def spec(model_dir: Path, tmp_path: Path) -> Callable[..., RolloutProcessSpec]:
    def build(**fields: Any) -> RolloutProcessSpec:
        return RolloutProcessSpec(
            **{"model_name_or_path": str(model_dir), "log_path": str(tmp_path / "rollout.log"), "batch_size": 8} | fields
        )

    return build


@pytest.fixture
def started(spec: Callable[..., RolloutProcessSpec]) -> Iterator[Callable[..., RolloutClient]]:
    clients: list[RolloutClient] = []

    def start(**fields: Any) -> RolloutClient:
        clients.append(RolloutClient(spec(**fields)))
        clients[-1].start()
        return clients[-1]

    yield start
    for client in clients:
        client.stop()


@pytest.fixture(scope="module")
def shared(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutClient]:
    """One process for the tests that leave it whole."""
    log = tmp_path_factory.mktemp("log") / "rollout.log"
    client = RolloutClient(RolloutProcessSpec(model_name_or_path=str(model_dir), log_path=str(log), batch_size=8, heartbeat_interval=0.05))
    client.start()
    yield client
    client.stop()


def request(index: int, n: int = 2, budget: int = 8, stop: tuple[int, ...] = ()) -> RolloutRequest:
    sampling = SamplingSpec(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, stop_token_ids=list(stop), seed=1)
    prompt = Prompt(prompt_id=index, index=index, epoch=0, token_ids=PROMPT, reference_ids=[3])
    return RolloutRequest(prompt=prompt, num_samples=n, max_new_tokens=budget, sampling=sampling)


def collect(client: RolloutClient, count: int, timeout: float = 60.0) -> dict[int, RolloutGroup]:
    found: dict[int, RolloutGroup] = {}
    deadline = time.monotonic() + timeout
    while len(found) < count and time.monotonic() < deadline:
        found |= {group.prompt.index: group for group in client.poll(1.0)}
    assert len(found) == count
    return found


def push(client: RolloutClient, model: PreTrainedModel, version: int) -> None:
    tensors = [(name, param.detach()) for name, param in model.named_parameters()]
    client.begin_update(manifest(tensors, version))
    for start in range(0, len(tensors), 5):
        client.send_bucket(tensors[start : start + 5])
    assert client.finish_update(30.0) == version


def manifest(tensors: list[tuple[str, torch.Tensor]], version: int) -> WeightManifest:
    return WeightManifest(version, [TensorSpec(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors])


def logprobs(model: PreTrainedModel, prompt: list[int], completion: list[int]) -> list[float]:
    with torch.no_grad():
        table = torch.log_softmax(model(torch.tensor([prompt + completion])).logits[0], dim=-1)
    return [float(table[len(prompt) - 1 + i, token]) for i, token in enumerate(completion)]


def gone(pid: int) -> bool:
    """No such process, or a zombie that nobody has reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_rollouts_and_scores_equal_the_model(shared: RolloutClient) -> None:
    push(shared, make_model(0), 0)
    shared.submit([request(i) for i in range(6)])
    for group in collect(shared, 6).values():
        assert len(group.rollouts) == 2
        for rollout in group.rollouts:
            assert rollout.logprobs == pytest.approx(logprobs(make_model(0), PROMPT, rollout.token_ids), abs=1e-5)
    assert shared.score([1, 9, 4], 1.0, 10.0) == pytest.approx(logprobs(make_model(0), [1], [9, 4]), abs=1e-5)
    assert shared.vocab_size == VOCAB
    assert [tensor.name for tensor in shared.expected_weights] == [name for name, _ in make_model(0).named_parameters()]


def test_twenty_pushes_with_requests_in_flight_lose_none(shared: RolloutClient) -> None:
    models = {version: make_model(version) for version in range(20)}
    found: dict[int, RolloutGroup] = {}
    for version, model in models.items():
        shared.submit([request(1000 + 10 * version + i, n=2, budget=5 + 11 * i) for i in range(4)])
        push(shared, model, version)
        assert shared.policy_version == version
        found |= {group.prompt.index: group for group in shared.poll(0.0)}
    found |= collect(shared, 80 - len(found))
    assert sorted(found) == [1000 + 10 * version + i for version in range(20) for i in range(4)]
    mixed = 0
    for group in found.values():
        for rollout in group.rollouts:
            mixed += len(rollout.spans) > 1
            for span in rollout.spans:
                if group.prompt.index >= 1010:  # before the first push the engine held what the test before left there
                    wanted = logprobs(models[span.policy_version], PROMPT, rollout.token_ids)
                    assert rollout.logprobs[span.start : span.end] == pytest.approx(wanted[span.start : span.end], abs=2e-5)
    assert mixed > 0


def test_a_refused_push_leaves_client_and_weights_usable(shared: RolloutClient) -> None:
    push(shared, make_model(3), 3)
    tensors = [(name, param.detach()) for name, param in make_model(4).named_parameters()]
    with pytest.raises(WeightSyncError, match="leaves out lm_head"):
        shared.begin_update(manifest([pair for pair in tensors if pair[0] != "lm_head.weight"], 4))
    shared.begin_update(manifest(tensors, 4))
    with pytest.raises(WeightSyncError, match=r"arrived as float32 \[1\]"):
        shared.send_bucket([(tensors[0][0], torch.zeros(1))])
    shared.begin_update(manifest(tensors, 4))
    shared.send_bucket(tensors[:-1])
    with pytest.raises(WeightSyncError, match="never arrived"):
        shared.finish_update(10.0)
    shared.begin_update(manifest(tensors, 4))
    shared.send_bucket(tensors)
    shared.abort_update()
    assert shared.policy_version == 3
    assert shared.score([1, 9, 4], 1.0, 10.0) == pytest.approx(logprobs(make_model(3), [1], [9, 4]), abs=1e-5)
    push(shared, make_model(4), 4)
    assert shared.score([1, 9, 4], 1.0, 10.0) == pytest.approx(logprobs(make_model(4), [1], [9, 4]), abs=1e-5)


def test_cancelled_requests_do_not_come_back(shared: RolloutClient) -> None:
    shared.submit([request(2000, budget=4000), request(2001, budget=5)])
    shared.cancel([2000])
    assert sorted(collect(shared, 1)) == [2001]
    assert wait_until(lambda: shared.health().pending <= 1, 10.0)


def test_a_keyboard_interrupt_does_not_reach_the_process(shared: RolloutClient) -> None:
    os.kill(shared.pid, signal.SIGINT)
    shared.submit([request(3000)])
    collect(shared, 1)


def test_an_answer_that_takes_too_long_is_an_error(shared: RolloutClient) -> None:
    with pytest.raises(RolloutError, match=r"did not answer Score within 0\.0001 s"):
        shared.score([1, 2], 1.0, 1e-4)
    tensors = [(name, param.detach()) for name, param in make_model(6).named_parameters()]
    shared.begin_update(manifest(tensors, 6))
    shared.send_bucket(tensors)
    with pytest.raises(WeightSyncError, match="did not answer FinishUpdate"):
        shared.finish_update(1e-4)
    assert shared.score([1, 9, 4], 1.0, 10.0) == pytest.approx(logprobs(make_model(6), [1], [9, 4]), abs=1e-5)


def test_bfloat16_weights_survive_the_wire(started: Callable[..., RolloutClient]) -> None:
    client = started(dtype="bfloat16")
    model = make_model(5).bfloat16()
    push(client, model, 1)
    assert client.score([1, 9, 4], 1.0, 10.0) == pytest.approx(logprobs(model.float(), [1], [9, 4]), abs=0.1)
    with pytest.raises(WeightSyncError, match="is float32, the engine holds bfloat16"):
        client.begin_update(manifest([(n, p.detach().float()) for n, p in model.named_parameters()], 2))


def test_a_killed_process_is_an_error_within_seconds(started: Callable[..., RolloutClient]) -> None:
    client = started()
    client.submit([request(0, budget=4000)])
    os.kill(client.pid, signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(RolloutError, match="killed by SIGKILL"):
        client.poll(60.0)
    assert time.monotonic() - begin < 10
    for call in (client.check, client.health, lambda: client.submit([request(1)]), lambda: client.score([1, 2], 1.0, 1.0)):
        with pytest.raises(RolloutError, match="SIGKILL"):
            call()


def test_an_exception_in_a_loop_arrives_with_its_text(started: Callable[..., RolloutClient]) -> None:
    client = started(rollout_loop=f"{LOOPS}:RaisingLoop")
    client.submit([request(0)])
    with pytest.raises(RolloutError, match=r"(?s)KeyError: .*judge has left.*Traceback.*rollout_loops\.py"):
        client.poll(60.0)


def test_a_quiet_exit_is_an_error_with_status_and_log(started: Callable[..., RolloutClient]) -> None:
    client = started(rollout_loop=f"{LOOPS}:QuittingLoop")
    client.submit([request(0)])
    with pytest.raises(RolloutError, match=r"(?s)exit status 9.*about to quit"):
        client.poll(60.0)


@pytest.mark.parametrize("name", ["SilentLoop", "HangingLoop"])
def test_a_silent_loop_is_an_error(started: Callable[..., RolloutClient], name: str) -> None:
    client = started(rollout_loop=f"{LOOPS}:{name}", timeout=1.5)
    client.submit([request(0)])
    with pytest.raises(RolloutError, match=r"no progress in rollouts for 1.5 s \(rollout_timeout\), 1 prompts pending"):
        client.poll(60.0)
    assert wait_until(lambda: gone(client.pid), 10.0)


def test_a_stopped_process_is_an_error_even_without_work(started: Callable[..., RolloutClient]) -> None:
    client = started(timeout=1.5, heartbeat_interval=0.1)
    os.kill(client.pid, signal.SIGSTOP)
    with pytest.raises(RolloutError, match="no sign of life"):
        client.poll(60.0)


def test_a_slow_loop_that_reports_progress_is_not_an_error(started: Callable[..., RolloutClient]) -> None:
    client = started(rollout_loop=f"{LOOPS}:WorkingLoop", timeout=1.0, heartbeat_interval=0.05)
    client.submit([request(0)])
    assert client.poll(2.5) == []


def test_a_users_loop_gets_its_arguments_versions_and_state(started: Callable[..., RolloutClient]) -> None:
    client = started(rollout_loop=f"{LOOPS}:ShoutingLoop", rollout_loop_kwargs={"token": 17})
    push(client, make_model(1), 4)
    client.submit([request(0)])
    for rollout in collect(client, 1)[0].rollouts:
        assert rollout.token_ids[-1] == 17
        assert rollout.sampled_mask == [True] * 8 + [False]
    assert client.state_dict() == {"groups": 1, "version": 4}
    client.load_state_dict({"groups": 5, "version": 4})
    assert client.state_dict() == {"groups": 5, "version": 4}


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"rollout_loop": "no.such.module:Loop"}, ConfigError, "cannot import 'no.such.module'"),
        ({"rollout_loop": f"{LOOPS}:LacksMethods"}, ConfigError, "lacks cancel, set_policy_version, groups, health"),
        ({"rollout_loop_kwargs": {"nonsense": 1}}, ConfigError, "nonsense"),
        ({"model_name_or_path": "/nonexistent/model"}, ModelError, "/nonexistent/model"),
    ],
)
def test_what_cannot_start_says_why(
    started: Callable[..., RolloutClient], fields: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        started(**fields)


def test_a_start_that_takes_too_long_is_an_error_and_leaves_nothing(spec: Callable[..., RolloutProcessSpec]) -> None:
    client = RolloutClient(spec(start_timeout=0.01))
    with pytest.raises(RolloutError, match=r"not ready after 0\.01 s"):
        client.start()
    assert gone(client.pid)


def test_stop_is_idempotent_and_leaves_no_process(started: Callable[..., RolloutClient]) -> None:
    client = started()
    client.submit([request(0, budget=4000)])
    client.stop()
    client.stop()
    assert gone(client.pid)
    with pytest.raises(RolloutError, match="stopped"):
        client.poll(0.0)


PARENT = """
import sys
from ebft_ds.rollout.client import RolloutClient
from ebft_ds.rollout.spec import RolloutProcessSpec
client = RolloutClient(RolloutProcessSpec(model_name_or_path=sys.argv[1], log_path=sys.argv[2]))
client.start()
print(client.pid, flush=True)
sys.stdin.read()
"""


def start_parent(model_dir: Path, log: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, str(model_dir), str(log)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "PYTHONPATH": os.getcwd()},
    )


def test_no_orphan_when_the_parent_is_killed(model_dir: Path, tmp_path: Path) -> None:
    with start_parent(model_dir, tmp_path / "log") as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert not gone(child)
        assert b"WORLD_SIZE" not in Path(f"/proc/{child}/environ").read_bytes()
        parent.kill()
        assert wait_until(lambda: gone(child), 10.0)


def test_no_orphan_when_the_parent_just_returns(model_dir: Path, tmp_path: Path) -> None:
    with start_parent(model_dir, tmp_path / "log") as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert parent.stdin is not None
        parent.stdin.close()
        assert parent.wait(20) == 0
        assert gone(child)
