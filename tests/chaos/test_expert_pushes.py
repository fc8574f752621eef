"""Mixture-of-experts models, untied heads, and faults inside a server: each model has a server of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ebft_ds.errors import EbftError, RolloutError, WeightSyncError
from ebft_ds.sidecar.address import ServerAddress
from ebft_ds.sidecar.control import ControlLoop
from ebft_ds.sidecar.server import ServerProcess
from ebft_ds.sidecar.versions import VersionNames, new_run_token
from ebft_ds.sync.transports.disk import DiskTransport
from ebft_ds.sync.transports.gloo import GlooTransport
from tests.integration.policies import Named, Policy, in_buckets, manifest_of
from tests.integration.vllm_server import group_members, started, tiny_plan
from tools.random_model import make_random_model

PROMPT = [1, 40, 77, 12, 300, 9, 120, 33, 250, 4]
TIMEOUT = 60.0
FAULTY = ("--worker-extension-cls", "tests.integration.faulty_worker.FaultyWorker")


@pytest.fixture
def control() -> Iterator[ControlLoop]:
    loop = ControlLoop()
    yield loop
    loop.close()


def scored(control: ControlLoop, address: ServerAddress) -> torch.Tensor:
    return torch.tensor(control.run(control.api(address).prompt_logprobs(PROMPT)))


def expect(control: ControlLoop, address: ServerAddress, policy: Policy) -> None:
    assert float((scored(control, address) - policy.log_probs(PROMPT)).abs().max()) < 1e-4


def push(transport: GlooTransport | DiskTransport, version: int, tensors: Named, *, complete: bool) -> None:
    transport.push(manifest_of(version, tensors, complete=complete), in_buckets(tensors), TIMEOUT)


@pytest.mark.timeout(600)
def test_qwen3_moe_with_an_untied_head(tmp_path: Path, control: ControlLoop) -> None:
    """Pushes by both ways, what is refused, a load that breaks in the middle, and the death of the server during a push."""
    model = make_random_model(
        tmp_path / "model",
        architecture="qwen3_moe",
        tie_word_embeddings=False,
        num_layers=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        initializer_range=0.1,
    )
    policy = Policy(model, tmp_path / "saved")
    names = VersionNames(new_run_token())
    with started(tiny_plan(model, extra_args=FAULTY), tmp_path / "server.log") as server:
        address = server.address
        gloo = GlooTransport([address], names, control)
        disk = DiskTransport([address], names, control, sync_dir=tmp_path / "pushes")
        assert gloo.stale(1)
        assert not gloo.stale(0), "a fresh server holds the checkpoint that a run starts from"
        assert control.run(control.api(address).weight_version()) == names.name(0), "and says so from now on"
        assert VersionNames(new_run_token()).version(names.name(0)) is None
        expect(control, address, policy)
        changes = [(), ("experts",), ("lm_head",), ("embed_tokens", "self_attn"), ("mlp.gate.", "norm")]
        for version in range(1, 11):
            chosen = changes[version % len(changes)]
            policy.move(*chosen)
            push(gloo if version % 2 else disk, version, policy.tensors(*chosen), complete=not chosen)
            expect(control, address, policy)

        one_expert_less = [(n, t) for n, t in policy.tensors("experts") if "experts.2.up_proj" not in n]
        with pytest.raises(WeightSyncError, match=r"experts.* only in part: .*missing: model.layers.0.mlp.experts.2.up_proj.weight"):
            push(gloo, 11, one_expert_less, complete=False)

        _a_load_that_breaks_is_taken_back(control, address, gloo, policy)
        _a_server_that_dies_during_a_push(control, server, gloo, policy)
        disk.close()


def _a_load_that_breaks_is_taken_back(control: ControlLoop, address: ServerAddress, transport: GlooTransport, policy: Policy) -> None:
    api = control.api(address)
    before = scored(control, address)
    policy.move()
    tensors = policy.tensors()
    for after in (0, 3, len(tensors) // 2, len(tensors) - 1):
        control.run(api._call("POST", "/collective_rpc", None, TIMEOUT, {"method": "fail_next_load", "args": [str(after)]}))
        with pytest.raises(WeightSyncError, match="a fault in the middle of a load"):
            push(transport, 11, tensors, complete=True)
        assert torch.equal(scored(control, address), before), "bit for bit what it was"
        assert not transport.stale(10)
    push(transport, 11, tensors, complete=True)
    expect(control, address, policy)


def _a_server_that_dies_during_a_push(control: ControlLoop, server: ServerProcess, transport: GlooTransport, policy: Policy) -> None:
    tensors = policy.tensors()
    pid = server.pid()
    assert pid is not None
    workers = [process for process in group_members(pid) if "Worker" in process.name() or "Worker" in " ".join(process.cmdline())]
    assert workers

    def buckets() -> Iterator[Named]:
        yield tensors[:4]
        for worker in workers:
            os.kill(worker.pid, signal.SIGKILL)
        yield tensors[4:]

    begun = time.monotonic()
    with pytest.raises(EbftError) as caught:
        transport.push(manifest_of(12, tensors, complete=True), buckets(), TIMEOUT)
    assert isinstance(caught.value, RolloutError | WeightSyncError)
    assert time.monotonic() - begun < TIMEOUT / 2 + 10


@pytest.mark.timeout(600)
def test_mixtral(tmp_path: Path, control: ControlLoop) -> None:
    model = make_random_model(
        tmp_path / "model",
        architecture="mixtral",
        num_layers=2,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.1,
    )
    policy = Policy(model, tmp_path / "saved")
    with started(tiny_plan(model, weight_transfer="ebft_disk"), tmp_path / "server.log") as server:
        transport = DiskTransport([server.address], VersionNames(new_run_token()), control, sync_dir=tmp_path / "pushes")
        for version, chosen in enumerate([(), ("experts",), ("embed_tokens", "experts"), ("self_attn",)], start=1):
            policy.move(*chosen)
            push(transport, version, policy.tensors(*chosen), complete=not chosen)
            expect(control, server.address, policy)
        transport.close()
