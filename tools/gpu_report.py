"""What the GPU checks share: skipping, and comparing numbers."""

from __future__ import annotations

import importlib.util

import torch


class Skip(Exception):
    """The check does not apply here; the message says why."""


def need(package: str) -> None:
    """Skip unless the package is installed."""
    if importlib.util.find_spec(package) is None:
        raise Skip(f"{package} is not installed")


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> str:
    """The largest difference as text; AssertionError above the tolerance."""
    gap = float((found.detach().float().cpu() - wanted.detach().float().cpu()).abs().max())
    assert gap <= tolerance, f"largest difference {gap:.3g}, allowed {tolerance:g}"
    return f"largest difference {gap:.2g}"
