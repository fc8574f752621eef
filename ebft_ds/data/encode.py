"""From checked rows to token ids: prompts with exactly one BOS, references closed by the token that ends an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    special_tokens,
)
from ebft_ds.data.rows import BadRow, Message, ValidRow
from ebft_ds.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EncodedTexts(msgspec.Struct, frozen=True):
    """Token ids of one row."""

    token_ids: list[int]
    reference_ids: list[int]


class TextEncoder:
    """Texts to ids with one tokenizer, and what it puts before them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._bos: int | None = tokenizer.bos_token_id
        self._prefix = _added_before(tokenizer)

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Batch encoding without special tokens; the tokenizer's own truncation and padding settings never apply."""
        if not texts:  # the tokenizer itself cannot take an empty batch
            return []
        batch: Any = self._tokenizer(
            texts,
            add_special_tokens=False,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        ids: list[list[int]] = batch["input_ids"]
        return ids

    def with_one_bos(self, ids: list[int], *, chat: bool) -> list[int]:
        """Add what the tokenizer puts before a text, and take away a BOS that would then be there twice."""
        if chat and self._bos not in self._prefix:
            prefix: list[int] = []  # a template writes whatever else opens a conversation
        elif chat:
            prefix = [] if ids[: len(self._prefix)] == self._prefix else self._prefix
        else:
            prefix = self._prefix
        ids = [*prefix, *ids]
        bos_at = next((i for i, token in enumerate(ids[: len(self._prefix) + 1]) if token == self._bos), None)
        if self._bos is None or bos_at is None:
            return ids
        stop = bos_at
        while stop + 1 < len(ids) and ids[stop + 1] == self._bos:
            stop += 1
        return [*ids[:bos_at], *ids[stop:]]


class RowEncoder:
    """Encodes batches of rows with one tokenizer. Nothing is ever cut."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system_prompt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        close_references: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt
        self._kwargs = dict(chat_template_kwargs or {})
        check_template_kwargs(self._kwargs)
        self._close = close_references
        self._text = TextEncoder(tokenizer)
        # SentencePiece-style tokenizers write a space before any text they see, so a reference encoded alone would differ
        # from the same text after its prompt.
        tokens: Any = tokenizer.convert_ids_to_tokens(self._text.ids(["a"])[0])
        self._prepends_space = tokens[0].startswith("▁")

    @cached_property
    def _turn(self) -> AssistantTurn:
        return assistant_turn(self._tokenizer, self._kwargs)

    @cached_property
    def _specials(self) -> dict[int, str]:
        return special_tokens(self._tokenizer)

    def encode(self, rows: Sequence[ValidRow]) -> list[EncodedTexts | BadRow]:
        """One result per row, in order: its ids, or why it cannot be encoded (a template that refuses it)."""
        texts = self._prompt_texts(rows)
        good = [i for i, text in enumerate(texts) if isinstance(text, str)]
        prompt_texts = [str(texts[i]) for i in good]
        answers = [self._answer_text(rows[i]) for i in good]
        prompts = self._text.ids(prompt_texts)
        references = self._reference_ids(prompt_texts, prompts, answers)
        results: list[EncodedTexts | BadRow] = [t if isinstance(t, BadRow) else BadRow("was not encoded") for t in texts]
        for i, prompt, reference in zip(good, prompts, references, strict=True):
            results[i] = self._finish(rows[i], prompt, reference)
        return results

    def _finish(self, row: ValidRow, prompt: list[int], reference: list[int]) -> EncodedTexts | BadRow:
        prompt = self._text.with_one_bos(prompt, chat=row.is_chat)
        if not prompt:
            return BadRow("has a prompt that encodes to no token")
        if not reference:
            return BadRow("has a ground_truth that encodes to no token")
        end = self._end_id(row.is_chat) if self._close else None
        return EncodedTexts(prompt, reference if end is None or reference[-1] == end else [*reference, end])

    def _prompt_texts(self, rows: Sequence[ValidRow]) -> list[str | BadRow]:
        texts: list[str | BadRow] = [row.prompt if isinstance(row.prompt, str) else BadRow("was not rendered") for row in rows]
        chats = [(i, with_system(row.prompt, self._system_prompt)) for i, row in enumerate(rows) if not isinstance(row.prompt, str)]
        for (i, _), text in zip(chats, self._render([messages for _, messages in chats]), strict=True):
            texts[i] = text
        return texts

    def _render(self, conversations: list[list[Message]]) -> list[str | BadRow]:
        """All at once; if the template refuses one of them, one by one to find which."""
        if not conversations:
            return []
        try:
            return list(render(self._tokenizer, conversations, add_generation_prompt=True, chat_template_kwargs=self._kwargs))
        except TEMPLATE_FAILURES as error:
            if len(conversations) == 1:
                return [BadRow(f"is refused by the chat template: {error}")]
            return [result for conversation in conversations for result in self._render([conversation])]

    def _answer_text(self, row: ValidRow) -> str:
        """The reference as text, without a closing token that it may bring itself (it is appended as an id)."""
        end = self._end_id(row.is_chat) if self._close else None
        answer = row.reference if end is None else without_end(row.reference, self._specials[end])
        return self._turn.wrap(answer, close=self._close) if row.is_chat else answer

    def _end_id(self, chat: bool) -> int:
        end = self._turn.end_id if chat else eos_id(self._tokenizer)
        if end is None:
            raise ModelError("The tokenizer has no EOS to close references with. Set one, or reference_end: none.")
        return end

    def _reference_ids(self, prompt_texts: list[str], prompts: list[list[int]], answers: list[str]) -> list[list[int]]:
        alone = self._text.ids(answers)
        if not self._prepends_space:
            return alone
        joint = self._text.ids([p + a for p, a in zip(prompt_texts, answers, strict=True)])
        # Where the joint encoding merges characters over the boundary, the prompt's ids would change: the separate one stays.
        return [
            both[len(prompt) :] if both[: len(prompt)] == prompt and len(both) > len(prompt) else own
            for both, prompt, own in zip(joint, prompts, alone, strict=True)
        ]


def with_system(messages: list[Message], system_prompt: str | None) -> list[Message]:
    """The conversation with the system prompt first, where it brings no system or developer message itself."""
    if system_prompt is None or any(m["role"] in ("system", "developer") for m in messages):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def without_end(answer: str, end: str) -> str:
    """The text without the closing token that it may bring itself, white space behind that included."""
    stripped = answer.rstrip()
    return stripped.removesuffix(end) if stripped.endswith(end) else answer


def _added_before(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids the tokenizer itself puts before a text (usually BOS or nothing)."""
    bare: Any = tokenizer("a", add_special_tokens=False)["input_ids"]
    full: Any = tokenizer("a", add_special_tokens=True)["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return list(full[:start])
    return []
