"""What of a server's log belongs into an error message."""

from __future__ import annotations

import re
from pathlib import Path

START_MARK = "=== "
"""Begins the line that heads each start of a server."""
TAIL_LINES = 30
EARLIER_ERRORS = 5
_READ_BYTES = 512 * 1024
_ERROR = re.compile(r"\b\w*(?:Error|Exception|Killed)\b: .+")
_NOISE = re.compile(r"\] Route: ")
_ORIGIN = re.compile(r"^\([^)]* pid=\d+\) (?:\w+ \d\d-\d\d [\d:]+ \[[^\]]*\] )?")


def log_end(path: Path) -> str:
    """The last lines of the last start, after the errors further up: vLLM's processes end one after another, and the last one to speak
    seldom knows why."""
    try:
        lines = _last_start(path)
    except OSError as error:
        return f"its log {path} cannot be read: {error.strerror}"
    tail, before = lines[-TAIL_LINES:], lines[:-TAIL_LINES]
    errors = list(dict.fromkeys(found.group() for line in before if (found := _ERROR.search(_ORIGIN.sub("", line)))))[:EARLIER_ERRORS]
    shown = [f"errors in {path}:", *errors, "its end:"] if errors else [f"the end of {path}:"]
    return "\n  ".join([shown[0], *shown[1:], *tail])


def _last_start(path: Path) -> list[str]:
    with open(path, "rb") as stream:
        stream.seek(0, 2)
        stream.seek(max(0, stream.tell() - _READ_BYTES))
        text = stream.read().decode(errors="backslashreplace")
    lines = [line for line in text.splitlines() if line.strip() and not _NOISE.search(line)]
    starts = [index for index, line in enumerate(lines) if line.startswith(START_MARK)]
    return lines[starts[-1] + 1 :] if starts else lines
