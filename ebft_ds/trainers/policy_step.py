"""The forwards and backwards of one optimizer step, in lockstep over ranks.

Every rank holds all sequences of the step, so plan and denominators are computed, not communicated, and the gradient does not
depend on how the step is split. What a rank returns are sums; they are reduced once, with the step's other metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ebft_ds.collectives import Collectives
from ebft_ds.config.sections import LossSection, MethodSection, RolloutSection, RunSection
from ebft_ds.engine.build import ZeroEngine
from ebft_ds.engine.network import LogProbWork
from ebft_ds.errors import NumericsError, PeerError
from ebft_ds.monitor.metrics import Metric, MetricsAccumulator
from ebft_ds.packing.packer import RowPacker
from ebft_ds.packing.plan import Plan
from ebft_ds.policy.batch import MicroBatch, TrainSequence, build_micro_batch, completion_sequences, reference_sequence
from ebft_ds.policy.denominators import LossDenominators
from ebft_ds.policy.importance import importance_weights, sequence_importance
from ebft_ds.policy.kl import per_token_kl
from ebft_ds.policy.losses import policy_loss, reference_cross_entropy
from ebft_ds.types import Prompt, RolloutGroup


@dataclass(frozen=True)
class StepSizes:
    """Global counts that the step's losses are divided by."""

    completions: LossDenominators
    reference_tokens: int


class PolicyStep:
    """Accumulates the gradient of one step; the optimizer step itself is the caller's.

    Args:
        actor: the trained engine.
        reference: engine of the KL reference; None: the actor with its adapters off.
        temperature: that the engine samples at.
        check_stop: collective, called before each micro-batch; may raise.
        packer: how rows are laid out; default: padded.
    """

    def __init__(
        self,
        actor: ZeroEngine,
        reference: ZeroEngine | None,
        collectives: Collectives,
        *,
        loss: LossSection,
        method: MethodSection,
        rollout: RolloutSection,
        run: RunSection,
        temperature: float,
        check_stop: Callable[[], None],
        packer: RowPacker | None = None,
    ) -> None:
        self._actor = actor
        self._reference = reference
        self._collectives = collectives
        self._loss = loss
        self._method = method
        self._rollout = rollout
        self._run = run
        self._temperature = temperature
        self._check_stop = check_stop
        self._packer = packer or RowPacker()

    def on_groups(
        self, step: int, groups: Sequence[RolloutGroup], advantages: Tensor, *, rl_coef: float, ce_coef: float, metrics: MetricsAccumulator
    ) -> None:
        """EBFT step: policy loss on the completions (`advantages` [G, n]), cross-entropy on the references where ce_coef > 0."""
        completions = completion_sequences(groups, advantages, mask_truncated=self._loss.mask_truncated_completions)
        references = [reference_sequence(g, group.prompt) for g, group in enumerate(groups)] if ce_coef > 0 else []
        trained = completions
        if self._loss.skip_zero_advantage_batches and self._loss.beta == 0:
            # They add nothing to the gradient; the denominators below still count them.
            trained = [s for s in completions if s.advantage != 0.0]
        self._run_step(step, trained, references, self._sizes(completions, references), rl_coef, ce_coef, metrics)

    def on_references(self, step: int, prompts: Sequence[Prompt], *, ce_coef: float, metrics: MetricsAccumulator) -> None:
        """Warm-start step: cross-entropy on references only."""
        references = [reference_sequence(i, prompt) for i, prompt in enumerate(prompts)]
        self._run_step(step, [], references, self._sizes([], references), 0.0, ce_coef, metrics)

    def sequence_weights(self, groups: Sequence[RolloutGroup]) -> Tensor:
        """[G, n] weights min(C, p/q) of whole completions, for `diversity_importance: sequence`. One forward without gradient."""
        sequences = completion_sequences(groups, torch.zeros(len(groups), len(groups[0].rollouts)), mask_truncated=False)
        plan = self._plan(sequences)
        found: dict[int, float] = {}
        for indices in plan.ranks[self._collectives.rank]:
            batch = self._build([sequences[i] for i in indices])
            log_probs, _ = self._actor.frozen_log_probs(_work(batch))
            weights = sequence_importance(
                batch.scatter(log_probs), batch.sampling_logp, batch.mask, cap=self._loss.vllm_importance_sampling_cap
            )
            found |= dict(zip(indices, weights.tolist(), strict=False))
        shares = self._collectives.all_gather({str(i): weight for i, weight in found.items()})
        merged: dict[int, float] = {int(i): weight for share in shares for i, weight in share.items()}
        table = torch.ones(len(groups), len(groups[0].rollouts))
        filled = [(g, j) for g, group in enumerate(groups) for j, rollout in enumerate(group.rollouts) if rollout.token_ids]
        for i, place in enumerate(filled):
            table[place] = merged[i]
        return table

    def _sizes(self, completions: Sequence[TrainSequence], references: Sequence[TrainSequence]) -> StepSizes:
        counted = [s.trained_tokens for s in completions]
        sizes = LossDenominators(
            tokens=sum(counted),
            sequences=sum(count > 0 for count in counted),
            rows=len(completions),
            max_completion_length=self._rollout.max_completion_length,
        )
        return StepSizes(sizes, sum(s.trained_tokens for s in references))

    def _plan(self, sequences: Sequence[TrainSequence]) -> Plan:
        return self._packer.plan(sequences, self._collectives.world_size, max_sequences=self._run.per_device_train_batch_size)

    def _build(self, sequences: Sequence[TrainSequence]) -> MicroBatch:
        return build_micro_batch(sequences, temperature=self._temperature, packer=self._packer, device=self._actor.device)

    def _run_step(
        self,
        step: int,
        completions: list[TrainSequence],
        references: list[TrainSequence],
        sizes: StepSizes,
        rl_coef: float,
        ce_coef: float,
        metrics: MetricsAccumulator,
    ) -> None:
        sequences = completions + references
        batches = self._plan(sequences).ranks[self._collectives.rank]
        for number, indices in enumerate(batches):
            self._check_stop()
            batch = self._build([sequences[i] for i in indices])
            loss = self._micro_loss(batch, sizes, rl_coef, ce_coef, metrics)
            self._agree_finite(step, number, loss, [sequences[i] for i in indices])
            self._actor.backward(loss, last=number == len(batches) - 1)
            metrics.sum("loss", float(loss.detach()))
            if indices:
                padded = batch.rows.input_ids.numel()
                metrics.add("perf/padding_ratio", Metric.ratio(padded - batch.rows.real_tokens, padded))
                metrics.sum("perf/trained_tokens", batch.rows.real_tokens)

    def _micro_loss(self, batch: MicroBatch, sizes: StepSizes, rl_coef: float, ce_coef: float, metrics: MetricsAccumulator) -> Tensor:
        """This micro-batch's share of rl_coef * policy loss + ce_coef * cross-entropy."""
        flat, entropy = self._actor.log_probs(_work(batch))
        log_probs = batch.scatter(flat)
        reference_log_probs = self._reference_log_probs(batch) if self._loss.beta > 0 and rl_coef > 0 else None
        is_completion = batch.mask & ~batch.is_reference[:, None]
        is_reference = batch.mask & batch.is_reference[:, None]
        # Adding 0 * sum keeps every parameter in the graph of a dummy batch: ZeRO-3 reduces gradients on all ranks together.
        total = flat.sum() * 0.0
        if bool(is_completion.any()):
            total = total + rl_coef * self._policy_share(batch, log_probs, reference_log_probs, is_completion, sizes, metrics)
            if self._loss.log_entropy:
                spread = batch.scatter(entropy)[is_completion]
                metrics.mean("entropy", float(spread.mean()), spread.numel())
        if bool(is_reference.any()):
            cross_entropy = reference_cross_entropy(log_probs, is_reference, sizes.reference_tokens)
            metrics.sum("ce_loss", float(cross_entropy.detach()))
            total = total + ce_coef * cross_entropy
        return total

    def _policy_share(
        self,
        batch: MicroBatch,
        log_probs: Tensor,
        reference_log_probs: Tensor | None,
        mask: Tensor,
        sizes: StepSizes,
        metrics: MetricsAccumulator,
    ) -> Tensor:
        options = self._loss
        current = log_probs.detach()
        old = batch.sampling_logp if options.old_logprobs == "engine" else current
        weights = None
        if options.old_logprobs == "current":
            weights = importance_weights(
                old, batch.sampling_logp, mask, mode=options.vllm_importance_sampling_mode, cap=options.vllm_importance_sampling_cap
            )
        penalty = None
        if reference_log_probs is not None:
            kl = per_token_kl(log_probs, reference_log_probs, options.kl_estimator, mask=mask)
            metrics.mean("kl", float(kl.detach()[mask].mean()), int(mask.sum()))
            penalty = options.beta * kl
        result = policy_loss(
            log_probs,
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
        self._log_ratios(current, batch.sampling_logp, mask, metrics)
        metrics.add("clip_ratio/low", Metric.ratio(int(result.clip_low_count), int(result.token_count)))
        metrics.add("clip_ratio/high", Metric.ratio(int(result.clip_high_count), int(result.token_count)))
        return result.loss

    def _reference_log_probs(self, batch: MicroBatch) -> Tensor:
        """A collective forward: every rank runs it for every micro-batch, a dummy included."""
        engine = self._reference or self._actor
        flat, _ = engine.frozen_log_probs(replace(_work(batch), use_adapters=False))
        return batch.scatter(flat)

    def _log_ratios(self, current: Tensor, sampling: Tensor, mask: Tensor, metrics: MetricsAccumulator) -> None:
        difference = (current - sampling)[mask]
        ratio = difference.exp()
        metrics.min("sampling/importance_sampling_ratio/min", float(ratio.min()))
        metrics.mean("sampling/importance_sampling_ratio/mean", float(ratio.mean()), ratio.numel())
        metrics.max("sampling/importance_sampling_ratio/max", float(ratio.max()))
        metrics.mean("sampling/sampling_logp_difference/mean", float(difference.abs().mean()), difference.numel())
        metrics.max("sampling/sampling_logp_difference/max", float(difference.abs().max()))

    def _agree_finite(self, step: int, number: int, loss: Tensor, sequences: Sequence[TrainSequence]) -> None:
        """Raises on every rank if any rank's loss is not finite, before a rank starts the collective backward."""
        finite = bool(torch.isfinite(loss))
        broken = self._collectives.max_int(0 if finite else self._collectives.rank + 1)
        if not finite:
            raise NumericsError(
                f"step {step}, rank {self._collectives.rank}, micro-batch {number}: the loss is {float(loss)} (sequence lengths "
                f"{[s.length for s in sequences]}, advantages {[round(s.advantage, 4) for s in sequences]}). Nothing of this step was "
                "applied and earlier checkpoints are unharmed. Lower the learning rate, or look at this step's prompts"
            )
        if broken:
            raise PeerError(f"step {step}: the loss of rank {broken - 1} is not finite; its message has the details")


def _work(batch: MicroBatch) -> LogProbWork:
    return LogProbWork(batch.rows, batch.positions, batch.targets, batch.inverse_temperature)
