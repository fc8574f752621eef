"""`ebft-ds samples` and `ebft-ds runs compare`: looking at runs that exist."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ebft_ds.errors import DataError

app = typer.Typer(help="Look at finished or running trainings.", no_args_is_help=True)


@app.command()
def compare(runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="output_dir of each run.", show_default=False)]) -> None:
    """Put the metrics of several runs side by side, and show where their configurations differ."""
    from ebft_ds.monitor.compare import compare_runs

    Console().print(compare_runs(runs))


def samples(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="output_dir of a run, or its samples.jsonl.", show_default=False)],
    step: Annotated[int | None, typer.Option(help="Only this step; default the last one there is.")] = None,
    limit: Annotated[int, typer.Option(help="Most completions shown.", min=1)] = 10,
) -> None:
    """Show sample completions of a run beside their references."""
    from ebft_ds.monitor.samples import read_samples, render_table

    path = run / "samples.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise DataError(f"{path} does not exist; give the output_dir of a run with log_samples_steps above 0")
    rows = read_samples(path, step=step)
    if not rows:
        raise DataError(f"{path} holds no sample" + (f" of step {step}" if step is not None else ""))
    shown = rows if step is not None else [row for row in rows if row.step == rows[-1].step]
    Console().print(render_table(shown[:limit], title=f"step {shown[0].step}"))
