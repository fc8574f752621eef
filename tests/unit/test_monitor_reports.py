"""Comparison of runs, before/after tables, logging, the environment report."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import math
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from rich.console import Console, RenderableType

from ebft_ds.errors import ConfigError, DataError
from ebft_ds.monitor import (
    EvalResult,
    MetricsWriter,
    compare_runs,
    environment_report,
    read_metrics,
    render_before_after,
    setup_logging,
    summarise_run,
    unknown_keys,
)
from ebft_ds.monitor.environment import code_version, gpu_names

BEFORE = EvalResult(
    alignment=1.0,
    diversity=0.5,
    cfm_loss=0.4,
    fm_loss_unbiased=0.3,
    pooling="completion_mean",
    cfm_loss_other=0.8,
    fm_loss_unbiased_other=math.nan,
    other_pooling="last_token",
    reference_ce=2.0,
    char_ngram_f=0.2,
    mean_length=10.0,
    reference_mean_length=20.0,
    ended_share=0.5,
    distinct_share=1.0,
    prompts=8,
    completions=32,
)
AFTER = dataclasses.replace(BEFORE, alignment=1.5, cfm_loss=0.3, reference_ce=2.5, mean_length=25.0, char_ngram_f=0.2, diversity=0.7)


def shown(content: RenderableType, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(content)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row(output: str, start: str) -> str:
    return next(line for line in output.splitlines() if line.strip("│┃ ").startswith(start))


def test_before_after_says_better_or_worse() -> None:
    output = shown(render_before_after(BEFORE, AFTER))
    assert "↑ better" in row(output, "alignment")
    assert "+0.5000" in row(output, "alignment")
    assert "↓ better" in row(output, "cfm_loss, completion_mean")
    assert "↑ worse" in row(output, "reference cross-entropy")
    assert "↑ better" in row(output, "mean length (reference 20.0)")  # 5 off instead of 10
    for neutral in ("diversity term", "character trigram F", "cfm_loss, last_token", "fm_loss_unbiased, last_token"):
        assert "better" not in row(output, neutral)
        assert "worse" not in row(output, neutral)
    assert "nan" not in output
    assert "8 prompts, 32 completions" in output


def test_without_before_only_the_values_are_shown() -> None:
    output = shown(render_before_after(None, AFTER))
    assert "1.5000" in row(output, "alignment")
    assert "better" not in output


def test_evaluation_keys_are_those_of_the_table() -> None:
    metrics = BEFORE.to_metrics()
    assert metrics["eval/alignment"] == 1.0
    assert unknown_keys(metrics) == []
    assert len(metrics) == len(dataclasses.fields(EvalResult)) - 2
    assert all(isinstance(value, int | float) for value in metrics.values())


def make_run(path: Path, losses: list[float], config: dict[str, object] | None = None) -> Path:
    with MetricsWriter(path, tensorboard=False, start_step=0) as writer:
        for step, loss in enumerate(losses, start=1):
            writer.write(step, {"loss": loss, "custom/x[y]": 1.0})
    if config is not None:
        (path / "config.resolved.yaml").write_text(yaml.safe_dump(config))
    return path


def test_runs_are_compared_by_metrics_and_configuration(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", [5.0] * 20 + [2.0, 4.0], {"optim": {"learning_rate": 1e-4, "seed": 1}, "versions": {"torch": "2"}})
    two = make_run(tmp_path / "two", [1.0], {"optim": {"learning_rate": 1e-5, "seed": 1}, "versions": {"torch": "2"}, "peft": {"r": 4}})
    summary = summarise_run(one)
    assert (summary.steps, summary.last["loss"]) == (22, 4.0)
    assert summary.mean["loss"] == pytest.approx((5.0 + 2.0 + 4.0) / 3)
    output = shown(compare_runs([one, two]))
    assert "4 (3.6667)" in row(output, "loss")
    assert "1 (1)" in row(output, "loss")
    assert "custom/x[y]" in output
    assert "0.0001" in row(output, "optim.learning_rate")
    assert "-" in row(output, "peft.r")
    assert "optim.seed" not in output
    assert "versions.torch" not in output


def test_a_run_with_null_metrics_and_no_config(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1.0, math.nan])
    assert summarise_run(run).last["loss"] == 1.0
    assert "loss" in shown(compare_runs([run]))


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run directory"):
        compare_runs([make_run(tmp_path / "run", [1.0]), tmp_path])
    with pytest.raises(DataError, match="no run directory"):
        compare_runs([])
    with pytest.raises(DataError, match="is not a run directory"):
        read_metrics(tmp_path / "nothing")


def test_broken_files_of_a_run_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1.0])
    (run / "config.resolved.yaml").write_text("a: [")
    with pytest.raises(DataError, match=r"config\.resolved\.yaml is not readable YAML"):
        compare_runs([run])
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2"):
        compare_runs([run])


def test_a_line_still_being_written_is_no_error(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [1.0])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    assert [values["step"] for values in read_metrics(run)] == [1]


@pytest.fixture
def logging_state() -> Iterator[None]:
    """Undo what setup_logging does to this process."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    logging.captureWarnings(False)


@pytest.mark.usefixtures("logging_state")
def test_rank_0_speaks_and_every_rank_keeps_a_file(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=40)
    log, deepspeed = logging.getLogger("ebft_ds.test"), logging.getLogger("DeepSpeed")
    noise = io.StringIO()
    deepspeed.addHandler(logging.StreamHandler(noise))
    for rank in (0, 1):
        setup_logging(rank, 2, "info", tmp_path / "logs", console=console)
        log.info("hello [bold]from[/bold] rank %d with a line that is longer than forty columns", rank)
        log.debug("details")
        deepspeed.info("chatter")
        deepspeed.warning("careful")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("deprecated thing", stacklevel=1)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert "hello [bold]from[/bold] rank 0 with a line that is longer than forty columns" in lines[0]
    assert "careful" in lines[1]
    assert "deprecated thing" in console.file.getvalue()
    assert not [line for line in lines if "rank 1" in line or "chatter" in line or "details" in line]
    files = [(tmp_path / "logs" / f"rank_{rank}.log").read_text() for rank in (0, 1)]
    assert "INFO rank 0/2 ebft_ds.test: hello" in files[0]
    assert "INFO rank 1/2 ebft_ds.test: hello" in files[1]
    assert "careful" in files[0]
    assert "careful" not in files[1]
    assert noise.getvalue() == ""


@pytest.mark.usefixtures("logging_state")
def test_setting_up_twice_writes_once_and_appends(tmp_path: Path) -> None:
    for _ in range(2):
        setup_logging(1, 2, "warning", tmp_path)
        logging.getLogger("ebft_ds.test").warning("once")
    assert (tmp_path / "rank_1.log").read_text().count("once") == 2


@pytest.mark.usefixtures("logging_state")
def test_logging_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'loud' is unknown"):
        setup_logging(0, 1, "loud", None)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        setup_logging(0, 1, "info", tmp_path / "file")


def test_the_environment_report_is_plain_data() -> None:
    report = environment_report(["ebft-ds", "train", "a b.yaml"])
    assert json.loads(json.dumps(report)) == report
    assert report["command"] == "ebft-ds train 'a b.yaml'"
    assert report["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "msgspec" in report["packages"]
    assert report["cpu_cores"] >= 1


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True).stdout.strip()


def test_code_version_is_of_the_files_own_checkout(tmp_path: Path) -> None:
    assert code_version(tmp_path) is None
    git(tmp_path, "init")
    package, installed = tmp_path / "package", tmp_path / "venv" / "package"
    for folder in (package, installed):
        folder.mkdir(parents=True)
        (folder / "code.py").write_text("x = 1\n")
    git(tmp_path, "add", "package")
    git(tmp_path, "commit", "-m", "first")
    assert code_version(package) == {"commit": git(tmp_path, "rev-parse", "HEAD"), "modified": False}
    (package / "code.py").write_text("x = 2\n")
    assert code_version(package) == {"commit": git(tmp_path, "rev-parse", "HEAD"), "modified": True}
    assert code_version(installed) is None


def test_gpu_names_come_from_the_driver(tmp_path: Path) -> None:
    for bus, name in (("0000:02:00.0", "NVIDIA H200"), ("0000:01:00.0", "NVIDIA A100")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(f"Model: \t\t {name}\nIRQ:   1\n")
    assert gpu_names(tmp_path) == ["NVIDIA A100", "NVIDIA H200"]
    assert gpu_names(tmp_path / "none") == []


def test_monitor_and_checkpoint_files_load_without_torch() -> None:
    code = "import sys, ebft_ds.monitor, ebft_ds.checkpoint; print([n for n in ('torch', 'tensorboard', 'deepspeed') if n in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
