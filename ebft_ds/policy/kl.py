"""Per-token estimators of KL(policy || reference policy) (Schulman, "Approximating KL divergence", 2020)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ebft_ds.errors import ConfigError

KlEstimator = Literal["k1", "k2", "k3"]


def per_token_kl(
    logp: Float[Tensor, "b t"],
    ref_logp: Float[Tensor, "b t"],
    estimator: KlEstimator | str = "k3",
    *,
    mask: Bool[Tensor, "b t"] | Float[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b t"]:
    """KL per sampled token, for the loss term beta * KL. With x = logp - ref_logp:

    `k1`: value x. Its own derivative would be 1 everywhere, which averages to no gradient at all, so the gradient given is the
        score-function one, x grad(logp): per token that of the reverse KL.
    `k2`: x^2 / 2, gradient x grad(logp): per token that of the reverse KL; never negative, biased as a value.
    `k3`: exp(-x) - 1 + x, never negative, unbiased as a value; its gradient (1 - exp(-x)) grad(logp) is in expectation that of
        the forward KL(reference || policy), close to the reverse one while x is small.

    No gradient flows into `ref_logp`. Where `mask` is 0 the value is 0 and log-probs may hold anything; without
    a mask they must be finite everywhere, or an overflow at an untrained position reaches the gradient as 0 * inf.

    Raises:
        ConfigError: an unknown estimator.
    """
    if estimator not in get_args(KlEstimator):
        raise ConfigError(f"kl_estimator is {estimator!r}; use one of {', '.join(get_args(KlEstimator))}")
    ref_logp = ref_logp.detach()
    if mask is not None:
        logp, ref_logp = torch.where(mask.bool(), logp, 0.0), torch.where(mask.bool(), ref_logp, 0.0)
    difference = logp - ref_logp
    if estimator == "k1":
        value = difference.detach()
        return value + value * (difference - value)
    if estimator == "k2":
        return 0.5 * difference.square()
    return (-difference).exp() - 1.0 + difference
