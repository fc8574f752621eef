"""Evaluation on held-out prompts: sampled completions against references, and the references' own cross-entropy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from ebft_ds.collectives import Collectives
from ebft_ds.engine.build import ZeroEngine
from ebft_ds.engine.network import LogProbWork
from ebft_ds.errors import DataError
from ebft_ds.features.scorer import EBFTScorer, Scores
from ebft_ds.monitor.summary import EvalResult
from ebft_ds.monitor.text_metrics import char_ngram_f
from ebft_ds.policy.batch import PolicyPacker, reference_sequence
from ebft_ds.trainers.rollout_desk import RolloutDesk
from ebft_ds.types import Prompt, RolloutGroup, RolloutRequest


class HeldOutEvaluation:
    """Collective. The same prompts and the same sampling seeds every time, so that before and after differ by the policy alone.

    Args:
        scorer: the trained pooling, without whitening.
        other_scorer: the same with another pooling: a loss that training does not push on directly.
        packer: how the references' rows are cut and laid out.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        make_request: Callable[[Prompt], RolloutRequest],
        scorer: EBFTScorer,
        other_scorer: EBFTScorer,
        actor: ZeroEngine,
        desk: RolloutDesk,
        tokenizer: PreTrainedTokenizerBase,
        collectives: Collectives,
        *,
        packer: PolicyPacker,
    ) -> None:
        self.prompts = list(prompts)
        self._make_request = make_request
        self._scorer = scorer
        self._other = other_scorer
        self._actor = actor
        self._desk = desk
        self._tokenizer = tokenizer
        self._collectives = collectives
        self._packer = packer

    def run(self, version: int) -> tuple[EvalResult, list[RolloutGroup]]:
        """The numbers and the completions they were measured on. `version`: the trainer's, which the engines hold."""
        groups = self._desk.roll_out([self._make_request(prompt) for prompt in self.prompts], version)
        trained, other = self._scorer.score(groups), self._other.score(groups)
        if not bool(trained.rewards.mask.any()):
            raise DataError("evaluation: no completion holds a token; check stop_token_ids")
        return self._result(groups, trained, other, self.reference_cross_entropy()), groups

    def reference_cross_entropy(self) -> float:
        """Nats per token of the held-out references under the actor."""
        sequences = [reference_sequence(i, prompt) for i, prompt in enumerate(self.prompts)]
        plan = self._packer.plan(sequences, self._collectives.world_size)
        total, tokens = 0.0, 0
        for indices in plan.ranks[self._collectives.rank]:
            batch = self._packer.build([sequences[i] for i in indices], temperature=1.0, device=self._actor.device)
            work = LogProbWork(batch.rows, batch.positions, batch.targets, batch.inverse_temperature)
            log_probs, _ = self._actor.frozen_log_probs(work)
            if indices:
                total -= float(log_probs.double().sum())
                tokens += log_probs.numel()
        total, count = self._collectives.sum_floats([total, float(tokens)])
        return total / count

    def _result(self, groups: Sequence[RolloutGroup], trained: Scores, other: Scores, cross_entropy: float) -> EvalResult:
        mask = trained.rewards.mask
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        references = [group.prompt.reference_ids for group in groups]
        overlaps = [
            char_ngram_f(self._text(rollout.token_ids), self._text(group.prompt.reference_ids))
            for group in groups
            for rollout in group.rollouts
        ]
        distinct = [len({tuple(r.token_ids) for r in group.rollouts}) / len(group.rollouts) for group in groups]
        return EvalResult(
            alignment=float(trained.rewards.alignment[mask].mean()),
            diversity=float(trained.rewards.diversity[mask].mean()),
            cfm_loss=_finite_mean(trained.rewards.cfm_loss),
            fm_loss_unbiased=_finite_mean(trained.rewards.fm_loss_unbiased),
            pooling=self._scorer.embed_method,
            cfm_loss_other=_finite_mean(other.rewards.cfm_loss),
            fm_loss_unbiased_other=_finite_mean(other.rewards.fm_loss_unbiased),
            other_pooling=self._other.embed_method,
            reference_ce=cross_entropy,
            char_ngram_f=sum(overlaps) / len(overlaps),
            mean_length=sum(len(r.token_ids) for r in rollouts) / len(rollouts),
            reference_mean_length=sum(len(ids) for ids in references) / len(references),
            ended_share=sum(r.finish_reason == "stop" for r in rollouts) / len(rollouts),
            distinct_share=sum(distinct) / len(distinct),
            prompts=len(groups),
            completions=len(rollouts),
        )

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


def _finite_mean(values: torch.Tensor) -> float:
    """Mean over groups that have a value; NaN if none has one."""
    known = values[~values.isnan()]
    return float(known.mean()) if known.numel() else float("nan")
