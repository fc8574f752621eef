"""Checkpoints and exports of real ZeRO-3 engines on two ranks."""

from __future__ import annotations

import errno
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import ebft_ds.checkpoint.export as export_module
import ebft_ds.checkpoint.state as state_module
from ebft_ds.checkpoint.export import export_final
from ebft_ds.checkpoint.retention import prune
from ebft_ds.checkpoint.state import CheckpointStore
from ebft_ds.collectives import Collectives
from ebft_ds.config import AsyncEBFTConfig
from ebft_ds.engine.network import LogProbWork
from ebft_ds.errors import EbftError
from ebft_ds.features.reference_cache import ReferenceCache
from ebft_ds.monitor.metrics import MetricsAccumulator
from ebft_ds.packing.padded import pad_rows
from ebft_ds.trainers.engines import Engines
from tests.distributed.engines import make_config, make_engines, make_group, make_policy, random_adapter
from tests.distributed.ranks import RankAnswers, run_ranks
from tests.distributed.small import LAYERS, small_model, token_rows

PROBE = token_rows(3, [20])[0]
MODES: dict[str, dict[str, Any]] = {
    "lora": {"use_peft": True, "lora_r": 4, "lora_dropout": 0.2},
    "full": {},
    "modules_to_save": {"use_peft": True, "lora_r": 4, "lora_modules_to_save": ["lm_head"], "lora_target_modules": ["q_proj", "down_proj"]},
}


class Job:
    def __init__(self, collectives: Collectives, config: AsyncEBFTConfig, seed: int = 0) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        self.collectives, self.config = collectives, config
        adapter = random_adapter(config) if config.peft.use_peft else None
        self.engines: Engines = make_engines(config, collectives.world_size, LAYERS, adapter)

    def train(self, step: int) -> None:
        prompt, reference, *completions = token_rows(40 + step, [4, 5, 3, 6])
        policy = make_policy(self.config, self.engines, self.collectives)
        groups = [make_group(0, prompt, completions, reference)]
        policy.on_groups(step, groups, torch.tensor([[1.0, -1.0]]), rl_coef=1.0, ce_coef=1.0, metrics=MetricsAccumulator())
        self.engines.actor.step(step)

    def shards(self) -> dict[str, Tensor]:
        return {name: p.ds_tensor.clone() for name, p in self.engines.actor.network.named_parameters()}

    def log_probs(self) -> Tensor:
        count = len(PROBE) - 1
        work = LogProbWork(pad_rows([PROBE]), torch.arange(count), torch.tensor(PROBE[1:]), torch.ones(count))
        return self.engines.actor.frozen_log_probs(work)[0]


def draws() -> list[float]:
    return [float(torch.rand(())), random.random()]


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def failure(action: Any) -> str:
    try:
        action()
    except EbftError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def run(collectives: Collectives, model: Path, tokenizer: Path, folder: Path, mode: str) -> dict[str, Any]:
    config = make_config(model, num_generations=2, **MODES[mode])
    job = Job(collectives, config)
    store = CheckpointStore(folder / "checkpoints", collectives, adapters_only=config.peft.use_peft, keep=None)
    job.train(0)
    first = store.save(job.engines.actor, 1, {"step": 1})
    at_save = job.shards()
    after_save = draws()
    job.train(1)  # draws dropout masks, where there are any
    wanted = job.shards()
    cache = filled_cache(collectives)
    caching = CheckpointStore(folder / "checkpoints", collectives, adapters_only=config.peft.use_peft, keep=None, reference_cache=cache)
    second = caching.save(job.engines.actor, 2, {"step": 2, "note": "two"})
    other = Job(collectives, config, seed=5)
    answer: dict[str, Any] = {"differed": not equal(other.shards(), at_save), "meta": store.load(other.engines.actor, first)}
    answer["restored"] = equal(other.shards(), at_save)
    answer["draws"] = draws() == after_save
    other.train(1)
    answer["next step"] = equal(other.shards(), wanted)
    answer |= cached_features(other, caching, cache, first, second)
    answer |= export(job, tokenizer, folder)
    if mode != "modules_to_save":
        answer |= failures(job, store, first, second, "*rank_1_*.pt" if mode == "lora" else "reference_features_rank_1.*")
    return answer


def filled_cache(collectives: Collectives) -> ReferenceCache:
    """Two features on rank 0, three on rank 1, the first of them the last used."""
    cache = ReferenceCache(1.0, collectives)
    source = torch.Generator().manual_seed(collectives.rank)
    keys = [bytes([collectives.rank, number] * 8) for number in range(2 + collectives.rank)]
    for width, key in enumerate(keys, start=3):
        cache.put(key, torch.randn(width, generator=source))
    cache.locate([bytes([rank, 0] * 8) for rank in range(collectives.world_size)])
    return cache


def cached_features(job: Job, store: CheckpointStore, cache: ReferenceCache, first: Path, second: Path) -> dict[str, Any]:
    """Loads checkpoints with and without a cache into `cache`, which has changed since."""
    engine, saved = job.engines.actor, cache.state_dict()
    cache.put(b"x" * 16, torch.ones(4))
    store.load(engine, second)
    answer: dict[str, Any] = {"cache": equal(saved, cache.state_dict()) and len(saved["keys"]) == 2 + job.collectives.rank}
    store.load(engine, first)
    answer["cache of a checkpoint without one"] = len(cache)
    path = second / f"reference_features_rank_{job.collectives.rank}.safetensors"
    content = path.read_bytes()
    if not job.collectives.is_main:
        save_file({"keys": saved["keys"]}, path)
    answer["other content"] = failure(lambda: store.load(engine, second))
    if not job.collectives.is_main:
        path.write_bytes(content[:20])
    answer["unreadable"] = failure(lambda: store.load(engine, second))
    if not job.collectives.is_main:
        path.write_bytes(content)
    job.collectives.barrier()
    return answer


def failures(job: Job, store: CheckpointStore, first: Path, second: Path, damaged: str) -> dict[str, Any]:
    """A full disk on one rank, then a damaged shard. Last in its process: a failed save may leave DeepSpeed out of step."""
    collectives = job.collectives
    answer: dict[str, Any] = {"found": str(store.find("auto")), "names": (str(first), str(second))}
    if collectives.is_main:
        shard = sorted(second.rglob(damaged))[0]
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 0xFF
        shard.write_bytes(content)
    collectives.barrier()
    answer["found beside a damaged one"] = str(store.find("auto"))
    saving = torch.save
    if collectives.rank == 1:

        def no_space(*args: Any, **options: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        torch.save = no_space
    started = time.monotonic()
    answer["disk full"] = failure(lambda: store.save(job.engines.actor, 3, {"step": 3}))
    answer["seconds to fail"] = time.monotonic() - started
    torch.save = saving
    answer["found after a full disk"] = str(store.find("auto"))
    answer["saved again"] = failure(lambda: store.save(job.engines.actor, 4, {"step": 4}))
    answer["found then"] = str(store.find("auto"))
    state_module.prune = no_permission
    answer["no permission"] = failure(lambda: store.save(job.engines.actor, 5, {"step": 5}))
    state_module.prune = prune
    return answer


def no_permission(*args: Any, **options: Any) -> None:
    raise PermissionError(errno.EACCES, "Permission denied")


def export(job: Job, tokenizer: Path, folder: Path) -> dict[str, Any]:
    options = {"dtype": torch.float32, "generation_config": None}
    network, collectives = job.engines.actor.network, job.collectives
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    export_final(network, loaded, folder / "final", collectives, merged=True, **options)
    whole = export_module.SHARD_BYTES
    export_module.SHARD_BYTES = 20_000
    export_final(network, loaded, folder / "sharded", collectives, merged=True, **options)
    export_module.SHARD_BYTES = whole
    saving = export_module.save_file
    export_module.save_file = no_permission
    full_disk = failure(lambda: export_final(network, loaded, folder / "final", collectives, merged=True, **options))
    export_module.save_file = saving
    if job.config.peft.use_peft:
        export_final(network, loaded, folder / "adapter only", collectives, merged=False, **options)
    return {"log_probs": job.log_probs(), "export failed": full_disk}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    tied, untied = small_model(folder / "tied"), small_model(folder / "untied", tied=False)
    return {"lora": tied, "full": tied, "modules_to_save": untied}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {mode: tmp_path_factory.mktemp(mode) for mode in MODES}


@pytest.fixture(scope="module")
def answers(models: dict[str, Path], folders: dict[str, Path]) -> RankAnswers:
    """By mode."""
    return RankAnswers(lambda mode: run_ranks(2, run, models[mode], models["full"], folders[mode], mode))


@pytest.mark.parametrize("mode", list(MODES))
def test_a_loaded_run_takes_the_same_next_step_bit_for_bit(answers: RankAnswers, mode: str) -> None:
    for answer in answers[mode]:
        assert answer["differed"], "the other engine must have started elsewhere"
        assert answer["meta"] == {"step": 1}
        assert answer["restored"]
        assert answer["draws"]
        assert answer["next step"]


@pytest.mark.parametrize("mode", list(MODES))
def test_every_rank_gets_its_cached_features_back(answers: RankAnswers, mode: str) -> None:
    for answer in answers[mode]:
        assert answer["cache"]
        assert answer["cache of a checkpoint without one"] == 0
        for label, words in (("other content", "does not fit"), ("unreadable", "cannot be read")):
            assert answer[label].startswith("CheckpointError")
            assert words in answer[label], "one rank's trouble is told on all"


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_damaged_shard_is_passed_over_by_all_ranks(answers: RankAnswers, mode: str) -> None:
    for answer in answers[mode]:
        first, second = answer["names"]
        assert answer["found"] == second
        assert answer["found beside a damaged one"] == first


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_one_rank_that_cannot_write_fails_the_save_on_all(answers: RankAnswers, mode: str) -> None:
    for answer in answers[mode]:
        assert answer["disk full"].startswith("CheckpointError")
        assert "No space left on device" in answer["disk full"]
        assert answer["seconds to fail"] < 30
        assert answer["found after a full disk"] == answer["names"][0]
        assert answer["saved again"] == "no error"
        assert answer["found then"].endswith("step_4")


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_what_rank_0_may_not_delete_is_an_error_on_all(answers: RankAnswers, mode: str) -> None:
    main, peer = (answer["no permission"] for answer in answers[mode])
    assert main.startswith("CheckpointError")
    assert "Permission denied" in main
    assert peer.startswith("PeerError")


def load_alone(collectives: Collectives, model: Path, folder: Path) -> str:
    job = Job(collectives, make_config(model, num_generations=2))
    store = CheckpointStore(folder / "checkpoints", collectives, adapters_only=False, keep=None)
    return failure(lambda: store.load(job.engines.actor, folder / "checkpoints" / "step_1"))


def test_another_number_of_ranks_is_refused(answers: RankAnswers, models: dict[str, Path], folders: dict[str, Path]) -> None:
    (message,) = run_ranks(1, load_alone, models["full"], folders["full"])
    assert message.startswith("CheckpointError")
    assert "saved by 2 ranks and this run has 1" in message


def load_clean(folder: Path) -> Any:
    network, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return network.eval()


def log_probs(network: Any) -> Tensor:
    with torch.no_grad():
        table = torch.log_softmax(network(torch.tensor([PROBE])).logits[0, :-1], dim=-1)
    return table.gather(1, torch.tensor(PROBE[1:])[:, None])[:, 0]


@pytest.mark.parametrize("mode", list(MODES))
def test_an_export_that_cannot_be_written_fails_on_all_ranks_and_keeps_the_former(
    answers: RankAnswers, folders: dict[str, Path], mode: str
) -> None:
    first, second = (answer["export failed"] for answer in answers[mode])
    assert first.startswith("CheckpointError")
    assert second.startswith("PeerError")
    assert (folders[mode] / "final" / "model.safetensors").exists()


@pytest.mark.parametrize("mode", list(MODES))
def test_the_exported_model_is_the_trained_one(answers: RankAnswers, models: dict[str, Path], folders: dict[str, Path], mode: str) -> None:
    base = log_probs(AutoModelForCausalLM.from_pretrained(models[mode], dtype=torch.float32))
    wanted = answers[mode][0]["log_probs"]
    assert (base - wanted).abs().max() > 1e-2
    for name in ("final", "sharded"):
        torch.testing.assert_close(log_probs(load_clean(folders[mode] / name)), wanted, rtol=1e-5, atol=1e-5)
        assert AutoTokenizer.from_pretrained(folders[mode] / name)("hello")["input_ids"]
        assert not (folders[mode] / f"{name}.incomplete").exists()


@pytest.mark.parametrize("mode", ["lora", "modules_to_save"])
def test_the_exported_adapter_gives_the_same(answers: RankAnswers, models: dict[str, Path], folders: dict[str, Path], mode: str) -> None:
    for adapter in (folders[mode] / "final" / "adapter", folders[mode] / "adapter only"):
        base = AutoModelForCausalLM.from_pretrained(models[mode], dtype=torch.float32)
        network = PeftModel.from_pretrained(base, adapter).eval()
        torch.testing.assert_close(log_probs(network), answers[mode][0]["log_probs"], rtol=1e-5, atol=1e-5)
    assert not (folders[mode] / "adapter only" / "model.safetensors").exists()


def stored_names(folder: Path) -> list[str]:
    found: list[str] = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found += file.keys()
    return found


@pytest.mark.parametrize("mode", list(MODES))
def test_every_weight_is_stored_once_and_shards_are_small(
    answers: RankAnswers, models: dict[str, Path], folders: dict[str, Path], mode: str
) -> None:
    wanted = sorted(name for name, _ in AutoModelForCausalLM.from_pretrained(models[mode]).named_parameters())
    for name in ("final", "sharded"):
        assert sorted(stored_names(folders[mode] / name)) == wanted
    sharded = folders[mode] / "sharded"
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == wanted
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
