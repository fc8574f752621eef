"""`ebft-ds plan`: derived numbers and a memory estimate, from the recipe and config.json alone."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ebft_ds.cli.devices import plan_ranks
from ebft_ds.cli.train import OverridesArgument, RecipeArgument, show_notes
from ebft_ds.errors import ConfigError


def plan(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    rows: Annotated[int | None, typer.Option(help="Training rows, for the number of steps.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks to plan for; default as `train` would start.", min=1)] = None,
) -> None:
    """Print the sizes of a run and the memory that each rank will need, about."""
    from ebft_ds.cli.dry_run import numbers_table
    from ebft_ds.config import RewardConfig, load_recipe
    from ebft_ds.config.checks import Surroundings, check_config
    from ebft_ds.config.derived import derive
    from ebft_ds.config.derived_reward import derive_reward
    from ebft_ds.config.memory import estimate_memory
    from ebft_ds.config.model_facts import read_model_facts

    loaded = load_recipe(recipe, overrides or [])
    config = loaded.config
    if config.model.model_name_or_path is None:
        raise ConfigError("model_name_or_path is not set")
    facts = read_model_facts(config.model.model_name_or_path)
    world_size = ranks or plan_ranks(config).world_size
    report = check_config(config, Surroundings(world_size, None, facts))
    report.raise_if_bad()
    show_notes(loaded.notes + report.notes)
    derived = derive_reward(config, world_size, rows) if isinstance(config, RewardConfig) else derive(config, world_size, rows)
    console = Console()
    console.print(numbers_table(derived))
    if facts is None:
        raise ConfigError(f"{config.model.model_name_or_path} is no folder: the memory estimate needs its config.json; download it first")
    table = Table(title=f"Memory, about ({facts.parameters / 1e6:,.0f} M parameters, {config.model.dtype})")
    for heading in ("item", "where"):
        table.add_column(heading)
    table.add_column("MiB", justify="right")
    items = estimate_memory(config, facts, derived)
    for item in items:
        table.add_row(Text(item.label), Text(item.where), f"{item.bytes / 2**20:,.0f}")
    table.add_section()
    table.add_row("sum", "each rank", f"{sum(item.bytes for item in items if item.where == 'each rank') / 2**20:,.0f}")
    console.print(table)
