"""EBFTScorer on one, two and three real ranks, against rewards from plain per-sequence forwards in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ebft_ds.collectives import Collectives
from ebft_ds.errors import NumericsError
from ebft_ds.features import pool_features
from ebft_ds.features.eos import feature_span, resolve_feature_eos
from ebft_ds.features.network import FeatureNetwork
from ebft_ds.features.scorer import EBFTScorer, Scores
from ebft_ds.features.spans import TokenRange, feature_spans
from ebft_ds.monitor.metrics import MetricsAccumulator
from ebft_ds.packing.padded import PaddedRows
from ebft_ds.packing.rows import Place, TokenRows
from ebft_ds.rewards import FeatureRewards, group_feature_rewards
from ebft_ds.sync.source import full_numel
from ebft_ds.types import RolloutGroup
from tests.distributed.engines import make_config, make_engines, make_group, make_policy
from tests.distributed.ranks import run_ranks
from tests.distributed.small import EOS, LAYERS, small_model, token_rows

FIELDS = ("reward", "alignment", "diversity", "diversity_to_siblings", "cfm_loss", "fm_loss_unbiased")
FEATURE_LAYERS = [1, 2]
BUDGETS = [24, 60, 4096]
METHODS = ["completion_mean", "last_token", "mean_pooling", "concat"]
ORDER = [3, 0, 4, 2, 1]


def five_groups() -> list[RolloutGroup]:
    groups = []
    for g in range(5):
        prompt, reference, *completions = token_rows(g, [3 + g, 4 + 2 * g, 5, 3 + g, 7, 4])
        groups.append(make_group(g, prompt, completions, [*reference, EOS]))
    return groups


def odd_group() -> RolloutGroup:
    """Completions: plain, its duplicate, empty, only EOS, another, the plain one again."""
    prompt, reference, plain, other = token_rows(9, [4, 6, 5, 3])
    return make_group(9, prompt, [plain, plain, [], [EOS], other, plain], [*reference, EOS])


@dataclass
class Watched:
    """A feature network that counts what it forwards and can be told to break."""

    network: FeatureNetwork
    broken: bool = False
    rows: list[list[int]] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.network.device

    def hidden_states(self, rows: TokenRows, layers: Sequence[int], positions: Tensor) -> list[Tensor]:
        assert isinstance(rows, PaddedRows)
        self.rows += [ids[mask.bool()].tolist() for ids, mask in zip(rows.input_ids, rows.attention_mask, strict=True)]
        states = self.network.hidden_states(rows, layers, positions)
        return [s * torch.nan for s in states] if self.broken else states


def packed(scores: Scores) -> dict[str, Any]:
    return {name: getattr(scores.rewards, name) for name in (*FIELDS, "mask", "whitening_kept_ratio")} | {
        "empty": scores.empty_completions,
        "real_tokens": scores.real_tokens,
        "padded_tokens": scores.padded_tokens,
    }


def run(collectives: Collectives, model: Path) -> dict[str, Any]:
    config = make_config(model, use_peft=True, lora_r=4, ebft_feature_layers=FEATURE_LAYERS)
    engines = make_engines(config, collectives.world_size, LAYERS)
    network = Watched(engines.feature_network)
    groups = five_groups()

    def score(
        chosen: list[RolloutGroup], method: str = "completion_mean", budget: int = 4096, whitening: bool | str = False
    ) -> dict[str, Any]:
        options = {"eos_ids": [EOS], "token_budget": budget, "collectives": collectives}
        return packed(EBFTScorer(engines.layer_indices, method, whitening, 1.0, 0.5, network, **options).score(chosen))

    answer: dict[str, Any] = {f"budget {budget}": score(groups, budget=budget) for budget in BUDGETS}
    network.rows.clear()
    answer |= {method: score(groups, method) for method in METHODS}
    answer["forwarded"] = list(network.rows)
    answer |= {
        f"whitened {kind} {budget}": score(groups, budget=budget, whitening=kind) for kind in ("feature", "sample") for budget in BUDGETS
    }
    answer["permuted"] = score([groups[g] for g in ORDER], whitening="feature")
    answer["one group"] = score(groups[:1], budget=24)
    answer["one group whitened"] = score(groups[:1], budget=24, whitening="feature")
    answer["odd"] = score([odd_group()])
    answer["odd last_token"] = score([odd_group()], "last_token")
    answer |= between_steps(config, engines, collectives, lambda: score(groups)["reward"])
    network.broken = collectives.rank == collectives.world_size - 1
    answer["errors"] = [error_of(lambda g=chosen: score(g)) for chosen in (groups, groups[:1])]  # type: ignore[misc]
    network.broken = False
    answer["after errors"] = score(groups)
    return answer


def between_steps(config: Any, engines: Any, collectives: Collectives, rewards: Any) -> dict[str, Any]:
    """Scores, trains a step and scores again, twice."""
    policy, actor = make_policy(config, engines, collectives), engines.actor
    found, whole = [], 0
    for step in range(2):
        found.append(rewards())
        whole += sum(p.numel() != 0 and full_numel(p) > 1 for p in actor.network.parameters() if not p.requires_grad)
        policy.on_groups(step, five_groups(), torch.ones(5, 4), rl_coef=1.0, ce_coef=0.0, metrics=MetricsAccumulator())
        actor.step(step)
    found.append(rewards())
    return {"rewards between steps": found, "frozen parameters left whole": whole}


def error_of(action: Any) -> str:
    try:
        action()
    except NumericsError as error:
        return str(error)
    return "no error"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def answers(model: Path) -> dict[int, list[dict[str, Any]]]:
    return {world_size: run_ranks(world_size, run, model) for world_size in (1, 2, 3)}


def plain_rewards(model: Path, groups: list[RolloutGroup], method: str, whitening: Any = None) -> FeatureRewards:
    """From one unpadded forward per sequence of an ordinary Hugging Face model."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    eos = resolve_feature_eos(method)

    def feature(prompt: list[int], completion: list[int]) -> Tensor:
        span = feature_span(len(prompt), completion, [EOS], eos)
        if span is None:
            return torch.zeros(1)
        with torch.no_grad():
            states = network(torch.tensor([prompt + completion]), output_hidden_states=True).hidden_states
        spans = feature_spans([Place(0, len(prompt), len(prompt), len(completion))], [TokenRange(*span)], method)
        return pool_features([states[k][0, spans.positions] for k in FEATURE_LAYERS], spans)[0]

    references = torch.stack([feature(g.prompt.token_ids, g.prompt.reference_ids) for g in groups])
    completions = torch.stack(
        [torch.stack([feature(g.prompt.token_ids, r.token_ids).expand_as(references[0]) for r in g.rollouts]) for g in groups]
    )
    mask = torch.tensor([[bool(r.token_ids) for r in g.rollouts] for g in groups])
    return group_feature_rewards(completions, references, diversity_coef=0.5, whitening=whitening, mask=mask)


def assert_same(found: dict[str, Any], wanted: FeatureRewards, order: Sequence[int] | None = None) -> None:
    for name in FIELDS:
        expected = getattr(wanted, name)
        torch.testing.assert_close(found[name], expected if order is None else expected[list(order)], rtol=1e-5, atol=1e-5)


def every(answers: dict[int, list[dict[str, Any]]], label: str) -> list[dict[str, Any]]:
    return [answer[label] for ranks in answers.values() for answer in ranks]


@pytest.mark.parametrize("method", METHODS)
def test_rewards_are_those_of_plain_forwards(answers: dict[int, list[dict[str, Any]]], model: Path, method: str) -> None:
    wanted = plain_rewards(model, five_groups(), method)
    assert wanted.reward.std() > 0.05, "rewards that do not differ would prove nothing"
    for found in every(answers, method):
        assert_same(found, wanted)


@pytest.mark.parametrize("budget", BUDGETS)
def test_world_size_and_budget_do_not_matter(answers: dict[int, list[dict[str, Any]]], model: Path, budget: int) -> None:
    wanted = plain_rewards(model, five_groups(), "completion_mean")
    for found in every(answers, f"budget {budget}"):
        assert_same(found, wanted)


@pytest.mark.parametrize("kind", ["feature", "sample"])
def test_whitened_rewards_too(answers: dict[int, list[dict[str, Any]]], model: Path, kind: str) -> None:
    wanted = plain_rewards(model, five_groups(), "completion_mean", kind)
    assert wanted.whitening_kept_ratio.min() > 1e-2
    for budget in BUDGETS:
        for found in every(answers, f"whitened {kind} {budget}"):
            assert_same(found, wanted)
            torch.testing.assert_close(found["whitening_kept_ratio"], wanted.whitening_kept_ratio, rtol=1e-4, atol=1e-5)


def test_the_order_of_groups_does_not_matter(answers: dict[int, list[dict[str, Any]]], model: Path) -> None:
    wanted = plain_rewards(model, five_groups(), "completion_mean", "feature")
    for found in every(answers, "permuted"):
        assert_same(found, wanted, ORDER)


def test_one_group_is_split_over_the_ranks_and_scores_the_same(answers: dict[int, list[dict[str, Any]]], model: Path) -> None:
    for label, kind in (("one group", None), ("one group whitened", "feature")):
        wanted = plain_rewards(model, five_groups()[:1], "completion_mean", kind)
        for found in every(answers, label):
            assert_same(found, wanted)


def test_all_ranks_return_identical_scores(answers: dict[int, list[dict[str, Any]]]) -> None:
    for ranks in answers.values():
        for label in (*METHODS, "permuted", "one group whitened", "odd"):
            for other in ranks[1:]:
                assert all(torch.equal(other[label][name], ranks[0][label][name]) for name in FIELDS if not name.endswith("unbiased"))
                assert other[label]["padded_tokens"] == ranks[0][label]["padded_tokens"]


def test_empty_eos_only_and_duplicate_completions(answers: dict[int, list[dict[str, Any]]], model: Path) -> None:
    for label, method in (("odd", "completion_mean"), ("odd last_token", "last_token")):
        wanted = plain_rewards(model, [odd_group()], method)
        for found in every(answers, label):
            assert_same(found, wanted)
            assert found["mask"].tolist() == [[True, True, False, True, True, True]]
            assert found["empty"] == 1
            reward = found["reward"][0]
            assert reward[2] == 0
            assert reward[0] == reward[1] == reward[5], "duplicates share one feature: not even rounding may part them"


def test_reference_and_duplicates_are_forwarded_once(answers: dict[int, list[dict[str, Any]]]) -> None:
    wanted = [g.prompt.token_ids + ids for g in five_groups() for ids in (g.prompt.reference_ids, *(r.token_ids for r in g.rollouts))]
    for ranks in answers.values():
        forwarded = [row for answer in ranks for row in answer["forwarded"] if row != [0]]
        assert sorted(forwarded) == sorted(wanted * len(METHODS))
        assert ranks[0]["completion_mean"]["real_tokens"] == sum(map(len, wanted))
        odd = odd_group()
        distinct = {tuple(r.token_ids) for r in odd.rollouts if r.token_ids} | {tuple(odd.prompt.reference_ids)}
        assert ranks[0]["odd"]["real_tokens"] == sum(len(odd.prompt.token_ids) + len(ids) for ids in distinct)


def test_no_forward_pads_beyond_its_budget(answers: dict[int, list[dict[str, Any]]]) -> None:
    for found in every(answers, "budget 24"):
        assert found["real_tokens"] <= found["padded_tokens"] <= 2 * found["real_tokens"]


def test_a_nan_feature_on_one_rank_is_an_error_on_all(answers: dict[int, list[dict[str, Any]]]) -> None:
    for world_size, ranks in answers.items():
        for errors in zip(*(answer["errors"] for answer in ranks), strict=True):
            assert len(set(errors)) == 1
            assert "non-finite feature" in errors[0]
            assert "prompt " in errors[0]
            assert f"on rank {0 if world_size == 1 else ''}" in errors[0]
        for answer in ranks:
            assert torch.equal(answer["after errors"]["reward"], answer["budget 4096"]["reward"])


def test_scoring_between_train_steps_sees_the_base_model_and_leaves_it_partitioned(answers: dict[int, list[dict[str, Any]]]) -> None:
    for ranks in answers.values():
        for answer in ranks:
            first, *later = answer["rewards between steps"]
            assert all(torch.equal(first, other) for other in later)
            if len(ranks) > 1:
                assert answer["frozen parameters left whole"] == 0
