"""Keys that are not ours but that other systems know: accepted when they ask for nothing, refused with the reason otherwise."""

from __future__ import annotations

from typing import Any


def judge_foreign(key: str, value: Any, where: str) -> str | None:
    """None: nobody's key. Otherwise a note for the log. ConfigError: a known key that is refused."""
    return None
