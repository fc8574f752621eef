"""The same training under DeepSpeed's own launcher: the module entry point, and a user's script with the Python trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.cli_runs import ROOT, Finished, end_tree, environment, metrics, overrides

LAUNCHER = Path(sys.executable).with_name("deepspeed")


def launch(*arguments: str) -> Finished:
    command = [sys.executable, str(LAUNCHER), "--num_accelerators", "2", *arguments]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as process:
        try:
            output, _ = process.communicate(timeout=240)
        finally:
            end_tree(process.pid)
        return Finished(process.returncode, output)


def test_module_entry_point_trains_under_the_launcher(tiny_model: Path, tiny_data: tuple[Path, Path], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("run: {mode: async}\n")
    settings = overrides(tiny_model, tiny_data, tmp_path / "run", max_steps=2)
    done = launch("--module", "ebft_ds.train", str(recipe), *[s for s in settings if not s.startswith("num_processes")])
    assert done.code == 0, done.output[-4000:]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2]

    contradicting = launch("--module", "ebft_ds.train", str(recipe), *settings[:3], "num_processes=3")
    assert contradicting.code != 0
    assert "num_processes" in contradicting.output


def test_python_trainer_with_objects_callbacks_and_a_reward_function(tiny_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    done = launch(str(ROOT / "tests" / "integration" / "trainer_script.py"), str(tiny_model), str(output))
    assert done.code == 0, done.output[-4000:]
    facts = json.loads((output / "facts.json").read_text())
    assert facts["world_size"] == 2
    assert facts["step"] == 3, "the callback asked for the end"
    new_batch = ["groups 2", "scored 4", "step"]
    asked_in_the_middle_of_a_batch = "save step_2"
    assert facts["calls"] == ["begin", *new_batch, "step", asked_in_the_middle_of_a_batch, *new_batch, "end", "save step_3"]
    lines = metrics(output)
    assert [line["custom/seven"] for line in lines] == [7.0, 7.0, 7.0]
    assert all(line["rewards/brevity"] < 0 for line in (lines[0], lines[2]))
    assert 0.0 <= lines[-1]["eval/ended_share"] <= 1.0


@pytest.fixture(autouse=True)
def _launcher_present() -> None:
    assert LAUNCHER.exists(), "deepspeed's launcher is not installed beside python"
