"""Model text made safe to show: control characters become visible, nothing can move the cursor or reverse the line."""

from __future__ import annotations

import unicodedata

_NAMED = {"\n": "↵", "\t": "⇥", "\r": "␍"}
_HARMLESS_FORMAT = "\u200c\u200d"
"""Joiners that scripts and emoji need."""


def visible(text: str, limit: int | None = None) -> str:
    """`text` on one line; at most `limit` characters of it, the rest replaced by an ellipsis.

    Line breaks and tabs become arrows, ASCII controls their Unicode pictures, other invisible or direction-changing
    characters `<U+202E>`.
    """
    cut = text if limit is None or len(text) <= limit else text[: max(limit - 1, 0)]
    shown = "".join(_visible_character(character) for character in cut)
    return shown if cut is text else shown + "…"


def _visible_character(character: str) -> str:
    if character in _NAMED:
        return _NAMED[character]
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") and character not in _HARMLESS_FORMAT:
        return f"<U+{code:04X}>"
    return character
