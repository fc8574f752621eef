"""The DeepSpeed JSON under the recipe: filled where it says auto, refused where it contradicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ebft_ds.config import AsyncEBFTConfig
from ebft_ds.config.deepspeed import build_deepspeed_config
from ebft_ds.config.deepspeed_files import find_deepspeed_file, read_deepspeed_file, shipped_folder
from ebft_ds.config.derived import derive
from ebft_ds.errors import ConfigError


def build(kind: Any = "actor", hidden_size: int | None = 64, **fields: Any) -> dict[str, Any]:
    config = AsyncEBFTConfig(**fields)
    return build_deepspeed_config(config, derive(config, world_size=2), kind, hidden_size)


@pytest.mark.parametrize("kind", ["actor", "feature"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_shipped_files_are_filled_from_the_recipe(kind: str, dtype: str) -> None:
    built = build(kind, dtype=dtype, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert built["zero_optimization"]["stage"] == 3
    assert built["bf16"]["enabled"] == (dtype == "bfloat16")
    assert built["fp16"]["enabled"] == (dtype == "float16")
    assert built["train_batch_size"] == built["train_micro_batch_size_per_gpu"] * built["gradient_accumulation_steps"] * 2
    assert built["gradient_accumulation_steps"] == 1
    assert built["zero_optimization"]["reduce_bucket_size"] == 64 * 64
    assert '"auto"' not in json.dumps(built)


def test_without_a_hidden_size_deepspeed_keeps_its_bucket_sizes() -> None:
    assert "reduce_bucket_size" not in build(hidden_size=None)["zero_optimization"]


def test_deepspeed_itself_accepts_the_result() -> None:
    runtime = pytest.importorskip("deepspeed.runtime.config")
    parsed = runtime.DeepSpeedConfig({**build(dtype="float32"), "train_batch_size": 8})
    assert parsed.zero_optimization_stage == 3


@pytest.mark.parametrize(
    ("content", "fields", "said"),
    [
        ({"bf16": {"enabled": True}}, {"dtype": "float32"}, ("bf16.enabled is true", "dtype: float32")),
        ({"bf16": {"enabled": False}}, {"dtype": "bfloat16"}, ("bf16.enabled is false", "dtype: bfloat16")),
        ({"gradient_clipping": 0.5}, {}, ("gradient_clipping is 0.5", "max_grad_norm: 1.0")),
        ({"train_micro_batch_size_per_gpu": 3}, {}, ("per_device_train_batch_size: 8",)),
        ({"gradient_accumulation_steps": 3}, {}, ("gradient_accumulation_steps: 1",)),
        ({"train_batch_size": 3}, {}, ("global batch: 16",)),
        ({"optimizer": {"type": "AdamW"}}, {}, ("optimizer is refused", "the recipe owns the optimizer")),
        ({"scheduler": {"type": "WarmupLR"}}, {}, ("the recipe owns the schedule",)),
        ({"zero_optimization": {"stage": 2}}, {}, ("stage 2 is refused",)),
        ({"tensor_parallel": {"autotp_size": 2}}, {}, ("data parallel",)),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, {}, ("needs nvme_path",)),
        ({"hybrid": "auto"}, {}, ("hybrid: auto cannot be filled",)),
    ],
)
def test_contradictions_name_both_sides(tmp_path: Path, content: dict[str, Any], fields: dict[str, Any], said: tuple[str, ...]) -> None:
    base = read_deepspeed_file(shipped_folder() / "zero3.json")
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({**base, **content}))
    with pytest.raises(ConfigError) as caught:
        build(deepspeed=str(file), **fields)
    assert "mine.json" in str(caught.value)
    for part in said:
        assert part in str(caught.value)


def test_agreeing_values_are_fine(tmp_path: Path) -> None:
    base = read_deepspeed_file(shipped_folder() / "zero3.json")
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({**base, "gradient_clipping": 0.5, "bf16": {"enabled": True}, "train_batch_size": 16}))
    assert build(deepspeed=str(file), max_grad_norm=0.5)["gradient_clipping"] == 0.5


def test_a_mapping_is_laid_over_the_shipped_file() -> None:
    built = build(deepspeed={"zero_optimization": {"overlap_comm": False}})
    assert built["zero_optimization"]["overlap_comm"] is False
    assert built["zero_optimization"]["stage"] == 3


def test_a_file_without_zero_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text("{}")
    with pytest.raises(ConfigError, match="only ZeRO stage 3"):
        build(deepspeed=str(file))


def test_the_frozen_copy_has_no_optimizer_to_offload() -> None:
    with pytest.raises(ConfigError, match="offload_optimizer"):
        build("feature", feature_deepspeed={"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})


def test_shipped_files_are_found_by_name_and_others_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_deepspeed_file("zero3.json") == find_deepspeed_file("ds_configs/zero3.json") == find_deepspeed_file("zero3")
    with pytest.raises(ConfigError, match=r"zero3\.json"):
        find_deepspeed_file("zero9.json")


@pytest.mark.parametrize(
    ("text", "said"), [('{"a": 1,\n"b"}', ":2: not valid JSON"), ('{"a": 1, "a": 2}', "a is given twice"), ("[]", "JSON object")]
)
def test_unreadable_json_is_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "mine.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        build(deepspeed=str(file))
    assert said in str(caught.value)
