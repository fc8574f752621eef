"""How responses become ids, saved with a reward model so that training, evaluation, RL and serving all do the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from ebft_ds.config.sections import DataSection, RewardSection
from ebft_ds.data.chat import template_text
from ebft_ds.errors import ConfigError, ModelError

FILE_NAME = "reward_encoding.json"
TruncationMode = Literal["keep_end", "keep_start", "drop"]


class RewardEncoding(msgspec.Struct, frozen=True, kw_only=True):
    """The recipe."""

    max_length: int
    """Most tokens of a prompt with its response."""
    truncation_mode: TruncationMode = "keep_end"
    close: bool = True
    """Does every response end with the end-of-turn token (texts: EOS)?"""
    system_prompt: str | None = None
    chat_template: str | None = None
    """Jinja text; None: the tokenizer's."""
    chat_template_kwargs: dict[str, Any] = {}
    identical_pairs: Literal["drop", "keep"] = "drop"
    empty_responses: Literal["keep", "drop"] = "keep"
    mean: float | None = None
    """Mean of the rewards on held-out rows; None: not measured."""
    std: float | None = None
    normalize: bool = False
    """Are scorers asked to give (reward - mean) / std as well?"""

    def __post_init__(self) -> None:
        if self.max_length < 1:
            raise ConfigError(f"max_length {self.max_length} holds no token.")

    @classmethod
    def of(cls, reward: RewardSection, data: DataSection) -> RewardEncoding:
        """As the sections say. Raises `ConfigError` for a template file that cannot be read."""
        return cls(
            max_length=data.max_seq_length,
            truncation_mode=reward.truncation_mode,
            close=data.reference_end == "auto",
            system_prompt=data.system_prompt,
            chat_template=None if data.chat_template is None else template_text(data.chat_template),
            chat_template_kwargs=dict(data.chat_template_kwargs),
            identical_pairs=reward.identical_pairs,
            empty_responses=reward.empty_responses,
            normalize=reward.normalize_rewards,
        )

    def save(self, folder: str | Path) -> None:
        """Writes `reward_encoding.json`."""
        (Path(folder) / FILE_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")

    @classmethod
    def load(cls, folder: str | Path) -> RewardEncoding:
        """Raises `ModelError` for a folder without the file, or with one that is damaged or of another version."""
        path = Path(folder) / FILE_NAME
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ModelError(
                f"{Path(folder).absolute()} has no readable {FILE_NAME} ({error.strerror}), which says how its responses are encoded."
                " Give a reward model that `ebft-ds reward` has exported, or write the file."
            ) from error
        try:
            return msgspec.json.decode(content, type=StrictEncoding).recipe()
        except (msgspec.MsgspecError, ValueError) as error:
            raise ModelError(f"{path.absolute()} is no encoding recipe: {error}. Export the model again.") from error


class StrictEncoding(RewardEncoding, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file: a field that this version does not know would change the ids, so it is an error."""

    def recipe(self) -> RewardEncoding:
        return RewardEncoding(**msgspec.structs.asdict(self))
