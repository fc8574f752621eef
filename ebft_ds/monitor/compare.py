"""Several runs side by side: their last and mean metrics, and where their configurations differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ebft_ds.errors import DataError
from ebft_ds.monitor.jsonl import read_json_lines
from ebft_ds.monitor.keys import KEYS

_LAST_SHARE = 0.1
_ABSENT = "-"


@dataclass(frozen=True)
class RunSummary:
    """What one run directory says about itself."""

    path: Path
    steps: int
    """Last step written."""
    last: dict[str, float]
    """Each key's last value."""
    mean: dict[str, float]
    """Each key's mean over the last tenth of its values (at least one)."""
    config: dict[str, Any]
    """config.resolved.yaml with dotted keys; empty if the run has none."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Objects of a run's metrics.jsonl, in order. `path`: the run directory, or the file itself.

    Raises DataError if it is not a run directory or a line is broken.
    """
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"{path} is not a run directory: there is no {file}; give the output_dir of a run")
    return read_json_lines(file)


def summarise_run(path: Path) -> RunSummary:
    """Read a run directory. Raises DataError if it is not one."""
    series: dict[str, list[float]] = {}
    steps = 0
    for values in read_metrics(path):
        steps = values.get("step", steps)
        for key, value in values.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and key != "step":
                series.setdefault(key, []).append(float(value))
    tails = {key: values[-max(1, math.ceil(len(values) * _LAST_SHARE)) :] for key, values in series.items()}
    return RunSummary(
        path=path,
        steps=steps,
        last={key: values[-1] for key, values in series.items()},
        mean={key: sum(tail) / len(tail) for key, tail in tails.items()},
        config=_read_config(path / "config.resolved.yaml"),
    )


def compare_runs(paths: Sequence[Path]) -> Group:
    """Two tables, one column per run: metrics (last value, and mean of the last tenth) and configuration values that differ.

    Raises DataError for a folder that is not a run.
    """
    if not paths:
        raise DataError("no run directory given to compare")
    runs = [summarise_run(path) for path in paths]
    return Group(_metrics_table(runs), _config_table(runs))


def config_differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Dotted keys whose values are not the same everywhere -> each configuration's value (`-` where it has none)."""
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = {key: [config.get(key, _ABSENT) for config in configs] for key in keys}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values[1:])}


def _metrics_table(runs: Sequence[RunSummary]) -> Table:
    table = _table("metric: last (mean of the last tenth)", runs)
    table.add_row("steps", *(str(run.steps) for run in runs))
    known = [key for key in KEYS if any(key in run.last for run in runs)]
    other = sorted({key for run in runs for key in run.last} - set(known))
    for key in known + other:
        table.add_row(Text(key), *(_cell(run, key) for run in runs))
    return table


def _config_table(runs: Sequence[RunSummary]) -> Table:
    table = _table("configuration that differs", runs)
    for key, values in config_differences([run.config for run in runs]).items():
        table.add_row(Text(key), *(Text(str(value)) for value in values))
    return table


def _table(heading: str, runs: Sequence[RunSummary]) -> Table:
    table = Table()
    table.add_column(heading, overflow="fold")
    for run in runs:
        table.add_column(Text(str(run.path)), justify="right", overflow="fold")
    return table


def _cell(run: RunSummary, key: str) -> str:
    return f"{run.last[key]:.5g} ({run.mean[key]:.5g})" if key in run.last else _ABSENT


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return _flatten(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not readable YAML: {error}") from None


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        flat: dict[str, Any] = {}
        for key, item in value.items():
            flat |= _flatten(item, f"{prefix}.{key}" if prefix else str(key))
        return flat
    return {prefix: value} if prefix else {}
