"""`ebft-ds train`: validate in this process, then start the ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ebft_ds.cli.devices import plan_ranks
from ebft_ds.config import LoadedRecipe, RewardConfig, load_recipe
from ebft_ds.errors import ConfigError

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="YAML recipe.", show_default=False)]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[key=value ...]", help="Fields set over the recipe.", show_default=False)
]


RANK_MODULES = {"async": "ebft_ds.train", "reward": "ebft_ds.reward"}
"""Mode -> what its ranks run."""


def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check recipe, model and data, print the derived numbers, and end.")] = False,
) -> None:
    """Train: starts one rank per GPU, or `num_processes` ranks, on this machine."""
    start_training(recipe, overrides or [], dry_run=dry_run)


def start_training(recipe: str, overrides: list[str], *, dry_run: bool, mode: str | None = None) -> None:
    """`ebft-ds train`, and (with the mode that its recipes must have) `ebft-ds reward`."""
    loaded = load_recipe(recipe, overrides, mode=mode)
    show_notes(loaded.notes)
    if dry_run:
        from ebft_ds.cli.dry_run import dry_run as run_dry

        run_dry(loaded)
        return
    if under_launcher():
        from ebft_ds.train import main

        raise typer.Exit(main([recipe, *overrides], mode=mode))
    raise typer.Exit(start_ranks(loaded, recipe, overrides))


def under_launcher() -> bool:
    """Another program has already started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start_ranks(loaded: LoadedRecipe, recipe: str, overrides: list[str], task: str = "train") -> int:
    """Check what can be checked without torch, start the ranks on a task, and return the job's exit code."""
    from ebft_ds.cli.supervisor import RankSupervisor

    config = loaded.config
    ranks = plan_ranks(config)
    output_dir = quick_check(loaded, ranks.world_size, ranks.accelerators)
    supervisor = RankSupervisor(
        # -P: a file called like a module in the working directory must not hide that module.
        [sys.executable, "-P", "-m", RANK_MODULES[config.MODE], f"--task={task}", recipe, *overrides],
        ranks.world_size,
        master_port=config.run.master_port,
        environment=rank_environment() | ranks.environment,
        log_folder=output_dir / "logs",
        on_cpu=ranks.accelerators == 0,
    )
    return supervisor.run()


def rank_environment() -> dict[str, str]:
    """The environment with this package importable under -P, wherever it was imported from."""
    environment = dict(os.environ)
    home = str(Path(__file__).resolve().parent.parent.parent)
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if home not in paths:
        paths.append(home)
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def quick_check(loaded: LoadedRecipe, world_size: int, accelerators: int) -> Path:
    """All checks that need neither torch nor the data. Returns the output folder. Errors: ConfigError or ModelError."""
    from ebft_ds.config.checks import Surroundings, check_config, require_training_inputs
    from ebft_ds.config.deepspeed import build_deepspeed_config
    from ebft_ds.config.derived import derive
    from ebft_ds.config.derived_reward import derive_reward
    from ebft_ds.config.preflight import check_dataset_paths, check_model_files, check_output_dir
    from ebft_ds.sidecar.preflight import check_sidecar

    config = loaded.config
    wanted = os.environ.get("WORLD_SIZE")
    if wanted is not None and wanted != str(world_size):
        raise ConfigError(f"WORLD_SIZE={wanted} is in the environment, but {world_size} rank(s) are to be started; unset it")
    require_training_inputs(config)
    output_dir = check_output_dir(config)
    facts = check_model_files(config)
    report = check_config(config, Surroundings(world_size, accelerators, facts))
    report.raise_if_bad()
    check_sidecar(config, os.environ, on_cpu=accelerators == 0, facts=facts)
    check_dataset_paths(config)
    show_notes(report.notes)
    hidden_size = facts.hidden_size if facts else None
    if isinstance(config, RewardConfig):
        build_deepspeed_config(config, derive_reward(config, world_size), "actor", hidden_size)
        return output_dir
    for kind in ("actor", "feature"):
        build_deepspeed_config(config, derive(config, world_size), kind, hidden_size)
    return output_dir


def show_notes(notes: list[str]) -> None:
    """Notes go to stderr; results go to stdout."""
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
