"""Weights for the mismatch between the policy that sampled and the policy that is trained (METHOD section 4)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ebft_ds.errors import ConfigError

ImportanceMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "none"]


def importance_weights(
    logp: Float[Tensor, "b t"],
    sampling_logp: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"] | Float[Tensor, "b t"],
    *,
    mode: ImportanceMode | str = "token_truncate",
    cap: float = 3.0,
) -> Float[Tensor, "b t"]:
    """w = exp(logp - sampling_logp), bounded by `cap`, without gradient.

    `token_*` take each token's ratio, `sequence_*` the product over the sequence's tokens, the same at each of them. `*_truncate` clamps
    above at `cap`; `*_mask` gives 0 where the ratio is above `cap` (a ratio below 1 is never cut: it already weighs little). `none`: 1.

    Args:
        logp: log-probs of the trained policy (`old_logp`); `sampling_logp`: of the engine, processed by temperature and filters.
        mask: nonzero at trained tokens. Elsewhere w is 0, and log-probs may hold anything.
        cap: C > 0 (`vllm_importance_sampling_cap`).

    Raises:
        ConfigError: unknown mode or cap <= 0.
    """
    if mode not in get_args(ImportanceMode):
        raise ConfigError(f"vllm_importance_sampling_mode is {mode!r}; use one of {', '.join(get_args(ImportanceMode))}")
    if not cap > 0.0:
        raise ConfigError(f"vllm_importance_sampling_cap is {cap}; it must be positive")
    trained = mask.bool()
    if mode == "none":
        return trained.to(logp.dtype)
    log_ratio = _log_ratio(logp, sampling_logp, trained)
    if mode in ("sequence_truncate", "sequence_mask"):
        log_ratio = log_ratio.sum(dim=1, keepdim=True)
    ratio = log_ratio.exp()
    bounded = ratio.clamp(max=cap) if mode in ("token_truncate", "sequence_truncate") else ratio.masked_fill(ratio > cap, 0.0)
    return bounded.expand_as(logp).masked_fill(~trained, 0.0)


def sequence_importance(
    logp: Float[Tensor, "b t"],
    sampling_logp: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"] | Float[Tensor, "b t"],
    *,
    cap: float = 3.0,
) -> Float[Tensor, " b"]:
    """min(cap, product of token ratios) per sequence, without gradient: `completion_weights` for `diversity_importance: sequence`.

    1 for a sequence without trained tokens. Restores the exact gradient off-policy only while no weight reaches the cap.
    """
    if not cap > 0.0:
        raise ConfigError(f"vllm_importance_sampling_cap is {cap}; it must be positive")
    return _log_ratio(logp, sampling_logp, mask.bool()).sum(dim=1).exp().clamp(max=cap)


def _log_ratio(logp: Tensor, sampling_logp: Tensor, trained: Tensor) -> Float[Tensor, "b t"]:
    return torch.where(trained, logp.detach() - sampling_logp.detach(), 0.0)
