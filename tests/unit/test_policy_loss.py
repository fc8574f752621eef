"""The policy loss: no dependence on how a batch is split, masks, clipping, denominators, KL, cross-entropy."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from beartype import beartype
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import jaxtyped
from torch import Tensor

from ebft_ds import policy
from ebft_ds.errors import ConfigError
from ebft_ds.policy import LossDenominators

per_token_kl = jaxtyped(typechecker=beartype)(policy.per_token_kl)
policy_loss = jaxtyped(typechecker=beartype)(policy.policy_loss)
reference_cross_entropy = jaxtyped(typechecker=beartype)(policy.reference_cross_entropy)

LOSS_TYPES = ["reinforce", "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo"]
F64 = torch.float64
BUDGET = 7


class Batch:
    """Rows of ragged completions under a small policy: logp is a function of theta, so that gradients can be compared."""

    def __init__(self, seed: int, lengths: list[int], drift: float = 0.3) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (len(lengths), max([*lengths, 1]))
        self.features = torch.randn(*shape, 3, generator=generator, dtype=F64)
        self.mask = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
        self.old = -torch.rand(shape, generator=generator, dtype=F64) - 0.1
        self.shift = drift * torch.randn(shape, generator=generator, dtype=F64)
        self.advantages = torch.randn(len(lengths), generator=generator, dtype=F64)
        self.weights = torch.rand(shape, generator=generator, dtype=F64) * 3
        self.ref = -torch.rand(shape, generator=generator, dtype=F64)

    def logp(self, theta: Tensor) -> Tensor:
        return self.old + self.shift + 0.1 * self.features @ theta

    def share(
        self, theta: Tensor, rows: slice, loss_type: str, denominators: LossDenominators, width: int | None = None
    ) -> policy.PolicyLoss:
        columns = slice(0, width)
        logp = self.logp(theta)[rows, columns]
        return policy_loss(
            logp,
            self.old[rows, columns],
            self.advantages[rows],
            self.mask[rows, columns],
            loss_type=loss_type,
            denominators=denominators,
            weights=self.weights[rows, columns],
            per_token_penalty=0.05 * per_token_kl(logp, self.ref[rows, columns], "k3", mask=self.mask[rows, columns]),
        )

    def whole(self, loss_type: str) -> tuple[Tensor, Tensor, policy.PolicyLoss]:
        theta = torch.zeros(3, dtype=F64, requires_grad=True)
        result = self.share(theta, slice(None), loss_type, LossDenominators.count(self.mask, BUDGET))
        return result.loss.detach(), torch.autograd.grad(result.loss, theta)[0], result


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(0, BUDGET), min_size=1, max_size=7),
    cuts=st.lists(st.integers(0, 7), max_size=4),
    loss_type=st.sampled_from(LOSS_TYPES),
)
def test_any_split_gives_the_same_loss_and_gradient(seed: int, lengths: list[int], cuts: list[int], loss_type: str) -> None:
    """Micro-batches and ranks: shares over the step's denominators add up, whatever each part's own length, and so do the counts."""
    batch = Batch(seed, lengths)
    loss, grad, whole = batch.whole(loss_type)
    bounds = sorted({0, len(lengths), *(cut for cut in cuts if cut <= len(lengths))})
    parts = [slice(low, high) for low, high in pairwise(bounds)]
    counts = [LossDenominators.count(batch.mask[part], BUDGET) for part in parts]
    total = counts[0]
    for count in counts[1:]:
        total = total + count
    assert total == LossDenominators.count(batch.mask, BUDGET)

    theta = torch.zeros(3, dtype=F64, requires_grad=True)
    summed, low, high, tokens = torch.zeros((), dtype=F64), 0, 0, 0
    for part in parts:
        width = max([*lengths[part], 1])  # every micro-batch is padded to its own longest completion
        result = batch.share(theta, part, loss_type, total, width)
        result.loss.backward()
        summed += result.loss.detach()
        low, high, tokens = low + int(result.clip_low_count), high + int(result.clip_high_count), tokens + int(result.token_count)
    assert theta.grad is not None
    torch.testing.assert_close(summed, loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(theta.grad, grad, rtol=0, atol=1e-12)
    assert (low, high, tokens) == (int(whole.clip_low_count), int(whole.clip_high_count), int(whole.token_count))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_value_and_gradient_at_ratio_one(loss_type: str) -> None:
    """`old_logprobs: current`: the gradient is each type's weighting of A grad logp."""
    lengths = [1, 2, 4, 0]
    mask = torch.arange(4) < torch.tensor(lengths)[:, None]
    logp = (-torch.rand(4, 4, dtype=F64) - 0.1).requires_grad_()
    advantages = torch.tensor([1.0, -2.0, 0.5, 9.0], dtype=F64)
    counts = LossDenominators.count(mask, BUDGET)
    assert counts == LossDenominators(tokens=7, sequences=3, rows=4, max_completion_length=BUDGET)
    result = policy_loss(logp, logp.detach(), advantages, mask, loss_type=loss_type, denominators=counts)
    (grad,) = torch.autograd.grad(result.loss, logp)
    per_row = torch.tensor([1.0, 2.0, 4.0, 1.0], dtype=F64)[:, None]
    factor = {
        "reinforce": 1 / 3,
        "grpo": 1 / (3 * per_row),
        "gspo": 1 / (3 * per_row),
        "dr_grpo": 1 / (4 * BUDGET),
        "dapo": 1 / 7,
        "bnpo": 1 / 7,
        "cispo": 1 / 7,
    }[loss_type]
    torch.testing.assert_close(grad, torch.where(mask, -advantages[:, None] * factor, 0.0))
    if loss_type != "cispo":  # whose value is -A logp
        torch.testing.assert_close(result.loss, torch.where(mask, -advantages[:, None] * factor, 0.0).sum())
    assert (int(result.clip_low_count), int(result.clip_high_count), int(result.token_count)) == (0, 0, 7)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_untrained_positions_have_no_influence(loss_type: str) -> None:
    batch = Batch(3, [0, 1, 5, 5])
    loss, grad, _ = batch.whole(loss_type)
    hole = ~batch.mask
    for tensor, filling in ((batch.old, -torch.inf), (batch.weights, torch.nan), (batch.ref, torch.inf), (batch.shift, 1e9)):
        tensor[hole] = filling
    batch.advantages[0] = torch.nan
    dirty_loss, dirty_grad, _ = batch.whole(loss_type)
    assert loss.isfinite()
    torch.testing.assert_close(dirty_loss, loss, rtol=0, atol=0)
    torch.testing.assert_close(dirty_grad, grad, rtol=0, atol=0)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_all_truncated_is_zero_not_nan(loss_type: str) -> None:
    batch = Batch(4, [0, 0, 0])
    loss, grad, result = batch.whole(loss_type)
    assert result.loss.requires_grad
    assert loss.item() == 0.0
    assert grad.eq(0).all()
    dummy = policy_loss(
        torch.zeros(0, 4, dtype=F64, requires_grad=True),
        torch.zeros(0, 4, dtype=F64),
        torch.zeros(0, dtype=F64),
        torch.zeros(0, 4, dtype=torch.bool),
        loss_type=loss_type,
        denominators=LossDenominators(0, 0, 0, BUDGET),
    )
    assert dummy.loss.item() == 0.0


@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name != "dr_grpo"])
def test_half_truncated_equals_the_other_half(loss_type: str) -> None:
    batch = Batch(5, [3, 4, 5, 2])
    batch.mask[2:] = False
    loss, grad, _ = batch.whole(loss_type)
    for name in ("features", "mask", "old", "shift", "advantages", "weights", "ref"):
        setattr(batch, name, getattr(batch, name)[:2])
    half_loss, half_grad, _ = batch.whole(loss_type)
    torch.testing.assert_close(loss, half_loss)
    torch.testing.assert_close(grad, half_grad)


@pytest.mark.parametrize(
    ("loss_type", "ratio", "advantage", "gradient", "low", "high"),
    [
        ("dapo", 1.5, 1.0, 0.0, 0, 1),
        ("dapo", 1.5, -1.0, 1.5, 0, 0),
        ("dapo", 0.5, -1.0, 0.0, 1, 0),
        ("dapo", 0.5, 1.0, -0.5, 0, 0),
        ("dapo", 1.1, 1.0, -1.1, 0, 0),
        ("reinforce", 1.5, 1.0, -1.5, 0, 0),
        ("cispo", 1.5, 1.0, -1.2, 0, 1),
        ("cispo", 0.5, -1.0, 0.5, 0, 0),
        ("gspo", 1.5, 1.0, 0.0, 0, 1),
    ],
)
def test_clipping(loss_type: str, ratio: float, advantage: float, gradient: float, low: int, high: int) -> None:
    logp = torch.full((1, 1), -1.0, dtype=F64, requires_grad=True)
    old = torch.full((1, 1), -1.0 - math.log(ratio), dtype=F64)
    mask = torch.ones(1, 1, dtype=torch.bool)
    counts = LossDenominators.count(mask, 1)
    result = policy_loss(logp, old, torch.tensor([advantage], dtype=F64), mask, loss_type=loss_type, denominators=counts)
    torch.testing.assert_close(torch.autograd.grad(result.loss, logp)[0].item(), gradient)
    assert (int(result.clip_low_count), int(result.clip_high_count)) == (low, high)


def test_gspo_takes_the_geometric_mean_ratio() -> None:
    logp = torch.tensor([[-1.0, -1.0]], dtype=F64, requires_grad=True)
    old = logp.detach() - torch.tensor([[math.log(2.0), math.log(0.5)]], dtype=F64)  # tokens off, the sequence not
    mask = torch.ones(1, 2, dtype=torch.bool)
    counts = LossDenominators.count(mask, 2)
    result = policy_loss(logp, old, torch.ones(1, dtype=F64), mask, loss_type="gspo", denominators=counts)
    torch.testing.assert_close(result.loss.item(), -1.0)
    assert int(result.clip_high_count) == 0
    torch.testing.assert_close(torch.autograd.grad(result.loss, logp)[0], torch.full((1, 2), -0.5, dtype=F64))


def test_weights_multiply_and_take_no_gradient() -> None:
    logp = torch.full((1, 3), -1.0, dtype=F64, requires_grad=True)
    weights = torch.tensor([[0.0, 0.5, 3.0]], dtype=F64, requires_grad=True)
    mask = torch.ones(1, 3, dtype=torch.bool)
    result = policy_loss(
        logp,
        logp.detach(),
        torch.ones(1, dtype=F64),
        mask,
        loss_type="reinforce",
        denominators=LossDenominators.count(mask, 3),
        weights=weights,
    )
    grads = torch.autograd.grad(result.loss, (logp, weights), allow_unused=True)
    torch.testing.assert_close(grads[0], -weights.detach())
    assert grads[1] is None


def test_unknown_loss_type() -> None:
    empty = torch.zeros(1, 1)
    with pytest.raises(ConfigError, match="loss_type"):
        policy_loss(empty, empty, torch.zeros(1), empty.bool(), loss_type="ppo", denominators=LossDenominators(1, 1, 1, 1))


def test_denominators_of_dummies_and_of_different_runs() -> None:
    mask = torch.tensor([[True, True], [False, False], [False, False]])
    assert LossDenominators.count(mask, 5, real_rows=torch.tensor([True, True, False])) == LossDenominators(2, 1, 2, 5)
    with pytest.raises(ConfigError, match="max_completion_length"):
        LossDenominators(1, 1, 1, 5) + LossDenominators(1, 1, 1, 6)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**31), lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5))
def test_cross_entropy_is_a_token_mean_over_all_parts(seed: int, lengths: list[int]) -> None:
    logp = -torch.rand(len(lengths), 6, generator=torch.Generator().manual_seed(seed), dtype=F64)
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    logp[~mask] = -torch.inf
    total = sum(lengths)
    summed = sum(reference_cross_entropy(logp[i : i + 1], mask[i : i + 1], total) for i in range(len(lengths)))
    torch.testing.assert_close(summed, -logp[mask].mean() if total else torch.zeros((), dtype=F64))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_values_and_gradients_by_enumeration(estimator: str) -> None:
    theta = torch.tensor([0.3, -0.2, 0.9, 0.0], dtype=F64, requires_grad=True)
    log_p, log_q = theta.log_softmax(0), torch.tensor([0.1, 0.4, 0.2, -0.5], dtype=F64).log_softmax(0)
    p = log_p.detach().exp()
    kl = (log_p.exp() * (log_p - log_q)).sum()
    estimate = per_token_kl(log_p[None], log_q[None], estimator)[0]
    if estimator != "k2":
        torch.testing.assert_close((p * estimate).sum(), kl)
    forward = (log_q.exp() * (log_q - log_p)).sum()
    (found,) = torch.autograd.grad((p * estimate).sum(), theta, retain_graph=True)
    (wanted,) = torch.autograd.grad(forward if estimator == "k3" else kl, theta)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert found.abs().max() > 1e-2
    with pytest.raises(ConfigError, match="kl_estimator"):
        per_token_kl(log_p[None], log_q[None], "k4")
