"""Whole runs of `ebft-ds reward` and of `ebft_ds.reward` under DeepSpeed's launcher."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from ebft_ds.config import load_recipe
from ebft_ds.monitor.keys import unknown_keys
from tests.integration.cli_runs import ROOT, Finished, end_tree, metrics, run, start, wait_for
from tests.integration.test_launcher import launch
from tools.preference_task import make_preference_task

RECIPE = ROOT / "launch" / "recipes" / "reward_synthetic.yaml"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_preference_task(tmp_path_factory.mktemp("task"))


def settings(task: Path, output: Path, **fields: Any) -> list[str]:
    """The shipped recipe's values, on the task's files."""
    recipe = load_recipe(RECIPE).config.explicit()
    files = {"model_name_or_path": task / "model", "train_dataset": task / "train.jsonl", "eval_dataset": task / "eval.jsonl"}
    chosen = recipe | files | {"output_dir": output} | fields
    return [f"{key}={value if isinstance(value, (Path, str)) else json.dumps(value)}" for key, value in chosen.items()]


@pytest.fixture(scope="module")
def finished_run(task: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    folder = tmp_path_factory.mktemp("finished")
    return folder / "run", run(
        folder / "recipe.yaml", settings(task, folder / "run", eval_steps=25), timeout=600, command="reward", text=""
    )


def test_synthetic_task_is_learnt_from_nothing_on_two_ranks(finished_run: tuple[Path, Finished]) -> None:
    output, finished = finished_run
    assert finished.code == 0, finished.output[-4000:]
    lines = metrics(output)
    assert lines[0]["eval/accuracy"] < 0.65
    assert lines[-1]["eval/accuracy"] >= 0.95
    assert all(lines[-1][f"eval/subset/word {place}"] >= 0.9 for place in (1, 2, 3))
    assert lines[-1]["eval/ece"] < 0.05
    assert "accuracy before" in finished.output
    assert "tensorboard --logdir" in finished.output


def test_metrics_are_documented_and_come_once_a_step(finished_run: tuple[Path, Finished]) -> None:
    output, _ = finished_run
    lines = metrics(output)
    assert [line["step"] for line in lines] == list(range(101))
    assert unknown_keys({key for line in lines for key in line}) == []
    expected = {
        "loss", "grad_norm", "learning_rate", "epoch", "num_rows_seen", "reward/accuracy", "reward/margin", "reward/chosen_mean",
        "reward/rejected_mean", "reward/mean", "reward/min", "reward/max", "reward/pairs", "time/step", "perf/tokens_per_s",
        "perf/padding_ratio", "perf/prefix_sharing_ratio", "memory/peak_gb",
    }  # fmt: skip
    assert set(lines[-1]) >= expected
    assert lines[-1]["reward/pairs"] == 128
    assert lines[-1]["perf/prefix_sharing_ratio"] > 1.3


def test_tensorboard_has_histograms_and_the_reliability_diagram(finished_run: tuple[Path, Finished]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished_run[0] / "tb"), size_guidance={"images": 0, "histograms": 0})
    events.Reload()
    assert {"eval/chosen", "eval/rejected"} <= set(events.Tags()["histograms"])
    assert [event.step for event in events.Images("eval/reliability")] == [0, 25, 50, 75, 100]


def test_resolved_configuration_is_a_recipe_of_the_same_mode(finished_run: tuple[Path, Finished]) -> None:
    config = load_recipe(finished_run[0] / "config.resolved.yaml", mode="reward").config
    assert (config.MODE, config.run.max_steps) == ("reward", 100)


def test_eval_and_export_of_a_checkpoint(finished_run: tuple[Path, Finished], task: Path, tmp_path: Path) -> None:
    output, _ = finished_run
    before, trained = (output / "metrics.jsonl").read_text(), load_file(output / "final" / "model.safetensors")
    shutil.rmtree(output / "final")
    stated = settings(task, output, resume_from_checkpoint="auto")
    evaluated = run(tmp_path / "recipe.yaml", stated, command="eval", text="run: {mode: reward}\n")
    assert evaluated.code == 0, evaluated.output[-4000:]
    numbers = json.loads(next(line for line in evaluated.output.splitlines() if line.startswith('{"step"')))
    assert numbers["step"] == 100
    assert numbers["accuracy"] == metrics(output)[-1]["eval/accuracy"]
    exported = run(tmp_path / "recipe.yaml", stated, command="export", text="run: {mode: reward}\n")
    assert exported.code == 0, exported.output[-4000:]
    assert (output / "metrics.jsonl").read_text() == before
    again = load_file(output / "final" / "model.safetensors")
    assert all(torch.equal(trained[name], again[name]) for name in trained)
    assert (output / "final" / "reward_encoding.json").is_file()
    assert AutoModelForSequenceClassification.from_pretrained(output / "final").config.num_labels == 1


@pytest.mark.timeout(1200)
def test_signal_saves_and_the_run_goes_on_from_there(task: Path, tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    fields = {"max_steps": 200, "per_device_train_batch_size": 4}  # a fast machine must not be through before the signal
    first = run(tmp_path / "recipe.yaml", settings(task, whole, **fields), timeout=400, command="train")
    assert first.code == 0, first.output[-4000:]
    process = start(tmp_path / "recipe.yaml", settings(task, part, **fields), "reward", "")
    try:
        wait_for(lambda: len(metrics(part)) > 3, "fourth step", process=process)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=180)
    finally:
        end_tree(process.pid)
    assert process.returncode == 7, output[-4000:]
    assert "the run is saved at step" in output
    resumed = run(tmp_path / "recipe.yaml", settings(task, part, **fields, resume_from_checkpoint="auto"), timeout=400, command="train")
    assert resumed.code == 0, resumed.output[-4000:]
    assert [line.get("loss") for line in metrics(part)] == [line.get("loss") for line in metrics(whole)]


def test_module_entry_point_under_the_launcher(task: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("run: {seed: 1}\n")
    stated = [
        s for s in settings(task, tmp_path / "run", max_steps=2, warmup_steps=0) if not s.startswith(("num_processes=", "mode=", "seed="))
    ]
    done = launch("--module", "ebft_ds.reward", str(recipe), *stated)
    assert done.code == 0, done.output[-4000:]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2]


def test_wrong_recipes_and_data_end_with_their_codes(task: Path, tmp_path: Path) -> None:
    wrong_mode = run(tmp_path / "recipe.yaml", settings(task, tmp_path / "run", mode="async"), command="reward", text="")
    assert wrong_mode.code == 2
    assert "recipes of mode: reward" in wrong_mode.output
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"chosen": "a"}\n' * 300)
    bad = run(tmp_path / "recipe.yaml", settings(task, tmp_path / "run", train_dataset=rows), command="reward", text="")
    assert bad.code == 3
    assert "rows.jsonl" in bad.output
    assert not (tmp_path / "run" / "config.resolved.yaml").exists(), "the folder is not claimed: the corrected run may use it"
    dry = run(tmp_path / "recipe.yaml", [*settings(task, tmp_path / "run", train_dataset=rows), "--dry-run"], command="reward", text="")
    assert dry.code == 3, "a dry run reads the first batch"
    fine = run(tmp_path / "recipe.yaml", [*settings(task, tmp_path / "run"), "--dry-run"], command="reward", text="")
    assert fine.code == 0, fine.output
    assert "4,096" in fine.output
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
