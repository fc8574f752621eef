"""What a user sees of a reward training: metrics, TensorBoard, progress line, evaluation tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ebft_ds.config import RewardConfig
from ebft_ds.data.preference import EncodingCounts
from ebft_ds.monitor.metrics import MetricsAccumulator
from ebft_ds.monitor.reliability import draw_reliability
from ebft_ds.trainers.callbacks import TrainerCallback, TrainerControl, TrainerState
from ebft_ds.trainers.model_sizes import reward_model_sizes
from ebft_ds.trainers.reward_evaluation import RewardEvaluation, prefix_of
from ebft_ds.trainers.reward_parts import RewardParts
from ebft_ds.trainers.run_output import RunOutput


class RewardReport:
    """Rank 0 writes; every rank takes part in the one reduction a step."""

    def __init__(self, config: RewardConfig, parts: RewardParts, state: TrainerState, *, recording: bool) -> None:
        sizes = reward_model_sizes(parts.reward.engine.network)
        self._output = RunOutput(config, parts.collectives, state, sizes, recording=recording)
        self.recording = recording
        self.timer = self._output.timer
        self.before: dict[str, float] = {}
        """Accuracy before the run, by set."""

    def reduce(self, metrics: MetricsAccumulator) -> dict[str, float | None]:
        """Collective: see RunOutput.reduce."""
        return self._output.reduce(metrics)

    def step(
        self,
        state: TrainerState,
        metrics: dict[str, float | None],
        epoch: float,
        callbacks: Sequence[TrainerCallback],
        control: TrainerControl,
    ) -> None:
        """Lets callbacks see the step's metrics, and writes them."""
        metrics |= {"num_rows_seen": state.prompts_seen, "epoch": epoch}
        for callback in callbacks:
            callback.on_step_end(state, control, metrics)
        self._output.write_step(state.step, metrics)

    def evaluation(self, state: TrainerState, found: RewardEvaluation) -> None:
        """Writes `eval/*`, histograms of rewards and the reliability diagram, and shows the numbers."""
        writer = self._output.writer
        if writer is not None:
            writer.write(state.step, found.to_metrics())
        for name, one in found.sets.items():
            prefix = prefix_of(name)
            if writer is not None:
                writer.histogram(f"{prefix}chosen", one.tally.chosen, state.step)
                writer.histogram(f"{prefix}rejected", one.tally.rejected, state.step)
                if not math.isnan(one.results.ece):
                    writer.figure(f"{prefix}reliability", draw_reliability(one.results.bins, one.results.ece), state.step)
            before = f" (accuracy before: {self.before[name]:.4f})" if name in self.before else ""
            self._output.note(f"evaluation{f' on {name}' if name else ''} at step {state.step}{before}\n{one.results.table()}")

    def rows(self, counts: EncodingCounts) -> None:
        """What became of the training rows."""
        self._output.note(f"training rows: {counts.summary()}")

    def summary(self, state: TrainerState) -> None:
        """The last words: where things are."""
        if self._output.progress is None:
            return
        self._output.progress.close()
        curves = f"tensorboard --logdir {self._output.output_dir / 'tb'}"
        self._output.note(f"done: {state.step} steps. {self._output.where_the_model_is()} Curves: {curves}")

    def restore_before(self, values: Mapping[str, Any]) -> None:
        """From a checkpoint."""
        self.before = {name: float(value) for name, value in values.items()}

    def close(self) -> None:
        """Flushes and closes the sinks."""
        self._output.close()
