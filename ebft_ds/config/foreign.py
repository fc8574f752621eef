"""Keys and values of other systems: accepted when they ask for nothing or can be translated, refused with the reason otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ebft_ds.config.axolotl_fields import AXOLOTL_FIELDS
from ebft_ds.config.fields import FieldSpec
from ebft_ds.config.other_systems import REFUSED_KEYS
from ebft_ds.errors import ConfigError

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def judge_foreign(key: str, value: Any, where: str) -> str | None:
    """A key that is no field of ours. None: nobody's key. A note: it asks for nothing. ConfigError: known, and refused."""
    row = AXOLOTL_FIELDS.get(key)
    if row is not None:
        if row.status == "different":
            return f"{where}: {key} has no effect here: {row.text}"
        if _same_value(value, (None, row.default)):
            return f"{where}: {key}: {value!r} asks for nothing and is left out"
        raise ConfigError(f"{where}: {key} is a field of Axolotl that is refused: {row.text}")
    refused = REFUSED_KEYS.get(key)
    if refused is None:
        return None
    if _same_value(value, refused.harmless):
        return f"{where}: {key}: {value!r} asks for nothing and is left out"
    raise ConfigError(f"{where}: {key} is refused: {refused.text}")


def _same_value(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Equality that keeps 1 and true apart."""
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in harmless)


def means_default(spec: FieldSpec, value: Any) -> bool:
    """null for a field that has no null here but has it as Axolotl's default."""
    row = AXOLOTL_FIELDS.get(spec.name)
    return value is None and row is not None and row.default is None and not spec.accepts(type(None))


def _scale_rewards(value: Any) -> Any:
    return ("group" if value else "none") if isinstance(value, bool) else value


def _resume(value: Any) -> Any:
    return ("auto" if value else None) if isinstance(value, bool) else value


def _report_to(value: Any) -> Any:
    if value == "none" or value is None:
        return []
    return [value] if isinstance(value, str) else value


def _dtype(value: Any) -> Any:
    return _DTYPES.get(value.removeprefix("torch."), value.removeprefix("torch.")) if isinstance(value, str) else value


_TRANSLATIONS: dict[str, Callable[[Any], Any]] = {
    "scale_rewards": _scale_rewards,
    "resume_from_checkpoint": _resume,
    "report_to": _report_to,
    "dtype": _dtype,
    "rollout_dtype": _dtype,
}


def translate_value(name: str, value: Any) -> Any:
    """Another system's way to write a value of field `name`; most values come back as they are."""
    translate = _TRANSLATIONS.get(name)
    return translate(value) if translate else value
