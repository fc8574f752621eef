"""Mixture-of-experts models under ZeRO-3: ranks whose tokens choose different experts, pushes, exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from ebft_ds.checkpoint.export import export_final
from ebft_ds.collectives import Collectives
from ebft_ds.config import AsyncEBFTConfig
from ebft_ds.engine.build import ZeroEngine
from ebft_ds.engine.leaf_modules import mark_leaf_modules
from ebft_ds.rollout.manifest import TensorSpec, WeightManifest
from ebft_ds.rollout.spec import RolloutProcessSpec
from ebft_ds.rollout.transformers_engine import TransformersEngine
from ebft_ds.sync.source import MergedWeightSource
from tests.distributed.engines import PARTITION_ALL, make_config, make_engines, random_adapter
from tests.distributed.moe_models import ARCHITECTURES, HIGH, moe_model
from tests.distributed.ranks import RankAnswers, run_ranks
from tests.distributed.small import LAYERS
from tests.distributed.test_engine import log_prob_work

ROWS = [[[21, 35, 40, 77, 103, 60], [90, 22, 31, 58]], [[HIGH + t for t in (9, 40, 71, 3, 88)]]]
"""By rank."""
FRESH = [30, 45, HIGH + 5, 99, HIGH + 31, HIGH + 60, 41, 77]
MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"use_peft": True, "lora_r": 4, "lora_alpha": 4.0},
    "experts": {"use_peft": True, "lora_r": 4, "lora_alpha": 4.0, "lora_target_modules": ["w1", "w2", "w3"]},
}
"""The last one leaves the first block's attention frozen: nothing below its experts needs a gradient."""
CASES = [("qwen3_moe", "lora"), ("qwen3_moe", "full"), ("mixtral", "lora"), ("mixtral", "full"), ("mixtral", "experts")]


def configuration(model: Path, mode: str) -> AsyncEBFTConfig:
    return make_config(model, **MODES[mode])


def chosen_experts(network: nn.Module, rows: list[list[int]], run: Any) -> list[set[int]]:
    """By block, the experts that `run(rows)` sends tokens to."""
    found: list[set[int]] = []

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        found.append(set(output[2].flatten().tolist()))

    routers = [m.gate for m in network.modules() if "experts" in dict(m.named_children())]
    handles = [router.register_forward_hook(note) for router in routers]
    run(rows)
    for handle in handles:
        handle.remove()
    return found


def moe_run(collectives: Collectives, model: Path, mode: str, export: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    config = configuration(model, mode)
    adapter = random_adapter(config) if config.peft.use_peft else None
    actor = make_engines(config, collectives.world_size, LAYERS, adapter).actor
    rows = ROWS[collectives.rank]
    answer: dict[str, Any] = {"experts": chosen_experts(actor.network, rows, lambda r: actor.frozen_log_probs(log_prob_work(r)))}
    trained = {name: p for name, p in actor.network.named_parameters() if p.requires_grad}
    with deepspeed.zero.GatheredParameters(list(trained.values())):
        answer["state"] = {name.removeprefix("model."): p.detach().clone() for name, p in trained.items()}
    log_probs, _ = actor.log_probs(log_prob_work(rows))
    actor.backward(log_probs.sum(), last=True)
    answer["gradient"] = {name.removeprefix("model."): deepspeed.utils.safe_get_full_grad(p).clone() for name, p in trained.items()}
    actor.step(0)
    answer["fresh"] = actor.frozen_log_probs(log_prob_work([FRESH]))[0]
    source = MergedWeightSource(actor.network, torch.float32, 20_000, collectives.is_main, whole_modules=True)
    answer["push"] = {name: tensor for bucket in source.buckets() for name, tensor in bucket}
    answer["announced"] = {piece.name: piece.shape for piece in source.pieces()}
    export_final(
        actor.network,
        AutoTokenizer.from_pretrained(model),
        export,
        collectives,
        dtype=torch.float32,
        merged=True,
        generation_config=None,
    )
    return answer


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {architecture: moe_model(tmp_path_factory.mktemp(architecture), architecture) for architecture in ARCHITECTURES}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def answers(models: dict[str, Path], exports: Path) -> RankAnswers:
    return RankAnswers(lambda case: run_ranks(2, moe_run, models[case[0]], case[1], exports / "-".join(case)))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_ranks_that_choose_different_experts_give_one_process_gradient(
    answers: RankAnswers, models: dict[str, Path], case: tuple[str, str]
) -> None:
    main, peer = answers[case]
    assert len(main["experts"]) == LAYERS
    assert all(not (one & other) for one, other in zip(main["experts"], peer["experts"], strict=True))
    network: Any = AutoModelForCausalLM.from_pretrained(models[case[0]], dtype=torch.float32)
    config = configuration(models[case[0]], case[1])
    if config.peft.use_peft:
        network = get_peft_model(network, random_adapter(config))
    parameters = dict(network.named_parameters())
    assert set(main["state"]) == {name for name, p in parameters.items() if p.requires_grad}
    assert any(".experts." in name for name in main["state"])
    with torch.no_grad():
        for name, value in main["state"].items():
            parameters[name].copy_(value)
    for row in ROWS[0] + ROWS[1]:
        logits = network(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1]
        torch.log_softmax(logits / 0.7, dim=-1).gather(1, torch.tensor(row[1:])[:, None]).sum().backward()
    for name, gradient in main["gradient"].items():
        wanted = parameters[name].grad
        assert wanted.abs().max() > 0, name
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def engine_for(model: Path) -> TransformersEngine:
    engine = TransformersEngine(RolloutProcessSpec(model_name_or_path=str(model), log_path="unused"))
    engine.start()
    return engine


def push(engine: TransformersEngine, version: int, tensors: dict[str, Tensor], *, complete: bool) -> None:
    specs = [TensorSpec(name, "float32", list(tensor.shape)) for name, tensor in tensors.items()]
    engine.begin_update(WeightManifest(version, specs, complete))
    for pair in tensors.items():
        engine.receive([pair])
    engine.finish_update(version)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_embedded_engine_scores_as_the_trainer_after_a_push(
    answers: RankAnswers, models: dict[str, Path], case: tuple[str, str]
) -> None:
    main, peer = answers[case]
    engine = engine_for(models[case[0]])
    before = torch.tensor(engine.score(FRESH, 0.7))
    push(engine, 1, main["push"], complete=False)
    torch.testing.assert_close(torch.tensor(engine.score(FRESH, 0.7)), main["fresh"], rtol=1e-4, atol=1e-4)
    assert (before - main["fresh"]).abs().max() > 1e-2
    assert main["announced"] == peer["announced"] == {name: list(tensor.shape) for name, tensor in main["push"].items()}
    assert peer["push"] == {}


@torch.no_grad()
def score(network: Any, row: list[int]) -> Tensor:
    logits = network(input_ids=torch.tensor([row])).logits[0, :-1]
    return torch.log_softmax(logits / 0.7, dim=-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_an_export_loads_as_the_trained_model_under_the_checkpoints_names(
    answers: RankAnswers, models: dict[str, Path], exports: Path, case: tuple[str, str]
) -> None:
    main = answers[case][0]
    folder = exports / "-".join(case)
    assert set(load_file(folder / "model.safetensors")) == set(load_file(models[case[0]] / "model.safetensors"))
    network, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch.testing.assert_close(score(network, FRESH), main["fresh"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", [case for case in CASES if case[1] != "full"], ids="-".join)
def test_the_exported_adapter_over_the_base_model_is_the_trained_model(
    answers: RankAnswers, models: dict[str, Path], exports: Path, case: tuple[str, str]
) -> None:
    main = answers[case][0]
    base = AutoModelForCausalLM.from_pretrained(models[case[0]], dtype=torch.float32)
    network = PeftModel.from_pretrained(base, exports / "-".join(case) / "adapter")
    torch.testing.assert_close(score(network, FRESH), main["fresh"], rtol=1e-4, atol=1e-4)


def test_a_push_that_lacks_an_expert_is_refused_by_the_embedded_engine(models: dict[str, Path]) -> None:
    engine = engine_for(models["mixtral"])
    specs = [spec for spec in engine.expected_weights() if ".experts." in spec.name and "layers.0" in spec.name]
    with pytest.raises(Exception, match=r"leaves out .*layers\.0.*experts\.3\.w1"):
        engine.begin_update(WeightManifest(1, [spec for spec in specs if "experts.3.w1" not in spec.name], complete=False))
    engine.begin_update(WeightManifest(1, specs, complete=False))


class SeparateExperts(nn.Module):
    """Experts as modules of their own, as models with their own code have them; those without tokens are not run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, hidden: Tensor, chosen: list[int]) -> Tensor:
        return torch.stack([self.experts[i](hidden) for i in chosen]).sum(0)


class TwoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Linear(8, 8), SeparateExperts(8), SeparateExperts(8)

    def forward(self, hidden: Tensor, chosen: list[int]) -> Tensor:
        result: Tensor = self.second(torch.tanh(self.first(self.embed(hidden), chosen)), chosen)
        return result


CHOSEN = [[0, 1], [1]]
"""Experts by rank."""


def separate_experts_run(collectives: Collectives) -> dict[str, Tensor]:
    torch.manual_seed(0)
    network: Any = TwoBlocks()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, **PARTITION_ALL["zero_optimization"]}}
    engine = ZeroEngine(network, config, optimizer=torch.optim.AdamW(network.parameters(), lr=0.0))
    output = engine.deepspeed(torch.ones(1, 8), CHOSEN[collectives.rank])
    engine.backward(output.sum(), last=True)
    return {name: deepspeed.utils.safe_get_full_grad(p).clone() for name, p in network.named_parameters()}


def test_separate_experts_that_only_one_rank_uses_do_not_hang() -> None:
    torch.manual_seed(0)
    network = TwoBlocks()
    for chosen in CHOSEN:
        network(torch.ones(1, 8), chosen).sum().backward()
    for answer in run_ranks(2, separate_experts_run):
        for name, parameter in network.named_parameters():
            torch.testing.assert_close(answer[name], parameter.grad, rtol=1e-5, atol=1e-5)


def test_leaf_modules_are_the_outermost_expert_blocks(models: dict[str, Path]) -> None:
    config = configuration(models["mixtral"], "lora")
    network = get_peft_model(AutoModelForCausalLM.from_pretrained(models["mixtral"]), random_adapter(config))
    assert mark_leaf_modules(network) == [f"base_model.model.model.layers.{i}.mlp" for i in range(LAYERS)]
    assert mark_leaf_modules(AutoModelForCausalLM.from_pretrained(models["mixtral"]).model.embed_tokens) == []
