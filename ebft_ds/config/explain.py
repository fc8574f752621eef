"""Explanations of recipe fields: type, default, aliases, and how they differ from the reference systems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ebft_ds.config.aliases import ALIASES, aliases_of
from ebft_ds.config.axolotl_fields import AXOLOTL_FIELDS, AxolotlField
from ebft_ds.config.fields import FIELDS, FieldSpec, nearest
from ebft_ds.config.other_systems import REFUSED_KEYS
from ebft_ds.config.recipe import RecipeConfig
from ebft_ds.errors import ConfigError


@dataclass(frozen=True)
class Difference:
    """A default that is not the reference system's."""

    field: str
    ours: Any
    theirs: Any
    why: str


def explain(name: str) -> str:
    """A few lines on one field, alias or refused key. Errors: ConfigError naming the nearest for an unknown name."""
    canonical = name if name in FIELDS else ALIASES.get(name)
    if canonical is not None:
        return _explain_field(FIELDS[canonical], asked=name)
    if name in AXOLOTL_FIELDS:
        row = AXOLOTL_FIELDS[name]
        return f"{name} (Axolotl, default {shown(row.default)}): {row.status}. {row.text}"
    if name in REFUSED_KEYS:
        return f"{name}: refused. {REFUSED_KEYS[name].text}"
    guess = nearest(name, [*FIELDS, *ALIASES, *AXOLOTL_FIELDS, *REFUSED_KEYS])
    raise ConfigError(f"there is no field {name}" + (f"; did you mean {guess}?" if guess else ""))


def differences() -> list[Difference]:
    """All fields whose default differs from the reference page's, with the reason."""
    found = []
    for name, spec in FIELDS.items():
        row = AXOLOTL_FIELDS.get(name)
        if row is not None and not _same_default(spec, row):
            found.append(Difference(name, spec.default, row.default, row.text))
    return found


def _same_default(spec: FieldSpec, row: AxolotlField) -> bool:
    """null there and an empty list or mapping here are the same; a default known only by its constant's name is not compared."""
    if isinstance(row.default, str) and row.default.isupper():
        return True
    if row.default is None and spec.default in ([], {}):
        return True
    return bool(row.default == spec.default) and isinstance(row.default, bool) == isinstance(spec.default, bool)


def shown(value: Any) -> str:
    """A value as it is written in YAML."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def schema() -> dict[str, Any]:
    """JSON schema of a recipe by sections."""
    return RecipeConfig.model_json_schema()


def _explain_field(spec: FieldSpec, asked: str) -> str:
    lines = [f"{spec.name} (section {spec.section})"]
    if asked != spec.name:
        lines.append(f"  {asked} is an alias")
    if spec.info.description:
        lines.append(f"  {spec.info.description}")
    lines.append(f"  type: {spec.type_text}")
    lines.append(f"  default: {shown(spec.default)}")
    others = aliases_of(spec.name)
    if others:
        lines.append(f"  also: {', '.join(others)}")
    row = AXOLOTL_FIELDS.get(spec.name)
    if row is not None:
        lines.append(f"  Axolotl: {row.status}, default {shown(row.default)}. {row.text}")
    return "\n".join(lines)
