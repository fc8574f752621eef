"""Which rows are too long."""

from __future__ import annotations

import msgspec

from ebft_ds.config.sections import DataSection, RolloutSection
from ebft_ds.errors import ConfigError


class LengthLimits(msgspec.Struct, frozen=True):
    """Longest prompt, reference and their sum, in tokens."""

    prompt: int
    reference: int
    total: int

    @classmethod
    def of(cls, data: DataSection, rollout: RolloutSection) -> LengthLimits:
        total = data.max_seq_length
        prompt = total - rollout.max_completion_length if data.max_prompt_length is None else data.max_prompt_length
        if prompt < 1:
            raise ConfigError(
                f"max_completion_length {rollout.max_completion_length} leaves no room for a prompt within max_seq_length {total}:"
                " raise max_seq_length or set max_prompt_length."
            )
        return cls(prompt=prompt, reference=total if data.max_reference_length is None else data.max_reference_length, total=total)
