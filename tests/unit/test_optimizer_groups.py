"""Parameter groups: complete, disjoint, named, with the right rates; the learning-rate schedule as a function of the step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ebft_ds.config.sections import LossSection, OptimSection
from ebft_ds.engine.optimizer import build_optimizer, parameter_groups
from ebft_ds.engine.schedule import learning_rate_factor
from ebft_ds.errors import ConfigError

NAMES = [
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.q_proj.bias",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.self_attn.q_proj.lora_A.default.weight",
    "model.layers.0.self_attn.q_proj.lora_B.default.weight",
    "model.layers.0.self_attn.q_proj.lora_magnitude_vector.default.weight",
    "model.norm.weight",
    "lm_head.weight",
]


def named(names: list[str] = NAMES) -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(torch.zeros(1))) for name in names]


def group_of(groups: list[dict[str, object]], parameters: list[tuple[str, nn.Parameter]], name: str) -> dict[str, object]:
    wanted = dict(parameters)[name]
    return next(group for group in groups if any(p is wanted for p in group["params"]))  # type: ignore[attr-defined]


@given(st.lists(st.sampled_from(NAMES), min_size=1, unique=True), st.booleans(), st.booleans())
def test_every_trainable_parameter_is_in_exactly_one_group(names: list[str], plus: bool, embedding: bool) -> None:
    parameters = named(names)
    frozen = ("frozen.weight", nn.Parameter(torch.zeros(1), requires_grad=False))
    optim = OptimSection(weight_decay=0.1, loraplus_lr_ratio=8.0 if plus else None, embedding_lr=1e-7 if embedding else None)
    groups = parameter_groups([*parameters, frozen], optim)
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for _, p in parameters)
    assert len({group["name"] for group in groups}) == len(groups)


def test_biases_norms_and_magnitudes_do_not_decay() -> None:
    parameters = named()
    groups = parameter_groups(parameters, OptimSection(weight_decay=0.1))
    for name, _ in parameters:
        exempt = any(part in name for part in ("bias", "norm", "magnitude"))
        assert group_of(groups, parameters, name)["weight_decay"] == (0.0 if exempt else 0.1), name


def test_lora_plus_and_embedding_rates() -> None:
    parameters = named()
    groups = parameter_groups(parameters, OptimSection(learning_rate=1e-4, loraplus_lr_ratio=16.0, embedding_lr_scale=0.5))
    assert group_of(groups, parameters, NAMES[5])["lr"] == pytest.approx(1.6e-3)
    assert group_of(groups, parameters, NAMES[4])["lr"] == pytest.approx(1e-4)
    assert group_of(groups, parameters, NAMES[0])["lr"] == pytest.approx(5e-5)
    assert group_of(groups, parameters, NAMES[8])["lr"] == pytest.approx(5e-5)


def test_named_groups_win_in_order_and_must_match_something() -> None:
    parameters = named()
    spec = [
        {"name": "first", "modules": r"layers\.0\.self_attn", "lr": 1e-5},
        {"name": "second", "modules": ["layers", "norm"], "lr": 2e-5},
    ]
    groups = parameter_groups(parameters, OptimSection(lr_groups=spec))
    assert group_of(groups, parameters, NAMES[1])["lr"] == 1e-5
    assert group_of(groups, parameters, NAMES[7])["lr"] == 2e-5
    with pytest.raises(ConfigError, match=r"nowhere matches no trainable parameter.*embed_tokens"):
        parameter_groups(parameters, OptimSection(lr_groups=[{"name": "nowhere", "modules": "experts", "lr": 1e-5}]))
    with pytest.raises(ConfigError, match="not a regular expression"):
        parameter_groups(parameters, OptimSection(lr_groups=[{"name": "bad", "modules": "(", "lr": 1e-5}]))


def test_optimizer_takes_the_groups_and_betas() -> None:
    optimizer = build_optimizer(parameter_groups(named(), OptimSection()), OptimSection(adam_beta2=0.95), offloaded=False)
    assert all(group["betas"] == (0.9, 0.95) for group in optimizer.param_groups)


def test_warm_start_is_flat_and_the_schedule_follows_it() -> None:
    optim = OptimSection(learning_rate=1e-4, lr_scheduler_type="linear", warmup_steps=2)
    factor = learning_rate_factor(optim, LossSection(warm_start_steps=5, warm_start_learning_rate=3e-4), total_steps=15)
    assert [factor(step) for step in range(5)] == [pytest.approx(3.0)] * 5
    assert factor(5) == 0.0
    assert factor(7) == pytest.approx(1.0)
    assert factor(11) == pytest.approx(0.5)
    assert factor(15) == 0.0


@pytest.mark.parametrize("name", ["constant", "constant_with_warmup", "linear", "cosine", "polynomial", "inverse_sqrt"])
def test_every_schedule_starts_to_warm_up_and_stays_within_bounds(name: str) -> None:
    optim = OptimSection(lr_scheduler_type=name, warmup_steps=3)
    values = [learning_rate_factor(optim, LossSection(), 20)(step) for step in range(21)]
    assert all(0.0 <= value <= 1.0 for value in values)
    assert values[3] == pytest.approx(1.0)
    assert values[0] == (1.0 if name == "constant" else 0.0)


def test_cosine_floor_and_wrong_arguments() -> None:
    optim = OptimSection(lr_scheduler_type="cosine", cosine_min_lr_ratio=0.1)
    assert learning_rate_factor(optim, LossSection(), 10)(10) == pytest.approx(0.1)
    with pytest.raises(ConfigError, match="lr_scheduler_kwargs"):
        learning_rate_factor(OptimSection(lr_scheduler_type="cosine", lr_scheduler_kwargs={"wrong": 1}), LossSection(), 10)
