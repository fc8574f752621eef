"""The gradient of a reward step is that of a plain model, however the step is split: ranks, micro-batches, rows, checkpointing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import msgspec
import pytest
import torch
from peft import get_peft_model
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from ebft_ds.collectives import Collectives
from ebft_ds.config import RewardConfig
from ebft_ds.config.derived_reward import derive_reward
from ebft_ds.data.preference import EncodedResponses
from ebft_ds.engine.loading import lora_config
from ebft_ds.errors import NumericsError, PeerError
from ebft_ds.monitor.metrics import Metric, MetricsAccumulator, reduce_over_ranks
from ebft_ds.rewards.preference_loss import PreferenceKind, PreferenceLoss
from ebft_ds.trainers.engines import row_packer
from ebft_ds.trainers.reward_step import RewardStep
from tests.distributed.ranks import RankAnswers, run_ranks
from tests.distributed.reward_runs import classifier, gathered, random_groups, reward_config, reward_engine
from tests.distributed.small import small_model

STYLES = ("shared", "unshared", "padded")
SPLITS: dict[str, dict[str, int | None]] = {
    "whole": {"per_device_train_batch_size": 7, "train_token_budget": None},
    "one by one": {"per_device_train_batch_size": 1, "train_token_budget": 45},
}
LOSSES = {
    "bradley_terry": PreferenceLoss("bradley_terry", 0.1, center_rewards_coefficient=0.02),
    "hinge": PreferenceLoss("hinge", 0.0, hinge_margin=0.7),
    "plackett_luce": PreferenceLoss("plackett_luce", center_rewards_coefficient=0.01),
}


def make_rows() -> list[EncodedResponses]:
    """Seven rows; two of them rank three responses, the others have margins and soft labels."""
    rows = []
    for i, group in enumerate(random_groups(11, 7, (2, 2, 3))):
        sequences = [[*group.prefix_ids, *branch] for branch in group.branches]
        pair = len(sequences) == 2
        rows.append(EncodedResponses(sequences, len(group.prefix_ids), 0.1 * i if pair else 0.0, 1 - 0.1 * i if pair else 1.0, row=i))
    return rows


def configuration(model: Path, *, lora: bool, reentrant: bool | None) -> RewardConfig:
    """The warm-up makes step 0 a step of learning rate 0."""
    fields: dict[str, Any] = {"use_peft": lora, "warmup_steps": 1, "max_grad_norm": 0.0}
    if reentrant is not None:
        fields |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    return reward_config(model, **fields)


def random_adapter(config: RewardConfig) -> Any:
    """With random B matrices: a fresh adapter changes nothing and gives A no gradient."""
    adapter = lora_config(config.peft.model_copy(update={"lora_r": 4, "lora_alpha": 4.0}), reward=True)
    adapter.init_lora_weights = False  # type: ignore[attr-defined]
    return adapter


class Job:
    """One engine, and RewardStep's gradients under different settings."""

    def __init__(self, collectives: Collectives, config: RewardConfig) -> None:
        torch.manual_seed(0)
        self.collectives, self.config = collectives, config
        self.made = reward_engine(config, collectives.world_size, peft_config=random_adapter(config) if config.peft.use_peft else None)
        self.trained = {n: p for n, p in self.made.engine.network.named_parameters() if p.requires_grad}

    def step(self, style: str, split: str, loss: PreferenceLoss) -> RewardStep:
        config = self.config.replace(packing=style, **SPLITS[split])
        packer = row_packer(config, self.made.engine.network, self.made.engine.device, style)
        return RewardStep(
            replace(self.made, packer=packer),
            self.collectives,
            loss=loss,
            run=config.run,
            derived=derive_reward(config, self.collectives.world_size, 7),
            check_stop=lambda: None,
        )

    def gradient(self, rows: list[EncodedResponses], style: str, split: str, loss: PreferenceLoss) -> dict[str, Any]:
        metrics = MetricsAccumulator()
        self.step(style, split, loss).accumulate(0, rows, metrics)
        grads = {name: deepspeed.utils.safe_get_full_grad(parameter).clone() for name, parameter in self.trained.items()}
        self.made.engine.step(0)
        local = {key: [m.kind, m.value, m.weight] for key, m in metrics.take().items()}
        return {"gradient": grads, "metrics": _reduced(self.collectives, local)}


def _reduced(collectives: Collectives, local: dict[str, Any]) -> dict[str, float]:
    shares = [{key: Metric(*value) for key, value in share.items()} for share in collectives.all_gather(local)]
    return reduce_over_ranks({}, lambda _: shares)


def gradients_run(collectives: Collectives, model: Path, lora: bool, reentrant: bool | None) -> dict[str, Any]:
    job = Job(collectives, configuration(model, lora=lora, reentrant=reentrant))
    answer: dict[str, Any] = {"state": {name: gathered(parameter) for name, parameter in job.trained.items()}}
    rows = make_rows()
    for kind, loss in LOSSES.items():
        for style in STYLES if kind == "bradley_terry" else ("shared",):
            for split in SPLITS:
                answer[kind, style, split] = job.gradient(rows, style, split, loss)
    answer["no work on most ranks"] = job.gradient(rows[:1], "shared", "whole", LOSSES["bradley_terry"])
    answer["error"] = broken_step(job)
    return answer


def broken_step(job: Job) -> str:
    """A loss that is not finite on some rank; leaves the engine unusable."""
    rows = make_rows()
    rows[3] = msgspec.structs.replace(rows[3], margin=float("nan"))
    try:
        job.step("shared", "one by one", LOSSES["bradley_terry"]).accumulate(4, rows, MetricsAccumulator())
    except (NumericsError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    body = small_model(tmp_path_factory.mktemp("small"))
    return classifier(body, tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def answers(model: Path) -> RankAnswers:
    return RankAnswers(lambda key: run_ranks(key[0], gradients_run, model, *key[1:]))


def plain_gradient(model: Path, state: dict[str, Tensor], lora: bool, rows: list[EncodedResponses], loss: PreferenceLoss) -> dict[str, Any]:
    """Of the library's classifier, one sequence at a time, with the run's trained parameters."""
    network: Any = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)
    if lora:
        network = get_peft_model(network, random_adapter(configuration(model, lora=True, reentrant=None)))
    parameters = {f"model.{name}": parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    assert parameters.keys() == state.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])
    rewards = torch.stack([network(torch.tensor([ids])).logits[0, 0] for row in rows for ids in row.group])
    counts = [len(row.group) for row in rows]
    total, terms = loss.sums(rewards, counts, [row.margin for row in rows], [row.preference for row in rows])
    (total / terms).backward()
    return {"gradient": {name: parameter.grad for name, parameter in parameters.items()}, "loss": float(total.detach()) / terms}


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, gradient in wanted["gradient"].items():
        torch.testing.assert_close(found["gradient"][name], gradient, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
    assert found["metrics"]["loss"] == pytest.approx(wanted["loss"], abs=1e-5)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradient_is_that_of_a_plain_model_for_every_split(answers: RankAnswers, model: Path, world_size: int, lora: bool) -> None:
    ranks = answers[world_size, lora, None]
    wanted = {kind: plain_gradient(model, ranks[0]["state"], lora, make_rows(), loss) for kind, loss in LOSSES.items()}
    single = plain_gradient(model, ranks[0]["state"], lora, make_rows()[:1], LOSSES["bradley_terry"])
    for answer in ranks:
        for key, found in answer.items():
            if isinstance(key, tuple):
                assert_same(found, wanted[key[0]])
        assert_same(answer["no work on most ranks"], single)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_gradient_checkpointing_changes_nothing(answers: RankAnswers, lora: bool, reentrant: bool) -> None:
    key: tuple[PreferenceKind, str, str] = ("bradley_terry", "shared", "one by one")
    expected = answers[2, lora, None][0]
    for answer in answers[2, lora, reentrant]:
        assert_same(answer[key], expected[key] | {"loss": expected[key]["metrics"]["loss"]})


def test_metrics_count_every_pair_once_whatever_the_split(answers: RankAnswers) -> None:
    reference = answers[1, False, None][0]["bradley_terry", "padded", "whole"]["metrics"]
    assert reference["reward/pairs"] == 5 + 2 * 3
    for answer in answers[3, False, None]:
        for key, found in answer.items():
            if isinstance(key, tuple) and key[0] == "bradley_terry":
                for name in ("accuracy", "tie_share", "margin", "chosen_mean", "rejected_mean", "mean", "min", "max", "pairs"):
                    assert found["metrics"][f"reward/{name}"] == pytest.approx(reference[f"reward/{name}"], abs=1e-5), (key, name)


def test_loss_that_is_not_finite_stops_every_rank_and_names_the_row(answers: RankAnswers) -> None:
    errors = [answer["error"] for answer in answers[3, False, None]]
    assert sum(error.startswith("NumericsError") for error in errors) == 1
    assert sum(error.startswith("PeerError") for error in errors) == 2
    assert any(re.search(r"rows \[[\d, ]*\b3\b", error) for error in errors)
