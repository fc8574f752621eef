"""What one training row must look like: a prompt (text or chat messages) and a reference text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from ebft_ds.data.file_rows import UnreadableRow

Message: TypeAlias = dict[str, Any]
"""A chat message as templates take it: `role`, `content`, and whatever else the row brought (`name`, ...)."""

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}


class BadRow(ValueError):
    """Why a row cannot be used. Whoever knows where the row is turns it into a `DataError` or a count."""


class ValidRow(msgspec.Struct, frozen=True):
    """A checked row, not tokenised yet."""

    prompt: str | list[Message]
    reference: str
    has_remaining_turns: bool = False

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str)


def validate_row(row: Any, *, prompt_field: str, ground_truth_field: str) -> ValidRow:
    """Check one row of a source. Raises `BadRow` with the reason, naming the fields that the row does have."""
    if isinstance(row, UnreadableRow):
        raise BadRow(row.reason)
    if not isinstance(row, Mapping):
        raise BadRow(f"is a {type_name(row)}, not an object with fields")
    prompt = _field(row, prompt_field, "prompt_field")
    reference = _field(row, ground_truth_field, "ground_truth_field")
    if not isinstance(reference, str):
        raise BadRow(f"has a {ground_truth_field} that is a {type_name(reference)}; it must be a string")
    if not reference.strip():
        raise BadRow(f"has an empty {ground_truth_field}: EBFT needs a reference completion for every prompt")
    return ValidRow(_validate_prompt(prompt, prompt_field), reference, bool(row.get("remaining_turns")))


def type_name(value: Any) -> str:
    """What JSON calls it, for messages."""
    return {"NoneType": "null", "dict": "object"}.get(type(value).__name__, type(value).__name__)


def _field(row: Mapping[str, Any], name: str, setting: str) -> Any:
    if name not in row:
        fields = ", ".join(str(key) for key in row) or "none"
        raise BadRow(f"has no {name}: its fields are {fields} (rename with {setting})")
    if row[name] is None:
        raise BadRow(f"has {name} null")
    return row[name]


def _validate_prompt(prompt: Any, field: str) -> str | list[Message]:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise BadRow(f"has an empty {field}")
        return prompt
    if not isinstance(prompt, (list, tuple)):
        raise BadRow(f"has a {field} that is a {type_name(prompt)}; it must be a string or a list of chat messages")
    if not prompt:
        raise BadRow(f"has a {field} without messages")
    messages = [validate_message(message, i, field) for i, message in enumerate(prompt)]
    last = messages[-1]
    if last["role"] == "assistant":
        raise BadRow(f"has a {field} that ends with an assistant message; that message belongs in the reference")
    if not last["content"].strip():
        raise BadRow(f"has a {field} whose last message is empty")
    return messages


def validate_message(message: Any, position: int, field: str) -> Message:
    """One message in the form of templates. An assistant that calls tools need not say anything: its content is then empty."""
    at = f"message {position + 1} of {field}"
    if not isinstance(message, Mapping):
        raise BadRow(f"has a {type_name(message)} as {at}; messages are objects with role and content (or from and value)")
    present = {key: value for key, value in message.items() if value is not None}  # Arrow fills absent struct fields with nulls
    if "role" in present:
        role, content, roles = present.get("role"), present.get("content"), {r: r for r in ROLES}
    elif "from" in present:
        role, content, roles = present.get("from"), present.get("value"), SHAREGPT_ROLES
    else:
        raise BadRow(f"has no role in {at}: its fields are {', '.join(map(str, message)) or 'none'}")
    if not isinstance(role, str) or role not in roles:
        raise BadRow(f"has the unknown role {role!r} in {at}; known are {', '.join(roles)}")
    if content is None and roles[role] == "assistant" and present.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise BadRow(f"has a content that is a {type_name(content)} in {at}; it must be a string")
    extra = {key: value for key, value in present.items() if key not in ("role", "content", "from", "value")}
    return {"role": roles[role], "content": content, **extra}
