"""`ebft-ds reward`: `ebft-ds train` for reward models."""

from __future__ import annotations

from typing import Annotated

import typer

from ebft_ds.cli.train import OverridesArgument, RecipeArgument, start_training


def reward(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check recipe, model and data, print the derived numbers, and end.")] = False,
) -> None:
    """Train a reward model from preferences: as `train`, for recipes of mode reward or without a mode."""
    start_training(recipe, overrides or [], dry_run=dry_run, mode="reward")
