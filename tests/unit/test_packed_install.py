"""The registered attention: padded rows keep their bits, nothing of it is saved, what it cannot honour is refused; who takes it at all."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ebft_ds.config import AsyncEBFTConfig
from ebft_ds.errors import ConfigError, ModelError
from ebft_ds.packing.attention import install_packed_attention, packed_attention
from ebft_ds.packing.packed import PackedRow, packed_batch
from ebft_ds.packing.style import choose_row_style, rotary_limit
from ebft_ds.packing.support import packing_support
from tests.unit.packed_models import LAYERS, as_network, gradients, small_model, some_sequences


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt_neox"])
def test_padded_rows_give_the_same_bits_as_without_it(architecture: str, implementation: str) -> None:
    plain = small_model(architecture, implementation)
    model = copy.deepcopy(plain)
    install_packed_attention(model)
    install_packed_attention(model)
    assert model.config._attn_implementation == f"ebft_{implementation}"
    assert plain.config._attn_implementation == implementation
    ids = torch.arange(24).view(2, 12)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    found, wanted = (m(ids, attention_mask=mask).logits for m in (model, plain))
    assert torch.equal(found, wanted)
    found, wanted = (gradients(as_network(m, lora=False).double(), m(ids).logits.flatten()) for m in (model, plain))
    for name, gradient in found.items():
        assert torch.equal(gradient, wanted[name])


def test_saved_configurations_name_the_models_own_attention(tmp_path: Path) -> None:
    model = small_model("gemma2", "eager")
    install_packed_attention(model)
    model.save_pretrained(tmp_path / "full")
    as_network(model, lora=True).model.save_pretrained(tmp_path / "adapter")
    for path in tmp_path.rglob("*.json"):
        assert "ebft_" not in path.read_text(encoding="utf-8"), path
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "full")
    assert loaded.config._attn_implementation == "sdpa"
    assert json.loads((tmp_path / "full" / "config.json").read_text(encoding="utf-8"))["model_type"] == "gemma2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"s_aux": torch.ones(4)}, "s_aux"),
        ({"position_bias": torch.ones(1)}, "position_bias"),
        ({"output_attentions": True}, "output_attentions"),
        ({"cache": object()}, "cache"),
        ({"is_causal": False}, "is_causal"),
        ({"attention_mask": torch.zeros(1, 1, 5, 5)}, "a mask of its own"),
    ],
)
def test_what_a_packed_row_does_not_honour_is_refused(arguments: dict[str, Any], message: str) -> None:
    model = small_model("llama")
    install_packed_attention(model)
    row = packed_batch(some_sequences(), packed_attention("dense", device="cpu"), share=True).rows
    assert isinstance(row, PackedRow)
    states = torch.zeros(1, 4, row.real_tokens, 8)
    layer = model.model.layers[0].self_attn
    attention = ALL_ATTENTION_FUNCTIONS["ebft_sdpa"]
    attention(layer, states, states, states, None, packed_row=row, cache=None, output_attentions=False)
    assert row.served == {0}
    mask = arguments.pop("attention_mask", None)
    with pytest.raises(ModelError, match=f"LlamaAttention passes {message}"):
        attention(layer, states, states, states, mask, packed_row=row, **arguments)


def test_a_kernel_that_transformers_knows_by_name_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from ebft_ds.packing.attention import install

    calls: list[tuple[str, ...]] = []

    def kernel(module: Any, query: torch.Tensor, *_: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        calls.append(tuple(kwargs))
        return query.transpose(1, 2).contiguous(), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "some_kernel", kernel)
    monkeypatch.setattr(install, "_wrapped", set())
    model = small_model("llama", "some_kernel")
    install_packed_attention(model)
    install_packed_attention(model)
    assert model.config._attn_implementation == "some_kernel"
    model(torch.tensor([[1, 2, 3]]))
    assert len(calls) == LAYERS
    batch = packed_batch(some_sequences(), packed_attention("split", device="cpu"), share=True)
    model.model(**batch.rows.body_inputs(), use_cache=False)
    batch.rows.check_forward(LAYERS)
    assert len(calls) == LAYERS


def test_custom_code_under_a_known_configuration_is_left_alone() -> None:
    class CustomForCausalLM(PreTrainedModel):
        config_class = LlamaConfig
        _supports_sdpa = True

    custom = CustomForCausalLM(small_model("llama").config)
    install_packed_attention(custom)
    assert custom.config._attn_implementation == "sdpa"
    body = AutoModel.from_config(custom.config)
    install_packed_attention(body)
    assert body.config._attn_implementation == "ebft_sdpa"


def config_of(model_type: str, **fields: Any) -> PretrainedConfig:
    return CONFIG_MAPPING[model_type](**fields)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (config_of("mamba2"), "state"),
        (config_of("qwen3_next"), "linear_attention"),
        (config_of("lfm2", num_hidden_layers=2, layer_types=["conv", "full_attention"]), "layers of type conv"),
        (config_of("llama4_text"), "chunked_attention"),
        (config_of("bloom"), "do not take another attention"),
        (config_of("mpt"), "do not take another attention"),
        (config_of("falcon", alibi=True), "ALiBi"),
        (config_of("gpt_oss"), "sinks"),
        (config_of("t5"), "encoder-decoder"),
        (config_of("olmoe", sliding_window=5), "sliding window"),
        (config_of("phimoe", sliding_window=5), "sliding window"),
        (config_of("doge"), "masks of its own"),
        (config_of("deepseek_v32"), "indexed_attention"),
        (config_of("nemotron"), "hand a packed row down"),
        (PretrainedConfig(), "not a causal language model of transformers"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PretrainedConfig) else "",
)
def test_models_whose_tokens_meet_otherwise_get_padded_rows_and_the_reason(config: PretrainedConfig, reason: str) -> None:
    support = packing_support(config)
    assert support.style == "padded"
    assert support.reason is not None
    assert reason in support.reason


@pytest.mark.parametrize("model_type", ["olmoe", "qwen2_moe", "qwen2", "gemma3_text", "olmo3", "cohere2", "smollm3", "granitemoe"])
def test_models_whose_tokens_meet_in_attention_only_get_shared_rows(model_type: str) -> None:
    assert packing_support(config_of(model_type)).style == "shared"


def test_a_row_that_is_forwarded_again_is_checked_again() -> None:
    row = packed_batch(some_sequences(), packed_attention("split", device="cpu"), share=True).rows
    installed = small_model("llama").base_model
    install_packed_attention(installed)
    installed(**row.body_inputs(), use_cache=False)
    row.check_forward(LAYERS)
    small_model("llama").base_model(**(row.body_inputs() | {"packed_row": None}), use_cache=False)
    with pytest.raises(ModelError, match="would have seen each other"):
        row.check_forward(LAYERS)


def recipe(**fields: Any) -> AsyncEBFTConfig:
    return AsyncEBFTConfig(**fields)


def test_the_recipe_and_the_model_decide_on_rows() -> None:
    llama, mamba = config_of("llama"), config_of("mamba2")
    assert choose_row_style(recipe(), llama).style == "shared"
    assert choose_row_style(recipe(packing="unshared"), llama).style == "unshared"
    assert choose_row_style(recipe(packing="padded"), mamba).style == "padded"
    with pytest.raises(ConfigError, match=r"packing: shared does not work.*state"):
        choose_row_style(recipe(packing="shared"), mamba)
    flash = choose_row_style(recipe(attn_implementation="flash_attention_2"), llama)
    assert flash.style == "padded"
    assert "flash_attention_2" in str(flash.reason)
    llama.auto_map = {"AutoModelForCausalLM": "modeling.Mine"}
    assert choose_row_style(recipe(), llama).style == "shared", "the checkpoint's code is not run"
    assert choose_row_style(recipe(trust_remote_code=True), llama).style == "padded"


def test_rotary_scaling_that_depends_on_the_neighbours_is_known() -> None:
    assert rotary_limit(config_of("llama")) is None
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert rotary_limit(config_of("llama", max_position_embeddings=64, rope_parameters=scaled)) == 64
