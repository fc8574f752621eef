"""What a preference row must look like: two or more responses, best first, with or without a prompt."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ebft_ds.data.file_rows import UnreadableRow
from ebft_ds.data.preference.fields import PreferenceFields
from ebft_ds.data.preference.plain import plain, without_nulls
from ebft_ds.data.preference.tokenised import tokenised_responses
from ebft_ds.data.rows import BadRow, Message, type_name, validate_message


class PreferenceRow(msgspec.Struct, frozen=True):
    """A checked row, not tokenised yet."""

    prompt: str | list[Message] | None
    """What all responses follow. In a chat: the messages that all conversations begin with."""
    responses: list[str | list[Message]]
    """Best first, two or more; in a chat each one's own messages, the assistant's at the end."""
    margin: float = 0.0
    preference: float = 1.0
    """Probability that the first response is better."""
    subset: str | None = None
    tools: list[Any] | None = None
    token_ids: list[list[int]] | None = None
    """Tokens of the responses of an already tokenised row, which has neither prompt nor texts."""

    @property
    def is_chat(self) -> bool:
        return bool(self.responses) and not isinstance(self.responses[0], str)


def validate_preference_row(row: Any, fields: PreferenceFields) -> PreferenceRow:
    """Check one row of a source. Raises `BadRow` with the reason, naming the fields that the row does have."""
    if isinstance(row, UnreadableRow):
        raise BadRow(row.reason)
    if not isinstance(row, Mapping):
        raise BadRow(f"is a {type_name(row)}, not an object with fields")
    given = {str(key): plain(row[key]) for key in row if key in fields.known and row[key] is not None}
    margin = _number(given, fields.margin, 0.0)
    _check_encodable(given)
    preference = _number(given, fields.preference, 1.0)
    if not 0.0 <= preference <= 1.0:
        raise BadRow(f"has a {fields.preference} of {preference}; it is a probability between 0 and 1")
    subset = str(given[fields.subset]) if fields.subset in given else None
    tokens = tokenised_responses(given)
    if tokens is not None:
        _check_of_a_pair(len(tokens), margin, preference, fields)
        return PreferenceRow(None, [], margin, preference, subset, token_ids=tokens)
    names, responses = _responses(given, fields, list(row))
    _check_of_a_pair(len(responses), margin, preference, fields)
    prompt = _prompt(given.get(fields.prompt), fields.prompt)
    tools = _tools(given.get(fields.tools), fields.tools)
    if isinstance(prompt, list) or not all(isinstance(response, str) for response in responses):
        prompt, responses = _conversations(prompt, responses, names, fields.prompt)
    elif tools:
        raise BadRow(f"has {fields.tools}, but its texts do not go through the chat template; give messages")
    return PreferenceRow(prompt, responses, margin, preference, subset, tools)


def _check_of_a_pair(responses: int, margin: float, preference: float, fields: PreferenceFields) -> None:
    """Both say something about two responses; of a longer ranking nobody could tell which two are meant."""
    if responses > 2 and (margin != 0.0 or preference != 1.0):
        name = fields.margin if margin != 0.0 else fields.preference
        raise BadRow(f"has a {name} beside {responses} responses; it is of a pair")


def _check_encodable(given: Mapping[str, Any]) -> None:
    """JSON can spell texts and numbers that neither a tokenizer nor a message to another rank can hold."""
    for name, value in given.items():
        try:
            msgspec.msgpack.encode(value)
        except UnicodeEncodeError:
            raise BadRow(f"has a {name} with half a surrogate pair in it, which is no text") from None
        except OverflowError:
            raise BadRow(f"has a {name} with a number of more than 64 bits in it") from None
        except RecursionError:
            raise BadRow(f"has a {name} that is nested too deep") from None


def _number(given: Mapping[str, Any], name: str, missing: float) -> float:
    value = given.get(name, missing)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**300:
        raise BadRow(f"has a {name} too large for a number")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BadRow(f"has a {name} that is {value if isinstance(value, float) else 'a ' + type_name(value)}; it must be a finite number")
    return float(value)


def _responses(given: Mapping[str, Any], fields: PreferenceFields, columns: list[Any]) -> tuple[list[str], list[str | list[Message]]]:
    """(what messages call them, responses), best first."""
    pair = [fields.chosen, fields.rejected]
    present = [name for name in pair if name in given]
    if fields.responses in given:
        if present:
            raise BadRow(f"has both {fields.responses} and {' and '.join(present)}: say which column is meant with responses_field")
        ranked = given[fields.responses]
        if not isinstance(ranked, list) or len(ranked) < 2:
            what = f"{len(ranked)} of them" if isinstance(ranked, list) else f"a {type_name(ranked)}"
            raise BadRow(f"has {fields.responses} that are {what}; they must be a list of two or more, the best one first")
        names = [f"{fields.responses}[{i}]" for i in range(len(ranked))]
        return names, [_response(value, name) for value, name in zip(ranked, names, strict=True)]
    if len(present) < 2:
        missing = next(name for name in pair if name not in given)
        if missing in columns:
            raise BadRow(f"has {missing} null")
        shown = ", ".join(map(str, columns)) or "none"
        raise BadRow(f"has no {missing}: its fields are {shown} (rename with chosen_field, rejected_field or responses_field)")
    return pair, [_response(given[name], name) for name in pair]


def _response(value: Any, name: str) -> str | list[Message]:
    if isinstance(value, str):
        return value
    messages = as_messages(value, name)
    if not messages:
        raise BadRow(f"has a {name} without messages")
    return messages


def _prompt(value: Any, name: str) -> str | list[Message] | None:
    if value is None or isinstance(value, str):
        return value or None
    return as_messages(value, name) or None


def as_messages(value: Any, field: str) -> list[Message]:
    """Checked messages from a list of them, a single one, or an object of equally long lists (how tfds and Arrow sequences store them)."""
    if isinstance(value, Mapping):
        columns = list(value.values())
        if columns and all(isinstance(column, list) for column in columns):
            if len({len(column) for column in columns}) > 1:
                raise BadRow(f"has a {field} whose lists differ in length")
            value = [dict(zip(value, items, strict=True)) for items in zip(*columns, strict=True)]
        else:
            value = [value]
    if not isinstance(value, list):
        raise BadRow(f"has a {field} that is a {type_name(value)}; it must be a string or a list of chat messages")
    return [without_nulls(validate_message(message, i, field)) for i, message in enumerate(value)]


def _tools(value: Any, name: str) -> list[Any] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:  # also integers of thousands of digits, lists nested thousands deep
            raise BadRow(f"has {name} that are no JSON ({error})") from None
    if value is not None and not isinstance(value, list):
        raise BadRow(f"has {name} that are a {type_name(value)}; they must be a list, or one as JSON text")
    return [without_nulls(tool) for tool in value] if value else None


def _conversations(
    prompt: str | list[Message] | None, responses: Sequence[str | list[Message]], names: list[str], prompt_field: str
) -> tuple[list[Message] | None, list[str | list[Message]]]:
    """The messages that all conversations begin with, and how each of them goes on."""
    asked: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    whole: list[list[Message]] = []
    for response, name in zip(responses, names, strict=True):
        if isinstance(response, str):
            if not isinstance(prompt, list):
                raise BadRow(f"has a {name} that is a string beside one that is a list of messages")
            response = [{"role": "assistant", "content": response}]
        conversation = response if _holds(response, asked) else [*asked, *response]
        if conversation[-1]["role"] != "assistant":
            raise BadRow(f"has a {name} that ends with a {conversation[-1]['role']} message; what is scored is the assistant's")
        whole.append(conversation)
    shared = 0
    while shared < min(map(len, whole)) - 1 and all(other[shared] == whole[0][shared] for other in whole):
        shared += 1
    return whole[0][:shared] or None, [conversation[shared:] for conversation in whole]


def _holds(response: list[Message], asked: list[Message]) -> bool:
    """Is the response a whole conversation that the prompt's messages are a part of?"""
    if response[0]["role"] in ("assistant", "tool"):
        return False
    wanted = [(m["role"], m["content"].strip()) for m in asked]
    found = [(m["role"], m["content"].strip()) for m in response]
    return any(found[at : at + len(wanted)] == wanted for at in range(len(found) - len(wanted) + 1))
