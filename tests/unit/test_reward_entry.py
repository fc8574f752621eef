"""How reward recipes are found and checked before a rank starts, and the synthetic tasks that the repository makes."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ebft_ds.config import AsyncEBFTConfig, RewardConfig, load_recipe
from ebft_ds.config.check_context import Surroundings
from ebft_ds.config.checks import check_config
from ebft_ds.errors import ConfigError, DataError
from ebft_ds.trainers.reward_inputs import reward_numbers
from tools.function_pairs import function_pairs, main, with_a_mistake
from tools.preference_task import listed_in, make_preference_task, preference_rows


def test_recipe_without_a_mode_counts_as_the_commands(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("run: {seed: 3}\n")
    assert isinstance(load_recipe(recipe, mode="reward").config, RewardConfig)
    assert isinstance(load_recipe(recipe).config, AsyncEBFTConfig)
    assert isinstance(load_recipe(recipe, ["mode=reward"]).config, RewardConfig)
    with pytest.raises(ConfigError, match=r"override mode=async.*mode: async.*mode: reward"):
        load_recipe(recipe, ["mode=async"], mode="reward")


def test_rows_and_streams_give_steps_or_an_error_that_says_what_is_missing() -> None:
    config = RewardConfig(per_device_train_batch_size=4, num_train_epochs=2)
    assert reward_numbers(config, 2, 20).steps == 5
    with pytest.raises(ConfigError, match="max_steps"):
        reward_numbers(config, 2, None)
    assert reward_numbers(config.replace(max_steps=7), 2, None).steps == 7
    with pytest.raises(DataError, match="fewer than the 8 of one step"):
        reward_numbers(config, 2, 7)


def test_evaluation_rows_given_as_objects_count_for_eval_steps() -> None:
    config = RewardConfig(eval_steps=5)
    assert any("eval_steps" in problem for problem in check_config(config, Surroundings()).problems)
    assert not check_config(config, Surroundings(evaluation_given=True)).problems


def test_no_word_of_the_synthetic_task_tells_chosen_from_rejected() -> None:
    rows = preference_rows(4000, random.Random(0))
    counts: dict[str, Counter[str]] = {
        side: Counter(word for row in rows for word in row[side].split()[1:]) for side in ("chosen", "rejected")
    }
    for word, count in counts["chosen"].items():
        assert abs(count - counts["rejected"][word]) < 6 * count**0.5
    for row in rows[:100]:
        assert set(row["chosen"].split()[1:]) < listed_in(row)
        assert len(set(row["rejected"].split()[1:]) - listed_in(row)) == 1


def test_no_held_out_list_is_trained_on(tmp_path: Path) -> None:
    import json

    folder = make_preference_task(tmp_path, rows=300, held_out=50)
    train, held_out = ([json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()] for name in ("train", "eval"))
    assert len(train) == 300
    assert not set(map(listed_in, train)) & set(map(listed_in, held_out))


def test_function_pairs_differ_and_keep_the_prompt() -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"body {i}", "ground_truth": f"    return {i} + len(x{i})"} for i in range(30)]
    pairs = function_pairs(rows, random.Random(0))
    assert {pair["subset"] for pair in pairs} == {"other body", "mistake"}
    for row, pair in zip(rows, pairs, strict=True):
        assert (pair["prompt"], pair["chosen"]) == (row["prompt"], row["ground_truth"])
        assert pair["rejected"] != pair["chosen"]
    assert with_a_mistake("    pass", random.Random(0)) is None


def test_function_pairs_need_two_bodies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "a", "ground_truth": "    pass"}) + "\n")
    with pytest.raises(SystemExit):
        main(["--rows", str(rows), "--output", str(tmp_path / "out"), "--held-out", "0"])
    assert "a single distinct body" in capsys.readouterr().err
