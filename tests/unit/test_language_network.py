"""LanguageNetwork without an engine: what it refuses, and that a failing forward leaves it as it was."""

from __future__ import annotations

import importlib.machinery
import sys
import types

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from ebft_ds.engine.liger import apply_liger_kernels
from ebft_ds.engine.loading import disable_dropout, keep_layers
from ebft_ds.engine.network import FeatureWork, LanguageNetwork, decoder_layers, install_log_prob_head
from ebft_ds.errors import ConfigError, ModelError
from ebft_ds.packing.padded import pad_rows
from ebft_ds.policy.logprobs import LogProbHead


def small(architecture: str = "llama", **fields: object) -> PreTrainedModel:
    settings: dict[str, object] = {
        "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    }  # fmt: skip
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[architecture](**(settings | fields)), dtype=torch.float32)


def test_tied_head_keeps_its_parameter_and_the_models_own_forward() -> None:
    model = small(tie_word_embeddings=True).eval()
    ids = torch.tensor([[3, 7, 9]])
    before = model(ids).logits
    install_log_prob_head(model, chunk_size=2)
    head = model.get_output_embeddings()
    assert isinstance(head, LogProbHead)
    assert head.weight is model.get_input_embeddings().weight
    torch.testing.assert_close(model(ids).logits, before)


@pytest.mark.parametrize(("architecture", "field"), [("cohere", "logit_scale"), ("granite", "logits_scaling")])
def test_models_that_scale_their_logits_are_refused(architecture: str, field: str) -> None:
    with pytest.raises(ModelError, match=field):
        install_log_prob_head(small(architecture, **{field: 0.25}), chunk_size=8)


def test_liger_kernels_are_refused_without_package_or_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    before = model.model.layers[0].mlp.forward
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ConfigError, match=r"ebft_ds\[liger\]"):
        apply_liger_kernels(model)
    package = types.ModuleType("liger_kernel")
    package.__spec__ = importlib.machinery.ModuleSpec("liger_kernel", None)
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    with pytest.raises(ConfigError, match="needs a GPU"):
        apply_liger_kernels(model)
    assert model.model.layers[0].mlp.forward == before


def test_mode_layers_and_hooks_are_restored_after_a_failing_feature_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    network = LanguageNetwork(small())
    network.train()
    _, layers = decoder_layers(network.body)

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(layers[1], "forward", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        network(FeatureWork(pad_rows([[1, 2, 3]]), [1, 2], torch.arange(3)))
    assert network.training
    assert len(decoder_layers(network.body)[1]) == 3
    assert not any(layer._forward_hooks for layer in layers)


def test_repeated_and_final_layers_are_returned_in_the_order_asked_for() -> None:
    network = LanguageNetwork(small()).eval()
    rows = pad_rows([[1, 2, 3], [4, 5]])
    deep, first, again = network(FeatureWork(rows, [3, 1, 1], torch.tensor([2, 0, 4])))
    assert torch.equal(first, again)
    plain = network.body(rows.input_ids[:1], output_hidden_states=True).hidden_states
    torch.testing.assert_close(deep[:2], plain[3][0, [2, 0]])
    torch.testing.assert_close(first[:2], plain[1][0, [2, 0]])


def test_noise_without_a_dropout_module_is_switched_off_too() -> None:
    model = small("mixtral", router_jitter_noise=0.3, num_local_experts=2, num_experts_per_tok=1, attention_dropout=0.2).train()
    disable_dropout(model)
    ids = torch.tensor([[3, 7, 9, 11]])
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_blocks_that_a_feature_model_lacks_are_not_made_up() -> None:
    config = small().config
    with pytest.raises(ConfigError, match="feature layer 7 is asked of a feature model of 3 layers"):
        keep_layers(config, 7)
