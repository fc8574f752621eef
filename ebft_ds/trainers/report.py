"""What a user sees of a run: metrics, TensorBoard, progress line, samples, and the table before and after."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ebft_ds.config import RecipeConfig
from ebft_ds.features.scorer import Scores
from ebft_ds.monitor.metrics import Metric, MetricsAccumulator
from ebft_ds.monitor.samples import SampleLog, SampleRow, render_table
from ebft_ds.monitor.summary import EvalResult, render_before_after
from ebft_ds.sync.push import SyncReport
from ebft_ds.trainers.assembly import RunParts
from ebft_ds.trainers.callbacks import TrainerCallback, TrainerControl, TrainerState
from ebft_ds.trainers.model_sizes import model_sizes
from ebft_ds.trainers.run_output import RunOutput
from ebft_ds.types import RolloutGroup, ScoredGroup


class RunReport:
    """Rank 0 writes; every rank takes part in the one reduction a step."""

    def __init__(self, config: RecipeConfig, parts: RunParts, state: TrainerState, *, recording: bool = True) -> None:
        self._config = config
        self._parts = parts
        self._output = RunOutput(config, parts.collectives, state, model_sizes(parts.engines), recording=recording)
        self.recording = recording
        """False: shown on the terminal only (`ebft-ds eval`)."""
        self.timer = self._output.timer
        self.before: EvalResult | None = None
        stats = parts.desk.stats()
        self._dropped_before = stats.dropped if stats is not None else 0
        self._samples_shown = -1
        """Which multiple of `log_samples_steps` the last table stood for."""
        self._samples: SampleLog | None = None
        if parts.collectives.is_main and recording:
            self._samples = SampleLog(self._output.output_dir / "samples.jsonl", start_step=state.step)

    def restore_before(self, values: Mapping[str, Any] | None) -> None:
        """The evaluation before the run, from a checkpoint."""
        known: dict[str, Any] = {key: math.nan if value is None else value for key, value in (values or {}).items()}
        self.before = EvalResult(**known) if known else None

    def before_as_dict(self) -> dict[str, Any] | None:
        """JSON types (NaN as None) for a checkpoint."""
        if self.before is None:
            return None
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in dataclasses.asdict(self.before).items()}

    def groups(
        self, state: TrainerState, groups: Sequence[RolloutGroup], scores: Scores, advantages: Tensor, metrics: MetricsAccumulator
    ) -> list[ScoredGroup]:
        """The step's groups with their scores; logs what concerns completions, and a table of some every `log_samples_steps`."""
        if self._parts.collectives.is_main:
            for rollout in (r for group in groups for r in group.rollouts):
                metrics.mean("completions/mean_length", len(rollout.token_ids))
                metrics.mean("completions/clipped_ratio", float(rollout.finish_reason == "length"))
            seconds = sum(group.generation_seconds for group in groups)
            if seconds > 0:
                tokens = sum(len(r.token_ids) for group in groups for r in group.rollouts)
                metrics.add("perf/rollout_tokens_per_s", Metric.ratio(tokens, seconds))
            every = self._config.monitor.log_samples_steps
            # With num_iterations new groups come at some steps only: the first ones at or after each multiple.
            if every and state.step // every != self._samples_shown:
                self._samples_shown = state.step // every
                self._show_samples(state.step + 1, groups, scores, advantages, "training samples")
        return _scored(groups, scores)

    def step(
        self,
        state: TrainerState,
        metrics: MetricsAccumulator,
        sync: SyncReport,
        grad_norm: float,
        learning_rate: float,
        callbacks: Sequence[TrainerCallback],
        control: TrainerControl,
    ) -> None:
        """Reduces the step's metrics once over ranks, lets callbacks see them, and writes them."""
        reduced = self._output.reduce(metrics)
        reduced |= {
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "policy_version": state.step,
            "num_prompts_seen": state.prompts_seen,
            "epoch": state.prompts_seen / self._parts.stream.prompts_per_epoch,
        }
        if self._parts.collectives.is_main:
            reduced |= self._rollout_side(sync)
        for callback in callbacks:
            callback.on_step_end(state, control, reduced)
        self._output.write_step(state.step, reduced)

    def _rollout_side(self, sync: SyncReport) -> dict[str, float | None]:
        """Rank 0's counters."""
        stats = self._parts.desk.stats()
        values: dict[str, float | None] = {f"sync/{name}": value for name, value in dataclasses.asdict(sync).items()}
        if stats is not None:
            values |= {
                "staleness/mean": stats.staleness_mean,
                "staleness/max": stats.staleness_max,
                "staleness/dropped": stats.dropped - self._dropped_before,
                "queue/depth": stats.queue_depth,
            }
            self._dropped_before = stats.dropped
        return {name: value for name, value in values.items() if value is not None}

    def evaluation(self, state: TrainerState, result: EvalResult, groups: Sequence[RolloutGroup]) -> None:
        """Writes `eval/*` and shows the numbers."""
        if self._output.writer is not None:
            self._output.writer.write(state.step, result.to_metrics())
        self._output.note(f"evaluation at step {state.step}")
        self._output.note(render_before_after(self.before, result))

    def summary(self, state: TrainerState, after: EvalResult | None) -> None:
        """The last words: where things are."""
        output, folder = self._output, self._output.output_dir
        if output.progress is None:
            return
        output.progress.close()
        if after is not None and self.before is not None and (folder / "final").exists():
            output.note(f"before and after {state.step} steps: see the table above")
        output.note(
            f"done: {state.step} steps. {output.where_the_model_is()} "
            f"Curves: tensorboard --logdir {folder / 'tb'}. Completions: ebft-ds samples {folder}"
        )

    def close(self) -> None:
        """Flushes and closes the sinks."""
        self._output.close()
        if self._samples is not None:
            self._samples.close()

    def _show_samples(self, step: int, groups: Sequence[RolloutGroup], scores: Scores, advantages: Tensor, title: str) -> None:
        """All of the step's completions go to samples.jsonl; a few, best and worst first, into a table."""
        if self._samples is None:
            return
        decode = self._parts.tokenizer.decode
        rows = [
            SampleRow(
                step=step,
                prompt_id=group.prompt.prompt_id,
                index=j,
                prompt=decode(group.prompt.token_ids, skip_special_tokens=True),
                completion=decode(rollout.token_ids, skip_special_tokens=True),
                reference=decode(group.prompt.reference_ids, skip_special_tokens=True),
                reward=float(scores.rewards.reward[g, j]),
                alignment=float(scores.rewards.alignment[g, j]),
                diversity=float(scores.rewards.diversity[g, j]),
                advantage=float(advantages[g, j]),
                length=len(rollout.token_ids),
                finish_reason=rollout.finish_reason,
                version=rollout.oldest_version,
            )
            for g, group in enumerate(groups)
            for j, rollout in enumerate(group.rollouts)
        ]
        self._samples.append(rows)
        spread = sorted(rows, key=lambda row: -(row.reward or 0.0))
        count = self._config.monitor.log_samples
        shown = spread if len(spread) <= count else [spread[round(i * (len(spread) - 1) / max(count - 1, 1))] for i in range(count)]
        self._output.note(render_table(shown, title=f"step {step}: {title}"))


def _scored(groups: Sequence[RolloutGroup], scores: Scores) -> list[ScoredGroup]:
    rewards = scores.rewards
    return [
        ScoredGroup(
            group=group,
            reward=rewards.reward[g].tolist(),
            alignment=rewards.alignment[g].tolist(),
            diversity=rewards.diversity[g].tolist(),
            valid=rewards.mask[g].tolist(),
            cfm_loss=float(rewards.cfm_loss[g]),
            fm_loss_unbiased=float(rewards.fm_loss_unbiased[g]),
        )
        for g, group in enumerate(groups)
    ]
