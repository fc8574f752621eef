"""The full encoding of a prompt with one response: the text, or the rendered conversation up to the assistant's end token."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from ebft_ds.data.chat import (
    TEMPLATE_FAILURES,
    AssistantTurn,
    assistant_turn,
    check_template_kwargs,
    eos_id,
    render,
    require_chat_template,
    special_tokens,
)
from ebft_ds.data.encode import TextEncoder, with_system, without_end
from ebft_ds.data.preference.recipe import RewardEncoding
from ebft_ds.data.rows import BadRow, Message
from ebft_ds.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class FullIds(msgspec.Struct, frozen=True):
    """Encodings of one row's responses, in order, nothing cut."""

    group: list[list[int]]
    eos_added: int


class FullEncoder:
    """Every response is rendered or joined with its prompt and encoded as a whole: what a template writes before an answer may depend
    on the answer, and tokens may span the boundary. So the ids do not depend on where a row's prompt ends and its response begins.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, encoding: RewardEncoding) -> None:
        self._tokenizer = tokenizer
        self._encoding = encoding
        check_template_kwargs(encoding.chat_template_kwargs)
        self._text = TextEncoder(tokenizer)

    @cached_property
    def _turn(self) -> AssistantTurn:
        return assistant_turn(self._tokenizer, self._encoding.chat_template_kwargs)

    @cached_property
    def _specials(self) -> dict[int, str]:
        return special_tokens(self._tokenizer)

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Tokens that an encoding may end with."""
        ends = [eos_id(self._tokenizer), self._turn.end_id if self._tokenizer.chat_template else None]
        return frozenset(end for end in ends if end is not None)

    def texts(self, prompt: str, responses: list[str]) -> FullIds:
        """`prompt + response` as one text, closed with EOS."""
        end = self._end_id(chat=False)
        texts = [prompt + (response if end is None else without_end(response, self._specials[end])) for response in responses]
        group = [self._text.with_one_bos(ids, chat=False) for ids in self._text.ids(texts)]
        brought = sum(text != prompt + response for text, response in zip(texts, responses, strict=True))
        return self._closed(group, end, brought)

    def chats(self, conversations: list[list[Message]], tools: list[Any] | None, where: str) -> FullIds:
        """The template's rendering of each conversation up to the end token of its last message, which is added where that has none.

        Raises `BadRow` for a conversation that the template refuses, `DataError` without a template.
        """
        require_chat_template(self._tokenizer, where)
        end = self._end_id(chat=True)
        prepared = [self._prepared(conversation, end) for conversation in conversations]
        kwargs = {**self._encoding.chat_template_kwargs, **({"tools": tools} if tools else {})}
        try:
            rendered = render(self._tokenizer, prepared, add_generation_prompt=False, chat_template_kwargs=kwargs)
        except TEMPLATE_FAILURES as error:
            raise BadRow(f"is refused by the chat template: {error}") from error
        texts = [self._up_to_end(text) for text in rendered]
        group = [
            self._text.with_one_bos(self._cut_behind_end(ids, text, conversation, kwargs), chat=True)
            for ids, text, conversation in zip(self._text.ids(texts), texts, prepared, strict=True)
        ]
        return self._closed(group, end, 0)

    def _prepared(self, conversation: list[Message], end: int | None) -> list[Message]:
        *before, last = with_system(conversation, self._encoding.system_prompt)
        return [*before, last if end is None else {**last, "content": without_end(last["content"], self._specials[end])}]

    def _up_to_end(self, text: str) -> str:
        """Without what the template writes behind the end token; without that too if responses stay open."""
        text = text.removesuffix(self._turn.rest)
        if self._encoding.close or self._turn.end_id is None:
            return text
        return text.removesuffix(self._turn.after + self._specials[self._turn.end_id])

    def _cut_behind_end(self, ids: list[int], text: str, conversation: list[Message], kwargs: dict[str, Any]) -> list[int]:
        """Where the rendering ends otherwise than the template's probe did, its last end token may still close the answer."""
        end = self._turn.end_id
        if not self._encoding.close or not self._turn.writes_end or end is None or end not in ids[:-1] or ids[-1] == end:
            return ids
        kept = len(ids) - ids[::-1].index(end)
        said = self._tokenizer.decode([token for token in ids[kept:] if token not in self._specials])
        # Tool calls may be closed by another token; then the last end token is that of an earlier message.
        if str(said).strip() or not self._ends_itself(text, conversation, self._specials[end], kwargs):
            return ids
        return ids[:kept]

    def _ends_itself(self, text: str, conversation: list[Message], end: str, kwargs: dict[str, Any]) -> bool:
        """Has the rendering more end tokens than that of the messages before the last?"""
        try:
            before = render(self._tokenizer, [conversation[:-1]], add_generation_prompt=False, chat_template_kwargs=kwargs)[0]
        except TEMPLATE_FAILURES:  # not known then, and a response must not get lost
            return False
        return text.count(end) > before.count(end)

    def _end_id(self, *, chat: bool) -> int | None:
        if not self._encoding.close:
            return None
        end = self._turn.end_id if chat else eos_id(self._tokenizer)
        if end is None:
            raise ModelError("The tokenizer has no EOS to close responses with. Set one, or reference_end: none.")
        return end

    def _closed(self, group: list[list[int]], end: int | None, brought: int) -> FullIds:
        if end is None:
            return FullIds(group, 0)
        open_ones = sum(ids[-1:] != [end] for ids in group)
        return FullIds([ids if ids[-1:] == [end] else [*ids, end] for ids in group], open_ones - min(brought, open_ones))
