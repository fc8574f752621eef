"""Logging of one rank: stderr on rank 0, and a file for every rank."""

from __future__ import annotations

import logging
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

from ebft_ds.errors import ConfigError
from ebft_ds.monitor.console import error_console

LIBRARIES = ("DeepSpeed", "transformers", "peft", "datasets", "huggingface_hub", "torch", "urllib3", "fsspec", "httpx")
_FORMAT = "%(asctime)s %(levelname)s rank {rank} %(name)s: %(message)s"


def setup_logging(rank: int, world_size: int, level: str, log_dir: Path | None, *, console: Console | None = None) -> None:
    """Send this process's log records to stderr (rank 0 only) and to `log_dir/rank_N.log` (every rank, appended).

    Libraries speak from warnings on, and on other ranks than 0 from errors on; Python warnings are logged too. May be called
    again: it replaces what it set up before. A library imported later brings its own handlers: call it after the imports.
    Raises ConfigError for an unknown level or a folder that cannot be written.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ConfigError(f"log_level {level!r} is unknown; use debug, info, warning or error")
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if getattr(handler, "ebft_ds", False)]:
        root.removeHandler(handler)
        handler.close()
    formatter = logging.Formatter(_FORMAT.format(rank=f"{rank}/{world_size}"))
    if rank == 0:
        _add(root, _stderr_handler(console if console is not None else error_console(), formatter))
    if log_dir is not None:
        _add(root, _file_handler(log_dir / f"rank_{rank}.log", formatter))
    if not root.handlers:
        _add(root, logging.NullHandler())  # else Python's handler of last resort prints warnings on every rank
    root.setLevel(number)
    logging.captureWarnings(True)
    for name in LIBRARIES:
        _tame(logging.getLogger(name), max(number, logging.WARNING if rank == 0 else logging.ERROR))


def _add(root: logging.Logger, handler: logging.Handler) -> None:
    handler.ebft_ds = True  # type: ignore[attr-defined]
    root.addHandler(handler)


def _stderr_handler(console: Console, formatter: logging.Formatter) -> logging.Handler:
    if console.is_terminal:
        return RichHandler(console=console, show_path=False, markup=False, rich_tracebacks=False)
    handler = logging.StreamHandler(console.file)  # a log file wants whole lines, not an 80-column layout
    handler.setFormatter(formatter)
    return handler


def _file_handler(path: Path, formatter: logging.Formatter) -> logging.Handler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path, mode="a", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"log file {path} cannot be written: {error.strerror}; choose another output_dir") from error
    handler.setFormatter(formatter)
    return handler


def _tame(library: logging.Logger, level: int) -> None:
    """Let a library's records go through the root's handlers alone, from `level` on."""
    for handler in list(library.handlers):
        if isinstance(handler, logging.StreamHandler):
            library.removeHandler(handler)
    library.propagate = True
    library.setLevel(level)
