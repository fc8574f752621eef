"""`ebft-ds convert-config`: an Axolotl configuration becomes a recipe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ebft_ds.errors import ConfigError


def convert_config(
    source: Annotated[Path, typer.Argument(metavar="AXOLOTL.yaml", help="Axolotl configuration with rl: ebft.", show_default=False)],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Recipe to write; default stdout.")] = None,
) -> None:
    """Translate an Axolotl configuration; what is left out, and why, is reported on stderr."""
    from ebft_ds.config.convert import convert_axolotl
    from ebft_ds.config.resolved import resolved_text

    conversion = convert_axolotl(source)
    text = f"# Converted from {source.name}\n" + resolved_text(conversion.config(), explicit_only=True)
    for line in conversion.notes:
        print(f"note: {line}", file=sys.stderr)
    for line in conversion.dropped:
        print(f"left out: {line}", file=sys.stderr)
    if output is None:
        print(text, end="")
        return
    try:
        with open(output, "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise ConfigError(f"{output} exists; name another file") from None
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}") from None
