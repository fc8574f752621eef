"""The `ebft-ds` command. Commands import what they need when they run, so that `--help` is quick and needs no torch."""

from __future__ import annotations

import os
import sys

import typer

from ebft_ds import __version__
from ebft_ds.cli import config_commands, data_preview, runs, tasks
from ebft_ds.cli.convert_config import convert_config
from ebft_ds.cli.demo import demo
from ebft_ds.cli.doctor import doctor
from ebft_ds.cli.plan import plan
from ebft_ds.cli.reward import reward
from ebft_ds.cli.score import score
from ebft_ds.cli.serve import serve
from ebft_ds.cli.train import train
from ebft_ds.errors import EbftError

app = typer.Typer(
    help="Energy-Based Fine-Tuning of language models on DeepSpeed ZeRO-3.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(demo)
app.command()(train)
app.command()(reward)
app.command()(serve)
app.command()(score)
app.command("eval")(tasks.evaluate)
app.command("export")(tasks.export)
app.command()(plan)
app.command()(doctor)
app.add_typer(config_commands.app, name="config")
app.command("convert-config")(convert_config)
app.add_typer(data_preview.app, name="data")
app.command()(runs.samples)
app.add_typer(runs.app, name="runs")


@runs.app.callback()
def _runs() -> None:
    """Look at finished or running trainings."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ebft-ds {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version and end."),
) -> None:
    """Energy-Based Fine-Tuning of language models on DeepSpeed ZeRO-3."""


def main() -> None:
    """Entry point. Errors raised on purpose are one message and their exit code; usage errors exit with 2."""
    try:
        app(prog_name="ebft-ds")
    except EbftError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except BrokenPipeError:  # `ebft-ds ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None


if __name__ == "__main__":
    main()
