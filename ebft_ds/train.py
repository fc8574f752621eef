"""Entry point of one training rank: `deepspeed --module ebft_ds.train RECIPE [key=value ...]`, and what `ebft-ds train` starts.

It accepts the launcher's `--local_rank=N`, runs the training, and turns errors into exit codes (ebft_ds.errors).
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from ebft_ds.config import LoadedRecipe, load_recipe
from ebft_ds.errors import ConfigError, EbftError, PeerError, Preempted

TASKS = ("train", "eval", "export")

EXIT_RECORD_VARIABLE = "EBFT_DS_EXIT_RECORDS"
"""Folder for one exit record a rank, set by `ebft-ds train`: the code survives even if the process is killed while it winds up."""


def main(argv: Sequence[str] | None = None, *, mode: str | None = None) -> int:
    """Run one rank and return its exit code; one clear message on stderr for an error that was raised on purpose.

    `mode`: see load_recipe.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # reward functions and rollout loops of the user; last, so that nothing there hides a library
    rank = int(os.environ.get("RANK", "0"))
    try:
        task, recipe, overrides = parse_arguments(sys.argv[1:] if argv is None else argv)
        loaded = load_recipe(recipe, overrides, mode=mode)
        check_world_size(loaded)
        from ebft_ds.trainers.run import run_task

        code, message = run_task(loaded, task), ""
    except Preempted as error:
        code, message = error.exit_code, str(error)
    except EbftError as error:
        code, message = error.exit_code, str(error)
        if error.__cause__ is not None and error.exit_code == 1 and not isinstance(error, PeerError):
            traceback.print_exception(error.__cause__)
    except KeyboardInterrupt:
        code, message = 1, "interrupted"
    except Exception as error:  # noqa: BLE001  the supervisor of the whole rank: whatever it is, it is reported and ends the rank
        traceback.print_exc()
        code, message = 1, f"unexpected {type(error).__name__}: {error}"
    report(rank, code, message)
    return code


def report(rank: int, code: int, message: str) -> None:
    """Say how the rank ends, on stderr and in its exit record."""
    if message:
        kind = "stopped" if code == Preempted.exit_code else "error"
        who = "" if rank == 0 else f" (rank {rank})"
        print(f"{kind}{who}: {message}", file=sys.stderr, flush=True)
    folder = os.environ.get(EXIT_RECORD_VARIABLE)
    if folder:
        target = Path(folder) / f"rank_{rank}.json"
        temporary = target.with_suffix(".tmp")
        temporary.write_text(json.dumps({"code": code, "message": message}), encoding="utf-8")
        os.replace(temporary, target)


def parse_arguments(argv: Sequence[str]) -> tuple[str, str, list[str]]:
    """(task, recipe, overrides). `--local_rank=N` of the launcher goes into the environment; `--task=` is what `ebft-ds` passes.

    Errors: ConfigError.
    """
    task = "train"
    rest: list[str] = []
    pending = list(argv)
    while pending:
        argument = pending.pop(0)
        name, equals, value = argument.partition("=")
        if name in ("--local_rank", "--local-rank"):
            local_rank = value if equals else (pending.pop(0) if pending else "")
            if not local_rank.isdigit():
                raise ConfigError(f"{name} takes a number, not {local_rank!r}")
            os.environ.setdefault("LOCAL_RANK", local_rank)
        elif name == "--task" and value in TASKS:
            task = value
        elif argument.startswith("-"):
            raise ConfigError(f"unknown option {name}; usage: ebft_ds.train RECIPE [key=value ...]")
        else:
            rest.append(argument)
    if not rest:
        raise ConfigError("no recipe given; usage: ebft_ds.train RECIPE [key=value ...]")
    return task, rest[0], rest[1:]


def check_world_size(loaded: LoadedRecipe) -> int:
    """Ranks of this job, from the launcher's environment (1 without). Errors: ConfigError if `num_processes` says otherwise."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"WORLD_SIZE is {text!r} in the environment; it must be a number of ranks")
    world_size, wanted = int(text), loaded.config.run.num_processes
    if wanted is not None and wanted != world_size:
        source = loaded.sources.get("num_processes", "the recipe")
        how = f"the launcher started {world_size} rank(s)" if "WORLD_SIZE" in os.environ else "this is a single process"
        raise ConfigError(
            f"num_processes: {wanted} ({source}), but {how}. num_processes is for `ebft-ds train`, which starts the ranks itself; "
            "under another launcher leave it out or make them equal"
        )
    return world_size


if __name__ == "__main__":
    sys.exit(main())
