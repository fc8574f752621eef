"""Axolotl's fields: each has its row, the loader goes by it, and whole configurations are converted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ebft_ds.config import AsyncEBFTConfig, load_recipe
from ebft_ds.config.axolotl_fields import AXOLOTL_FIELDS
from ebft_ds.config.convert import convert_axolotl
from ebft_ds.config.explain import differences, explain
from ebft_ds.config.fields import FIELDS
from ebft_ds.config.other_systems import REFUSED_KEYS
from ebft_ds.errors import ConfigError

LISTED = json.loads((Path(__file__).parent.parent / "data" / "axolotl_async_ebft_fields.json").read_text())


def test_the_table_has_every_field_and_no_other() -> None:
    assert list(AXOLOTL_FIELDS) == list(LISTED)


def test_rows_are_consistent() -> None:
    for row in AXOLOTL_FIELDS.values():
        assert row.text
        if row.status == "refused":
            assert row.ours is None
            assert row.name not in FIELDS
        elif row.status == "supported" or row.ours is not None:
            assert row.ours in FIELDS
    assert not set(REFUSED_KEYS) & (set(FIELDS) | set(AXOLOTL_FIELDS))


@pytest.mark.parametrize("name", list(AXOLOTL_FIELDS))
def test_axolotl_defaults_ask_for_nothing(tmp_path: Path, name: str) -> None:
    """A recipe that states Axolotl's default loads: the field is supported, or left out with a note."""
    row = AXOLOTL_FIELDS[name]
    if isinstance(row.default, str) and row.default.isupper():
        pytest.skip("the default is only known by its constant's name")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({name: row.default}))
    loaded = load_recipe(recipe)
    if row.ours is None:
        assert any(name in note for note in loaded.notes)


@pytest.mark.parametrize("name", [row.name for row in AXOLOTL_FIELDS.values() if row.status == "refused"])
def test_refused_fields_say_why(tmp_path: Path, name: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"seed: 1\n{name}: 12345\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe)
    assert f"recipe.yaml:2: {name} is a field of Axolotl that is refused" in str(caught.value)
    assert AXOLOTL_FIELDS[name].text in str(caught.value)


@pytest.mark.parametrize("key", ["tensor_parallel_size", "sequence_parallel_size", "pipeline_parallel_size", "expert_parallel_size"])
def test_parallelism_is_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is refused: .* parallelism of the trainer"):
        AsyncEBFTConfig(**{key: 2})
    AsyncEBFTConfig(**{key: 1})


def test_quantised_bases_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="load_in_4bit is refused: Quantised"):
        AsyncEBFTConfig(load_in_4bit=True)
    with pytest.raises(ConfigError, match="qlora"):
        AsyncEBFTConfig(qlora=True)
    AsyncEBFTConfig(qlora=False, load_in_4bit=False)


def test_differences_are_the_measured_choices() -> None:
    assert {item.field for item in differences()} == {
        "ebft_embed_method",
        "ebft_use_whitening",
        "scoring_token_budget",
        "scale_rewards",
        "vllm_lora_alias",
    }


def test_explain_knows_fields_aliases_and_refusals() -> None:
    assert "default: 1.5" in explain("gt_length_multiplier")
    assert "is an alias" in explain("gt_length_multiplier")
    assert "refused" in explain("lisa_n_layers")
    assert "refused" in explain("tensor_parallel_size")
    with pytest.raises(ConfigError, match="did you mean temperature"):
        explain("temprature")


AXOLOTL_YAML = """
base_model: org/model
rl: ebft
bf16: true
adapter: lora
lora_r: 8
lora_target_linear: true
datasets:
  - path: rows.jsonl
    type: ebft_structured.transform
    split: train
sequence_len: 1024
micro_batch_size: 4
gradient_accumulation_steps: 2
learning_rate: 1e-5
optimizer: adamw_torch
lr_scheduler: cosine
sample_packing: true
val_set_size: 0.1
wandb_project: mine
trl:
  num_generations: 4
  max_completion_length: 128
  temperature: 0.8
  use_vllm: true
  vllm_sync_interval: 2
vllm:
  gpu_memory_utilization: 0.5
ebft:
  mode: structured
  feature_layers: [0.5]
  ce_coef: 0.1
strange_key: 3
"""


def test_an_axolotl_configuration_becomes_a_recipe(tmp_path: Path) -> None:
    source = tmp_path / "axolotl.yaml"
    source.write_text(AXOLOTL_YAML)
    conversion = convert_axolotl(source)
    config = conversion.config()
    assert config.model.model_name_or_path == "org/model"
    assert config.model.dtype == "bfloat16"
    assert (config.peft.use_peft, config.peft.lora_r, config.peft.lora_target_modules) == (True, 8, "all-linear")
    assert (config.data.train_dataset, config.data.max_seq_length) == ("rows.jsonl", 1024)
    assert (config.rollout.num_generations, config.rollout.vllm_merge_check_interval) == (4, 2)
    assert (config.method.ebft_feature_layers, config.method.ebft_ce_coef) == ([0.5], 0.1)
    assert (config.vllm.vllm_server_base_url, config.vllm.vllm_gpu_memory_utilization) == ("http://127.0.0.1:8000", 0.5)
    # what Axolotl would have done by default is stated
    assert (config.method.ebft_embed_method, config.method.ebft_use_whitening, config.loss.scale_rewards) == ("last_token", False, "group")
    dropped = "\n".join(conversion.dropped)
    for key in ("sample_packing", "val_set_size", "wandb_project", "strange_key"):
        assert key in dropped


def test_other_kinds_of_training_are_not_converted(tmp_path: Path) -> None:
    source = tmp_path / "axolotl.yaml"
    source.write_text("rl: dpo\n")
    with pytest.raises(ConfigError, match="rl: dpo"):
        convert_axolotl(source)
    source.write_text("rl: ebft\nebft: {mode: strided}\n")
    with pytest.raises(ConfigError, match="strided"):
        convert_axolotl(source)
