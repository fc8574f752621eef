"""RewardTrainer: a reward model from preferences.

rows -> encoded groups -> micro-batches -> optimizer step
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch.distributed as dist
from peft import PeftConfig
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ebft_ds.config import RewardConfig
from ebft_ds.data.preference import (
    CollectFunction,
    EncodedResponses,
    EncodingCounts,
    PreferenceFields,
    PreferenceSource,
    RewardCollator,
    RewardEncoding,
    grain_collect_function,
    tfds_collect_function,
)
from ebft_ds.data.preflight import load_checked_tokenizer, load_model_facts
from ebft_ds.engine.build import accelerator_count
from ebft_ds.errors import ConfigError, Preempted
from ebft_ds.monitor.metrics import MetricsAccumulator
from ebft_ds.rewards.preference_results import PreferenceResults
from ebft_ds.trainers.callbacks import TrainerCallback, TrainerControl, TrainerState
from ebft_ds.trainers.inputs import agree, prepare_run
from ebft_ds.trainers.reward_evaluation import RewardEvaluation, RewardScale
from ebft_ds.trainers.reward_export import export_reward_model
from ebft_ds.trainers.reward_inputs import DataCollator, RewardChecked, RewardInputs, check_reward_run
from ebft_ds.trainers.reward_parts import RewardParts, build_reward_parts
from ebft_ds.trainers.reward_report import RewardReport
from ebft_ds.trainers.stop_signal import StopSignal

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RewardStepFunctions:
    """Both are collective: every rank passes the same rows. Compiled with `torch_compile: true`, equal in results."""

    train_step: Callable[[Sequence[EncodedResponses]], dict[str, float | None]]
    """One optimizer step; returns its metrics over all ranks (`loss`, `reward/*`, `grad_norm`, `learning_rate`, `perf/*`, ...)."""
    eval_step: Callable[[Sequence[EncodedResponses]], list[list[float]]]
    """Raw rewards of each row, best response first, without gradient."""


class RewardTrainer:
    """Trains a sequence classifier with one label on preferences, on ZeRO-3. Construct and call it on every rank.

    Args:
        model: folder or hub name of a causal model or a reward model, or a loaded one (saved to output_dir/initial_model first).
        args, arguments: the configuration (give one of them); fields given by the other arguments are filled in.
        processing_class: tokenizer; default the model's own.
        train_dataset: path or hub name, `datasets.Dataset` or `IterableDataset`, or list of rows.
        eval_dataset: the same, or a dictionary of named sets.
        data_collator: own function from raw rows to the arrays that RewardCollator gives; default: the recipe's encoding.
        callbacks: see TrainerCallback.
        optimizers: (optimizer, None): an own optimizer over the model's parameters needs a loaded model; schedules come from `args`.
        peft_config: an adapter of PEFT; overrides the configuration's peft section. The head is always trained and saved with it.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: RewardConfig | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        train_dataset: PreferenceSource | None = None,
        eval_dataset: PreferenceSource | dict[str, PreferenceSource] | None = None,
        data_collator: DataCollator | None = None,
        callbacks: Sequence[TrainerCallback] | None = None,
        optimizers: tuple[Optimizer | None, None] = (None, None),
        peft_config: PeftConfig | None = None,
        *,
        arguments: RewardConfig | None = None,
    ) -> None:
        if args is not None and arguments is not None:
            raise ConfigError("args and arguments are two names of one thing: give one of them")
        self.args = args or arguments or RewardConfig()
        self._inputs = _inputs(model, train_dataset, eval_dataset, processing_class, peft_config, data_collator)
        self._optimizer = optimizers[0]
        self.callbacks = list(callbacks or [])
        self.state = TrainerState()
        self._stop = StopSignal()
        self._parts: RewardParts | None = None
        self._open_report: RewardReport | None = None
        self._feed_state: dict[str, Any] = {}
        """Rank 0: the rows as of the last finished step; those that an interrupted step took come again."""
        self._counts_before = EncodingCounts()
        """Of the rows that a resumed run had read before."""
        self._scale: tuple[int, RewardScale] | None = None
        """Rewards on held-out rows, and the step that they were measured at."""

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

    def evaluate(self, *, record: bool = True) -> dict[str, PreferenceResults]:
        """Results on the held-out rows by the name of the set ("" for a single one), with the current weights (before `train`: the
        model's own, or the checkpoint's that `resume_from_checkpoint` names); empty without held-out rows. Without `record` nothing is
        written to output_dir's metrics."""
        with self._stop:
            found = self._evaluate(self._parts or self._build(record=record))
            return found.results() if found is not None else {}

    def export(self, target: Path) -> Path:
        """Writes the current weights (before `train`: those that `resume_from_checkpoint` names) to `target` in Hugging Face format."""
        with self._stop:
            return self._export(self._parts or self._build(record=False), target)

    def configure_functions(self) -> RewardStepFunctions:
        """The step functions that `train` uses, on the engine that it uses."""
        parts = self._parts or self._build()
        return RewardStepFunctions(lambda rows: self._train_step(parts, rows), parts.held_out.score)

    @property
    def data_collator(self) -> DataCollator:
        """The one given, or a RewardCollator with this trainer's tokenizer and recipe, for own DataLoaders. (Without one given, `train`
        packs its rows and pads nothing.)"""
        if self._inputs.data_collator is not None:
            return self._inputs.data_collator
        return RewardCollator(self._tokenizer(), remove_unused_columns=self.args.reward.remove_unused_columns, **self._collecting())

    def create_grain_collect_function(
        self, max_sequence_length: int, truncation_mode: Literal["keep_end", "keep_start"] = "keep_end"
    ) -> CollectFunction:
        """For Grain: preference rows to arrays of `max_sequence_length` (rounded up to `pad_to_multiple_of`), with this trainer's
        tokenizer, columns and encoding."""
        return grain_collect_function(self._tokenizer(), max_sequence_length, truncation_mode, **self._collecting())

    def create_tfds_collect_function(
        self, max_sequence_length: int, truncation_mode: Literal["keep_end", "keep_start"] = "keep_end"
    ) -> CollectFunction:
        """For rows as `tfds.as_numpy` yields them; otherwise as `create_grain_collect_function`."""
        return tfds_collect_function(self._tokenizer(), max_sequence_length, truncation_mode, **self._collecting())

    def close(self) -> None:
        """Closes the logs; the interpreter's end does it too."""
        self._parts = None
        if self._open_report is not None:  # not yet where a checkpoint could not be read
            self._open_report.close()
            self._open_report = None

    @property
    def _report(self) -> RewardReport:
        assert self._open_report is not None
        return self._open_report

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        if self._inputs.tokenizer is not None:
            return self._inputs.tokenizer
        if not isinstance(self._inputs.model, str):
            raise ConfigError("processing_class is not set: a model given as an object needs its tokenizer beside it")
        config = self.args.replace(model_name_or_path=self._inputs.model)
        return load_checked_tokenizer(config, load_model_facts(config))

    def _collecting(self) -> dict[str, Any]:
        return {
            "encoding": RewardEncoding.of(self.args.reward, self.args.data),
            "fields": PreferenceFields.of(self.args.reward, self.args.data),
            "pad_to_multiple_of": self.args.reward.pad_to_multiple_of,
        }

    def _build(self, *, record: bool = True) -> RewardParts:
        self.state, self._feed_state, self._scale = TrainerState(), {}, None
        self._counts_before = EncodingCounts()
        prepared = prepare_run(self.args, self._inputs, self._check, record=record)
        self.args = prepared.config
        parts = build_reward_parts(
            prepared.config, prepared.checked, self._inputs, prepared.collectives, self._stop, optimizer=self._optimizer
        )
        self._parts = parts
        self.state.total_steps = parts.derived.steps or self.args.run.max_steps
        before = self._resume(parts)
        self._open_report = RewardReport(self.args, parts, self.state, recording=record)
        self._report.restore_before(before)
        self._feed_state = parts.feed.state_dict()
        return parts

    def _check(self, config: RewardConfig, inputs: object, world_size: int) -> RewardChecked:
        return check_reward_run(
            config, self._inputs, world_size, accelerators=accelerator_count(), reads=not dist.is_initialized() or dist.get_rank() == 0
        )

    def _run(self, parts: RewardParts) -> None:
        control = TrainerControl()
        for callback in self.callbacks:
            callback.on_train_begin(self.state, control)
        control.should_stop = bool(parts.collectives.max_int(int(control.should_stop)))
        functions = self.configure_functions()
        try:
            parts.check_stop()
            if self.args.monitor.eval_at_start and self.state.step == 0:
                found = self._evaluate(parts)
                self._report.before = found.accuracies() if found is not None else {}
            while self.state.step < self.state.total_steps and not control.should_stop:
                rows = parts.feed.next_rows(parts.derived.global_batch)
                metrics = functions.train_step(rows)
                self._report.step(self.state, metrics, parts.feed.epoch, self.callbacks, control)
                self._after_step(parts, control)
            self._finish(parts)
        except Preempted as error:
            path = self._save(parts)
            raise Preempted(
                f"{error}; the run is saved at step {self.state.step} in {path}. Continue with resume_from_checkpoint=auto"
            ) from error

    def _train_step(self, parts: RewardParts, rows: Sequence[EncodedResponses]) -> dict[str, float | None]:
        """One optimizer step, which moves `state` and the position in the rows on."""
        metrics, timer, step = MetricsAccumulator(), self._report.timer, self.state.step
        with timer("policy"):
            parts.step.accumulate(step, rows, metrics)
        with timer("optim"):
            grad_norm, learning_rate = parts.reward.engine.step(step)
        self.state.step += 1
        self.state.prompts_seen += len(rows)
        self._feed_state = parts.feed.state_dict()
        return self._report.reduce(metrics) | {"grad_norm": grad_norm, "learning_rate": learning_rate}

    def _after_step(self, parts: RewardParts, control: TrainerControl) -> None:
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
        if save or (every and step % every == 0 and not (last and options.checkpoint.save_at_end)):
            self._save(parts)

    def _evaluate(self, parts: RewardParts) -> RewardEvaluation | None:
        if not parts.held_out.sets:
            return None
        with self._report.timer("eval"):
            found = parts.held_out.run()
        self._scale = (self.state.step, found.scale)
        self._report.evaluation(self.state, found)
        for callback in self.callbacks:
            callback.on_evaluate(self.state, found.results())
        return found

    def _save(self, parts: RewardParts) -> Path:
        meta = {
            "step": self.state.step,
            "rows_seen": self.state.prompts_seen,
            "feed": self._feed_state,
            "before": self._report.before,
            "counts": msgspec.to_builtins(self._row_counts(parts)),
        }
        with self._report.timer("save"):
            path = parts.checkpoints.save(parts.reward.engine, self.state.step, meta)
        logger.info("checkpoint %s", path)
        for callback in self.callbacks:
            callback.on_save(self.state, path)
        return path

    def _resume(self, parts: RewardParts) -> Mapping[str, Any]:
        """Loads the checkpoint that the recipe asks for, if there is one; returns the accuracies from before the run."""
        folder = parts.checkpoints.find(self.args.run.resume_from_checkpoint)
        if folder is None:
            return {}
        meta = parts.checkpoints.load(parts.reward.engine, folder)
        agree(parts.collectives, lambda: parts.feed.load_state_dict(meta["feed"]))  # rank 0 alone holds it against the rows
        self.state.step, self.state.prompts_seen = meta["step"], meta["rows_seen"]
        logger.info("resumed from %s: step %d of %d", folder, self.state.step, self.state.total_steps)
        self._counts_before = msgspec.convert(meta["counts"], EncodingCounts)
        before: Mapping[str, Any] = meta["before"]
        return before

    def _row_counts(self, parts: RewardParts) -> EncodingCounts:
        """Collective: what became of the rows since the run's very start. (Those that a stopped step had taken come twice.)"""
        counts = msgspec.structs.replace(self._counts_before)
        counts.merge(parts.feed.counts())
        return counts

    def _finish(self, parts: RewardParts) -> None:
        for callback in self.callbacks:
            callback.on_train_end(self.state)
        self._report.rows(self._row_counts(parts))
        if self.args.checkpoint.save_at_end:
            self._save(parts)  # before anything that only looks at the result
        if self.args.monitor.eval_at_end:
            self._evaluate(parts)
        if self.args.checkpoint.export_final:
            assert self.args.run.output_dir is not None
            self._export(parts, Path(self.args.run.output_dir) / "final")
        self._report.summary(self.state)

    def _export(self, parts: RewardParts, target: Path) -> Path:
        if parts.held_out.sets and (self._scale is None or self._scale[0] != self.state.step):
            self._scale = (self.state.step, parts.held_out.run().scale)
        return export_reward_model(self.args, parts, self._scale[1] if self._scale is not None else None, target)


def _inputs(
    model: str | PreTrainedModel,
    train: PreferenceSource | None,
    evaluation: PreferenceSource | dict[str, PreferenceSource] | None,
    tokenizer: PreTrainedTokenizerBase | None,
    peft_config: PeftConfig | None,
    data_collator: DataCollator | None,
) -> RewardInputs:
    """Names go into the configuration, objects beside it."""
    named = evaluation if isinstance(evaluation, str) else None
    sets: dict[str, Any] = {}
    if named is None and evaluation is not None:
        sets = dict(evaluation) if type(evaluation) is dict else {"": evaluation}
    return RewardInputs(
        model,
        train if isinstance(train, str) else None,
        named,
        tokenizer,
        peft_config,
        train_source=None if isinstance(train, str) else train,
        eval_sources=sets,
        data_collator=data_collator,
    )
