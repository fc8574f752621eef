"""Chat templates: rendering prompts, and what a template puts around an assistant's answer.

A template is a program, so what it does to an assistant turn is found out by rendering a probe conversation: the text it puts
before the answer, the text and the token that close it, and whether it strips white space.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from jinja2 import TemplateError

from ebft_ds.data.rows import Message
from ebft_ds.errors import ConfigError, DataError, ModelError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

SENTINEL = "Sentinel0Answer"
RESERVED_KWARGS = ("conversation", "tokenize", "add_generation_prompt", "continue_final_message", "chat_template", "return_dict")
# What a template may raise: its own raise_exception(), undefined names (both TemplateError), and operations on wrong types.
TEMPLATE_FAILURES = (TemplateError, TypeError, ValueError, KeyError)


class AssistantTurn(msgspec.Struct, frozen=True):
    """How the template writes an assistant's answer after the generation prompt: `before + answer + after + end token`."""

    before: str
    after: str
    end_id: int | None
    """Closes the turn; None if the template writes no special token there and the tokenizer has no EOS."""
    strips_left: bool
    strips_right: bool
    rest: str = ""
    """What the template writes behind the end token; without an end token of its own, behind the answer."""
    writes_end: bool = False
    """Does the template write the end token itself?"""

    def wrap(self, answer: str, *, close: bool) -> str:
        """The text to encode for `answer`; the end token itself is appended as an id."""
        answer = answer.lstrip() if self.strips_left else answer
        answer = answer.rstrip() if self.strips_right else answer
        return self.before + answer + (self.after if close else "")


def set_chat_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> None:
    """Replace the tokenizer's template by Jinja text or by the text of a file; None leaves it.

    Raises `ConfigError` for a file that does not exist.
    """
    if chat_template is not None:
        tokenizer.chat_template = template_text(chat_template)


def template_text(chat_template: str) -> str:
    """Jinja text, as given or from the file that is named. Raises `ConfigError` for a file that does not exist."""
    if "{" in chat_template:
        return chat_template
    path = Path(chat_template).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template: {path.absolute()} cannot be read ({error}), and the value is not a Jinja template.") from error


def require_chat_template(tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Raises `DataError` if the tokenizer cannot render chat messages; `where` names the row that needs it."""
    if not tokenizer.chat_template:
        raise DataError(
            f"{where} is a chat prompt, but the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template."
            " Set chat_template to a Jinja template or file, use a model with one, or give the prompts as plain strings."
        )


def check_template_kwargs(chat_template_kwargs: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for names that the encoder sets itself."""
    for name in RESERVED_KWARGS:
        if name in chat_template_kwargs:
            raise ConfigError(f"chat_template_kwargs: {name} is set by the encoder; remove it.")


def render(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Sequence[Message]],
    *,
    add_generation_prompt: bool,
    chat_template_kwargs: Mapping[str, Any],
) -> list[str]:
    """Template text of each conversation. Raises what the template raises (`TEMPLATE_FAILURES`)."""
    texts: Any = tokenizer.apply_chat_template(
        [list(c) for c in conversations], tokenize=False, add_generation_prompt=add_generation_prompt, **chat_template_kwargs
    )
    return list(texts)


def assistant_turn(tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any] | None = None) -> AssistantTurn:
    """Find out how the template writes an answer. Raises `ModelError` if it fails on, or drops, a plain exchange."""
    kwargs = chat_template_kwargs or {}
    question: Message = {"role": "user", "content": "Hello"}

    def rendered(answer: str) -> str:
        return render(
            tokenizer, [[question, {"role": "assistant", "content": answer}]], add_generation_prompt=False, chat_template_kwargs=kwargs
        )[0]

    try:
        opening = render(tokenizer, [[question]], add_generation_prompt=True, chat_template_kwargs=kwargs)[0]
        full, left, right = rendered(SENTINEL), rendered(" \n" + SENTINEL), rendered(SENTINEL + " \n")
    except TEMPLATE_FAILURES as error:
        raise ModelError(f"The chat template fails on one user and one assistant message: {error}. Set another chat_template.") from error
    before, found, tail = full.partition(SENTINEL)
    if not found:
        raise ModelError("The chat template leaves out the assistant's message. Set another chat_template.")
    closing = _first_special(tokenizer, tail)
    return AssistantTurn(
        before=before[len(opening) :] if before.startswith(opening) else "",
        after=tail[: closing[0]] if closing else "",
        end_id=closing[2] if closing else eos_id(tokenizer),
        strips_left=(" \n" + SENTINEL) not in left,
        strips_right=(SENTINEL + " \n") not in right,
        rest=tail[closing[1] :] if closing else tail,
        writes_end=closing is not None,
    )


def _first_special(tokenizer: PreTrainedTokenizerBase, tail: str) -> tuple[int, int, int] | None:
    """(start, end, id) of the first special token in `tail`, the longest one there; None if it has none."""
    best: tuple[int, int, int] | None = None
    for token_id, text in special_tokens(tokenizer).items():
        at = tail.find(text)
        if at >= 0 and (best is None or (at, -len(text)) < (best[0], best[0] - best[1])):
            best = (at, at + len(text), token_id)
    return best


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Id -> text of every token that is special: named ones (BOS, EOS, ...) and added ones flagged so."""
    flagged = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return {**flagged, **named}


def eos_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The tokenizer's EOS id. Some tokenizers list several: the first."""
    value: int | list[int] | None = tokenizer.eos_token_id
    return value[0] if isinstance(value, list) else value


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any] | None = None) -> int | None:
    """The token that closes an assistant turn; EOS without a chat template; None if there is neither."""
    if not tokenizer.chat_template:
        return eos_id(tokenizer)
    return assistant_turn(tokenizer, chat_template_kwargs).end_id


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase,
    generation_config: GenerationConfig | None,
    *,
    chat: bool,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Ids that end a completion: EOS of the generation configuration (else of the tokenizer), and the end-of-turn token for chat.

    Sorted, without duplicates. Raises `ModelError` if there is none, since every completion would run to its budget.
    """
    configured: Any = generation_config.eos_token_id if generation_config is not None else None
    ids = set(configured) if isinstance(configured, (list, tuple)) else {configured}
    closing = end_of_turn_id(tokenizer, chat_template_kwargs) if chat else None
    ids = {i for i in (*ids, closing) if i is not None} or {i for i in (eos_id(tokenizer),) if i is not None}
    if not ids:
        raise ModelError("No stop token: neither the generation configuration nor the tokenizer has an EOS. Set stop_token_ids.")
    return sorted(ids)
