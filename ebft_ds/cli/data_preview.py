"""`ebft-ds data preview`: the first rows as the model will see them."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ebft_ds.cli.train import OverridesArgument, RecipeArgument
from ebft_ds.errors import ConfigError

app = typer.Typer(help="Look at training data.", no_args_is_help=True)


@app.callback()
def _data() -> None:
    """Look at training data."""


@app.command()
def preview(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    rows: Annotated[int, typer.Option(help="Rows shown.", min=1)] = 5,
) -> None:
    """Show the first usable rows: prompt and reference as decoded tokens, special ones included, with their lengths."""
    from ebft_ds.config import load_recipe
    from ebft_ds.data.preflight import load_checked_tokenizer, load_model_facts
    from ebft_ds.data.prompts import load_prompt_dataset

    config = load_recipe(recipe, overrides or []).config
    if config.MODE != "async":
        raise ConfigError(f"data preview shows prompts and references; it does not read recipes of mode: {config.MODE}")
    if config.data.train_dataset is None or config.model.model_name_or_path is None:
        raise ConfigError("data preview needs model_name_or_path (for the tokenizer) and train_dataset")
    tokenizer = load_checked_tokenizer(config, load_model_facts(config))
    dataset = load_prompt_dataset(
        config.data, config.rollout, tokenizer, split=config.data.train_split, max_rows=config.data.max_train_rows
    )
    console = Console()
    table = Table(show_lines=True)
    table.add_column("row")
    for heading in ("prompt", "reference"):
        table.add_column(heading, ratio=1, overflow="fold")
    table.add_column("tokens", justify="right")
    for index in range(min(rows, len(dataset))):
        row = dataset[index]
        lengths = f"{len(row.token_ids)} + {len(row.reference_ids)}"
        table.add_row(str(row.prompt_id), Text(tokenizer.decode(row.token_ids)), Text(tokenizer.decode(row.reference_ids)), lengths)
    console.print(table)
    console.print(Text(dataset.report.summary()))
