"""ZeRO-3 engines on two real ranks against plain Hugging Face models in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ebft_ds.collectives import Collectives
from ebft_ds.engine.network import FeatureWork, LogProbWork, decoder_layers
from ebft_ds.packing.padded import pad_rows
from ebft_ds.sync.source import full_numel
from tests.distributed.engines import make_config, make_engines
from tests.distributed.ranks import run_ranks
from tests.distributed.small import small_model

ROWS = [[5, 9, 14, 22, 7, 31], [8, 3, 44, 12], [6, 6, 19, 2, 90, 41, 17, 33]]


def log_prob_work(rows: list[list[int]], **options: Any) -> LogProbWork:
    """Every token of every row but its first."""
    padded = pad_rows(rows)
    width = padded.input_ids.shape[1]
    positions = torch.tensor([b * width + t for b, row in enumerate(rows) for t in range(len(row) - 1)])
    targets = padded.input_ids.flatten()[positions + 1]
    return LogProbWork(padded, positions, targets, torch.full(targets.shape, 1 / 0.7), **options)


def plain(model: Path, rows: list[list[int]]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """(hidden states by layer, log-probs at temperature 0.7) of a plain model, one sequence at a time."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    hidden: list[list[torch.Tensor]] = []
    log_probs = []
    with torch.no_grad():
        for row in rows:
            output = network(torch.tensor([row]), output_hidden_states=True)
            hidden.append(list(output.hidden_states))
            scaled = torch.log_softmax(output.logits[0, :-1] / 0.7, dim=-1)
            log_probs.append(scaled.gather(1, torch.tensor(row[1:])[:, None])[:, 0])
    return [torch.cat([h[layer][0] for h in hidden]) for layer in range(len(hidden[0]))], torch.cat(log_probs)


def feature_work(layers: list[int]) -> FeatureWork:
    """Every real token."""
    rows = pad_rows(ROWS)
    return FeatureWork(rows, layers, rows.flat_positions())


def adapter_run(collectives: Collectives, model: Path) -> dict[str, Any]:
    config = make_config(model, use_peft=True, lora_r=4, ebft_feature_layers=[1, 3, 4])
    engines = make_engines(config, collectives.world_size)
    actor = engines.actor
    frozen = {n: p for n, p in actor.network.named_parameters() if not p.requires_grad}
    shards_before = {n: p.ds_tensor.clone() for n, p in frozen.items()}
    answer: dict[str, Any] = {
        "partitioned": all(p.numel() == 0 and full_numel(p) > 0 for p in actor.network.parameters()),
        "log_probs": actor.log_probs(log_prob_work(ROWS))[0].detach(),
    }
    features, off = [], []
    for step in range(3):
        features.append(actor.features(feature_work([1, 3, 4])))
        off.append(actor.frozen_log_probs(log_prob_work(ROWS, use_adapters=False))[0])
        answer["partitioned"] &= all(p.numel() == 0 for p in frozen.values())
        log_probs, _ = actor.log_probs(log_prob_work(ROWS))
        actor.backward(-log_probs.sum() / 30, last=True)
        actor.step(step)
    answer["trained"] = actor.log_probs(log_prob_work(ROWS))[0].detach()
    answer["features"] = features[0]
    answer["features_constant"] = all(torch.equal(a, b) for f in features[1:] for a, b in zip(features[0], f, strict=True))
    answer["off_constant"] = all(torch.equal(off[0], later) for later in off[1:])
    answer["off"] = off[0]
    answer["frozen_unchanged"] = all(torch.equal(shards_before[n], p.ds_tensor) for n, p in frozen.items())
    answer["mode_restored"] = actor.network.training
    answer["layers_restored"] = len(decoder_layers(actor.network.body)[1])
    return answer


@pytest.fixture(scope="module")
def adapter_answers(tiny_model: Path) -> list[dict[str, Any]]:
    return run_ranks(2, adapter_run, tiny_model)


def test_sharded_actor_gives_the_plain_models_log_probs(adapter_answers: list[dict[str, Any]], tiny_model: Path) -> None:
    _, expected = plain(tiny_model, ROWS)
    for answer in adapter_answers:
        torch.testing.assert_close(answer["log_probs"], expected, rtol=1e-5, atol=1e-5)


def test_adapters_off_is_the_base_model_bit_for_bit_between_steps(adapter_answers: list[dict[str, Any]], tiny_model: Path) -> None:
    _, expected = plain(tiny_model, ROWS)
    for answer in adapter_answers:
        assert answer["off_constant"]
        assert answer["features_constant"]
        torch.testing.assert_close(answer["off"], expected, rtol=1e-5, atol=1e-5)
        assert (answer["trained"] - answer["off"]).abs().max() > 0.1, "training must have moved the adapter"


def test_features_are_the_plain_models_hidden_states(adapter_answers: list[dict[str, Any]], tiny_model: Path) -> None:
    hidden, _ = plain(tiny_model, ROWS)
    for answer in adapter_answers:
        for layer, states in zip([1, 3, 4], answer["features"], strict=True):
            torch.testing.assert_close(states, hidden[layer], rtol=1e-5, atol=1e-5)


def test_weights_stay_partitioned_and_frozen_ones_never_change(adapter_answers: list[dict[str, Any]]) -> None:
    for answer in adapter_answers:
        assert answer["partitioned"]
        assert answer["frozen_unchanged"]
        assert answer["mode_restored"]
        assert answer["layers_restored"] == 4


def full_run(collectives: Collectives, model: Path) -> dict[str, Any]:
    engines = make_engines(make_config(model, ebft_feature_layers=[1, 2]), collectives.world_size)
    copy = engines.frozen_copy
    assert copy is not None
    before = copy.features(feature_work([1, 2]))
    log_probs, _ = engines.actor.log_probs(log_prob_work(ROWS))
    engines.actor.backward(-log_probs.sum() / 30, last=True)
    engines.actor.step(0)
    after = copy.features(feature_work([1, 2]))
    return {
        "features": before,
        "unchanged": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        "copy_layers": copy.network.num_layers,
        "copy_parameters": sorted(name for name, _ in copy.network.named_parameters()),
        "moved": float((engines.actor.log_probs(log_prob_work(ROWS))[0].detach() - log_probs.detach()).abs().max()),
    }


def test_frozen_copy_holds_only_the_layers_it_needs_and_never_moves(tiny_model: Path) -> None:
    hidden, _ = plain(tiny_model, ROWS)
    for answer in run_ranks(2, full_run, tiny_model):
        assert answer["copy_layers"] == 2
        assert not any("lm_head" in name or "layers.2" in name for name in answer["copy_parameters"])
        assert answer["unchanged"]
        assert answer["moved"] > 1e-3
        for layer, states in zip([1, 2], answer["features"], strict=True):
            torch.testing.assert_close(states, hidden[layer], rtol=1e-5, atol=1e-5)


def bf16_rotary(collectives: Collectives, model: Path) -> list[torch.dtype]:
    engines = make_engines(make_config(model, dtype="bfloat16", rollout_dtype="float32"), collectives.world_size)
    return [
        buffer.dtype
        for engine in (engines.actor, engines.frozen_copy)
        if engine is not None
        for name, buffer in engine.network.named_buffers()
        if name.endswith("inv_freq")
    ]


def test_rotary_tables_stay_float32_in_a_bf16_model(tiny_model: Path) -> None:
    dtypes = run_ranks(1, bf16_rotary, tiny_model)[0]
    assert dtypes
    assert set(dtypes) == {torch.float32}


def other_feature_model_run(collectives: Collectives, model: Path, other: Path) -> dict[str, Any]:
    config = make_config(model, use_peft=True, lora_r=4, feature_model_name_or_path=str(other), ebft_feature_layers=[0.5, 1.0])
    engines = make_engines(config, collectives.world_size, num_layers=4)
    assert engines.frozen_copy is not None
    return {"layers": engines.layer_indices, "features": engines.frozen_copy.features(feature_work(engines.layer_indices))}


def test_another_feature_model_is_cut_by_its_own_depth(tiny_model: Path, tmp_path: Path) -> None:
    other = small_model(tmp_path / "other")
    (answer,) = run_ranks(1, other_feature_model_run, tiny_model, other)
    assert answer["layers"] == [1, 2]
    hidden, _ = plain(other, ROWS)
    for layer, states in zip([1, 2], answer["features"], strict=True):
        torch.testing.assert_close(states, hidden[layer], rtol=1e-5, atol=1e-5)
