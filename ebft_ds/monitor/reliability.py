"""A reliability diagram as a small picture: drawn with Pillow, which TensorBoard brings."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

WIDTH, HEIGHT = 420, 400
_LEFT, _TOP, _SIZE = 60, 40, 300
_INK, _GRID, _BAR, _LINE = (40, 40, 40), (225, 225, 225), (86, 136, 196), (200, 70, 60)


class ReliabilityBin(Protocol):
    """What the diagram needs of a bin (see ebft_ds.rewards.calibration)."""

    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...
    @property
    def count(self) -> int: ...
    @property
    def accuracy(self) -> float: ...
    @property
    def confidence(self) -> float: ...


@dataclass(frozen=True)
class Figure:
    """A PNG image; sizes in pixels."""

    png: bytes
    width: int
    height: int


def draw_reliability(bins: Sequence[ReliabilityBin], error: float) -> Figure:
    """Accuracy of each bin over confidence from 0.5 to 1, its count below; the line is perfect calibration, the tick mean confidence.

    Args:
        error: the expected calibration error, for the title.
    """
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    draw.text((_LEFT, 12), f"accuracy over confidence, calibration error {error:.4f}", fill=_INK)
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        draw.line([(_x(0.5), _y(tick)), (_x(1.0), _y(tick))], fill=_GRID)
        draw.text((_LEFT - 34, _y(tick) - 6), f"{tick:.2f}", fill=_INK)
    for one in bins:
        left, right, middle = _x(one.low), _x(one.high), _x((one.low + one.high) / 2)
        if one.count:
            draw.rectangle([left + 2, _y(one.accuracy), right - 2, _y(0.0)], fill=_BAR)
            draw.line([(left + 2, _y(one.confidence)), (right - 2, _y(one.confidence))], fill=_LINE, width=3)
        draw.text((left - 8, _y(0.0) + 6), f"{one.low:.2f}", fill=_INK)
        draw.text((middle, _y(0.0) + 24), f"n={one.count}", fill=_INK, anchor="ma")
    draw.text((_x(1.0) - 8, _y(0.0) + 6), "1.00", fill=_INK)
    draw.line([(_x(0.5), _y(0.5)), (_x(1.0), _y(1.0))], fill=_LINE)
    draw.rectangle([_x(0.5), _y(1.0), _x(1.0), _y(0.0)], outline=_INK)
    file = io.BytesIO()
    image.save(file, format="PNG")
    return Figure(file.getvalue(), WIDTH, HEIGHT)


def _x(confidence: float) -> int:
    return _LEFT + round((confidence - 0.5) * 2 * _SIZE)


def _y(share: float) -> int:
    return _TOP + round((1.0 - share) * _SIZE)
