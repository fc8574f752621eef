"""Further objectives before a run: what a dry run finds wrong, and where functions given as objects are called."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ebft_ds.cli.dry_run import check_objectives
from ebft_ds.config import AsyncEBFTConfig
from ebft_ds.config.sections import LossSection
from ebft_ds.errors import ConfigError, EbftError, ModelError
from ebft_ds.rewards.functions import CompletionTexts
from ebft_ds.trainers.objectives import FunctionObjectives
from tests.distributed.reward_folder import make_reward_model
from tests.unit import reward_functions

HERE = "tests.unit.reward_functions"
TEXTS = CompletionTexts(["p", "p"], ["a", "bb"], ["", ""], [[1], [2]])


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("reward") / "judge")


def test_a_dry_run_reads_reward_models_and_imports_functions(judge: Path, tiny_model: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], type[EbftError], str]] = [
        ({"reward_models": [str(tmp_path / "none")]}, ModelError, "none"),
        ({"reward_models": [str(tiny_model)]}, ModelError, "reward_encoding.json"),
        ({"reward_models": [str(judge)], "reward_model_token_budget": 32}, ConfigError, "is 32, below the 64 tokens"),
        ({"reward_funcs": [f"{HERE}:missing"]}, ConfigError, "cannot be imported"),
    ]
    for fields, kind, text in cases:
        with pytest.raises(kind, match=text):
            check_objectives(AsyncEBFTConfig(advantage_estimator="group", **fields))
    check_objectives(AsyncEBFTConfig(advantage_estimator="group", reward_models=[str(judge)], reward_funcs=[f"{HERE}:length"]))
    check_objectives(AsyncEBFTConfig())


def test_plain_functions_of_a_module_have_a_process_and_other_objects_stay(caplog: pytest.LogCaptureFixture) -> None:
    def own_process(completions: list[str], **_: Any) -> list[float]:
        return [float(os.getpid())] * len(completions)

    objectives = FunctionObjectives(
        LossSection(reward_funcs=[f"{HERE}:length"]), [own_process, reward_functions.process_and_size, reward_functions.Scaled(2.0)]
    )
    assert objectives.names == ["length", "own_process", "process_and_size", "Scaled"]
    with caplog.at_level("INFO"):
        objectives.start()
    try:
        length, own, other, scaled = objectives.call(TEXTS, 2)
    finally:
        objectives.close()
    assert (length, own, scaled) == ([1.0, 2.0], [float(os.getpid())] * 2, [2.0, 4.0])
    assert int(other[0]) != os.getpid()
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == ["own_process, Scaled"]
