"""Expected gradients by enumeration of every group a small categorical policy can produce, in float64.

L_FM(theta) = || sum_v p_v phi_v - phi_y ||^2 = ||m||^2 - 2 <m, phi_y> + const. E[g] sums P(group) * 1/n sum_j A_j grad log p_j over all
groups. `ebft_rloo` and `reinforce` must give -grad L_FM; `rloo` and `group` have known factors on its two parts.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from ebft_ds.features import unit_normalize
from ebft_ds.policy import LossDenominators, group_advantages, importance_weights, policy_loss, sequence_importance
from ebft_ds.rewards import FeatureRewards, group_feature_rewards

F64 = torch.float64
EXACT = 1e-12


def outcomes(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, unit features of the outcomes, and the reference's; not symmetric on purpose."""
    generator = torch.Generator().manual_seed(count)
    features = unit_normalize(torch.randn(count, 5, generator=generator, dtype=F64))
    reference = unit_normalize(torch.randn(5, generator=generator, dtype=F64))
    return torch.randn(count, generator=generator, dtype=F64), features, reference


def groups_of(count: int, n: int) -> Tensor:
    return torch.tensor(list(product(range(count), repeat=n)))


def score(features: Tensor, reference: Tensor, groups: Tensor, weights: Tensor | None = None, **coefs: float) -> FeatureRewards:
    return group_feature_rewards(features[groups], reference.expand(len(groups), -1), completion_weights=weights, **coefs)


def loss_parts(log_p: Tensor, features: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """||m||^2 and -2 <m, phi_y>: the diversity and the alignment part of L_FM."""
    mean = log_p.exp() @ features
    return mean.square().sum(), -2.0 * mean @ reference


def gradient(value: Tensor, theta: Tensor) -> Tensor:
    (result,) = torch.autograd.grad(value, theta, retain_graph=True)
    return result


def expected_gradient(log_p: Tensor, theta: Tensor, groups: Tensor, advantages: Tensor, probability: Tensor) -> Tensor:
    weighted = probability[:, None] * advantages / groups.shape[1]
    return gradient((weighted.detach() * log_p[groups]).sum(), theta)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("estimator", "alignment_factor", "diversity_factor"),
    [
        ("ebft_rloo", lambda n: 1.0, lambda n: 1.0),
        ("reinforce", lambda n: 1.0, lambda n: 1.0),
        ("rloo", lambda n: 1.0, lambda n: (n - 2) / (n - 1)),
        ("group", lambda n: (n - 1) / n, lambda n: (n - 2) / n),
    ],
)
def test_estimators(n: int, estimator: str, alignment_factor, diversity_factor) -> None:  # type: ignore[no-untyped-def]
    logits, features, reference = outcomes(3)
    theta = logits.requires_grad_()
    log_p, groups = theta.log_softmax(0), groups_of(3, n)
    probability = log_p.detach()[groups].sum(1).exp()
    advantages = group_advantages(score(features, reference, groups), estimator=estimator)
    diversity, alignment = loss_parts(log_p, features, reference)
    wanted = -(alignment_factor(n) * gradient(alignment, theta) + diversity_factor(n) * gradient(diversity, theta))
    found = expected_gradient(log_p, theta, groups, advantages, probability)
    assert (found - wanted).abs().max() <= EXACT
    if estimator in ("rloo", "group"):
        assert (found + gradient(diversity + alignment, theta)).abs().max() > 1e-3


@pytest.mark.parametrize("estimator", ["ebft_rloo", "reinforce"])
def test_coefficients_weigh_the_parts(estimator: str) -> None:
    logits, features, reference = outcomes(3)
    theta = logits.requires_grad_()
    log_p, groups = theta.log_softmax(0), groups_of(3, 4)
    scored = score(features, reference, groups, alignment_coef=1.7, diversity_coef=0.3)
    found = expected_gradient(log_p, theta, groups, group_advantages(scored, estimator=estimator), log_p.detach()[groups].sum(1).exp())
    diversity, alignment = loss_parts(log_p, features, reference)
    assert (found + gradient(1.7 * alignment + 0.3 * diversity, theta)).abs().max() <= EXACT


@pytest.mark.parametrize("n", [2, 3, 4])
def test_invalid_siblings_leave_the_gradient_exact(n: int) -> None:
    logits, features, reference = outcomes(3)
    theta = logits.requires_grad_()
    log_p, groups = theta.log_softmax(0), groups_of(3, n)
    completions = torch.cat([torch.full((len(groups), 1, 5), torch.nan, dtype=F64), features[groups]], dim=1)
    mask = torch.tensor([False] + [True] * n).expand(len(groups), -1)
    scored = group_feature_rewards(completions, reference.expand(len(groups), -1), mask=mask)
    advantages = group_advantages(scored)
    assert advantages[:, 0].eq(0).all()
    found = expected_gradient(log_p, theta, groups, advantages[:, 1:], log_p.detach()[groups].sum(1).exp())
    assert (found + gradient(sum(loss_parts(log_p, features, reference)), theta)).abs().max() <= EXACT


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_unbiased_loss_estimate(n: int) -> None:
    logits, features, reference = outcomes(3)
    log_p, groups = logits.log_softmax(0), groups_of(3, n)
    probability = log_p[groups].sum(1).exp()
    scored = score(features, reference, groups)
    exact = (log_p.exp() @ features - reference).square().sum()
    assert abs((probability * scored.fm_loss_unbiased).sum() - exact) <= EXACT
    assert (probability * scored.cfm_loss).sum() - exact > 1e-3  # the plug-in estimate is too large


class Tokens:
    """Completions over two tokens, 1 being EOS: [1], [0, 1], [0, 0]; the second token depends on the first."""

    mask = torch.tensor([[True, False], [True, True], [True, True]])
    choice = torch.tensor([[1, 0], [0, 1], [0, 0]])

    def __init__(self, theta: Tensor) -> None:
        self.per_token = torch.stack([theta[0].log_softmax(0)[self.choice[:, 0]], theta[1].log_softmax(0)[self.choice[:, 1]]], dim=1)
        self.log_p = (self.per_token * self.mask).sum(1)


def run_policy_loss(
    tokens: Tokens, groups: Tensor, advantages: Tensor, loss_type: str, weights: Tensor | None = None, old: Tensor | None = None
) -> Tensor:
    """E over groups of one step's loss. The denominator is n: policy_loss sees one group a step, the groups' probabilities as factors."""
    n = groups.shape[1]
    logp = tokens.per_token[groups].flatten(0, 1)
    return policy_loss(
        logp,
        logp.detach() if old is None else old,
        advantages.flatten(),
        Tokens.mask[groups].flatten(0, 1),
        loss_type=loss_type,
        denominators=LossDenominators(tokens=0, sequences=n, rows=n, max_completion_length=2),
        weights=weights,
    ).loss


@pytest.mark.parametrize("n", [2, 3, 4, 5])
@pytest.mark.parametrize("estimator", ["ebft_rloo", "reinforce"])
@pytest.mark.parametrize(("loss_type", "factor"), [("reinforce", 1.0), ("dr_grpo", 0.5)])
def test_policy_loss_descends_the_exact_gradient(n: int, estimator: str, loss_type: str, factor: float) -> None:
    _, features, reference = outcomes(3)
    theta = torch.randn(2, 2, generator=torch.Generator().manual_seed(1), dtype=F64).requires_grad_()
    tokens, groups = Tokens(theta), groups_of(3, n)
    probability = tokens.log_p.detach()[groups].sum(1).exp()
    assert abs(probability.sum() - 1.0) <= EXACT
    advantages = group_advantages(score(features, reference, groups), estimator=estimator)
    loss = run_policy_loss(tokens, groups, probability[:, None] * advantages, loss_type)
    wanted = factor * gradient(sum(loss_parts(tokens.log_p, features, reference)), theta)
    assert (gradient(loss, theta) - wanted).abs().max() <= EXACT


def test_length_means_bend_the_gradient() -> None:
    _, features, reference = outcomes(3)
    theta = torch.randn(2, 2, generator=torch.Generator().manual_seed(1), dtype=F64).requires_grad_()
    tokens, groups = Tokens(theta), groups_of(3, 3)
    advantages = group_advantages(score(features, reference, groups))
    loss = run_policy_loss(tokens, groups, tokens.log_p.detach()[groups].sum(1).exp()[:, None] * advantages, "grpo")
    found, wanted = gradient(loss, theta).flatten(), gradient(sum(loss_parts(tokens.log_p, features, reference)), theta).flatten()
    assert torch.cosine_similarity(found, wanted, dim=0) < 1.0 - 1e-4


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("estimator", ["ebft_rloo", "reinforce"])
def test_sequence_weights_restore_the_gradient_off_policy(n: int, estimator: str) -> None:
    _, features, reference = outcomes(3)
    generator = torch.Generator().manual_seed(2)
    theta = torch.randn(2, 2, generator=generator, dtype=F64).requires_grad_()
    tokens = Tokens(theta)
    stale = Tokens(theta.detach() + 0.4 * torch.randn(2, 2, generator=generator, dtype=F64))
    groups = groups_of(3, n)
    probability = stale.log_p[groups].sum(1).exp()  # sampled from the stale policy
    logp, stale_logp, mask = (source[groups].flatten(0, 1) for source in (tokens.per_token.detach(), stale.per_token, Tokens.mask))
    sibling_weights = sequence_importance(logp, stale_logp, mask, cap=1e6).view(groups.shape)
    own_weights = importance_weights(logp, stale_logp, mask, mode="sequence_truncate", cap=1e6)
    wanted = gradient(sum(loss_parts(tokens.log_p, features, reference)), theta)

    def error(weights: Tensor | None) -> float:
        advantages = group_advantages(score(features, reference, groups, weights), estimator=estimator)
        loss = run_policy_loss(tokens, groups, probability[:, None] * advantages, "reinforce", own_weights)
        return float((gradient(loss, theta) - wanted).norm() / wanted.norm())

    assert error(sibling_weights) <= EXACT
    assert error(None) > 1e-3  # weighting sample j alone is not enough
