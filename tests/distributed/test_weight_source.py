"""The merged-weight source on two real ZeRO-3 ranks: what it brings, in what portions, and what it leaves behind."""

from __future__ import annotations

import weakref
from collections import deque
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ebft_ds.collectives import Collectives
from ebft_ds.config.deepspeed import build_deepspeed_config
from ebft_ds.config.derived import derive
from ebft_ds.engine.loading import load_actor
from ebft_ds.engine.network import LanguageNetwork
from ebft_ds.errors import WeightSyncError
from ebft_ds.sync.source import MergedWeightSource, full_numel
from tests.distributed.engines import make_config, make_engines, random_adapter
from tests.distributed.moe_models import moe_model
from tests.distributed.ranks import RankAnswers, run_ranks
from tests.distributed.small import LAYERS, small_model
from tests.unit.small_architectures import ARCHITECTURES, small_architecture

BUCKET_BYTES = 12_000
KINDS = [(architecture, tied) for architecture in ARCHITECTURES for tied in (True, False)]
VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "up_proj"]},
    "dora": {"use_peft": True, "lora_r": 4, "use_dora": True},
    "all-linear": {"use_peft": True, "lora_r": 4},
    "full": {},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    folder = tmp_path_factory.mktemp("architectures")
    return {(a, tied): small_architecture(folder / f"{a}-{tied}", a, tied=tied) for a, tied in KINDS}


def names_run(collectives: Collectives, checkpoints: dict[tuple[str, bool], Path]) -> dict[Any, Any]:
    """Every architecture, loaded into shards and read back."""
    found: dict[Any, Any] = {}
    for kind, path in checkpoints.items():
        config = make_config(path, attn_implementation="eager")  # gpt_oss knows no other
        shards = build_deepspeed_config(config, derive(config, collectives.world_size), "actor", None)
        network = load_actor(config.model, config.peft, shards, chunk_size=64)
        source = MergedWeightSource(network, torch.float32, 50_000, collectives.is_main, only_trained=False)
        found[kind] = {
            "split": all(p.numel() < full_numel(p) or full_numel(p) == 1 for p in network.parameters()),
            "tensors": {name: tensor for bucket in source.buckets() for name, tensor in bucket},
            "announced": {piece.name: piece.shape for piece in source.pieces()},
        }
    return found


def test_shards_of_every_architecture_are_read_back_as_the_saved_checkpoint(checkpoints: dict[tuple[str, bool], Path]) -> None:
    main, peer = run_ranks(2, names_run, checkpoints)
    for kind, path in checkpoints.items():
        saved = load_file(path / "model.safetensors")
        tensors = main[kind]["tensors"]
        assert main[kind]["split"], kind
        assert set(tensors) == set(saved), kind
        assert all(torch.equal(tensors[name], saved[name]) for name in saved), kind
        assert main[kind]["announced"] == peer[kind]["announced"] == {name: list(t.shape) for name, t in saved.items()}, kind
        assert peer[kind]["tensors"] == {}


class GatherRecorder:
    """Stands in for GatheredParameters and notes the bytes of each gather."""

    def __init__(self) -> None:
        self.real = deepspeed.zero.GatheredParameters
        self.gathers: list[int] = []

    def __call__(self, parameters: Any, **options: Any) -> Any:
        self.gathers.append(sum(full_numel(p) * p.element_size() for p in parameters))
        return self.real(parameters, **options)

    def __enter__(self) -> GatherRecorder:
        deepspeed.zero.GatheredParameters = self
        return self

    def __exit__(self, *failure: object) -> None:
        deepspeed.zero.GatheredParameters = self.real


class AliveBytes:
    """Bytes of the tensors seen that somebody still holds."""

    def __init__(self) -> None:
        self.count = 0

    def see(self, tensor: Tensor) -> None:
        self.count += tensor.nbytes
        weakref.finalize(tensor, self._gone, tensor.nbytes)

    def _gone(self, size: int) -> None:
        self.count -= size


def walk(source: MergedWeightSource, *, complete: bool) -> dict[str, Any]:
    """Walks as a transport may: still holding one bucket when it asks for the next."""
    alive, held, peaks, buckets = AliveBytes(), deque[Any](maxlen=2), [], 0
    with GatherRecorder() as recorder:
        for bucket in source.buckets(complete=complete):
            buckets += 1
            for _, tensor in bucket:
                alive.see(tensor)
            held.append(bucket)
            del bucket
            peaks.append(alive.count + recorder.gathers[-1])
            if len(held) == 2:
                held.popleft()
            tensor = None
    return {"peaks": peaks, "gathers": recorder.gathers, "buckets": buckets, "noted": source.peak_gathered_bytes}


def left_whole(network: LanguageNetwork) -> int:
    return sum(p.numel() == full_numel(p) > 1 for p in network.parameters())


def source_run(collectives: Collectives, model: Path, label: str) -> dict[str, Any]:
    torch.manual_seed(0)
    config = make_config(model, **VARIANTS[label])
    network = make_engines(config, collectives.world_size, LAYERS, random_adapter(config) if config.peft.use_peft else None).actor.network
    answer: dict[str, Any] = {}
    source = MergedWeightSource(network, torch.float32, BUCKET_BYTES, collectives.is_main, whole_modules=True)
    answer["touched"] = walk(source, complete=False)
    answer["complete"] = walk(source, complete=True)
    answer["sizes"] = [part.bytes_needed(torch.float32) for part in source._parts(True)]
    answer["names"] = {complete: [piece.name for piece in source.pieces(complete=complete)] for complete in (False, True)}
    answer["order"] = [name for bucket in source.buckets(complete=True) for name, _ in bucket]
    for stop_after in (0, 1, 3):
        buckets = source.buckets(complete=True)
        for _ in range(stop_after):
            next(buckets)
        buckets.close()
    answer["left whole"] = left_whole(network)
    answer["after abandoning"] = len(list(source.buckets(complete=True)))
    answer["meta"] = {tensor.device.type for bucket in _on_meta(source) for _, tensor in bucket}
    return answer


def _on_meta(source: MergedWeightSource) -> Any:
    """The device option, without an accelerator: a device that is not the CPU."""
    return MergedWeightSource(source.network, source.dtype, BUCKET_BYTES, source.is_main, device=torch.device("meta")).buckets()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> RankAnswers:
    folder = tmp_path_factory.mktemp("models")
    small_model(folder / "dense", tied=False)
    moe_model(folder / "moe", "qwen3_moe")
    return RankAnswers(lambda case: run_ranks(2, source_run, folder / case[0], case[1]))


CASES = [("dense", "lora"), ("dense", "dora"), ("dense", "full"), ("moe", "full"), ("moe", "all-linear")]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_two_buckets_and_the_largest_tensor_are_the_most_that_is_ever_held(sources: RankAnswers, case: tuple[str, str]) -> None:
    main, peer = sources[case]
    largest = max(main["sizes"])
    small = [size for size in main["sizes"] if size <= BUCKET_BYTES]
    assert len(small) > len(main["sizes"]) / 2
    for kind in ("touched", "complete"):
        assert main[kind]["buckets"] == peer[kind]["buckets"] == len(main[kind]["gathers"]) > 3
        assert main[kind]["gathers"] == peer[kind]["gathers"]
        assert main[kind]["noted"] == max(main[kind]["gathers"]) <= max(BUCKET_BYTES, largest)
        # A tensor larger than a bucket makes one by itself; it is gathered, copied and held like any other.
        assert max(main[kind]["peaks"]) <= 2 * max(BUCKET_BYTES, largest) + largest
        assert max(peer[kind]["peaks"]) <= max(BUCKET_BYTES, largest)


def test_a_bucket_closes_by_full_sizes_not_by_those_of_the_shards(sources: RankAnswers) -> None:
    main = sources["dense", "full"][0]
    assert main["complete"]["buckets"] >= sum(size for size in main["sizes"] if size <= BUCKET_BYTES) / BUCKET_BYTES
    assert main["complete"]["buckets"] < len(main["sizes"])


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_pieces_come_in_the_order_announced_and_leave_nothing_gathered(sources: RankAnswers, case: tuple[str, str]) -> None:
    main, peer = sources[case]
    assert main["order"] == main["names"][True] == peer["names"][True]
    assert peer["order"] == []
    assert set(main["names"][False]) <= set(main["names"][True])
    for rank in (main, peer):
        assert rank["left whole"] == 0
        assert rank["after abandoning"] == main["complete"]["buckets"]
    assert main["meta"] == {"meta"}


def test_a_touched_module_brings_all_of_its_parts(sources: RankAnswers) -> None:
    attention = {f"self_attn.{p}_proj.weight" for p in "qkvo"}
    dense = attention | {f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    assert set(sources["dense", "lora"][0]["names"][False]) == {f"model.layers.{i}.{name}" for i in range(LAYERS) for name in dense}


def bf16_walks(collectives: Collectives, model: Path) -> dict[str, Any]:
    """200 merges of a bf16 model with an adapter on a few tensors."""
    torch.manual_seed(0)
    config = make_config(model, dtype="bfloat16", use_peft=True, lora_r=4, lora_target_modules=["q_proj", "v_proj"])
    network = make_engines(config, collectives.world_size, LAYERS, random_adapter(config)).actor.network
    before = {name: p.ds_tensor.clone() for name, p in network.named_parameters()}
    source = MergedWeightSource(network, torch.bfloat16, 2**20, collectives.is_main, whole_modules=True)
    first = dict(pair for bucket in source.buckets() for pair in bucket)
    for _ in range(199):
        last = dict(pair for bucket in source.buckets() for pair in bucket)
    return {
        "unchanged": all(torch.equal(before[name], p.ds_tensor) for name, p in network.named_parameters()),
        "tensors": len(first),
        "same": all(torch.equal(first[name], last[name]) for name in first),
        "survival": source.loss.delta_survival,
    }


def test_two_hundred_merges_leave_the_bits_of_the_base_weights(tmp_path: Path) -> None:
    main, peer = run_ranks(2, bf16_walks, small_model(tmp_path / "model", tied=True))
    for rank in (main, peer):
        assert rank["unchanged"]
        assert rank["same"]
    assert main["tensors"] == 4 * LAYERS
    assert 0.5 < main["survival"] < 2.0


def ungathered_run(collectives: Collectives, model: Path) -> str:
    """A gather that gathers nothing."""
    config = make_config(model)
    network = make_engines(config, collectives.world_size, LAYERS).actor.network
    real = deepspeed.zero.GatheredParameters
    deepspeed.zero.GatheredParameters = lambda parameters, **options: real([], **options)
    try:
        for _ in MergedWeightSource(network, torch.float32, BUCKET_BYTES, is_main=True).buckets():
            pass
    except WeightSyncError as error:
        return str(error)
    finally:
        deepspeed.zero.GatheredParameters = real
    return "no error"


def test_a_tensor_that_was_not_gathered_is_refused_by_name(tmp_path: Path) -> None:
    for answer in run_ranks(2, ungathered_run, small_model(tmp_path / "model")):
        assert answer.startswith("model.embed_tokens.weight was not gathered: shape [0], expected [")
