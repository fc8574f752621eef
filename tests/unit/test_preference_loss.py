"""Preference losses: TRL's numbers, the formulas in float64, and what must hold for any rewards."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from beartype import beartype
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import jaxtyped
from torch import Tensor
from torch.autograd import gradcheck

import ebft_ds
from ebft_ds.config import RewardConfig
from ebft_ds.errors import ConfigError, DataError
from ebft_ds.rewards.preference_loss import PreferenceLoss, pairwise_loss

VECTORS: dict[str, list[dict[str, Any]]] = json.loads((Path(__file__).parents[1] / "data" / "reward_vectors.json").read_text())
KINDS = ["bradley_terry", "hinge", "plackett_luce"]
checked_loss = jaxtyped(typechecker=beartype)(pairwise_loss)


def doubles(values: Any, *, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


rewards_of_a_row = st.lists(st.floats(-30, 30), min_size=2, max_size=6)
pairs = st.lists(st.tuples(*[st.floats(-1e4, 1e4)] * 2, st.floats(-5, 5), st.sampled_from([0.0, 0.3, 0.5, 1.0])), min_size=1, max_size=5)
losses = st.builds(
    PreferenceLoss,
    st.sampled_from(["bradley_terry", "hinge"]),
    st.sampled_from([0.0, 0.1, 0.4]),
    st.floats(0.1, 3.0),
    st.sampled_from([None, 0.0, 0.05]),
)


def of_pairs(loss: PreferenceLoss, rows: list[tuple[float, float, float, float]]) -> float:
    flat = doubles([reward for row in rows for reward in row[:2]])
    return float(loss.sums(flat, [2] * len(rows), [row[2] for row in rows], [row[3] for row in rows])[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", VECTORS["bt_loss"], ids=lambda c: f"{c['chosen'][0]}-{c['rejected'][0]}-{c['center_rewards_coefficient']}")
def test_trl_losses_and_gradients(case: dict[str, Any], dtype: torch.dtype) -> None:
    chosen, rejected = (torch.tensor(case[side], dtype=dtype, requires_grad=True) for side in ("chosen", "rejected"))
    margin = torch.tensor(case["margin"], dtype=dtype) if case["margin"] is not None else None
    loss = checked_loss(chosen, rejected, margin=margin, center_rewards_coefficient=case["center_rewards_coefficient"])
    exact = dtype == torch.float64
    assert loss.item() == pytest.approx(case["float64_ref"], rel=1e-12 if exact else 1e-6, abs=1e-12 if exact else 1e-6)
    loss.backward()
    assert chosen.grad is not None
    assert rejected.grad is not None
    gradient = torch.cat([chosen.grad, rejected.grad]).tolist()
    assert gradient == pytest.approx(case["grad_chosen_then_rejected"], abs=1e-6)


@pytest.mark.parametrize("case", VECTORS["bt_loss"], ids=lambda c: f"{c['chosen'][0]}-{c['rejected'][0]}-{c['center_rewards_coefficient']}")
def test_sums_over_terms_are_the_public_loss(case: dict[str, Any]) -> None:
    flat = doubles([list(pair) for pair in zip(case["chosen"], case["rejected"], strict=True)]).flatten()
    rows = len(case["chosen"])
    loss = PreferenceLoss(center_rewards_coefficient=case["center_rewards_coefficient"])
    total, terms = loss.sums(flat, [2] * rows, case["margin"] or [0.0] * rows, [1.0] * rows)
    assert terms == rows == loss.terms([2] * rows)
    assert float(total) / terms == pytest.approx(case["float64_ref"], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("case", VECTORS["logexp"], ids=lambda c: str(c["diff"]))
def test_stable_where_log_of_one_plus_exp_is_not(case: dict[str, Any]) -> None:
    gap = torch.tensor(case["diff"], requires_grad=True)
    loss = pairwise_loss(gap, torch.zeros_like(gap))
    assert loss.item() == pytest.approx(case["softplus"], rel=1e-6)
    loss.backward()
    assert gap.grad is not None
    assert gap.grad.tolist() == pytest.approx(case["grad_softplus"], rel=1e-6)


def test_a_column_of_rewards_is_refused_and_not_broadcast() -> None:
    case = VECTORS["margin_broadcast_bug"][0]
    chosen, rejected, margin = (torch.tensor(case[name]) for name in ("chosen", "rejected", "margin"))
    assert float(pairwise_loss(chosen, rejected, margin=margin)) == pytest.approx(case["correct_loss"], rel=1e-6)
    for bad in [(chosen[:, None], rejected[:, None], margin), (chosen, rejected[:, None], None), (chosen[:0], rejected[:0], None)]:
        with pytest.raises(ValueError, match=r"rewards \[B\]"):
            pairwise_loss(bad[0], bad[1], margin=bad[2])
    with pytest.raises(ValueError, match=r"margin is \[B\]"):
        pairwise_loss(chosen, rejected, margin=margin[:, None])
    with pytest.raises(ValueError, match="shape"):
        PreferenceLoss().sums(chosen[:, None], [3], [0.0], [1.0])


def test_half_precision_rewards_are_widened_but_ties_made_before_stay() -> None:
    case = VECTORS["bf16_ties"][0]
    assert torch.tensor(case["rewards_fp32"], dtype=torch.bfloat16).tolist() == case["rewards_bf16"]
    low, high = torch.tensor(case["rewards_fp32"], dtype=torch.bfloat16)[:, None]
    loss = pairwise_loss(high, low)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(math.log(2), rel=1e-6)
    assert PreferenceLoss().sums(torch.tensor([3.0, 0.001], dtype=torch.bfloat16), [2], [0.0], [1.0])[0].dtype == torch.float32


def test_public_name() -> None:
    assert ebft_ds.pairwise_loss is pairwise_loss
    assert "pairwise_loss" in ebft_ds.__all__


def test_the_loss_of_a_recipe() -> None:
    config = RewardConfig(reward_loss_type="hinge", label_smoothing=0.1, hinge_margin=2.0, center_rewards_coefficient=0.01)
    assert PreferenceLoss.of(config.reward) == PreferenceLoss("hinge", 0.1, 2.0, 0.01)
    with pytest.raises(ConfigError, match="label_smoothing"):
        PreferenceLoss("plackett_luce", label_smoothing=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_formulas_of_a_pair_with_margin_and_preference(kind: Any) -> None:
    r, m, p = (1.2, 0.7), 0.4, 0.8
    z, q = r[0] - r[1] - m, p if kind == "plackett_luce" else p * 0.9 + (1 - p) * 0.1
    expected = q * max(0.0, 2.0 - z) + (1 - q) * max(0.0, 2.0 + z) if kind == "hinge" else q * softplus(-z) + (1 - q) * softplus(z)
    loss = PreferenceLoss(kind, 0.0 if kind == "plackett_luce" else 0.1, hinge_margin=2.0, center_rewards_coefficient=0.5)
    total, terms = loss.row(list(r), margin=m, preference=p)
    assert terms == 1
    assert total == pytest.approx(expected + 0.5 * (r[0] + r[1]) ** 2, rel=1e-12)


def test_a_tie_draws_rewards_together_and_smoothing_bounds_the_gap() -> None:
    apart = doubles([2.0, -1.0], grad=True)
    PreferenceLoss().sums(apart, [2], [0.0], [0.5])[0].backward()
    assert apart.grad is not None
    assert apart.grad[0] > 0 > apart.grad[1]
    best = math.log(0.9 / 0.1)  # the gap that a label of probability 0.9 asks for
    still = doubles([best, 0.0], grad=True)
    PreferenceLoss(label_smoothing=0.1).sums(still, [2], [0.0], [1.0])[0].backward()
    assert still.grad is not None
    assert still.grad.abs().max() < 1e-15


@settings(max_examples=60)
@given(row=rewards_of_a_row)
def test_a_ranking_under_bradley_terry_is_all_its_ordered_pairs(row: list[float]) -> None:
    expected = [pairwise_loss(doubles([row[i]]), doubles([row[j]])) for i in range(len(row)) for j in range(i + 1, len(row))]
    total, terms = PreferenceLoss().row(row)
    assert terms == len(expected) == PreferenceLoss().terms([len(row)])
    assert total == pytest.approx(float(sum(expected)), rel=1e-12)


@settings(max_examples=60)
@given(row=rewards_of_a_row)
def test_plackett_luce_is_the_likelihood_of_the_ranking(row: list[float]) -> None:
    probability = math.prod(1 / sum(math.exp(other - best) for other in row[k:]) for k, best in enumerate(row[:-1]))
    total, terms = PreferenceLoss("plackett_luce").row(row)
    assert terms == 1
    assert total == pytest.approx(-math.log(probability) if probability else total, rel=1e-9, abs=1e-12)


@settings(max_examples=60)
@given(rows=pairs, coefficient=st.sampled_from([None, 0.1]))
def test_plackett_luce_of_pairs_is_bradley_terry(rows: list[tuple[float, float, float, float]], coefficient: float | None) -> None:
    terry = PreferenceLoss("bradley_terry", center_rewards_coefficient=coefficient)
    luce = PreferenceLoss("plackett_luce", center_rewards_coefficient=coefficient)
    assert of_pairs(luce, rows) == pytest.approx(of_pairs(terry, rows), rel=1e-12)
    flat, counts = [reward for row in rows for reward in row[:2]], [2] * len(rows)
    beside = [row[2] for row in rows] + [0.0], [row[3] for row in rows] + [1.0]
    mixed, _ = luce.sums(doubles([*flat, 1.0, 0.5, -2.0]), [*counts, 3], *beside)  # a row of three takes the other path
    alone, _ = luce.row([1.0, 0.5, -2.0])
    assert float(mixed) == pytest.approx(of_pairs(terry, rows) + alone, rel=1e-12)


@settings(max_examples=60)
@given(loss=losses, rows=pairs)
def test_exchanging_the_responses_turns_margin_and_preference_round(
    loss: PreferenceLoss, rows: list[tuple[float, float, float, float]]
) -> None:
    turned = [(rejected, chosen, -margin, 1.0 - preference) for chosen, rejected, margin, preference in rows]
    assert of_pairs(loss, turned) == pytest.approx(of_pairs(loss, rows), rel=1e-9, abs=1e-9)


@settings(max_examples=60)
@given(row=rewards_of_a_row, shift=st.floats(-100, 100), kind=st.sampled_from(KINDS))
def test_a_shift_of_all_rewards_changes_nothing_and_gradients_sum_to_zero(row: list[float], shift: float, kind: Any) -> None:
    loss = PreferenceLoss(kind)
    rewards = doubles(row, grad=True)
    total, _ = loss.sums(rewards, [len(row)], [0.0], [1.0])
    assert loss.row([reward + shift for reward in row])[0] == pytest.approx(total.item(), rel=1e-9, abs=1e-9)
    total.backward()
    assert rewards.grad is not None
    assert float(rewards.grad.sum()) == pytest.approx(0.0, abs=1e-12)


@settings(max_examples=60)
@given(loss=losses, rows=pairs)
def test_finite_at_any_gap_in_float32(loss: PreferenceLoss, rows: list[tuple[float, float, float, float]]) -> None:
    rewards = torch.tensor([reward for row in rows for reward in row[:2]], requires_grad=True)
    total, _ = loss.sums(rewards, [2] * len(rows), [row[2] for row in rows], [row[3] for row in rows])
    total.backward()
    assert rewards.grad is not None
    assert total.isfinite()
    assert rewards.grad.isfinite().all()


def test_rankings_are_finite_at_gaps_of_ten_thousand() -> None:
    rewards = torch.tensor([-1e4, 1e4, 0.0, 1e4], requires_grad=True)
    total, _ = PreferenceLoss("plackett_luce").sums(rewards, [4], [0.0], [1.0])
    total.backward()
    assert rewards.grad is not None
    assert total.item() == pytest.approx(3e4 + 2 * math.log(2), rel=1e-6)
    assert rewards.grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("coefficient", [None, 0.3])
def test_gradients_are_those_of_finite_differences(kind: Any, coefficient: float | None) -> None:
    loss = PreferenceLoss(kind, 0.0 if kind == "plackett_luce" else 0.2, 1.5, coefficient)
    counts, margins, preferences = [2, 3, 2, 4], [0.3, 0.0, -0.7, 0.0], [0.9, 1.0, 0.5, 1.0]
    torch.manual_seed(3)
    rewards = torch.randn(sum(counts), dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda r: loss.sums(r, counts, margins, preferences)[0], (rewards,))


@settings(max_examples=40)
@given(rows=st.lists(rewards_of_a_row, min_size=1, max_size=5), kind=st.sampled_from(KINDS), cut=st.integers(0, 5))
def test_sums_and_terms_add_up_over_any_split_of_the_rows(rows: list[list[float]], kind: Any, cut: int) -> None:
    loss = PreferenceLoss(kind, center_rewards_coefficient=0.1)

    def of(part: list[list[float]]) -> tuple[float, float]:
        total, terms = loss.sums(
            doubles([r for row in part for r in row]), [len(row) for row in part], [0.0] * len(part), [1.0] * len(part)
        )
        return float(total), terms

    whole, parts = of(rows), [of(rows[:cut]), of(rows[cut:])]
    assert whole[0] == pytest.approx(sum(part[0] for part in parts), rel=1e-9, abs=1e-9)
    assert whole[1] == sum(part[1] for part in parts) == loss.terms([len(row) for row in rows])


def test_a_rank_without_rows_takes_part_with_a_gradient_of_zeros() -> None:
    rewards = torch.tensor([3.0], requires_grad=True)
    total, terms = PreferenceLoss().sums(rewards, [], [], [])
    total.backward()
    assert (total.item(), terms) == (0.0, 0.0)
    assert rewards.grad is not None
    assert rewards.grad.tolist() == [0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_margin_or_preference_of_a_ranking_is_refused(kind: Any) -> None:
    with pytest.raises(DataError, match="row 1 of the batch ranks 3 responses"):
        PreferenceLoss(kind).sums(torch.randn(5), [2, 3], [0.5, 0.5], [1.0, 1.0])
    with pytest.raises(DataError, match=r"preference 0\.5"):
        PreferenceLoss(kind).row([1.0, 2.0, 3.0], preference=0.5)
    for counts, margins in [([1, 4], [0.0, 0.0]), ([2, 3], [0.0])]:
        with pytest.raises(ValueError, match="rows"):
            PreferenceLoss(kind).sums(torch.randn(5), counts, margins, [1.0] * len(margins))
