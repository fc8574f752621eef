"""Rows to be scored: what they may look like, and their token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ebft_ds.data.preference import PreferenceFields, PreferenceRow, RewardEncoder, RewardEncoding, Skipped, validate_preference_row
from ebft_ds.data.rows import BadRow
from ebft_ds.errors import DataError, ModelError
from ebft_ds.packing.rows import RowStyle
from ebft_ds.trainers.reward_evaluation import RewardScale
from ebft_ds.trainers.score_rounds import GroupIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SINGLE = ("messages", "response")
"""Fields that hold one response."""
FIELDS = PreferenceFields()


def read_score_row(row: Any) -> PreferenceRow:
    """Any preference row, and rows of a single response: `prompt` (or none) with `response`, a whole conversation as `messages`.

    Raises:
        BadRow: anything else.
    """
    single = _single_response(row) if isinstance(row, Mapping) else None
    if single is None:
        return validate_preference_row(row, FIELDS)
    name, response = single
    others = {key: row.get(key) for key in (FIELDS.prompt, FIELDS.tools)}
    try:  # a preference has two responses at least: this one stands in for both
        checked = validate_preference_row({**others, FIELDS.responses: [response, response]}, FIELDS)
    except BadRow as error:
        raise BadRow(str(error).replace(f"{FIELDS.responses}[0]", name)) from None
    return msgspec.structs.replace(checked, responses=checked.responses[:1])


def _single_response(row: Mapping[str, Any]) -> tuple[str, Any] | None:
    """(its field, the one response) of a row that has not several."""
    given = [name for name in (*SINGLE, FIELDS.responses, FIELDS.chosen, FIELDS.rejected) if row.get(name) is not None]
    if len(set(given) - {FIELDS.chosen, FIELDS.rejected}) > 1 or (given and given[0] in SINGLE and len(given) > 1):
        raise BadRow(f"has {' and '.join(given)}; one of them must say what is scored")
    if not given or given[0] not in (*SINGLE, FIELDS.responses):
        return None
    [name] = given
    value = row[name]
    if name == FIELDS.responses:
        return (f"{name}[0]", value[0]) if isinstance(value, (list, tuple)) and len(value) == 1 else None
    if name == "messages" and (not isinstance(value, (list, tuple)) or row.get(FIELDS.prompt)):
        raise BadRow("has a prompt beside messages" if row.get(FIELDS.prompt) else "has messages that are no list")
    return name, value


class ScoreEncoder:
    """Token ids of rows, as the reward model was trained on them. Not for several threads at once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, encoding: RewardEncoding, *, style: RowStyle, token_budget: int) -> None:
        """`style` and `token_budget`: of the forwards that will score them."""
        # Whatever training leaves out, here a score is wanted of it.
        kept = msgspec.structs.replace(encoding, identical_pairs="keep", empty_responses="keep")
        self._encoder = RewardEncoder(tokenizer, kept)
        self._style, self._token_budget = style, token_budget

    def encode(self, row: Any) -> list[GroupIds]:
        """The row's responses in their order, those that share a forward in one group. Raises `BadRow`."""
        try:
            encoded = self._encoder.encode(read_score_row(row), where="the row")
        except DataError as error:
            raise BadRow(f"cannot be encoded: {error}") from error
        if isinstance(encoded, Skipped):
            raise BadRow(encoded.reason if encoded.is_bad else f"cannot be scored: {encoded.reason}")
        whole = encoded.whole_group()
        if sum(whole.tokens(self._style)) <= self._token_budget:
            return [GroupIds(list(whole.prefix_ids), [list(branch) for branch in whole.branches])]
        return [GroupIds(ids[:-1], [ids[-1:]]) for ids in encoded.group]


def measured_scale(encoding: RewardEncoding) -> RewardScale:
    """Of the held-out rows that the model was evaluated on. Errors: ModelError if the model brings none that is usable."""
    if encoding.mean is None or encoding.std is None or not (scale := RewardScale(encoding.mean, encoding.std)).usable:
        raise ModelError("--normalize: the model's reward_encoding.json has no mean and std of rewards; train it with held-out rows")
    return scale
