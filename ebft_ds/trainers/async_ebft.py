"""AsyncEBFTTrainer: the training loop. Synchronous training is the same loop with `max_staleness: 0`.

groups -> scores -> advantages -> micro-batches -> optimizer step (policy version + 1) -> merge check and push

With `num_iterations` above 1 the following steps begin at the micro-batches of the same groups. A run that is saved in between (a stop
signal, the last step) resumes with new groups: what was left of the batch's iterations is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftConfig
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ebft_ds.checkpoint.export import export_final
from ebft_ds.config import AsyncEBFTConfig
from ebft_ds.errors import Preempted
from ebft_ds.features.scorer import Scores
from ebft_ds.monitor.metrics import MetricsAccumulator
from ebft_ds.monitor.summary import EvalResult
from ebft_ds.rewards.functions import RewardFunction
from ebft_ds.sync.push import SyncReport
from ebft_ds.trainers.advantages import log_scores, step_advantages
from ebft_ds.trainers.assembly import RunParts, build_parts
from ebft_ds.trainers.callbacks import TrainerCallback, TrainerControl, TrainerState
from ebft_ds.trainers.inputs import RunInputs, agree, check_ebft, prepare_run
from ebft_ds.trainers.objectives import FurtherObjectives
from ebft_ds.trainers.phases import Phases
from ebft_ds.trainers.policy_step import StepBatch
from ebft_ds.trainers.report import RunReport
from ebft_ds.trainers.step_work import log_scoring_work
from ebft_ds.trainers.stop_signal import StopSignal
from ebft_ds.types import RolloutGroup

logger = logging.getLogger(__name__)


class AsyncEBFTTrainer:
    """Energy-based fine-tuning on ZeRO-3 with rollouts from a separate process. Construct and call it on every rank.

    Args:
        model: folder or hub name, or a loaded model (saved to output_dir/initial_model first, so that every process starts from it).
        args: the configuration; fields given by the other arguments are filled in.
        train_dataset, eval_dataset: path or hub name, or a `datasets.Dataset` or list of rows (`prompt`, `ground_truth`).
        processing_class: tokenizer; default the model's own.
        callbacks: see TrainerCallback.
        optimizers: (optimizer, None): an own optimizer over the model's parameters needs a loaded model; schedules come from `args`.
        peft_config: a LoRA configuration of PEFT; overrides the configuration's peft section.
        reward_funcs: further objectives (see ebft_ds.rewards.functions), beside those that `args` names.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: AsyncEBFTConfig | None = None,
        train_dataset: str | Dataset | list[dict[str, Any]] | None = None,
        eval_dataset: str | Dataset | list[dict[str, Any]] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: Sequence[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, None] = (None, None),
        peft_config: PeftConfig | None = None,
        reward_funcs: RewardFunction | Sequence[RewardFunction] | None = None,
    ) -> None:
        functions = [reward_funcs] if callable(reward_funcs) else list(reward_funcs or [])
        self._inputs = RunInputs(model, train_dataset, eval_dataset, processing_class, peft_config, len(functions))
        self._optimizer = optimizers[0]
        self.callbacks = list(callbacks or [])
        self._reward_functions = functions
        self.args = args or AsyncEBFTConfig()
        self.state = TrainerState()
        self._stop = StopSignal()
        self._parts: RunParts | None = None
        self._open_report: RunReport | None = None
        self._engine_checked = False
        """The rollout engine has been shown to hold the trainer's weights in this process."""
        self._batch: StepBatch | None = None
        """What the last step trained on, for the further ones of `num_iterations`."""
        self._batch_ends = 0
        """First step that takes new groups."""
        self._save_asked = False
        """A callback asked in the middle of a batch; granted at its end."""
        self._feed_state: dict[str, Any] = {}
        """Rank 0: the rollout side as of the last finished step; what an interrupted step took is rolled out again."""

    def train(self) -> TrainerState:
        """The whole run: build, resume, evaluate, train, evaluate, export.

        Raises:
            Preempted: a stop signal came and the run was saved. Other EbftErrors as their classes say.
        """
        if self._parts is not None and not self._report.recording:
            self.close()
        with self._stop:
            parts = self._parts or self._build()
            try:
                self._run(parts)
            except BaseException:
                self.close()
                raise
        return self.state

    def evaluate(self, *, record: bool = True) -> EvalResult | None:
        """Evaluation on the held-out prompts with the current weights (before `train`: the model's own, or the checkpoint's that
        `resume_from_checkpoint` names); None without held-out prompts. Without `record` nothing is written to output_dir's metrics."""
        with self._stop:
            return self._evaluate(self._parts or self._build(record=record))

    def export(self, target: Path) -> Path:
        """Writes the current weights (before `train`: those that `resume_from_checkpoint` names) to `target` in Hugging Face format."""
        with self._stop:
            parts = self._parts or self._build(record=False)
            return self._export(parts, target)

    def close(self) -> None:
        """Ends the rollout process and reward functions' processes, and closes the logs; the interpreter's end does it too."""
        if self._parts is not None:
            parts, self._parts = self._parts, None
            self._objectives.close()
            parts.close()
            if self._open_report is not None:  # not yet where a checkpoint could not be read
                self._open_report.close()
                self._open_report = None

    @property
    def _report(self) -> RunReport:
        assert self._open_report is not None
        return self._open_report

    def _build(self, *, record: bool = True) -> RunParts:
        self.state, self._feed_state, self._engine_checked = TrainerState(), {}, False
        self._batch, self._batch_ends, self._save_asked = None, 0, False
        prepared = prepare_run(self.args, self._inputs, check_ebft, record=record)
        self.args = prepared.config
        self._phases = Phases(self.args.loss, self.args.method)
        self._objectives = agree(prepared.collectives, lambda: FurtherObjectives(self.args, self._reward_functions))
        parts = build_parts(
            prepared.config,
            prepared.checked,
            prepared.collectives,
            self._stop,
            peft_config=self._inputs.peft_config,
            optimizer=self._optimizer,
        )
        self._parts = parts
        self.state.total_steps = parts.derived.steps or self.args.run.max_steps
        before = self._resume(parts)
        self._open_report = RunReport(self.args, parts, self.state, recording=record)
        self._report.restore_before(before)
        return parts

    def _run(self, parts: RunParts) -> None:
        control = TrainerControl()
        self._objectives.start(parts)
        for callback in self.callbacks:
            callback.on_train_begin(self.state, control)
        control.should_stop = bool(parts.collectives.max_int(int(control.should_stop)))
        self._feed_state = parts.desk.state_dict()
        try:
            self._bring_engine_up_to_date(parts)
            if self.args.monitor.eval_at_start and self.state.step == 0:
                self._report.before = self._evaluate(parts)
            while self.state.step < self.state.total_steps and not control.should_stop:
                self._step(parts, control)
            self._finish(parts)
        except Preempted as error:
            if parts.reference_cache is not None:
                parts.reference_cache.rewind()  # what the interrupted step cached; a resume repeats that step
            path = self._save(parts, going_on=False)
            raise Preempted(
                f"{error}; the run is saved at step {self.state.step} in {path}. Continue with resume_from_checkpoint=auto"
            ) from error

    def _step(self, parts: RunParts, control: TrainerControl) -> None:
        """One optimizer step, from groups to the push."""
        step = self.state.step
        metrics, timer = MetricsAccumulator(), self._report.timer
        if self._phases.rolls_out(step):
            self._bring_engine_up_to_date(parts)
            again = self._batch is not None and step < self._batch_ends
            seen = self._train_again(parts, step, metrics) if again else self._train_on_new_groups(parts, step, metrics)
        else:
            seen = self._train_on_references(parts, step, metrics)
        with timer("optim"):
            grad_norm, learning_rate = parts.engines.actor.step(step)
        self.state.step += 1
        self.state.prompts_seen += seen
        with timer("sync"):
            sync = parts.sync.merge_check(self.state.step) if self._phases.rolls_out(step) else SyncReport()
        self._feed_state = parts.desk.state_dict()
        self._mark_cache(parts)
        self._report.step(self.state, metrics, sync, grad_norm, learning_rate, self.callbacks, control)
        self._after_step(parts, control)

    def _train_on_references(self, parts: RunParts, step: int, metrics: MetricsAccumulator) -> int:
        """Returns how many prompts were trained on, as the two below."""
        prompts = parts.desk.references(self._phases.reference_count(step, parts.derived))
        with self._report.timer("policy"):
            parts.policy.on_references(step, prompts, ce_coef=self._phases.coefficients(step).ce, metrics=metrics)
        return len(prompts)

    def _train_on_new_groups(self, parts: RunParts, step: int, metrics: MetricsAccumulator) -> int:
        coefficients, timer = self._phases.coefficients(step), self._report.timer
        self._batch_ends = self._phases.batch_end(step)
        with timer("wait_rollout"):
            groups = parts.desk.next_groups(step, self._batch_ends - step)
        self._call("on_groups", groups)
        with timer("score"):
            scores, advantages = self._score(parts, groups)
        with timer("policy"):
            self._batch = parts.policy.on_groups(
                step, groups, advantages, rl_coef=coefficients.rl, ce_coef=coefficients.ce, metrics=metrics
            )
        self._describe(parts, groups, scores, advantages, metrics)
        return len(groups)

    def _train_again(self, parts: RunParts, step: int, metrics: MetricsAccumulator) -> int:
        coefficients = self._phases.coefficients(step)
        assert self._batch is not None
        parts.desk.reuse(step)
        with self._report.timer("policy"):
            parts.policy.again(step, self._batch, rl_coef=coefficients.rl, ce_coef=coefficients.ce, metrics=metrics)
        return 0

    def _score(self, parts: RunParts, groups: Sequence[RolloutGroup]) -> tuple[Scores, Tensor]:
        weights = parts.policy.sequence_weights(groups) if self.args.method.diversity_importance == "sequence" else None
        scores = parts.scorer.score(groups, weights)
        further = self._objectives.rewards(parts, groups)
        return scores, step_advantages(scores.rewards, further, self.args.loss)

    def _describe(
        self, parts: RunParts, groups: Sequence[RolloutGroup], scores: Scores, advantages: Tensor, metrics: MetricsAccumulator
    ) -> None:
        if parts.collectives.is_main:
            log_scores(scores, metrics)
            log_scoring_work(scores, metrics)
            self._objectives.log(metrics)
        scored = self._report.groups(self.state, groups, scores, advantages, metrics)
        self._call("on_scored", scored)

    def _after_step(self, parts: RunParts, control: TrainerControl) -> None:
        """Evaluation and saving, where the recipe or a callback on any rank asks for them."""
        options, step = self.args, self.state.step
        save, evaluate, stop = parts.collectives.max_ints(
            [int(control.should_save), int(control.should_evaluate), int(control.should_stop)]
        )
        control.should_save, control.should_evaluate, control.should_stop = False, False, bool(stop)
        last = step >= self.state.total_steps
        every = options.monitor.eval_steps
        if evaluate or (every and step % every == 0 and not last):
            self._evaluate(parts)
        every = options.checkpoint.save_steps
        self._save_asked |= bool(save) or bool(every and step % every == 0 and not (last and options.checkpoint.save_at_end))
        if self._save_asked and (step >= self._batch_ends or last or stop):
            self._save(parts)
            self._save_asked = False

    def _bring_engine_up_to_date(self, parts: RunParts) -> None:
        """Before rollouts: the engines must hold the trainer's weights. The first time in this process the probe must agree as well;
        later only an engine that has lost them (a restarted server) gets them again."""
        step = self.state.step
        if self._engine_checked:
            parts.sync.repair(step)
        elif step == 0 or self._phases.rolls_out(step) or step >= self.state.total_steps:
            parts.sync.begin(step)
            self._engine_checked = self._phases.rolls_out(step)

    def _evaluate(self, parts: RunParts) -> EvalResult | None:
        if parts.evaluation is None:
            return None
        parts.sync.merge_check(self.state.step, force=True)
        parts.sync.repair(self.state.step)
        with self._report.timer("eval"):
            result, groups = parts.evaluation.run(self.state.step)
        self._mark_cache(parts)
        self._report.evaluation(self.state, result, groups)
        self._call("on_evaluate", result)
        return result

    def _mark_cache(self, parts: RunParts) -> None:
        """What is cached now belongs to finished work."""
        if parts.reference_cache is not None:
            parts.reference_cache.mark()

    def _save(self, parts: RunParts, *, going_on: bool = True) -> Path:
        if going_on and self.args.rollout.vllm_merge_check_interval > 1:
            # A resumed engine starts from these weights; so must this one go on from them, or the two runs would differ.
            parts.sync.merge_check(self.state.step, force=True)
        meta = {
            "step": self.state.step,
            "prompts_seen": self.state.prompts_seen,
            "rollouts": self._feed_state,
            "stream": parts.stream.state_dict(),
            "before": self._report.before_as_dict(),
        }
        with self._report.timer("save"):
            path = parts.checkpoints.save(parts.engines.actor, self.state.step, meta)
        logger.info("checkpoint %s", path)
        self._call("on_save", path)
        return path

    def _resume(self, parts: RunParts) -> dict[str, Any] | None:
        """Loads the checkpoint that the recipe asks for, if there is one; returns the evaluation from before the run."""
        folder = parts.checkpoints.find(self.args.run.resume_from_checkpoint)
        if folder is None:
            parts.sync.remember_initial()
            return None
        meta = parts.checkpoints.load(parts.engines.actor, folder)
        parts.stream.load_state_dict(meta["stream"])
        parts.desk.load_state_dict(meta["rollouts"])
        self.state.step, self.state.prompts_seen = meta["step"], meta["prompts_seen"]
        logger.info("resumed from %s: step %d of %d", folder, self.state.step, self.state.total_steps)
        before: dict[str, Any] | None = meta["before"]
        return before

    def _finish(self, parts: RunParts) -> None:
        self._call("on_train_end")
        if self.args.checkpoint.save_at_end:
            self._save(parts)  # before anything that only looks at the result
        after = self._evaluate(parts) if self.args.monitor.eval_at_end else None
        if self.args.checkpoint.export_final:
            assert self.args.run.output_dir is not None
            self._export(parts, Path(self.args.run.output_dir) / "final")
        self._report.summary(self.state, after)

    def _export(self, parts: RunParts, target: Path) -> Path:
        return export_final(
            parts.engines.actor.network,
            parts.tokenizer,
            target,
            parts.collectives,
            dtype=getattr(torch, self.args.model.dtype),
            merged=self.args.checkpoint.export_merged,
            generation_config=parts.generation_config,
        )

    def _call(self, hook: str, *values: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self.state, *values)
