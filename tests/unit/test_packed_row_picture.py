"""The picture of a packed row in the docs is what the code draws now."""

from __future__ import annotations

from tools.draw_packed_row import PICTURE, picture


def test_picture_is_fresh() -> None:
    assert PICTURE.read_text(encoding="utf-8") == picture(), "run `python tools/draw_packed_row.py`"
