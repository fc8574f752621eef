"""`ebft-ds train --dry-run`: every check that a training makes at its start, and the numbers that follow."""

from __future__ import annotations

import os
from typing import Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ebft_ds.cli.devices import plan_ranks
from ebft_ds.config import LoadedRecipe, RecipeConfig, RewardConfig


class Numbers(Protocol):
    """A mode's derived numbers."""

    def table(self) -> list[tuple[str, str]]: ...


def dry_run(loaded: LoadedRecipe) -> None:
    """Print the derived numbers. Errors: whatever would stop the training at its start."""
    from ebft_ds.cli.supervisor import usable_port
    from ebft_ds.cli.train import show_notes

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    ranks = plan_ranks(loaded.config)
    world_size = world_size_here(loaded, ranks.world_size)
    if loaded.config.run.master_port is not None:
        usable_port(loaded.config.run.master_port)
    if isinstance(loaded.config, RewardConfig):
        from ebft_ds.trainers.reward_dry_run import check_reward_data

        derived, notes = check_reward_data(loaded.config, world_size=world_size, accelerators=ranks.accelerators)
        show_notes(notes)
        _show(derived)
        return
    from ebft_ds.data.preflight import run_preflight
    from ebft_ds.sidecar.preflight import check_sidecar

    found = run_preflight(loaded.config, world_size=world_size, accelerators=ranks.accelerators)
    check_sidecar(loaded.config, os.environ, on_cpu=ranks.accelerators == 0, facts=found.facts)
    check_objectives(loaded.config)
    show_notes(found.notes)
    _show(found.derived)


def check_objectives(config: RecipeConfig) -> None:
    """Reward models are there with their encodings and fit their token budget, and reward functions can be imported.

    Errors: ModelError, ConfigError.
    """
    if not (config.loss.reward_models or config.loss.reward_funcs):
        return
    from ebft_ds.trainers.objectives import FurtherObjectives

    FurtherObjectives(config, []).check()


def _show(derived: Numbers) -> None:
    console = Console()
    console.print(numbers_table(derived))
    console.print("The recipe, the model files and the data are fine; nothing was started.")


def world_size_here(loaded: LoadedRecipe, own_ranks: int) -> int:
    """Ranks: a launcher's, or those that `ebft-ds train` would start (`own_ranks`)."""
    if "WORLD_SIZE" in os.environ:
        from ebft_ds.train import check_world_size

        return check_world_size(loaded)
    return own_ranks


def numbers_table(derived: Numbers) -> Table:
    """Derived numbers as a two-column table."""
    table = Table(title="Derived numbers", show_header=False)
    for label, value in derived.table():
        table.add_row(Text(label), Text(value))
    return table
