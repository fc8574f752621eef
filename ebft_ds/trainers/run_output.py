"""Where the numbers of any run go: metrics.jsonl, TensorBoard and the progress line on rank 0, reduced once a step over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import RenderableType

from ebft_ds.collectives import Collectives
from ebft_ds.config import RecipeConfig
from ebft_ds.config.resolved import resolved_text
from ebft_ds.engine.build import accelerator_count
from ebft_ds.monitor.memory import PeakMemory, take_cuda_peak
from ebft_ds.monitor.metrics import Metric, MetricsAccumulator, reduce_over_ranks
from ebft_ds.monitor.progress import ProgressReporter
from ebft_ds.monitor.throughput import ModelSizes, model_flops_utilisation
from ebft_ds.monitor.timing import StepTimer
from ebft_ds.monitor.writer import MetricsWriter
from ebft_ds.trainers.callbacks import TrainerState
from ebft_ds.trainers.step_work import StepWork


class RunOutput:
    """`writer` and `progress` are None on ranks other than 0; `writer` also without `recording` (`ebft-ds eval`)."""

    def __init__(self, config: RecipeConfig, collectives: Collectives, state: TrainerState, sizes: ModelSizes, *, recording: bool) -> None:
        assert config.run.output_dir is not None
        self.recording = recording
        self.output_dir = Path(config.run.output_dir)
        self._config = config
        self._collectives = collectives
        self._sizes = sizes
        cuda = accelerator_count() > 0
        self.timer = StepTimer(synchronize=torch.cuda.synchronize if cuda else None)
        self._memory = PeakMemory(take_cuda_peak if cuda else None)
        self._device_name = torch.cuda.get_device_name() if cuda else None
        self.progress = ProgressReporter(state.total_steps, state.step) if collectives.is_main else None
        self.writer: MetricsWriter | None = None
        self._unwritten: dict[str, float | None] = {}
        if collectives.is_main and recording:
            self.writer = MetricsWriter(self.output_dir, tensorboard="tensorboard" in config.monitor.report_to, start_step=state.step)
            self.writer.write_text("config", resolved_text(config), state.step)

    def reduce(self, metrics: MetricsAccumulator) -> dict[str, float | None]:
        """Collective: the step's metrics over all ranks, its times, memory and throughput; the next step begins."""
        times = self.timer.take()
        metrics.max("memory/peak_gb", self._memory.take_gb())
        gather = self._collectives.all_gather
        reduced: dict[str, float | None] = dict(
            reduce_over_ranks(metrics.take(), lambda local: [_as_metrics(share) for share in gather(_as_builtins(local))])
        )
        work = StepWork.take(reduced)
        seconds = times["time/step"]
        flops = self._sizes.step_flops(tokens=work.computed, head_positions=work.head, feature_tokens=work.features)
        mfu = model_flops_utilisation(flops, seconds, devices=self._collectives.world_size, device_name=self._device_name)
        return reduced | times | {"perf/tokens_per_s": work.trained / seconds, "perf/mfu": mfu}

    def write_step(self, step: int, values: Mapping[str, float | None]) -> None:
        """At every `logging_steps`. Values that some steps only have (new groups with num_iterations) wait for the next written one."""
        if self.writer is None or self.progress is None:
            return
        self._unwritten |= values
        if step % self._config.monitor.logging_steps == 0:
            self.writer.write(step, self._unwritten)
            self.progress.update(step, self._unwritten)
            self._unwritten = {}

    def note(self, content: RenderableType) -> None:
        """Something for the terminal; rank 0 shows it."""
        if self.progress is not None:
            self.progress.note(content)

    def where_the_model_is(self) -> str:
        if self._config.checkpoint.export_final:
            return f"Model: {self.output_dir / 'final'}."
        return f"No model was exported (export_final: false); `ebft-ds export` makes one of {self.output_dir / 'checkpoints'}."

    def close(self) -> None:
        """Flushes and closes."""
        for sink in (self.progress, self.writer):
            if sink is not None:
                sink.close()


def _as_builtins(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    built: dict[str, Any] = {key: [m.kind, m.value, m.weight] for key, m in metrics.items()}
    return built


def _as_metrics(share: Mapping[str, Any]) -> dict[str, Metric]:
    return {key: Metric(*msgspec.convert(value, tuple[str, float, float])) for key, value in share.items()}  # type: ignore[arg-type]
