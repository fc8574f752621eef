"""Gradients of PolicyStep on one, two and three real ranks and over every row layout, against a plain torch computation in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from peft import get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from ebft_ds.collectives import Collectives
from ebft_ds.config import AsyncEBFTConfig
from ebft_ds.engine.build import ZeroEngine
from ebft_ds.errors import EbftError
from ebft_ds.monitor.metrics import MetricsAccumulator, reduce_over_ranks
from ebft_ds.packing.attention.dense import DenseAttention
from ebft_ds.packing.attention.split import SplitAttention
from ebft_ds.packing.packer import RowPacker
from ebft_ds.policy import LossDenominators, importance_weights, per_token_kl, policy_loss
from ebft_ds.policy.batch import PolicyPacker
from ebft_ds.trainers.policy_step import PolicyStep
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
PACKERS = {
    "padded": PolicyPacker(RowPacker(), 3, None),
    "padded, one row": PolicyPacker(RowPacker(), 1, None),
    "padded, 8 rows": PolicyPacker(RowPacker(), 8, None),
    "padded, 30 tokens": PolicyPacker(RowPacker(), None, 30),
    "unshared": PolicyPacker(RowPacker("unshared", DenseAttention), None, 400),
    "unshared, 20 tokens": PolicyPacker(RowPacker("unshared", SplitAttention), None, 20),
    "shared": PolicyPacker(RowPacker("shared", SplitAttention), None, 400),
    "shared, 16 tokens": PolicyPacker(RowPacker("shared", SplitAttention), None, 16),
    "shared, 30 tokens, dense": PolicyPacker(RowPacker("shared", DenseAttention), None, 30),
}
"""The first one is the reference of the others. The longest sequence has 14 tokens."""
IN_EVERY_LAYOUT = {
    "dapo": {"loss_type": "dapo"},
    "kl without CE": {"loss_type": "gspo", "beta": 0.5, "ce_coef": 0.0},
}
CHECKPOINTED = ("padded", "shared", "shared, 30 tokens, dense", "unshared, 20 tokens")
REPEATED = ("padded", "shared, 16 tokens")
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


def configuration(model: Path, *, lora: bool, checkpointing: bool | None = None) -> AsyncEBFTConfig:
    """`checkpointing`: None: off; else use_reentrant. The warm-up makes step 0 a step of learning rate 0."""
    fields: dict[str, Any] = {"use_peft": True, "lora_r": 4, "lora_alpha": 2.0} if lora else {"beta": 0.5}
    if checkpointing is not None:
        fields |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": checkpointing}}
    return make_config(
        model, per_device_train_batch_size=3, num_generations=1, temperature=TEMPERATURE, warmup_steps=1, max_grad_norm=0.0, **fields
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

    def policy(self, layout: str = "padded", **loss: Any) -> PolicyStep:
        return make_policy(self.config, self.engines, self.collectives, PACKERS[layout], **({"beta": 0.0} | loss))

    def gradient(
        self, groups: list[RolloutGroup], advantages: Tensor, *, layout: str = "padded", ce_coef: float = CE_COEF, **loss: Any
    ) -> dict[str, Any]:
        """By parameter name, and the step's metrics. The step taken afterwards has learning rate 0."""
        metrics = MetricsAccumulator()
        self.policy(layout, **loss).on_groups(0, groups, advantages, rl_coef=1.0, ce_coef=ce_coef, metrics=metrics)
        return self.finish_step(metrics)

    def finish_step(self, metrics: MetricsAccumulator) -> dict[str, Any]:
        grads: dict[str, Any] = {
            name: deepspeed.utils.safe_get_full_grad(parameter).clone()
            for name, parameter in self.actor.network.named_parameters()
            if parameter.requires_grad
        }
        self.actor.step(0)
        return grads | {"metrics": reduce_over_ranks(metrics.take(), gather_objects)}

    def second_iteration(self, layout: str) -> dict[str, Any]:
        """A step that moves the weights, and the gradient of a further one on the same batch."""
        policy, before = self.policy(layout, old_logprobs="recompute"), self.state()
        batch = policy.on_groups(3, make_groups(), ADVANTAGES, rl_coef=1.0, ce_coef=CE_COEF, metrics=MetricsAccumulator())
        self.actor.step(3)
        metrics, after = MetricsAccumulator(), self.state()
        policy.again(4, batch, rl_coef=1.0, ce_coef=CE_COEF, metrics=metrics)
        return {"before": before, "after": after, "gradient": self.finish_step(metrics)}

    def failure_of_one_rank(self) -> str:
        """The last rank's loss is NaN; what each rank raises. Leaves the engine unusable."""
        if self.collectives.rank == self.collectives.world_size - 1:
            working = self.actor.log_probs
            self.actor.log_probs = lambda work: tuple(x * torch.nan for x in working(work))  # type: ignore[method-assign, assignment]
        policy = self.policy("shared")
        try:
            policy.on_groups(7, make_groups(), ADVANTAGES, rl_coef=1.0, ce_coef=0.0, metrics=MetricsAccumulator())
        except EbftError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"


def gather_objects(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def run(collectives: Collectives, model: Path, lora: bool) -> dict[str, Any]:
    job = Job(collectives, configuration(model, lora=lora))
    groups = make_groups()
    answer: dict[str, Any] = {"state": job.state()}
    for label in ("dapo", "grpo", "reinforce", "gspo", "engine"):
        answer[label] = job.gradient(groups, ADVANTAGES, **LOSSES[label])
    for layout in PACKERS:
        answer[f"dapo {layout}"] = job.gradient(groups, ADVANTAGES, layout=layout, **IN_EVERY_LAYOUT["dapo"])
    answer["not skipped"] = job.gradient(groups, ADVANTAGES, skip_zero_advantage_batches=False, **LOSSES["dapo"])
    truncated = make_groups(finish="length")
    for layout in ("padded", "shared, 16 tokens"):
        fields: dict[str, Any] = {"layout": layout, "ce_coef": 0.0}
        answer[f"truncated {layout}"] = job.gradient(truncated, ADVANTAGES, mask_truncated_completions=True, **fields)
        answer[f"all skipped {layout}"] = job.gradient(groups, torch.zeros(3, 3), **fields)
    answer["after them"] = job.gradient(groups, ADVANTAGES, **LOSSES["dapo"])
    if not lora:  # the trained model must differ from its frozen copy before a KL means anything
        policy = job.policy()
        policy.on_groups(9, groups, ADVANTAGES, rl_coef=1.0, ce_coef=0.0, metrics=MetricsAccumulator())
        job.actor.step(9)
        answer["kl state"] = job.state()
    answer["kl"] = job.gradient(groups, ADVANTAGES, **LOSSES["kl"])
    for layout in ("padded", "unshared", "shared", "shared, 16 tokens"):
        answer[f"kl without CE {layout}"] = job.gradient(groups, ADVANTAGES, layout=layout, **IN_EVERY_LAYOUT["kl without CE"])
    if collectives.world_size == 2:
        for reentrant in (False, True):
            other = Job(collectives, configuration(model, lora=lora, checkpointing=reentrant))
            for layout in CHECKPOINTED:
                answer[f"checkpointing {reentrant} {layout}"] = other.gradient(groups, ADVANTAGES, layout=layout, **LOSSES["dapo"])
    for layout in REPEATED:
        answer[f"again {layout}"] = job.second_iteration(layout)
    answer["failure"] = job.failure_of_one_rank()
    return answer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def answers(model: Path) -> RankAnswers:
    """By (lora, world size)."""
    return RankAnswers(lambda key: run_ranks(key[1], run, model, key[0]))


def plain(
    model: Path, lora: bool, state: dict[str, Tensor], *, old_state: dict[str, Tensor] | None = None, ce_coef: float = CE_COEF, **loss: Any
) -> dict[str, Any]:
    """The same step on an ordinary model: one forward per sequence, the whole batch in one policy_loss. `old_state`: weights at the
    start of the batch, where they are other ones."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if lora:
        network = get_peft_model(network, random_adapter(configuration(model, lora=True)))
    trained = {f"model.{name}": p for name, p in network.named_parameters() if p.requires_grad}
    assert set(trained) == set(state)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rollouts = [(g, r, float(ADVANTAGES[i, j])) for i, g in enumerate(make_groups()) for j, r in enumerate(g.rollouts) if r.token_ids]
    width = max(len(r.token_ids) for _, r, _ in rollouts)

    def table(source: Any) -> Tensor:
        return torch.stack([padded(log_probs(source, g.prompt.token_ids, r.token_ids, TEMPERATURE), width) for g, r, _ in rollouts])

    def load(values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(values[name])

    load(old_state or state)
    with torch.no_grad():
        old = table(network)
    load(state)
    log_p = table(network)
    sampling = torch.stack([padded(torch.tensor(r.logprobs), width) for _, r, _ in rollouts])
    mask = torch.stack([padded(torch.tensor(r.sampled_mask), width) for _, r, _ in rollouts])
    engine = loss.get("old_logprobs") == "engine"
    beta = loss.get("beta", 0.0)
    with torch.no_grad():
        reference = table(base)
    total = policy_loss(
        log_p,
        sampling if engine else old,
        torch.tensor([advantage for *_, advantage in rollouts]),
        mask,
        loss_type=loss["loss_type"],
        denominators=LossDenominators.count(mask, 32),
        weights=None if engine else importance_weights(old, sampling, mask),
        per_token_penalty=beta * per_token_kl(log_p, reference, "k3", mask=mask) if beta else None,
    ).loss
    spans = [log_probs(network, g.prompt.token_ids, g.prompt.reference_ids, 1.0) for g in make_groups()]
    total = total - ce_coef * torch.cat(spans).mean()
    total.backward()
    return {name: p.grad for name, p in trained.items()} | {"metrics": {"loss": float(total.detach())}}


def log_probs(network: Any, prompt: list[int], completion: list[int], temperature: float) -> Tensor:
    logits = network(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def padded(values: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, width - len(values)))


OF_LAYOUT = ("perf/", "work/computed")
"""Metrics that say how rows were laid out; every other one must not depend on it."""


def flat(gradient: dict[str, Any]) -> Tensor:
    return torch.cat([gradient[name].double().flatten() for name in sorted(gradient) if name != "metrics"])


def assert_same(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert flat(wanted).norm() > 1e-3
    assert (flat(found) - flat(wanted)).norm() <= tolerance * flat(wanted).norm()
    wanted_metrics = {key: value for key, value in wanted["metrics"].items() if not key.startswith(OF_LAYOUT)}
    found_metrics = {key: value for key, value in found["metrics"].items() if key in wanted_metrics}
    assert found_metrics == pytest.approx(wanted_metrics, rel=1e-5, abs=1e-6)


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
def test_row_layout_and_micro_batches_do_not_matter(answers: RankAnswers, lora: bool) -> None:
    for world_size in (1, 2, 3):
        answer = answers[lora, world_size][0]
        for loss in IN_EVERY_LAYOUT:
            for layout in (name.removeprefix(f"{loss} ") for name in answer if name.startswith(f"{loss} ")):
                assert_same(answer[f"{loss} {layout}"], answers[lora, 1][0][f"{loss} padded"])


@pytest.mark.parametrize("lora", [True, False])
def test_shared_rows_compute_a_prompt_once(answers: RankAnswers, lora: bool) -> None:
    metrics = {layout: answers[lora, 1][0][f"dapo {layout}"]["metrics"] for layout in PACKERS}
    lengths = [(4, 5 + 3 + 6 + 2, 4), (2, 3 + 5, 2), (6, 4 + 2 + 8, 3)]  # prompt, branches that train, how many of them
    assert {found["work/trained"] for found in metrics.values()} == {sum(prompt * n + rest for prompt, rest, n in lengths)}
    assert metrics["shared"]["work/computed"] == sum(prompt + rest for prompt, rest, _ in lengths)
    for layout, found in metrics.items():
        assert found["perf/prefix_sharing_ratio"] == pytest.approx(found["work/trained"] / found["work/computed"])
        assert (found["perf/padding_ratio"] > 0) == (layout in ("padded", "padded, 8 rows", "padded, 30 tokens"))
        if not layout.startswith("shared"):
            assert found["perf/prefix_sharing_ratio"] == 1
    assert metrics["shared"]["work/computed"] < metrics["shared, 16 tokens"]["work/computed"] < metrics["unshared"]["work/computed"]


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_does_not_matter(answers: RankAnswers, lora: bool, reentrant: bool) -> None:
    for layout in CHECKPOINTED:
        assert_same(answers[lora, 2][0][f"checkpointing {reentrant} {layout}"], answers[lora, 2][0]["dapo"])


@pytest.mark.parametrize("lora", [True, False])
def test_a_second_step_on_a_batch_keeps_the_log_probs_of_its_start(answers: RankAnswers, model: Path, lora: bool) -> None:
    for world_size in (1, 2, 3):
        for layout in REPEATED:
            answer = answers[lora, world_size][0][f"again {layout}"]
            wanted = plain(model, lora, answer["after"], old_state=answer["before"], loss_type="dapo")
            assert_same(answer["gradient"], wanted)
            fresh = plain(model, lora, answer["after"], loss_type="dapo")
            assert (flat(fresh) - flat(wanted)).norm() > 1e-2 * flat(wanted).norm(), "the weights have hardly moved"
            clipped = answer["gradient"]["metrics"]
            assert clipped["clip_ratio/low"] + clipped["clip_ratio/high"] > 0


@pytest.mark.parametrize("lora", [True, False])
def test_skipping_zero_advantages_changes_nothing(answers: RankAnswers, lora: bool) -> None:
    for world_size in (1, 2, 3):
        answer = answers[lora, world_size][0]
        assert answer["not skipped"]["metrics"]["work/trained"] > answer["dapo"]["metrics"]["work/trained"]
        wanted = answer["dapo"] | {"metrics": {"loss": answer["dapo"]["metrics"]["loss"]}}
        assert_same(answer["not skipped"], wanted)


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("label", [f"{what} {layout}" for what in ("truncated", "all skipped") for layout in REPEATED])
def test_a_step_without_trained_tokens_has_a_zero_gradient_and_harms_nothing(answers: RankAnswers, lora: bool, label: str) -> None:
    for world_size in (1, 2, 3):
        answer = answers[lora, world_size][0]
        assert flat(answer[label]).eq(0).all()
        assert answer[label]["metrics"]["loss"] == 0
        assert_same(answer["after them"], answer["dapo"])


@pytest.mark.parametrize("lora", [True, False])
def test_a_nan_loss_on_one_rank_stops_all(answers: RankAnswers, lora: bool) -> None:
    for world_size in (1, 2, 3):
        *peers, broken = (answer["failure"] for answer in answers[lora, world_size])
        assert broken.startswith(f"NumericsError: step 7, rank {world_size - 1}, micro-batch 0: the loss is nan")
        for message in peers:
            assert message.startswith("PeerError: step 7, rank ")
            assert f"the loss of rank {world_size - 1} is not finite" in message
