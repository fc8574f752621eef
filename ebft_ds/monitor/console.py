"""The one console on stderr that progress, logs and tables share, so that they never tear each other."""

from __future__ import annotations

from functools import cache

from rich.console import Console

PLAIN_WIDTH = 120
"""Columns where there is no terminal to ask (a log file): 80, rich's guess, would cut the tables."""


@cache
def error_console() -> Console:
    """Console on stderr. stdout stays free for what a command prints as its result."""
    console = Console(stderr=True, soft_wrap=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console
