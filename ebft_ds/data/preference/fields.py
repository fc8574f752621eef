"""Which column of a preference row holds what."""

from __future__ import annotations

import msgspec

from ebft_ds.config.sections import DataSection, RewardSection

TOKENISED = (("chosen_ids", None), ("rejected_ids", None))
TOKENISED_PADDED = (("input_ids_chosen", "attention_mask_chosen"), ("input_ids_rejected", "attention_mask_rejected"))
"""(ids, mask) columns of rows that are tokens already: unpadded as TRL writes them, and padded."""


class PreferenceFields(msgspec.Struct, frozen=True):
    """Column names."""

    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"
    responses: str = "responses"
    tools: str = "tools"
    margin: str = "margin"
    preference: str = "preference"
    subset: str = "subset"

    @classmethod
    def of(cls, reward: RewardSection, data: DataSection) -> PreferenceFields:
        return cls(
            prompt=data.prompt_field,
            chosen=reward.chosen_field,
            rejected=reward.rejected_field,
            responses=reward.responses_field,
            tools=reward.tools_field,
            margin=reward.margin_field,
            preference=reward.preference_field,
            subset=reward.subset_field,
        )

    @property
    def known(self) -> frozenset[str]:
        """Every column that a row may use; others are ignored."""
        tokenised = [name for pair in (*TOKENISED, *TOKENISED_PADDED) for name in pair if name is not None]
        return frozenset((*msgspec.structs.astuple(self), *tokenised))
