"""The forwards and backwards of one optimizer step, in lockstep over ranks.

Every rank holds all sequences of the step, so plan and denominators are computed, not communicated, and the gradient does not
depend on how the step is split. What a rank returns are sums; they are reduced once, with the step's other metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ebft_ds.collectives import Collectives
from ebft_ds.config.sections import LossSection, RolloutSection, RunSection
from ebft_ds.engine.build import ZeroEngine
from ebft_ds.engine.network import LogProbWork
from ebft_ds.monitor.metrics import MetricsAccumulator
from ebft_ds.packing.packer import RowPacker
from ebft_ds.packing.plan import Plan
from ebft_ds.policy.batch import MicroBatch, PolicyPacker, TrainSequence, completion_sequences, reference_sequence
from ebft_ds.policy.denominators import LossDenominators
from ebft_ds.policy.importance import sequence_importance
from ebft_ds.trainers.finite_loss import agree_finite
from ebft_ds.trainers.policy_losses import MicroLogProbs, StepSizes, micro_batch_loss
from ebft_ds.trainers.step_work import log_work
from ebft_ds.types import Prompt, RolloutGroup


@dataclass(frozen=True)
class StepBatch:
    """What one optimizer step trains on, or `num_iterations` of them: the same on every rank, `old_log_probs` apart."""

    sequences: list[TrainSequence]
    sizes: StepSizes
    plan: Plan
    old_log_probs: dict[int, Tensor] = field(default_factory=dict)
    """This rank's micro-batch -> float32 [B, T] at the batch's first step; filled there with `old_logprobs: recompute`."""


class PolicyStep:
    """Accumulates the gradient of one step; the optimizer step itself is the caller's.

    Args:
        actor: the trained engine.
        reference: engine of the KL reference; None: the actor with its adapters off.
        temperature: that the engine samples at.
        check_stop: collective, called before each micro-batch; may raise.
        packer: how rows are cut and laid out; default: padded.
    """

    def __init__(
        self,
        actor: ZeroEngine,
        reference: ZeroEngine | None,
        collectives: Collectives,
        *,
        loss: LossSection,
        rollout: RolloutSection,
        run: RunSection,
        temperature: float,
        check_stop: Callable[[], None],
        packer: PolicyPacker | None = None,
    ) -> None:
        self._actor = actor
        self._reference = reference
        self._collectives = collectives
        self._loss = loss
        self._rollout = rollout
        self._temperature = temperature
        self._check_stop = check_stop
        self._packer = packer or PolicyPacker(RowPacker(), run.per_device_train_batch_size, run.train_token_budget)

    def on_groups(
        self, step: int, groups: Sequence[RolloutGroup], advantages: Tensor, *, rl_coef: float, ce_coef: float, metrics: MetricsAccumulator
    ) -> StepBatch:
        """EBFT step: policy loss on the completions (`advantages` [G, n]), cross-entropy on the references where ce_coef > 0.

        Returns what was trained on, for `again`.
        """
        completions = completion_sequences(groups, advantages, mask_truncated=self._loss.mask_truncated_completions)
        references = [reference_sequence(g, group.prompt) for g, group in enumerate(groups)] if ce_coef > 0 else []
        # A completion without a trained token adds nothing to the gradient; the denominators still count it.
        trained = [s for s in completions if s.trained_tokens]
        if self._loss.skip_zero_advantage_batches and self._loss.beta == 0:
            trained = [s for s in trained if s.advantage != 0.0]
        batch = self._batch(trained, references, self._sizes(completions, references))
        self._run_step(step, batch, rl_coef, ce_coef, metrics)
        return batch

    def again(self, step: int, batch: StepBatch, *, rl_coef: float, ce_coef: float, metrics: MetricsAccumulator) -> None:
        """A further step on a batch of `on_groups` (`num_iterations`), against the log-probs of its first one or the engine's.

        Plan and references stay those of the first step, where `ce_coef` may still have been above 0: old log-probs lie by micro-batch.
        """
        self._run_step(step, batch, rl_coef, ce_coef, metrics)

    def on_references(self, step: int, prompts: Sequence[Prompt], *, ce_coef: float, metrics: MetricsAccumulator) -> None:
        """Warm-start step: cross-entropy on references only."""
        references = [reference_sequence(i, prompt) for i, prompt in enumerate(prompts)]
        self._run_step(step, self._batch([], references, self._sizes([], references)), 0.0, ce_coef, metrics)

    def sequence_weights(self, groups: Sequence[RolloutGroup]) -> Tensor:
        """[G, n] weights min(C, p/q) of whole completions, for `diversity_importance: sequence`. One forward without gradient."""
        sequences = completion_sequences(groups, torch.zeros(len(groups), len(groups[0].rollouts)), mask_truncated=False)
        plan = self._packer.plan(sequences, self._collectives.world_size)
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

    def _batch(self, completions: list[TrainSequence], references: list[TrainSequence], sizes: StepSizes) -> StepBatch:
        """A group's reference is one more sequence behind its prompt, so it is planned beside the completions."""
        sequences = completions + references
        return StepBatch(sequences, sizes, self._packer.plan(sequences, self._collectives.world_size))

    def _build(self, sequences: Sequence[TrainSequence]) -> MicroBatch:
        return self._packer.build(sequences, temperature=self._temperature, device=self._actor.device)

    def _run_step(self, step: int, batch: StepBatch, rl_coef: float, ce_coef: float, metrics: MetricsAccumulator) -> None:
        shares = batch.plan.ranks[self._collectives.rank]
        for number, indices in enumerate(shares):
            self._check_stop()
            sequences = [batch.sequences[i] for i in indices]
            micro = self._build(sequences)
            log_probs = self._log_probs(micro, batch.old_log_probs.get(number), rl_coef)
            if self._loss.old_logprobs == "recompute" and number not in batch.old_log_probs:
                # The weights have not moved since the batch began: its first forward has them, and no other one is needed.
                batch.old_log_probs[number] = log_probs.current.detach()
            loss = micro_batch_loss(micro, log_probs, batch.sizes, self._loss, rl_coef=rl_coef, ce_coef=ce_coef, metrics=metrics)
            self._agree_finite(step, number, loss, sequences)
            self._actor.backward(loss, last=number == len(shares) - 1)
            metrics.sum("loss", float(loss.detach()))
            if sequences:
                log_work(micro, metrics)

    def _log_probs(self, micro: MicroBatch, old: Tensor | None, rl_coef: float) -> MicroLogProbs:
        """Collective forwards: every rank runs them for every micro-batch, a dummy included."""
        flat, entropy = self._actor.log_probs(replace(_work(micro), entropy=self._loss.log_entropy and rl_coef > 0))
        reference = self._reference_log_probs(micro) if self._loss.beta > 0 and rl_coef > 0 else None
        return MicroLogProbs(micro.scatter(flat), old, reference, None if entropy is None else micro.scatter(entropy))

    def _reference_log_probs(self, batch: MicroBatch) -> Tensor:
        engine = self._reference or self._actor
        flat, _ = engine.frozen_log_probs(replace(_work(batch), use_adapters=False))
        return batch.scatter(flat)

    def _agree_finite(self, step: int, number: int, loss: Tensor, sequences: Sequence[TrainSequence]) -> None:
        """Raises on every rank if any rank's loss is not finite, before a rank starts the collective backward."""
        lengths, advantages = [s.length for s in sequences], [round(s.advantage, 4) for s in sequences]
        where = f"step {step}, rank {self._collectives.rank}, micro-batch {number}"
        agree_finite(loss, self._collectives, where, f"sequence lengths {lengths}, advantages {advantages}")


def _work(batch: MicroBatch) -> LogProbWork:
    return LogProbWork(batch.rows, batch.positions, batch.targets, batch.inverse_temperature)
