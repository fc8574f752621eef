"""`ebft-ds eval` and `ebft-ds export`: a run's checkpoint, or the base model, on the ranks that the recipe asks for."""

from __future__ import annotations

import typer

from ebft_ds.cli.train import OverridesArgument, RecipeArgument, show_notes, start_ranks
from ebft_ds.config import load_recipe


def evaluate(recipe: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """Evaluate on the held-out prompts: with resume_from_checkpoint=auto (or a folder) a run's checkpoint, else the base model.

    The table goes to stderr, the numbers as one JSON object to stdout; nothing in output_dir but logs/ is written.
    """
    _start(recipe, overrides, "eval")


def export(recipe: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """Write a checkpoint (resume_from_checkpoint=auto, or a folder) to output_dir/final in Hugging Face format."""
    _start(recipe, overrides, "export")


def _start(recipe: str, overrides: list[str] | None, task: str) -> None:
    loaded = load_recipe(recipe, overrides or [])
    show_notes(loaded.notes)
    raise typer.Exit(start_ranks(loaded, recipe, overrides or [], task))
