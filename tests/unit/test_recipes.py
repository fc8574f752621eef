"""The recipes that the repository ships are valid for the ranks they ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebft_ds.config import RewardConfig, load_recipe
from ebft_ds.config.checks import Surroundings, check_config
from ebft_ds.config.deepspeed import build_deepspeed_config
from ebft_ds.config.derived import derive
from ebft_ds.config.derived_reward import derive_reward

RECIPES = sorted((Path(__file__).resolve().parent.parent.parent / "launch" / "recipes").glob("*.yaml"))


def test_there_are_recipes() -> None:
    assert RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipe_is_valid(path: Path) -> None:
    loaded = load_recipe(path)
    world_size = loaded.config.run.num_processes or 1
    assert check_config(loaded.config, Surroundings(world_size, accelerators=0)).problems == []
    assert loaded.notes == [], "a shipped recipe uses canonical names"
    numbers = derive_reward if isinstance(loaded.config, RewardConfig) else derive
    build_deepspeed_config(loaded.config, numbers(loaded.config, world_size))
