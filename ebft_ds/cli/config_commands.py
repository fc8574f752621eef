"""`ebft-ds config show|explain|schema`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ebft_ds.cli.train import OverridesArgument, RecipeArgument, show_notes
from ebft_ds.errors import ConfigError

app = typer.Typer(help="Show, explain, or describe configurations.", no_args_is_help=True)


@app.command()
def show(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    all_fields: Annotated[bool, typer.Option("--all", help="Also the fields that have their default.")] = False,
) -> None:
    """Print what a recipe with its includes and overrides comes to, and where each value was set."""
    from ebft_ds.config import load_recipe
    from ebft_ds.config.resolved import resolved_text

    loaded = load_recipe(recipe, overrides or [])
    show_notes(loaded.notes)
    print(resolved_text(loaded.config, explicit_only=not all_fields), end="")
    for name, source in loaded.sources.items():
        print(f"# {name}: {source}")


@app.command()
def explain(
    field: Annotated[str | None, typer.Argument(help="A field, an alias, or a field of Axolotl.", show_default=False)] = None,
    all_fields: Annotated[bool, typer.Option("--all", help="Every field.")] = False,
    only_differences: Annotated[bool, typer.Option("--differences", help="Defaults that differ from Axolotl's.")] = False,
) -> None:
    """Explain a field: type, default, other spellings, and what Axolotl does."""
    from ebft_ds.config import explain as explaining
    from ebft_ds.config.fields import FIELDS

    if [field is not None, all_fields, only_differences].count(True) != 1:
        raise ConfigError("give a field, or --all, or --differences")
    if field is not None:
        print(explaining.explain(field))
    elif all_fields:
        print("\n\n".join(explaining.explain(name) for name in FIELDS))
    else:
        for difference in explaining.differences():
            ours, theirs = explaining.shown(difference.ours), explaining.shown(difference.theirs)
            print(f"{difference.field}: {ours} (Axolotl: {theirs}). {difference.why}")


@app.command()
def schema() -> None:
    """Print the JSON schema of a recipe by sections."""
    from ebft_ds.config.explain import schema as recipe_schema

    print(json.dumps(recipe_schema(), indent=2))
