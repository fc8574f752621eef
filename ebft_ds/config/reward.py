"""RewardConfig: training of a reward model from preferences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ebft_ds.config.recipe import RecipeConfig


class RewardConfig(RecipeConfig):
    """A recipe of `mode: reward`: `RewardConfig(per_device_train_batch_size=8, learning_rate=2e-5, max_length=512)`.

    Batches are counted in rows (pairs, or ranked lists). See RecipeConfig for what the constructor takes.
    """

    MODE: ClassVar[str] = "reward"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"mode": "reward", "learning_rate": 1e-5}

    def __init__(self, **settings: Any) -> None:  # written out for type checkers, which would take sections for the only arguments
        super().__init__(**settings)
