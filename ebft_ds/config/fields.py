"""Registry of all recipe fields: which section a name belongs to, its type, default and description."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from ebft_ds.config.sections import SECTIONS


@dataclass(frozen=True)
class FieldSpec:
    """One recipe field."""

    name: str
    section: str
    annotation: Any
    info: FieldInfo

    @property
    def default(self) -> Any:
        """The default value (a fresh object for lists and dicts)."""
        return self.info.get_default(call_default_factory=True, validated_data={})

    @property
    def type_text(self) -> str:
        """The type as a user reads it, with its bounds: `int, >= 1`, `one of none, group, batch`."""
        return describe_type(self.annotation, self.info.metadata)

    @property
    def takes_text_only(self) -> bool:
        """The field is a string (or null): the text of an override is taken as it stands."""
        return set(_members(self.annotation)) <= {str, types.NoneType}

    @property
    def accepts_mapping(self) -> bool:
        """The field may hold a mapping, so dotted keys may reach into it."""
        return any(typing.get_origin(member) is dict or member is dict for member in _members(self.annotation))

    def accepts(self, kind: type) -> bool:
        """Is `kind` one of the types the field is declared with? A Literal's values count."""
        for member in _members(self.annotation):
            if member is kind or any(isinstance(value, kind) for value in _literal_values(member)):
                return True
        return False


def _collect() -> dict[str, FieldSpec]:
    fields: dict[str, FieldSpec] = {}
    for section, model in SECTIONS.items():
        for name, info in model.model_fields.items():
            if name in fields or name in SECTIONS:
                raise TypeError(f"recipe field {name!r} of section {section!r} is not unique")
            fields[name] = FieldSpec(name, section, info.annotation, info)
    return fields


def _members(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [inner for member in typing.get_args(annotation) for inner in _members(member)]
    if typing.get_origin(annotation) is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    return [annotation]


def _literal_values(member: Any) -> tuple[Any, ...]:
    return typing.get_args(member) if typing.get_origin(member) is typing.Literal else ()


def _bounds(metadata: Iterable[Any]) -> str:
    signs = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
    found = [f"{sign} {getattr(item, key)}" for item in metadata for key, sign in signs if getattr(item, key, None) is not None]
    return ", ".join(found)


def describe_type(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """A type in words, e.g. `float, > 0 or null`."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        inner, *extra = typing.get_args(annotation)
        return describe_type(inner, [*extra, *metadata])
    if origin in (typing.Union, types.UnionType):
        parts = [describe_type(member) for member in typing.get_args(annotation) if member is not types.NoneType]
        bounds = _bounds(metadata)
        text = " or ".join(parts) + (f", {bounds}" if bounds else "")
        return text + (" or null" if types.NoneType in typing.get_args(annotation) else "")
    if origin is typing.Literal:
        return "one of " + ", ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in typing.get_args(annotation))
    if origin is list:
        return "list of " + describe_type(typing.get_args(annotation)[0])
    if origin is dict or annotation is dict:
        return "mapping"
    bounds = _bounds(metadata)
    return getattr(annotation, "__name__", str(annotation)) + (f", {bounds}" if bounds else "")


FIELDS: dict[str, FieldSpec] = _collect()
"""Field name -> specification, in the order of the sections."""


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate a user most likely meant, or None when nothing is close."""
    matches = difflib.get_close_matches(name.lower(), list(candidates), n=1, cutoff=0.6)
    return matches[0] if matches else None
