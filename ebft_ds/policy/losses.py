"""Policy losses whose value and gradient do not depend on how a batch is split (METHOD section 4).

A call returns one micro-batch's share: sums over its tokens, divided by denominators of the whole optimizer step (all ranks, all
accumulation steps). Adding the shares of any split gives the whole-batch loss, so the trainer must sum gradients over ranks and
micro-batches (or undo the averaging that its engine does).

    loss_type   per token                              denominator                      expected gradient on-policy
    reinforce   -rho A                                 sequences                        exact
    dr_grpo     -min(rho A, clip(rho) A)               rows * max_completion_length     exact up to a constant factor
    dapo, bnpo  -min(rho A, clip(rho) A)               tokens                           bent: the token count depends on what was sampled
    cispo       -min(rho, 1 + epsilon_high) A logp     tokens                           bent, as dapo
    grpo        -min(rho A, clip(rho) A) / length      sequences                        bent: short completions weigh more per token
    gspo        -min(s A, clip(s) A), s = exp(mean log rho)  sequences, length mean     bent, as grpo

rho = exp(logp - old_logp) is 1 with `old_logprobs: current`, where no clip is active. Clipping, and weights cut at their cap, bend
every type that has them. Advantages scaled by a standard deviation bend all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ebft_ds.errors import ConfigError
from ebft_ds.policy.denominators import LossDenominators

LossType = Literal["reinforce", "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo"]


@dataclass(frozen=True)
class PolicyLoss:
    """One micro-batch's share of the loss, and counts that add up over micro-batches and ranks."""

    loss: Float[Tensor, ""]
    """Share of the loss, with gradient; 0 with a graph where nothing is trained, so that every rank can run its backward."""
    clip_low_count: Int[Tensor, ""]
    """Trained tokens whose gradient the lower bound removed: rho < 1 - epsilon_low and A < 0."""
    clip_high_count: Int[Tensor, ""]
    """Trained tokens whose gradient the upper bound removed or limited: rho > 1 + epsilon_high and A > 0."""
    token_count: Int[Tensor, ""]
    """Trained tokens."""


def policy_loss(
    logp: Float[Tensor, "b t"],
    old_logp: Float[Tensor, "b t"],
    advantages: Float[Tensor, " b"],
    mask: Bool[Tensor, "b t"] | Float[Tensor, "b t"],
    *,
    loss_type: LossType | str,
    denominators: LossDenominators,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    weights: Float[Tensor, "b t"] | None = None,
    per_token_penalty: Float[Tensor, "b t"] | None = None,
) -> PolicyLoss:
    """The micro-batch's share of the policy loss; see the module's table.

    Args:
        logp: log-probs of the trained policy, with gradient.
        old_logp: the same detached (`old_logprobs: current`), or the log-probs of the policy that sampled. Never takes gradient.
        mask: nonzero at trained tokens; elsewhere nothing has an influence, NaN included.
        denominators: of the whole optimizer step.
        epsilon_low, epsilon_high: clip(rho) = rho in [1 - low, 1 + high]. `reinforce` does not clip; `cispo` limits the detached
            weight from above, at 1 + epsilon_high.
        weights: mismatch weights w of `importance_weights`; multiply the token's loss.
        per_token_penalty: beta * KL per token; added after the weights, with the same denominator.

    Raises:
        ConfigError: an unknown loss_type.
    """
    if loss_type not in get_args(LossType):
        raise ConfigError(f"loss_type is {loss_type!r}; use one of {', '.join(get_args(LossType))}")
    trained = mask.bool()
    # Masked before any exp or product: a NaN or overflow at an untrained position would reach the gradient through 0 * inf.
    logp = _at(trained, logp)
    old_logp = _at(trained, old_logp.detach())
    advantage = _at(trained, advantages.detach().to(logp.dtype)[:, None].expand_as(logp))

    length = trained.sum(dim=1, keepdim=True)
    log_ratio = logp - old_logp
    if loss_type == "gspo":
        log_ratio = (log_ratio.sum(dim=1, keepdim=True) / length.clamp_min(1)).expand_as(logp)
    ratio = log_ratio.exp()
    per_token = _objective(logp, ratio, advantage, loss_type, epsilon_low, epsilon_high)
    if weights is not None:
        per_token = per_token * _at(trained, weights.detach().to(logp.dtype))
    if per_token_penalty is not None:
        per_token = per_token + _at(trained, per_token_penalty)
    per_token = _at(trained, per_token)
    if loss_type in ("grpo", "gspo"):
        per_token = per_token / length.clamp_min(1)

    clips = loss_type != "reinforce"
    low = trained & (ratio.detach() < 1.0 - epsilon_low) & (advantage < 0.0) & (clips and loss_type != "cispo")
    high = trained & (ratio.detach() > 1.0 + epsilon_high) & (advantage > 0.0) & clips
    return PolicyLoss(
        loss=share(per_token.sum(), _denominator(loss_type, denominators)),
        clip_low_count=low.sum(),
        clip_high_count=high.sum(),
        token_count=trained.sum(),
    )


def reference_cross_entropy(
    logp: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"] | Float[Tensor, "b t"], tokens_total: int | float
) -> Float[Tensor, ""]:
    """The micro-batch's share of the token-mean cross-entropy on references (the CE term).

    Args:
        tokens_total: reference tokens of the whole optimizer step, each reference counted once.
    """
    return share(-_at(mask.bool(), logp).sum(), tokens_total)


def share(total: Float[Tensor, ""], denominator: int | float) -> Float[Tensor, ""]:
    """total / denominator; 0 with the graph kept where the denominator is 0."""
    return total / denominator if denominator > 0 else total * 0.0


def _at(trained: Bool[Tensor, "b t"], values: Float[Tensor, "b t"]) -> Float[Tensor, "b t"]:
    return torch.where(trained, values, 0.0)


def _objective(logp: Tensor, ratio: Tensor, advantage: Tensor, loss_type: str, epsilon_low: float, epsilon_high: float) -> Tensor:
    if loss_type == "reinforce":
        return -ratio * advantage
    if loss_type == "cispo":
        return -ratio.detach().clamp(max=1.0 + epsilon_high) * advantage * logp
    clipped = ratio.clamp(1.0 - epsilon_low, 1.0 + epsilon_high)
    return -torch.minimum(ratio * advantage, clipped * advantage)


def _denominator(loss_type: str, counts: LossDenominators) -> int:
    if loss_type in ("reinforce", "grpo", "gspo"):
        return counts.sequences
    if loss_type == "dr_grpo":
        return counts.rows * counts.max_completion_length
    return counts.tokens
