"""One micro-batch's share of a step's loss, from its log-probs. What it logs are sums, reduced over ranks with the step's metrics."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ebft_ds.config.sections import LossSection
from ebft_ds.monitor.metrics import Metric, MetricsAccumulator
from ebft_ds.policy.batch import MicroBatch
from ebft_ds.policy.denominators import LossDenominators
from ebft_ds.policy.importance import importance_weights
from ebft_ds.policy.kl import per_token_kl
from ebft_ds.policy.losses import policy_loss, reference_cross_entropy


@dataclass(frozen=True)
class StepSizes:
    """Global counts that the step's losses are divided by."""

    completions: LossDenominators
    reference_tokens: int


@dataclass(frozen=True)
class MicroLogProbs:
    """Log-probs of a micro-batch's wanted tokens, float32 [B, T]."""

    current: Tensor
    """Of the trained policy, with gradient."""
    old: Tensor | None
    """Of the policy at the start of the batch; None: `current` without its gradient."""
    reference: Tensor | None
    """Of the KL reference; None: no KL term."""
    entropy: Tensor | None
    """Of the trained policy, without gradient; None: not asked for."""


def micro_batch_loss(
    batch: MicroBatch,
    log_probs: MicroLogProbs,
    sizes: StepSizes,
    options: LossSection,
    *,
    rl_coef: float,
    ce_coef: float,
    metrics: MetricsAccumulator,
) -> Tensor:
    """rl_coef * policy loss + ce_coef * cross-entropy; 0 where the micro-batch has neither."""
    is_completion = batch.mask & ~batch.is_reference[:, None]
    is_reference = batch.mask & batch.is_reference[:, None]
    # Adding 0 * sum keeps every parameter in the graph of a dummy batch: ZeRO-3 reduces gradients on all ranks together.
    total = log_probs.current.sum() * 0.0
    if bool(is_completion.any()):
        total = total + rl_coef * _policy_share(batch, log_probs, is_completion, sizes, options, metrics)
        if log_probs.entropy is not None:
            spread = log_probs.entropy[is_completion]
            metrics.mean("entropy", float(spread.mean()), spread.numel())
    if bool(is_reference.any()):
        cross_entropy = reference_cross_entropy(log_probs.current, is_reference, sizes.reference_tokens)
        metrics.sum("ce_loss", float(cross_entropy.detach()))
        total = total + ce_coef * cross_entropy
    return total


def _policy_share(
    batch: MicroBatch, log_probs: MicroLogProbs, mask: Tensor, sizes: StepSizes, options: LossSection, metrics: MetricsAccumulator
) -> Tensor:
    current = log_probs.current.detach()
    if options.old_logprobs == "engine":
        old, weights = batch.sampling_logp, None
    else:
        old = current if log_probs.old is None else log_probs.old
        weights = importance_weights(
            old, batch.sampling_logp, mask, mode=options.vllm_importance_sampling_mode, cap=options.vllm_importance_sampling_cap
        )
    penalty = None
    if log_probs.reference is not None:
        kl = per_token_kl(log_probs.current, log_probs.reference, options.kl_estimator, mask=mask)
        metrics.mean("kl", float(kl.detach()[mask].mean()), int(mask.sum()))
        penalty = options.beta * kl
    result = policy_loss(
        log_probs.current,
        old,
        batch.advantages,
        mask,
        loss_type=options.loss_type,
        denominators=sizes.completions,
        epsilon_low=options.epsilon_low,
        epsilon_high=options.epsilon_high,
        weights=weights,
        per_token_penalty=penalty,
    )
    _log_ratios(((current if log_probs.old is None else log_probs.old) - batch.sampling_logp)[mask], metrics)
    metrics.add("clip_ratio/low", Metric.ratio(int(result.clip_low_count), int(result.token_count)))
    metrics.add("clip_ratio/high", Metric.ratio(int(result.clip_high_count), int(result.token_count)))
    return result.loss


def _log_ratios(difference: Tensor, metrics: MetricsAccumulator) -> None:
    """`difference`: trainer - engine, at the trained tokens, the trainer as of the start of the batch where that is known."""
    ratio = difference.exp()
    metrics.min("sampling/importance_sampling_ratio/min", float(ratio.min()))
    metrics.mean("sampling/importance_sampling_ratio/mean", float(ratio.mean()), ratio.numel())
    metrics.max("sampling/importance_sampling_ratio/max", float(ratio.max()))
    metrics.mean("sampling/sampling_logp_difference/mean", float(difference.abs().mean()), difference.numel())
    metrics.max("sampling/sampling_logp_difference/max", float(difference.abs().max()))
