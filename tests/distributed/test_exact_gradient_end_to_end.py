"""The exact gradient through the real parts: scorer, advantages, policy step and ZeRO-3 backward, summed over every possible group.

Six tokens and completions of one token leave 6^n groups. Weighted by its probability, each contributes its gradient; METHOD section 1
says that the sum is the gradient of L_FM = || sum_v p_v phi_v - phi_y ||^2.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from ebft_ds.collectives import Collectives
from ebft_ds.features.scorer import EBFTScorer
from ebft_ds.monitor.metrics import MetricsAccumulator
from ebft_ds.policy import group_advantages
from tests.distributed.engines import make_config, make_engines, make_group, make_policy
from tests.distributed.ranks import run_ranks

VOCAB, LAYERS = 6, 2
PROMPT, REFERENCE = [2, 5, 0], [4, 1]
FEATURE_LAYERS = [1, 2]
CASES = [("ebft_rloo", 2), ("ebft_rloo", 3), ("reinforce", 2), ("rloo", 2), ("rloo", 3), ("group", 2)]


def plain_model(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def probabilities(network: Any) -> Tensor:
    return torch.softmax(network(torch.tensor([PROMPT])).logits[0, -1], dim=-1)


def run(collectives: Collectives, model: Path) -> dict[tuple[str, int], dict[str, Tensor]]:
    config = make_config(
        model,
        ebft_feature_layers=FEATURE_LAYERS,
        per_device_train_batch_size=256,
        num_generations=2,
        warmup_steps=1,
        max_grad_norm=0.0,
        loss_type="reinforce",
        vllm_importance_sampling_mode="none",
        max_staleness=0,
    )
    engines = make_engines(config, collectives.world_size, LAYERS)
    scorer = EBFTScorer(engines.layer_indices, "completion_mean", False, 1.0, 1.0, engines.feature_network, collectives=collectives)
    policy = make_policy(config, engines, collectives)
    chances = probabilities(plain_model(model)).detach()
    found = {}
    for estimator, n in CASES:
        tuples = torch.tensor(list(product(range(VOCAB), repeat=n)))
        groups = [make_group(i, PROMPT, [[v] for v in row], REFERENCE) for i, row in enumerate(tuples.tolist())]
        advantages = group_advantages(scorer.score(groups).rewards, estimator=estimator)
        # The loss is a mean over all completions, linear in the advantages: so a group's weight is its probability x their number.
        weights = chances[tuples].prod(dim=1) * len(groups)
        policy.on_groups(0, groups, weights[:, None] * advantages, rl_coef=1.0, ce_coef=0.0, metrics=MetricsAccumulator())
        parameters = engines.actor.network.named_parameters()
        found[estimator, n] = {name.removeprefix("model."): deepspeed.utils.safe_get_full_grad(p).clone() for name, p in parameters}
        engines.actor.step(0)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("six_tokens")
    torch.manual_seed(4)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=32, tie_word_embeddings=False, initializer_range=0.3, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def found(model: Path) -> dict[tuple[str, int], Tensor]:
    (answer,) = run_ranks(1, run, model)
    return {case: flat(gradients) for case, gradients in answer.items()}


@pytest.fixture(scope="module")
def exact(model: Path) -> Tensor:
    """Gradient of L_FM by autograd through the policy's probabilities; the features are those of the frozen base."""
    network = plain_model(model)

    def feature(completion: list[int]) -> Tensor:
        with torch.no_grad():
            states = network(torch.tensor([PROMPT + completion]), output_hidden_states=True).hidden_states
        states = torch.cat([states[k][0, len(PROMPT) :].mean(dim=0) for k in FEATURE_LAYERS])
        return states / states.norm()

    outcomes = torch.stack([feature([v]) for v in range(VOCAB)])
    (probabilities(network) @ outcomes - feature(REFERENCE)).square().sum().backward()
    return flat({name: p.grad for name, p in network.named_parameters()})


def flat(gradients: dict[str, Any]) -> Tensor:
    return torch.cat([gradients[name].double().flatten() for name in sorted(gradients)])


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize(("estimator", "n"), [("ebft_rloo", 2), ("ebft_rloo", 3), ("reinforce", 2)])
def test_expected_gradient_of_the_loss_is_that_of_feature_matching(
    found: dict[tuple[str, int], Tensor], exact: Tensor, estimator: str, n: int
) -> None:
    assert exact.norm() > 1e-3
    assert error(found[estimator, n], exact) < 1e-4


@pytest.mark.parametrize(("estimator", "n"), [("rloo", 2), ("rloo", 3), ("group", 2)])
def test_baselines_that_contain_the_sample_itself_bend_it(
    found: dict[tuple[str, int], Tensor], exact: Tensor, estimator: str, n: int
) -> None:
    assert error(found[estimator, n], exact) > 0.05
