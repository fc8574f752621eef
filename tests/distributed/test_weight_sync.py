"""Pushes from ZeRO-3 ranks to a real rollout process: merge check, probe, refusals. What is pushed: test_weight_source.py."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ebft_ds.sync.push as push_module
from ebft_ds.collectives import Collectives
from ebft_ds.config import AsyncEBFTConfig
from ebft_ds.errors import EbftError
from ebft_ds.monitor.metrics import MetricsAccumulator
from ebft_ds.rollout.client import RolloutClient
from ebft_ds.rollout.manifest import TensorSpec
from ebft_ds.rollout.spec import RolloutProcessSpec
from ebft_ds.sync.push import SyncOptions, WeightSync
from ebft_ds.sync.source import MergedWeightSource
from ebft_ds.sync.transports.embedded import EmbeddedTransport
from ebft_ds.trainers.engines import Engines
from tests.distributed.engines import make_config, make_engines, make_group, make_policy, random_adapter
from tests.distributed.ranks import run_ranks
from tests.distributed.small import LAYERS, small_model, token_rows

BUCKET_BYTES = 12_000
PROBE = token_rows(1, [24])[0]


def configuration(folder: Path, *, tied: bool = False, **fields: Any) -> AsyncEBFTConfig:
    return make_config(folder / ("tied" if tied else "untied"), lora_r=4, num_generations=2, **fields)


def build(collectives: Collectives, config: AsyncEBFTConfig) -> Engines:
    torch.manual_seed(0)
    return make_engines(config, collectives.world_size, LAYERS, random_adapter(config) if config.peft.use_peft else None)


def train(collectives: Collectives, config: AsyncEBFTConfig, engines: Engines, step: int) -> None:
    prompt, reference, *completions = token_rows(30 + step, [4, 5, 3, 6])
    policy = make_policy(config, engines, collectives)
    groups = [make_group(0, prompt, completions, reference)]
    policy.on_groups(step, groups, torch.tensor([[1.0, -1.0]]), rl_coef=1.0, ce_coef=1.0, metrics=MetricsAccumulator())
    engines.actor.step(step)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    small_model(folder / "tied", tied=True)
    small_model(folder / "untied", tied=False)
    return folder


def push_run(collectives: Collectives, folder: Path, log: Path) -> dict[str, Any]:
    config = configuration(folder, use_peft=True)
    engines = build(collectives, config)
    client = None
    if collectives.is_main:
        client = RolloutClient(RolloutProcessSpec(model_name_or_path=str(config.model.model_name_or_path), log_path=str(log)))
        client.start()
    try:
        return pushes(collectives, config, engines, client)
    finally:
        if client is not None:
            client.stop()


def pushes(collectives: Collectives, config: AsyncEBFTConfig, engines: Engines, client: RolloutClient | None) -> dict[str, Any]:
    def sync_every(interval: int) -> WeightSync:
        source = MergedWeightSource(engines.actor.network, torch.float32, BUCKET_BYTES, collectives.is_main)
        options = SyncOptions(
            interval=interval,
            dtype="float32",
            trainer_dtype="float32",
            timeout=60.0,
            retries=0,
            probe_ids=PROBE,
            probe_tolerance=None,
            temperature=0.7,
        )
        return WeightSync(engines.actor, source, EmbeddedTransport(client) if client else None, collectives, options)

    sync, answer = sync_every(1), {}
    sync.remember_initial()
    answer["before any push"] = failure(lambda: sync.probe(0))
    answer["reports"], answer["versions"] = [], []
    for version in (1, 2, 3):
        train(collectives, config, engines, version)
        answer["reports"].append(sync.merge_check(version))
        answer["versions"].append((sync.pushed_version, client.policy_version if client else None))
    answer["again"] = sync.merge_check(3)
    answer["unmoved"] = sync.merge_check(4)
    answer["unmoved versions"] = (sync.pushed_version, client.policy_version if client else None)
    train(collectives, config, engines, 5)
    started = time.monotonic()
    answer["refused"] = refused(collectives, lambda: sync.merge_check(5))
    answer["seconds to refuse"] = time.monotonic() - started
    answer["version after refusal"] = (sync.pushed_version, client.policy_version if client else None)
    answer["recovered"] = sync.merge_check(6)
    every_second = sync_every(2)
    every_second.pushed_version = 6
    answer["interval"] = []
    for version in (7, 8, 9, 10):
        train(collectives, config, engines, version)
        answer["interval"].append(every_second.merge_check(version).bytes > 0)
    return answer


def refused(collectives: Collectives, action: Any) -> str:
    """Rank 0 announces its first tensor with a wrong shape."""
    if not collectives.is_main:
        return failure(action)
    announced: list[str] = []

    def wrong(name: str, dtype: str, shape: list[int]) -> TensorSpec:
        announced.append(name)
        return TensorSpec(name, dtype, shape if len(announced) > 1 else [*shape, 1])

    push_module.TensorSpec = wrong  # type: ignore[assignment, misc]
    try:
        return failure(action)
    finally:
        push_module.TensorSpec = TensorSpec  # type: ignore[misc]


def failure(action: Any) -> str:
    try:
        action()
    except EbftError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.fixture(scope="module")
def pushed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, push_run, folder, tmp_path_factory.mktemp("log") / "rollout.log")


def test_the_engine_scores_as_the_trainer_after_every_push(pushed: list[dict[str, Any]]) -> None:
    for rank, answer in enumerate(pushed):
        for version, (report, versions) in enumerate(zip(answer["reports"], answer["versions"], strict=True), start=1):
            assert report.bytes > 0
            assert report.probe_max_gap < 1e-4
            assert versions == (version, version if rank == 0 else None)


def test_a_stale_engine_fails_the_probe_on_every_rank(pushed: list[dict[str, Any]]) -> None:
    # the adapter starts out random here, so the engine's checkpoint is not what the trainer holds
    for answer in pushed:
        assert answer["before any push"].startswith("WeightSyncError: version 0: engine and trainer disagree")


def test_unmoved_weights_send_nothing_but_move_the_version(pushed: list[dict[str, Any]]) -> None:
    for rank, answer in enumerate(pushed):
        assert answer["again"].bytes == 0
        assert answer["again"].seconds == 0
        assert answer["unmoved"].bytes == 0
        assert answer["unmoved versions"] == (4, 4 if rank == 0 else None)


def test_a_refused_push_fails_on_all_ranks_at_once_and_the_next_one_works(pushed: list[dict[str, Any]]) -> None:
    main, peer = pushed
    assert main["refused"].startswith("WeightSyncError")
    assert "shape" in main["refused"]
    assert peer["refused"].startswith("PeerError")
    for rank, answer in enumerate(pushed):
        assert answer["seconds to refuse"] < 20
        assert answer["version after refusal"] == (4, 4 if rank == 0 else None)
        assert answer["recovered"].bytes > 0
        assert answer["recovered"].probe_max_gap < 1e-4


def test_an_interval_of_two_pushes_every_second_step(pushed: list[dict[str, Any]]) -> None:
    for answer in pushed:
        assert answer["interval"] == [False, True, False, True]
