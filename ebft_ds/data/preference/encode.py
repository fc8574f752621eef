"""From checked preference rows to token ids: one function for training, evaluation, RL and serving."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from ebft_ds.data.preference.counts import EncodingCounts
from ebft_ds.data.preference.full import FullEncoder, FullIds
from ebft_ds.data.preference.plain import without_nulls
from ebft_ds.data.preference.recipe import RewardEncoding
from ebft_ds.data.preference.rows import PreferenceRow
from ebft_ds.data.preference.truncate import common_prefix, truncate
from ebft_ds.data.rows import BadRow, Message
from ebft_ds.errors import DataError
from ebft_ds.packing.whole_groups import WholeGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOO_LONG, IDENTICAL, EMPTY = "too long", "identical", "empty"


class EncodedResponses(msgspec.Struct, frozen=True):
    """The responses of one row as whole sequences with their prompt."""

    group: list[list[int]]
    """Best first, each 1 to max_length tokens; its last token is where it is scored."""
    prefix_length: int
    """Tokens that all begin with, at most all but one of the shortest."""
    margin: float = 0.0
    preference: float = 1.0
    subset: str | None = None
    row: int = -1
    """Number in its source, for messages."""

    def whole_group(self) -> WholeGroup:
        """For packed rows."""
        return WholeGroup(self.group[0][: self.prefix_length], [ids[self.prefix_length :] for ids in self.group])


class Skipped(msgspec.Struct, frozen=True):
    """A row that is left out."""

    reason: str
    """`identical`, `too long`, `empty`, or why the chat template refuses it."""

    @property
    def is_bad(self) -> bool:
        """Is the row wrong, rather than left out by the recipe?"""
        return self.reason not in (TOO_LONG, IDENTICAL, EMPTY)


class RewardEncoder:
    """Encodes rows with one tokenizer and recipe, and counts. The given tokenizer is left as it is."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, encoding: RewardEncoding) -> None:
        """Raises `ConfigError` for template arguments that the encoder sets itself."""
        if encoding.chat_template is not None and encoding.chat_template != tokenizer.chat_template:
            tokenizer = copy.copy(tokenizer)
            tokenizer.chat_template = encoding.chat_template
        self.tokenizer = tokenizer
        """With the recipe's template."""
        self.encoding = encoding
        self.counts = EncodingCounts()
        self._full = FullEncoder(tokenizer, encoding)

    def encode(self, row: PreferenceRow, *, number: int = -1, where: str = "a row") -> EncodedResponses | Skipped:
        """The row's ids, or why it is left out.

        Raises:
            DataError: messages without any chat template; `where` names the row.
            ModelError: responses cannot be closed, or the template fails on a plain exchange.
        """
        self.counts.rows += 1
        result = self._encode(row, number, where)
        self.counts.used += isinstance(result, EncodedResponses)
        return result

    def _encode(self, row: PreferenceRow, number: int, where: str) -> EncodedResponses | Skipped:
        try:
            full = self._ids(row, where)
        except BadRow as problem:
            self.counts.bad_rows += 1
            self.counts.first_bad = self.counts.first_bad or f"{where} {problem}"
            return Skipped(str(problem))
        nothing = not all(full.group)
        if nothing or any(map(_says_nothing, row.responses)):
            self.counts.empty += 1
            if nothing or self.encoding.empty_responses == "drop":
                return Skipped(EMPTY)
        self.counts.eos_added += full.eos_added
        group = self._cut(full.group)
        if group is None:
            return Skipped(TOO_LONG)
        if all(ids == group[0] for ids in group):
            self.counts.identical += 1
            if self.encoding.identical_pairs == "drop":
                return Skipped(IDENTICAL)
        prefix = common_prefix(group)
        self.counts.no_common_prompt += prefix == 0
        return EncodedResponses(group, prefix, row.margin, row.preference, row.subset, number)

    def _ids(self, row: PreferenceRow, where: str) -> FullIds:
        if row.token_ids is None:
            return full_ids(self._full, row.prompt, row.responses, row.tools, where)
        largest, size = max(map(max, row.token_ids)), len(self.tokenizer)
        if largest >= size:
            raise BadRow(f"has the token {largest}, but the tokenizer ends at {size - 1}")
        self.counts.without_end += sum(ids[-1] not in self._full.end_ids for ids in row.token_ids)
        return FullIds(row.token_ids, 0)

    def _cut(self, group: list[list[int]]) -> list[list[int]] | None:
        mode, limit = self.encoding.truncation_mode, self.encoding.max_length
        if max(map(len, group)) <= limit:
            return group
        if mode == "drop":
            self.counts.dropped += 1
            return None
        cut = truncate(group, limit, mode, self._full.end_ids)
        self.counts.truncated += 1
        self.counts.responses_cut += cut.responses_cut
        self.counts.end_restored += cut.end_restored
        return cut.group

    def encode_one(self, prompt: str | list[Message] | None, response: str | list[Message], tools: list[Any] | None = None) -> list[int]:
        """One response's ids: where nothing is cut those that `encode` gives it in any row. Counts nothing.

        Raises:
            DataError: the template refuses the messages, there is none, there is no token, or `drop` forbids the length.
            ModelError: as `encode`.
        """
        return self._encode_group(prompt, [response], tools).group[0]

    def _encode_group(
        self, prompt: str | list[Message] | None, responses: Sequence[str | list[Message]], tools: list[Any] | None
    ) -> EncodedResponses:
        try:
            group = full_ids(self._full, prompt, responses, tools, "the prompt").group
        except BadRow as problem:
            raise DataError(f"The prompt with its response {problem}.") from problem
        if not all(group):
            raise DataError("A prompt and a response that encode to no token cannot be scored.")
        longest, limit, mode = max(map(len, group)), self.encoding.max_length, self.encoding.truncation_mode
        if longest > limit:
            if mode == "drop":
                raise DataError(f"{longest} tokens of prompt and response are over max_length {limit}, and truncation_mode is drop.")
            group = truncate(group, limit, mode, self._full.end_ids).group
        return EncodedResponses(group, common_prefix(group))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of recipe, template and vocabulary: changes when the same texts may become other ids.
        A large vocabulary takes seconds, once.
        """
        recipe = msgspec.structs.replace(self.encoding, mean=None, std=None, normalize=False)
        vocabulary = hashlib.sha256(repr(sorted(self.tokenizer.get_vocab().items())).encode()).hexdigest()
        parts = [msgspec.json.encode(recipe).decode(), str(self.tokenizer.chat_template), vocabulary]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def encode_for_reward(
    tokenizer: PreTrainedTokenizerBase,
    encoding: RewardEncoding,
    prompt: str | list[Message] | None,
    responses: Sequence[str | list[Message]],
    tools: list[Any] | None = None,
) -> EncodedResponses:
    """The ids of one or more responses to one prompt, cut together. Errors as `RewardEncoder.encode_one`, which is cheaper for many."""
    return RewardEncoder(tokenizer, encoding)._encode_group(prompt, responses, tools)


def full_ids(
    encoder: FullEncoder,
    prompt: str | list[Message] | None,
    responses: Sequence[str | list[Message]],
    tools: list[Any] | None,
    where: str,
) -> FullIds:
    """Texts are joined; as soon as there are messages, texts become the user's and the assistant's."""
    texts = [response for response in responses if isinstance(response, str)]
    if not isinstance(prompt, list) and len(texts) == len(responses):
        return encoder.texts(prompt or "", texts)
    asked: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    conversations = [
        [*asked, *([{"role": "assistant", "content": response}] if isinstance(response, str) else response)] for response in responses
    ]
    clean = [without_nulls(conversation) for conversation in conversations]
    return encoder.chats(clean, None if tools is None else without_nulls(tools), where)


def _says_nothing(response: str | list[Message]) -> bool:
    if isinstance(response, str):
        return not response.strip()
    return not response[-1]["content"].strip() and not response[-1].get("tool_calls")
