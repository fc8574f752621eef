"""The one console on stderr that progress, logs and tables share, so that they never tear each other."""

from __future__ import annotations

from functools import cache

from rich.console import Console


@cache
def error_console() -> Console:
    """Console on stderr. stdout stays free for what a command prints as its result."""
    return Console(stderr=True, soft_wrap=False)
