"""Whole runs of `ebft-ds train` with further objectives beside feature matching: a reward model, functions, and ones that break."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebft_ds.monitor.keys import unknown_keys
from tests.distributed.reward_folder import make_reward_model
from tests.integration.cli_runs import metrics, overrides, run

Data = tuple[Path, Path]
FUNCTIONS = "tests.unit.reward_functions"


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("reward") / "judge")


def test_feature_matching_with_a_reward_model_and_a_function(tiny_model: Path, tiny_data: Data, judge: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    fields = {
        "reward_models": [str(judge)], "reward_funcs": [f"{FUNCTIONS}:length"], "reward_num_workers": 2, "reward_weights": [1.0, 0.5, 0.01],
        "advantage_estimator": "group", "multi_objective_aggregation": "normalize_then_sum", "max_steps": 3,
    }  # fmt: skip
    finished = run(tmp_path / "recipe.yaml", overrides(tiny_model, tiny_data, output, **fields))
    assert finished.code == 0, finished.output[-4000:]
    lines = metrics(output)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert unknown_keys({key for line in lines for key in line}) == []
    for line in lines:
        assert {"ebft/reward", "rewards/judge", "rewards/judge/std", "rewards/length", "rewards/length/std"} <= set(line)
        assert line["rewards/judge/std"] > 0
        assert line["rewards/length"] > 0
    assert len({line["rewards/judge"] for line in lines}) == 3
    assert all(line["loss"] != 0 for line in lines)


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"reward_funcs": [f"{FUNCTIONS}:always_hangs"], "reward_timeout": 2.0}, 3, "reward function always_hangs"),
        ({"reward_funcs": [f"{FUNCTIONS}:die"]}, 3, "the process of reward function die"),
        ({"reward_funcs": [f"{FUNCTIONS}:missing"]}, 2, "cannot be imported"),
    ],
)
def test_a_function_that_breaks_ends_the_run(
    tiny_model: Path, tiny_data: Data, tmp_path: Path, fields: dict[str, object], code: int, message: str
) -> None:
    finished = run(tmp_path / "recipe.yaml", overrides(tiny_model, tiny_data, tmp_path / "run", **fields))
    assert finished.code == code, finished.output[-4000:]
    assert message in finished.output
    assert metrics(tmp_path / "run") == []


def test_a_model_without_a_recipe_is_refused_before_anything_is_loaded(tiny_model: Path, tiny_data: Data, tmp_path: Path) -> None:
    settings = overrides(tiny_model, tiny_data, tmp_path / "run", reward_models=[str(tiny_model)])
    finished = run(tmp_path / "recipe.yaml", settings)
    assert finished.code == 2, finished.output[-4000:]
    assert "reward_encoding.json" in finished.output
