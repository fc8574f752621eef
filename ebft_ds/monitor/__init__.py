"""What a user sees: metrics.jsonl, TensorBoard, progress, sample tables, summaries, logs. Loads without torch."""

from __future__ import annotations

from ebft_ds.monitor.compare import compare_runs, read_metrics, summarise_run
from ebft_ds.monitor.console import error_console
from ebft_ds.monitor.environment import environment_report
from ebft_ds.monitor.keys import KEYS, MetricKey, render_metrics_doc, unknown_keys
from ebft_ds.monitor.logging_setup import setup_logging
from ebft_ds.monitor.memory import PeakMemory, take_cuda_peak
from ebft_ds.monitor.metrics import Metric, MetricsAccumulator, reduce_over_ranks
from ebft_ds.monitor.progress import ProgressReporter
from ebft_ds.monitor.reliability import Figure, draw_reliability
from ebft_ds.monitor.samples import SampleLog, SampleRow, read_samples, render_table
from ebft_ds.monitor.summary import EvalResult, render_before_after
from ebft_ds.monitor.text_metrics import char_ngram_f
from ebft_ds.monitor.throughput import ModelSizes, model_flops_utilisation
from ebft_ds.monitor.timing import StepTimer
from ebft_ds.monitor.writer import MetricsWriter

__all__ = [
    "KEYS",
    "EvalResult",
    "Figure",
    "Metric",
    "MetricKey",
    "MetricsAccumulator",
    "MetricsWriter",
    "ModelSizes",
    "PeakMemory",
    "ProgressReporter",
    "SampleLog",
    "SampleRow",
    "StepTimer",
    "char_ngram_f",
    "compare_runs",
    "draw_reliability",
    "environment_report",
    "error_console",
    "model_flops_utilisation",
    "read_metrics",
    "read_samples",
    "reduce_over_ranks",
    "render_before_after",
    "render_metrics_doc",
    "render_table",
    "setup_logging",
    "summarise_run",
    "take_cuda_peak",
    "unknown_keys",
]
