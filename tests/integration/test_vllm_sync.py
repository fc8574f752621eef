"""Real ZeRO-3 ranks push to real vLLM servers: after every push the server computes what the trainer computes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ebft_ds.collectives import Collectives
from ebft_ds.config import AsyncEBFTConfig
from ebft_ds.engine.network import LogProbWork
from ebft_ds.monitor.metrics import MetricsAccumulator
from ebft_ds.packing.padded import pad_rows
from ebft_ds.sidecar.address import ServerAddress
from ebft_ds.sidecar.api import GenerateAnswer, VllmApi
from ebft_ds.sidecar.command import AdapterPlan
from ebft_ds.sidecar.control import ControlLoop
from ebft_ds.sidecar.server import ServerProcess
from ebft_ds.sidecar.versions import VersionNames, adapter_name, new_run_token
from ebft_ds.sync.adapter_source import AdapterSource
from ebft_ds.sync.push import SyncOptions, WeightSync
from ebft_ds.sync.source import MergedWeightSource
from ebft_ds.sync.transport import WeightTransport
from ebft_ds.sync.transports.adapter import AdapterTransport
from ebft_ds.sync.transports.disk import DiskTransport
from ebft_ds.sync.transports.gloo import GlooTransport
from ebft_ds.sync.transports.run_folder import RunFolder
from ebft_ds.trainers.engines import Engines
from ebft_ds.trainers.rollout_servers import adapter_settings
from tests.distributed.engines import make_config, make_engines, make_group, make_policy, random_adapter
from tests.distributed.ranks import run_ranks
from tests.distributed.small import token_rows
from tests.integration.vllm_server import started, tiny_plan
from tools.random_model import make_random_model

pytestmark = pytest.mark.timeout(900)

PUSHES = 10
LONG = 200
"""Tokens of the prompt that is asked before and after every push: longer than a cache block."""
VARIANTS: dict[str, dict[str, Any]] = {
    "lora, tied": {"use_peft": True, "lora_r": 4},
    "dora on some modules, tied": {"use_peft": True, "lora_r": 4, "use_dora": True, "lora_target_modules": ["q_proj", "up_proj"]},
    "full, tied": {},
    "lora and head, untied": {"use_peft": True, "lora_r": 4, "lora_modules_to_save": ["lm_head"], "lora_target_modules": ["v_proj"]},
    "full, untied": {},
}
ALIAS = "policy"


def log_probs(engines: Engines, ids: list[int]) -> list[float]:
    """Collective: the trainer's log-probs of ids[1:] at temperature 1."""
    count, device = len(ids) - 1, engines.actor.device
    work = LogProbWork(
        rows=pad_rows([ids], device=device),
        positions=torch.arange(count, device=device),
        targets=torch.tensor(ids[1:], dtype=torch.int64, device=device),
        inverse_temperature=torch.ones(count, device=device),
    )
    values: list[float] = engines.actor.frozen_log_probs(work)[0].cpu().tolist()
    return values


def train(collectives: Collectives, config: AsyncEBFTConfig, engines: Engines, step: int) -> None:
    prompt, reference, *completions = token_rows(30 + step, [4, 5, 3, 6])
    policy = make_policy(config, engines, collectives)
    groups = [make_group(0, prompt, completions, reference)]
    policy.on_groups(step, groups, torch.tensor([[1.0, -1.0]]), rl_coef=1.0, ce_coef=1.0, metrics=MetricsAccumulator())
    engines.actor.step(step)


def push_and_compare(
    collectives: Collectives, model: Path, fields: dict[str, Any], address: ServerAddress, way: str, folder: Path
) -> dict[str, Any]:
    """Ten steps with a push after each; what the server says of fresh and of repeated prompts, and what the trainer says."""
    config = make_config(model, num_generations=2, learning_rate=2e-3, sync_mode="adapter" if way == "adapter" else "merged", **fields)
    engines = make_engines(config, collectives.world_size, 2, random_adapter(config) if config.peft.use_peft else None)
    token, control = new_run_token(), ControlLoop()
    transport = make_transport(way, address, token, control, engines, folder) if collectives.is_main else None
    network = engines.actor.network
    if way == "adapter":
        source: Any = AdapterSource(network.model, torch.float32, 2**16, is_main=collectives.is_main)
    else:
        source = MergedWeightSource(network, torch.float32, 2**16, is_main=collectives.is_main, whole_modules=True)
    long_prompt = token_rows(7, [LONG])[0]
    sync = WeightSync(engines.actor, source, transport, collectives, SyncOptions(1, "float32", "float32", 120.0, 0, long_prompt, None, 1.0))
    answer: dict[str, Any] = {"bytes": [], "probe": [], "gaps": [], "named": []}
    for version in range(1, PUSHES + 1):
        train(collectives, config, engines, version)
        report = sync.merge_check(version)
        answer["bytes"].append(report.bytes)
        answer["probe"].append(report.probe_max_gap)
        name = adapter_name(f"{ALIAS}-{token}", version) if way == "adapter" else None
        fresh = token_rows(100 + version, [60])[0]
        said = collectives.broadcast(ask(control, address, name, fresh, long_prompt) if collectives.is_main else None, dict)
        answer["gaps"].append(largest_gap(engines, fresh, long_prompt, said))
        answer["named"].append([VersionNames(token).version(span) for span in said["spans"]])
    sync.close()
    control.close()
    return answer


def make_transport(way: str, address: ServerAddress, token: str, control: ControlLoop, engines: Engines, folder: Path) -> WeightTransport:
    match way:
        case "gloo":
            return GlooTransport([address], VersionNames(token), control)
        case "disk":
            return DiskTransport([address], VersionNames(token), control, sync_dir=folder)
        case _:
            settings = adapter_settings(engines.actor.network.model)
            return AdapterTransport(
                [address], control, alias=f"{ALIAS}-{token}", adapter_config=settings, folder=RunFolder(folder, token, shared=False), keep=1
            )


def ask(control: ControlLoop, address: ServerAddress, model: str | None, fresh: list[int], long_prompt: list[int]) -> dict[str, Any]:
    """Prompt log-probs of a fresh row, and a few sampled tokens after the long prompt, whose cache the push must have made void."""
    api = control.api(address)
    params = {"max_tokens": 6, "temperature": 1.0, "logprobs": 0, "ignore_eos": True, "detokenize": False, "seed": 1}
    sampled: GenerateAnswer = control.run(api.generate(long_prompt, params, request_id=f"{model}-{fresh[:8]}", model=model, timeout=120.0))
    choice = sampled.choices[0]
    assert choice.logprobs is not None
    return {
        "fresh": control.run(api.prompt_logprobs(fresh, model=model, timeout=120.0)),
        "tokens": choice.token_ids,
        "sampled": [entry.logprob for entry in choice.logprobs.content or []],
        "spans": [span.version for span in choice.weight_versions or []],
    }


def largest_gap(engines: Engines, fresh: list[int], long_prompt: list[int], said: dict[str, Any]) -> float:
    own_fresh = log_probs(engines, fresh)
    own_sampled = log_probs(engines, long_prompt + said["tokens"])[LONG - 1 :]
    pairs = zip([*own_fresh, *own_sampled], [*said["fresh"], *said["sampled"]], strict=True)
    return max(abs(ours - theirs) for ours, theirs in pairs)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    shape: dict[str, Any] = {"num_layers": 2, "hidden": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "initializer_range": 0.08}
    return {
        kind: make_random_model(folder / kind, tie_word_embeddings=kind == "tied", seed=index, **shape)
        for index, kind in enumerate(("tied", "untied"))
    }


def serve(model: Path, folder: Path, **plan: Any) -> Iterator[ServerProcess]:
    with started(tiny_plan(model, **plan), folder / "server.log") as server:
        yield server


@pytest.fixture(scope="module")
def tied_server(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    yield from serve(models["tied"], tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="module")
def untied_server(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    yield from serve(models["untied"], tmp_path_factory.mktemp("untied"), weight_transfer="ebft_disk")


def check(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert max(answer["gaps"]) < 1e-4
        assert max(answer["probe"]) < 1e-4
        assert min(answer["bytes"]) > 0


@pytest.mark.parametrize("label", [label for label in VARIANTS if label.endswith(", tied")])
def test_merged_weights_by_gloo(label: str, tied_server: ServerProcess, models: dict[str, Path], tmp_path: Path) -> None:
    answers = run_ranks(2, push_and_compare, models["tied"], VARIANTS[label], tied_server.address, "gloo", tmp_path)
    check(answers)
    assert answers[0]["named"] == [[version] for version in range(1, PUSHES + 1)]
    assert (answers[0]["bytes"][-1] == total_bytes(models["tied"])) == label.startswith("full")  # else only what training changes travels


@pytest.mark.parametrize("label", [label for label in VARIANTS if label.endswith(", untied")])
def test_merged_weights_by_disk(label: str, untied_server: ServerProcess, models: dict[str, Path], tmp_path: Path) -> None:
    answers = run_ranks(2, push_and_compare, models["untied"], VARIANTS[label], untied_server.address, "disk", tmp_path)
    check(answers)
    assert answers[0]["named"] == [[version] for version in range(1, PUSHES + 1)]
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def adapter_server(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    adapters = AdapterPlan(max_rank=8, max_adapters=3)
    yield from serve(models["tied"], tmp_path_factory.mktemp("adapter"), weight_transfer=None, adapters=adapters)


@pytest.mark.parametrize("fields", [{}, {"use_rslora": True, "lora_target_modules": ["q_proj", "down_proj"]}], ids=["lora", "rslora"])
def test_the_adapter_alone(fields: dict[str, Any], adapter_server: ServerProcess, models: dict[str, Path], tmp_path: Path) -> None:
    lora = {"use_peft": True, "lora_r": 4} | fields
    check(run_ranks(2, push_and_compare, models["tied"], lora, adapter_server.address, "adapter", tmp_path / "sync"))
    assert set(asyncio.run(served(adapter_server.address))) == {str(models["tied"])}  # nothing is left loaded
    assert not list((tmp_path / "sync").iterdir())


def total_bytes(model: Path) -> int:
    """Of the checkpoint's tensors."""
    return sum(tensor.nbytes for tensor in load_file(model / "model.safetensors").values())


async def served(address: ServerAddress) -> dict[str, int | None]:
    api = VllmApi(address)
    try:
        return await api.models()
    finally:
        await api.close()
