"""The names, shapes and values of a push against those of a saved checkpoint, and merges against PEFT's own, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, TrainableTokensConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
from transformers.core_model_loading import ConversionOps, WeightConverter

from ebft_ds.engine.network import LanguageNetwork, install_log_prob_head
from ebft_ds.errors import WeightSyncError
from ebft_ds.sync.names import checkpoint_units
from ebft_ds.sync.slots import model_slots
from ebft_ds.sync.source import MergedWeightSource
from tests.unit.small_architectures import ARCHITECTURES, small_architecture

KINDS = [(architecture, tied) for architecture in ARCHITECTURES for tied in (True, False)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("architectures")


def checkpoint(folder: Path, architecture: str, tied: bool) -> Path:
    target = folder / f"{architecture}-{'tied' if tied else 'untied'}"
    return target if target.exists() else small_architecture(target, architecture, tied=tied)


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    install_log_prob_head(model, 128)
    return model


def source_of(model: Any, dtype: torch.dtype = torch.float32, **options: Any) -> MergedWeightSource:
    return MergedWeightSource(LanguageNetwork(model), dtype, 20_000, is_main=True, **options)


def everything(model: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    source = source_of(model, dtype)
    found = {name: tensor for bucket in source.buckets(complete=True) for name, tensor in bucket}
    assert {piece.name: piece.shape for piece in source.pieces(complete=True)} == {name: list(t.shape) for name, t in found.items()}
    assert all(tensor.is_contiguous() and tensor.dtype == dtype for tensor in found.values())
    return found


@pytest.mark.parametrize(("architecture", "tied"), KINDS)
def test_a_complete_push_is_the_saved_checkpoint(folder: Path, architecture: str, tied: bool) -> None:
    path = checkpoint(folder, architecture, tied)
    saved = load_file(path / "model.safetensors")
    found = everything(load(path))
    assert set(found) == set(saved)
    assert all(torch.equal(found[name], saved[name]) for name in saved)


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_checkpoint_tensors_go_back_into_the_parameters_they_came_from(folder: Path, architecture: str) -> None:
    model = load(checkpoint(folder, architecture, True))
    tensors = {slot.name: slot.tensor.detach() for slot in model_slots(model)}
    for unit in checkpoint_units(model, {name: tensor.shape for name, tensor in tensors.items()}):
        back = unit.to_memory(unit.to_checkpoint(tensors))
        assert set(back) == set(unit.members)
        assert all(torch.equal(back[name], tensors[name]) for name in back)


def test_a_model_made_from_its_configuration_has_the_architectures_names(folder: Path) -> None:
    path = checkpoint(folder, "mixtral", False)
    model = AutoModelForCausalLM.from_config(load(path).config, dtype=torch.float32)
    assert set(everything(model)) == set(load_file(path / "model.safetensors"))


def test_the_text_part_of_a_multimodal_model_has_its_checkpoints_prefix(tmp_path: Path) -> None:
    text = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=120)
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14, projection_dim=32
    )
    made = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_index=119))
    made.save_pretrained(tmp_path)
    model = LlavaForConditionalGeneration.from_pretrained(tmp_path)
    slots = {slot.name: slot.tensor.detach() for slot in model_slots(model)}
    units = checkpoint_units(model, {name: tensor.shape for name, tensor in slots.items()})
    found = {name: tensor for unit in units for name, tensor in unit.to_checkpoint(slots).items()}
    saved = load_file(tmp_path / "model.safetensors")
    assert set(found) == set(saved)
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    assert set(found) != set(slots), "names in memory and on disk were meant to differ"


class CannotGoBack(ConversionOps):
    """As the dequantizing conversions are."""

    def convert(self, input_dict: dict[str, Any], **options: Any) -> dict[str, Any]:
        return input_dict


def test_a_conversion_without_a_way_back_is_refused_by_name(folder: Path) -> None:
    model = load(checkpoint(folder, "llama", True))
    converter = WeightConverter("mlp.up_proj.packed", "mlp.up_proj.weight", [CannotGoBack()])
    converter.rename_source_key("model.layers.0.mlp.up_proj.packed")
    model._weight_conversions = [converter]
    with pytest.raises(WeightSyncError, match=r"LlamaForCausalLM.*mlp\.up_proj"):
        source_of(model).pieces()


def test_two_parameters_of_one_checkpoint_name_are_refused(folder: Path) -> None:
    model = load(checkpoint(folder, "llama", True))
    from transformers.core_model_loading import WeightRenaming

    renaming = WeightRenaming("mlp.down_proj.", "mlp.up_proj.")
    renaming.rename_source_key("mlp.down_proj.weight")
    model._weight_conversions = [renaming]
    with pytest.raises(WeightSyncError, match=r"down_proj.*would both be saved"):
        source_of(model).pieces()


ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {"target_modules": "all-linear"}),
    "dora": ("qwen2", {"target_modules": "all-linear", "use_dora": True}),
    "rank pattern": ("llama", {"target_modules": ["q_proj", "up_proj"], "rank_pattern": {"up_proj": 3}, "use_rslora": True}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "conv1d dora": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "use_dora": True}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "v_proj"]}),
    "embedding dora": ("llama", {"target_modules": ["embed_tokens"], "use_dora": True}),
    "modules_to_save": ("llama", {"target_modules": ["o_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "experts": ("qwen3_moe", {"target_modules": "all-linear"}),
    "experts, checkpoint names": ("mixtral", {"target_modules": ["w1", "w2", "w3", "q_proj"]}),
    "one expert matrix": ("qwen3_moe", {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}),
    "transposed experts": ("gpt_oss", {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}),
}


def adapted(folder: Path, label: str, dtype: torch.dtype = torch.float32) -> Any:
    """With random adapters, magnitudes and saved modules."""
    architecture, fields = ADAPTERS[label]
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=6, init_lora_weights=False, task_type="CAUSAL_LM", **fields)
    model = get_peft_model(load(checkpoint(folder, architecture, False), dtype), config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_A" not in name:
                parameter.mul_(1 + 0.3 * torch.randn(parameter.shape)).add_(0.02 * torch.randn(parameter.shape))
    return model


@pytest.mark.parametrize("label", list(ADAPTERS))
def test_merged_weights_are_those_that_peft_merges_and_saves(folder: Path, tmp_path: Path, label: str) -> None:
    model = adapted(folder, label)
    found = everything(model)
    trained = {name for bucket in source_of(model).buckets() for name, _ in bucket}
    base = load_file(checkpoint(folder, ADAPTERS[label][0], False) / "model.safetensors")
    model.merge_and_unload().save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert set(found) == set(saved)
    for name, tensor in saved.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert trained == {name for name in base if not torch.equal(base[name], saved[name])}


def test_float32_adapters_over_a_bf16_base_are_added_in_float32_and_cast_once(folder: Path) -> None:
    model = adapted(folder, "lora", torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float() * 0.01  # well below a bf16 step of most weights
    exact = everything(model, torch.float32)
    rounded = everything(model, torch.bfloat16)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    factors = layer.lora_B["default"].weight, layer.lora_A["default"].weight
    wanted = layer.base_layer.weight.float() + 1.5 * factors[0] @ factors[1]
    torch.testing.assert_close(exact["model.layers.0.self_attn.q_proj.weight"], wanted, rtol=1e-6, atol=1e-7)
    assert all(torch.equal(rounded[name], exact[name].bfloat16()) for name in exact)


def test_what_rounding_costs_is_measured(folder: Path) -> None:
    model = adapted(folder, "lora", torch.bfloat16)
    source = source_of(model, torch.bfloat16)
    for _ in source.buckets():
        pass
    assert source.loss.delta_survival is not None
    assert 0.9 < source.loss.delta_survival < 1.1
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data *= 1e-5
    for _ in source.buckets():
        pass
    assert source.loss.delta_survival < 0.7


REFUSED: dict[str, tuple[bool, Any, str]] = {
    "tied head trained alone": (True, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]), r"lm_head\.weight is tied"),
    "tied embedding adapted": (True, LoraConfig(target_modules=["embed_tokens"]), r"lm_head\.weight is tied"),
    "lora bias": (False, LoraConfig(target_modules=["q_proj"], lora_bias=True), r"self_attn\.q_proj: lora_bias"),
    "ia3": (False, IA3Config(target_modules=["k_proj"], feedforward_modules=[]), r"self_attn\.k_proj: adapters of type"),
    "tokens": (False, TrainableTokensConfig(token_indices=[1, 2], target_modules=["embed_tokens"]), "embed_tokens.*cannot be merged"),
    "new tokens": (False, LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 2]), "embed_tokens.*cannot be merged"),
}


@pytest.mark.parametrize("label", list(REFUSED))
def test_what_cannot_be_merged_is_refused_by_name(folder: Path, label: str) -> None:
    tied, config, text = REFUSED[label]
    model = get_peft_model(load(checkpoint(folder, "llama", tied)), config)
    with pytest.raises(WeightSyncError, match=text):
        source_of(model).pieces()


def test_tied_modules_that_stay_tied_in_training_go_once(folder: Path) -> None:
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True, task_type="CAUSAL_LM")
    path = checkpoint(folder, "llama", True)
    model = get_peft_model(load(path), config)
    assert set(everything(model)) == set(load_file(path / "model.safetensors"))


def names(source: MergedWeightSource) -> set[str]:
    return {piece.name for piece in source.pieces()}


@pytest.mark.parametrize(
    ("architecture", "targets", "wanted"),
    [
        ("qwen2", ["q_proj"], {f"self_attn.{p}_proj.{kind}" for p in "qkv" for kind in ("weight", "bias")} | {"self_attn.o_proj.weight"}),
        ("llama", ["up_proj"], {"mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"}),
        (
            "mixtral",
            ["w2"],
            {f"block_sparse_moe.experts.{e}.w{w}.weight" for e in range(4) for w in (1, 2, 3)} | {"block_sparse_moe.gate.weight"},
        ),
        ("gpt_neox", ["query_key_value"], {f"attention.{m}.{kind}" for m in ("query_key_value", "dense") for kind in ("weight", "bias")}),
    ],
)
def test_whole_modules_bring_the_rest_of_a_touched_part_and_nothing_else(
    folder: Path, architecture: str, targets: list[str], wanted: set[str]
) -> None:
    model = get_peft_model(load(checkpoint(folder, architecture, False)), LoraConfig(target_modules=targets, layers_to_transform=None))
    prefix = "gpt_neox.layers" if architecture == "gpt_neox" else "model.layers"
    assert names(source_of(model, whole_modules=True)) == {f"{prefix}.{i}.{name}" for i in (0, 1) for name in wanted}
    assert names(source_of(model)) < names(source_of(model, whole_modules=True))


def test_only_the_touched_layers_travel_and_a_trained_norm_travels_alone(folder: Path) -> None:
    config = LoraConfig(target_modules=["q_proj", "v_proj"], layers_to_transform=[1], modules_to_save=["model.norm"])
    model = get_peft_model(load(checkpoint(folder, "llama", False)), config)
    wanted = {f"model.layers.1.self_attn.{p}_proj.weight" for p in "qkvo"} | {"model.norm.weight"}
    assert names(source_of(model, whole_modules=True)) == wanted


def test_nothing_trained_is_nothing_to_push(folder: Path) -> None:
    model = load(checkpoint(folder, "llama", False)).requires_grad_(False)
    with pytest.raises(WeightSyncError, match="no weight to push"):
        source_of(model).pieces()
    assert source_of(model).pieces(complete=True)


def test_a_tensor_of_whole_numbers_is_refused(folder: Path) -> None:
    model = load(checkpoint(folder, "llama", False))
    model.model.layers[0].mlp.register_buffer("counts", torch.zeros(3, dtype=torch.int64))
    with pytest.raises(WeightSyncError, match=r"layers\.0\.mlp\.counts holds torch\.int64"):
        everything(model)


def test_copies_are_the_callers_own(folder: Path) -> None:
    model = load(checkpoint(folder, "mixtral", False))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for bucket in source_of(model).buckets():
        for _, tensor in bucket:
            tensor.zero_()
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert isinstance(model.lm_head, nn.Linear)
