"""Packed rows give the numbers of separate sequences: hidden states, log-probs, gradients, for every architecture and back end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ebft_ds.errors import ConfigError, ModelError
from ebft_ds.packing.attention import install_packed_attention, packed_attention
from ebft_ds.packing.packed import packed_batch
from ebft_ds.packing.rows import RowBatch
from ebft_ds.packing.support import packing_support
from tests.unit.packed_models import (
    LAYERS,
    as_network,
    gradients,
    largest_gap,
    packed_features,
    packed_log_probs,
    separate_features,
    separate_log_probs,
    small_model,
    some_sequences,
)

PACKED = [
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "gpt_neox", "gpt2", "qwen3_moe", "qwen2_moe", "mixtral",
    "deepseek_v3",
]  # fmt: skip
EXTRA: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_key_value_heads": 4},
    "gpt2": {"n_layer": LAYERS, "n_head": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
}
CHECKPOINTING = [None, {"use_reentrant": False}, {"use_reentrant": True}]


def batch_of(backend: str, *, share: bool = True) -> RowBatch:
    return packed_batch(some_sequences(), packed_attention(backend, device="cpu"), share=share)  # type: ignore[arg-type]


def reference_implementation(architecture: str) -> str:
    return "eager" if architecture == "gemma2" else "sdpa"  # transformers' sdpa leaves Gemma 2's soft cap out


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("architecture", PACKED)
def test_packed_rows_equal_separate_sequences(architecture: str, lora: bool) -> None:
    sequences = some_sequences()
    plain = small_model(architecture, reference_implementation(architecture), **EXTRA.get(architecture, {}))
    separate = as_network(plain, lora=lora)
    wanted_states = separate_features(separate, sequences, [1, LAYERS], adapters=lora)
    wanted_shallow = separate_features(separate, sequences, [1])
    wanted_log_probs = separate_log_probs(separate, sequences)
    wanted = gradients(separate, wanted_log_probs)
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())

    model = small_model(architecture, **EXTRA.get(architecture, {}))
    assert packing_support(model.config).style == "shared"
    install_packed_attention(model)
    for backend in ("split", "dense", "flex"):
        network = as_network(model, lora=lora)
        for found, states in zip(packed_features(network, batch_of(backend), [1, LAYERS], adapters=lora), wanted_states, strict=True):
            assert largest_gap(found, states) < 1e-5
        [shallow] = packed_features(network, batch_of(backend), [1])  # a truncated body, adapters off
        assert largest_gap(shallow, wanted_shallow[0]) < 1e-5
        if backend == "flex":
            continue
        for checkpointing in CHECKPOINTING:
            network.train()
            if checkpointing is not None:
                network.base_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
            log_probs = packed_log_probs(network, batch_of(backend), sequences)
            assert largest_gap(log_probs, wanted_log_probs) < 1e-5
            found_gradients = gradients(network, log_probs)
            assert found_gradients.keys() == wanted.keys()
            for name, gradient in found_gradients.items():
                assert largest_gap(gradient, wanted[name], floor=0.1 * largest) < 1e-5, (backend, checkpointing, name)


def test_unshared_rows_equal_separate_sequences() -> None:
    sequences = some_sequences()
    model = small_model("mistral")
    wanted = separate_features(as_network(model, lora=False), sequences, [LAYERS])
    install_packed_attention(model)
    for backend in ("split", "dense", "flex"):
        found = packed_features(as_network(model, lora=False), batch_of(backend, share=False), [LAYERS])
        assert largest_gap(found[0], wanted[0]) < 1e-5


def test_the_comparison_sees_a_leak_between_branches() -> None:
    sequences = some_sequences()
    model = small_model("llama")
    wanted = separate_features(as_network(model, lora=False), sequences, [LAYERS])
    install_packed_attention(model)
    batch = batch_of("dense")
    layout = batch.rows.attention.layout  # type: ignore[attr-defined]
    object.__setattr__(layout.groups[0], "branch_lengths", (4, 6))  # two branches taken for one
    found = packed_features(as_network(model, lora=False), batch, [LAYERS])
    assert largest_gap(found[0], wanted[0]) > 1e-3


@pytest.mark.parametrize("architecture", ["nemotron", "stablelm"])
def test_a_model_whose_blocks_do_not_use_the_rows_attention_is_refused(architecture: str) -> None:
    model = small_model(architecture)
    assert packing_support(model.config).style == "padded"
    install_packed_attention(model)
    with pytest.raises(ModelError, match=rf"in blocks \[\] of {LAYERS}"):
        packed_features(as_network(model, lora=False), batch_of("split"), [LAYERS])


def test_flex_says_that_it_has_no_backward_on_a_cpu() -> None:
    model = small_model("llama")
    install_packed_attention(model)
    with pytest.raises(ConfigError, match="no backward on a CPU"):
        packed_log_probs(as_network(model, lora=False), batch_of("flex"), some_sequences())


def test_softcap_holds_on_padded_rows_too_where_transformers_sdpa_leaves_it_out() -> None:
    sequences = some_sequences()
    wanted = separate_features(as_network(small_model("gemma2", "eager"), lora=False), sequences, [LAYERS])[0]
    model = small_model("gemma2", "sdpa")
    before = separate_features(as_network(model, lora=False), sequences, [LAYERS])[0]
    install_packed_attention(model)
    after = separate_features(as_network(model, lora=False), sequences, [LAYERS])[0]
    assert largest_gap(before, wanted) > 1e-3
    assert largest_gap(after, wanted) < 1e-5
    ids = torch.tensor([sequences[0].ids, sequences[0].ids[::-1]])
    mask = torch.ones_like(ids)
    mask[1, -4:] = 0
    eager = small_model("gemma2", "eager")
    assert largest_gap(model(ids, attention_mask=mask).logits[0], eager(ids, attention_mask=mask).logits[0]) < 1e-5
    assert largest_gap(model(ids, attention_mask=mask).logits[1, :-4], eager(ids, attention_mask=mask).logits[1, :-4]) < 1e-5
    generated = [m.generate(ids, max_new_tokens=6, do_sample=False) for m in (model, eager)]
    assert torch.equal(*generated)
