"""Gradients of PolicyStep on one, two and three real ranks, against a plain torch computation in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from peft import get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from ebft_ds.collectives import Collectives
from ebft_ds.config import AsyncEBFTConfig
from ebft_ds.engine.build import ZeroEngine
from ebft_ds.errors import EbftError
from ebft_ds.monitor.metrics import MetricsAccumulator
from ebft_ds.policy import LossDenominators, importance_weights, per_token_kl, policy_loss
from ebft_ds.types import Prompt, Rollout, RolloutGroup, TokenSpan
from tests.distributed.engines import make_config, make_engines, make_policy, random_adapter
from tests.distributed.ranks import RankAnswers, run_ranks
from tests.distributed.small import LAYERS, small_model, token_rows

TEMPERATURE = 0.8
CE_COEF = 0.3
LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {"loss_type": "dapo"},
    "grpo": {"loss_type": "grpo"},
    "reinforce": {"loss_type": "reinforce"},
    "gspo": {"loss_type": "gspo"},
    "engine": {"loss_type": "dapo", "old_logprobs": "engine"},
    "kl": {"loss_type": "grpo", "beta": 0.5},
}
BATCHES = {"dapo": 1, "gspo": 8}
"""Beside 3, which everything runs with."""
ADVANTAGES = torch.tensor([[1.0, -0.5, 0.7], [0.0, 0.4, -1.2], [0.3, 0.0, 0.9]])


def make_groups(*, finish: str = "stop") -> list[RolloutGroup]:
    """Three prompts with three completions each: one empty, one with an inserted, untrained stretch."""
    groups = []
    for g, lengths in enumerate([[4, 5, 3, 6, 2], [2, 3, 7, 0, 5], [6, 4, 2, 4, 8]]):
        prompt, reference, *completions = token_rows(20 + g, lengths)
        rollouts = []
        for ids in completions:
            spans = [TokenSpan(0, len(ids), 0)] if ids else []
            if len(ids) == 8:
                spans = [TokenSpan(0, 3, 0), TokenSpan(3, 6, 0, sampled=False), TokenSpan(6, 8, 0)]
            rollouts.append(Rollout(ids, [-4.0 - 0.2 * (i % 3) for i in range(len(ids))], spans, finish))  # type: ignore[arg-type]
        groups.append(RolloutGroup(Prompt(g, g, 0, prompt, reference), rollouts))
    return groups


def configuration(model: Path, *, lora: bool, batch: int = 3, checkpointing: bool | None = None) -> AsyncEBFTConfig:
    """`checkpointing`: None: off; else use_reentrant. The warm-up makes step 0 a step of learning rate 0."""
    fields: dict[str, Any] = {"use_peft": True, "lora_r": 4, "lora_alpha": 2.0} if lora else {"beta": 0.5}
    if checkpointing is not None:
        fields |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": checkpointing}}
    return make_config(
        model, per_device_train_batch_size=batch, num_generations=1, temperature=TEMPERATURE, warmup_steps=1, max_grad_norm=0.0, **fields
    )


class Job:
    """One engine, and PolicyStep's gradients under different settings."""

    def __init__(self, collectives: Collectives, config: AsyncEBFTConfig) -> None:
        torch.manual_seed(0)
        self.collectives, self.config = collectives, config
        adapter = random_adapter(config) if config.peft.use_peft else None
        self.engines = make_engines(config, collectives.world_size, LAYERS, adapter)

    @property
    def actor(self) -> ZeroEngine:
        return self.engines.actor

    def state(self) -> dict[str, Tensor]:
        """The trained parameters, whole."""
        found = {}
        for name, parameter in self.actor.network.named_parameters():
            if parameter.requires_grad:
                with deepspeed.zero.GatheredParameters([parameter]):
                    found[name] = parameter.detach().clone()
        return found

    def gradient(
        self, groups: list[RolloutGroup], advantages: Tensor, *, batch: int = 3, ce_coef: float = CE_COEF, **loss: Any
    ) -> dict[str, Tensor | float]:
        """By parameter name, and the step's loss under `loss`. The step taken afterwards has learning rate 0."""
        run = self.config.run.model_copy(update={"per_device_train_batch_size": batch})
        config = self.config.model_copy(update={"run": run})
        metrics = MetricsAccumulator()
        policy = make_policy(config, self.engines, self.collectives, **({"beta": 0.0} | loss))
        policy.on_groups(0, groups, advantages, rl_coef=1.0, ce_coef=ce_coef, metrics=metrics)
        grads: dict[str, Any] = {
            name: deepspeed.utils.safe_get_full_grad(parameter).clone()
            for name, parameter in self.actor.network.named_parameters()
            if parameter.requires_grad
        }
        self.actor.step(0)
        return grads | {"loss": self.collectives.sum_floats([metrics.take()["loss"].value])[0]}

    def failure_of_one_rank(self) -> str:
        """The last rank's loss is NaN; what each rank raises. Leaves the engine unusable."""
        if self.collectives.rank == self.collectives.world_size - 1:
            working = self.actor.log_probs
            self.actor.log_probs = lambda work: tuple(x * torch.nan for x in working(work))  # type: ignore[method-assign, assignment]
        policy = make_policy(self.config, self.engines, self.collectives)
        try:
            policy.on_groups(7, make_groups(), ADVANTAGES, rl_coef=1.0, ce_coef=0.0, metrics=MetricsAccumulator())
        except EbftError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"


def run(collectives: Collectives, model: Path, lora: bool) -> dict[str, Any]:
    job = Job(collectives, configuration(model, lora=lora))
    groups = make_groups()
    answer: dict[str, Any] = {"state": job.state()}
    for label in ("dapo", "grpo", "reinforce", "gspo", "engine"):
        answer[label] = job.gradient(groups, ADVANTAGES, **LOSSES[label])
    for label, batch in BATCHES.items():
        answer[f"{label} {batch}"] = job.gradient(groups, ADVANTAGES, batch=batch, **LOSSES[label])
    answer["not skipped"] = job.gradient(groups, ADVANTAGES, skip_zero_advantage_batches=False, **LOSSES["dapo"])
    truncated = make_groups(finish="length")
    answer["truncated"] = job.gradient(truncated, ADVANTAGES, ce_coef=0.0, mask_truncated_completions=True)
    answer["all skipped"] = job.gradient(groups, torch.zeros(3, 3), ce_coef=0.0)
    answer["after them"] = job.gradient(groups, ADVANTAGES, **LOSSES["dapo"])
    if not lora:  # the trained model must differ from its frozen copy before a KL means anything
        policy = make_policy(job.config, job.engines, collectives, beta=0.0)
        policy.on_groups(9, groups, ADVANTAGES, rl_coef=1.0, ce_coef=0.0, metrics=MetricsAccumulator())
        job.actor.step(9)
        answer["kl state"] = job.state()
    answer["kl"] = job.gradient(groups, ADVANTAGES, **LOSSES["kl"])
    if collectives.world_size == 2:
        for reentrant in (False, True):
            other = Job(collectives, configuration(model, lora=lora, checkpointing=reentrant))
            answer[f"checkpointing {reentrant}"] = other.gradient(groups, ADVANTAGES, **LOSSES["dapo"])
    answer["failure"] = job.failure_of_one_rank()
    return answer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def answers(model: Path) -> RankAnswers:
    """By (lora, world size)."""
    return RankAnswers(lambda key: run_ranks(key[1], run, model, key[0]))


def plain(model: Path, lora: bool, state: dict[str, Tensor], *, ce_coef: float = CE_COEF, **loss: Any) -> dict[str, Tensor | float]:
    """The same step on an ordinary model: one forward per sequence, the whole batch in one policy_loss."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if lora:
        network = get_peft_model(network, random_adapter(configuration(model, lora=True)))
    trained = {f"model.{name}": p for name, p in network.named_parameters() if p.requires_grad}
    assert set(trained) == set(state)
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(state[name])
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rollouts = [(g, r, float(ADVANTAGES[i, j])) for i, g in enumerate(make_groups()) for j, r in enumerate(g.rollouts) if r.token_ids]
    width = max(len(r.token_ids) for _, r, _ in rollouts)

    def table(source: Any) -> Tensor:
        return torch.stack([padded(log_probs(source, g.prompt.token_ids, r.token_ids, TEMPERATURE), width) for g, r, _ in rollouts])

    log_p = table(network)
    sampling = torch.stack([padded(torch.tensor(r.logprobs), width) for _, r, _ in rollouts])
    mask = torch.stack([padded(torch.tensor(r.sampled_mask), width) for _, r, _ in rollouts])
    engine = loss.get("old_logprobs") == "engine"
    beta = loss.get("beta", 0.0)
    with torch.no_grad():
        reference = table(base)
    total = policy_loss(
        log_p,
        sampling if engine else log_p.detach(),
        torch.tensor([advantage for *_, advantage in rollouts]),
        mask,
        loss_type=loss["loss_type"],
        denominators=LossDenominators.count(mask, 32),
        weights=None if engine else importance_weights(log_p.detach(), sampling, mask),
        per_token_penalty=beta * per_token_kl(log_p, reference, "k3", mask=mask) if beta else None,
    ).loss
    spans = [log_probs(network, g.prompt.token_ids, g.prompt.reference_ids, 1.0) for g in make_groups()]
    total = total - ce_coef * torch.cat(spans).mean()
    total.backward()
    return {name: p.grad for name, p in trained.items()} | {"loss": float(total.detach())}


def log_probs(network: Any, prompt: list[int], completion: list[int], temperature: float) -> Tensor:
    logits = network(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def padded(values: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, width - len(values)))


def flat(gradient: dict[str, Any]) -> Tensor:
    return torch.cat([gradient[name].double().flatten() for name in sorted(gradient) if name != "loss"])


def assert_same(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert flat(wanted).norm() > 1e-3
    assert (flat(found) - flat(wanted)).norm() <= tolerance * flat(wanted).norm()
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("label", ["dapo", "grpo", "reinforce", "gspo", "engine", "kl"])
def test_gradient_is_that_of_a_plain_model_for_every_world_size(answers: RankAnswers, model: Path, label: str, lora: bool) -> None:
    for world_size in (1, 2, 3):
        ranks = answers[lora, world_size]
        state = ranks[0].get("kl state", ranks[0]["state"]) if label == "kl" else ranks[0]["state"]
        wanted = plain(model, lora, state, **LOSSES[label])
        for answer in ranks:
            assert_same(answer[label], wanted)


@pytest.mark.parametrize("lora", [True, False])
def test_micro_batch_size_does_not_matter(answers: RankAnswers, lora: bool) -> None:
    for world_size in (1, 2, 3):
        answer = answers[lora, world_size][0]
        for label, batch in BATCHES.items():
            assert_same(answer[f"{label} {batch}"], answers[lora, 1][0][label])


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_does_not_matter(answers: RankAnswers, lora: bool, reentrant: bool) -> None:
    assert_same(answers[lora, 2][0][f"checkpointing {reentrant}"], answers[lora, 2][0]["dapo"])


@pytest.mark.parametrize("lora", [True, False])
def test_skipping_zero_advantages_changes_nothing(answers: RankAnswers, lora: bool) -> None:
    for world_size in (1, 2, 3):
        assert_same(answers[lora, world_size][0]["not skipped"], answers[lora, world_size][0]["dapo"])


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("label", ["truncated", "all skipped"])
def test_a_step_without_trained_tokens_has_a_zero_gradient_and_harms_nothing(answers: RankAnswers, lora: bool, label: str) -> None:
    for world_size in (1, 2, 3):
        answer = answers[lora, world_size][0]
        assert flat(answer[label]).eq(0).all()
        assert answer[label]["loss"] == 0
        assert_same(answer["after them"], answer["dapo"])


@pytest.mark.parametrize("lora", [True, False])
def test_a_nan_loss_on_one_rank_stops_all(answers: RankAnswers, lora: bool) -> None:
    for world_size in (1, 2, 3):
        *peers, broken = (answer["failure"] for answer in answers[lora, world_size])
        assert broken.startswith(f"NumericsError: step 7, rank {world_size - 1}, micro-batch 0: the loss is nan")
        for message in peers:
            assert message.startswith(f"PeerError: step 7: the loss of rank {world_size - 1} is not finite")
