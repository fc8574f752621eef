"""From keys as a user wrote them to canonical fields: sections, dotted names, aliases, refusals, sources."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ebft_ds.config.aliases import ALIASES
from ebft_ds.config.fields import FIELDS, FieldSpec, nearest
from ebft_ds.config.foreign import judge_foreign, means_default, translate_value
from ebft_ds.config.sections import SECTIONS
from ebft_ds.errors import ConfigError


@dataclass(frozen=True)
class Source:
    """Where a value was written."""

    origin: str
    """File name, `override`, or `argument`."""
    line: int | None = None

    def __str__(self) -> str:
        return self.origin if self.line is None else f"{self.origin}:{self.line}"


@dataclass(frozen=True)
class Setting:
    """One `key: value` as written; the key may be dotted."""

    key: str
    value: Any
    source: Source
    raw_text: str | None = None
    """The value's text before YAML took it apart (overrides only)."""


@dataclass
class Layer:
    """Canonical settings of one file, of the overrides, or of a constructor call."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)
    """Field -> the key it was given by."""
    notes: list[str] = field(default_factory=list)

    def laid_over(self, base: Layer) -> Layer:
        """This layer's values win over `base`'s; notes of both are kept."""
        return Layer(base.values | self.values, base.sources | self.sources, base.spelled | self.spelled, base.notes + self.notes)


def read_settings(settings: Iterable[Setting], base: Layer | None = None) -> Layer:
    """Resolve the keys of one layer. `base` supplies the mappings that dotted keys like `generation_kwargs.top_k` go into.

    Errors: ConfigError listing every unknown key, field in a wrong section, refused foreign field and alias conflict.
    """
    layer, problems = Layer(), []
    for setting in settings:
        try:
            _add(layer, setting, base or Layer())
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return layer


def _add(layer: Layer, setting: Setting, base: Layer) -> None:
    head, _, rest = setting.key.partition(".")
    if head in SECTIONS:
        if rest:
            _add_field(layer, setting, head, rest, base)
        else:
            _add_section(layer, setting, head, base)
    else:
        _add_field(layer, setting, None, setting.key, base)


def _add_section(layer: Layer, setting: Setting, section: str, base: Layer) -> None:
    value = setting.value
    if value is None:
        return
    if not isinstance(value, dict):
        if section == "optim":
            raise ConfigError(f"{setting.source}: optim is a section here; the optimizer is AdamW, remove {value!r}")
        guess = "model_name_or_path" if section == "model" else nearest(section, FIELDS)
        hint = f"; did you mean {guess}?" if guess else ""
        raise ConfigError(f"{setting.source}: {section} is a section and takes a mapping of fields, not {value!r}{hint}")
    for key, item in value.items():
        _add_field(layer, Setting(str(key), item, setting.source), section, str(key), base)


def _add_field(layer: Layer, setting: Setting, section: str | None, key: str, base: Layer) -> None:
    head, _, inner = key.partition(".")
    if section == "vllm" and f"vllm_{head}" in FIELDS:
        head = f"vllm_{head}"  # the section says it already
    name = head if head in FIELDS else ALIASES.get(head)
    if name is None:
        note = judge_foreign(head, setting.value, str(setting.source))
        if note is None:
            raise ConfigError(_unknown(head, section, setting.source))
        layer.notes.append(note)
        return
    spec = FIELDS[name]
    if section is not None and section != spec.section:
        raise ConfigError(f"{setting.source}: {head} does not belong to section {section}: it is a field of section {spec.section}")
    if inner:
        value = _with_inner(layer.values.get(name, base.values.get(name)), name, inner, setting.value, setting.source)
    else:
        value = _whole_value(layer, setting, head, spec)
        if name in layer.values and layer.values[name] != value:
            first = f"{layer.spelled[name]}: {layer.values[name]!r} ({layer.sources[name]})"
            raise ConfigError(f"{setting.source}: {head}: {value!r} contradicts {first}; both set {name}. Keep one of them.")
    if head != name:
        layer.notes.append(f"{setting.source}: {head} is read as {name}")
    layer.values[name], layer.sources[name], layer.spelled[name] = value, setting.source, head


def _whole_value(layer: Layer, setting: Setting, written: str, spec: FieldSpec) -> Any:
    """The value in our terms: other systems' ways to write it are translated, and the text of a text field is kept as it stands."""
    value = setting.value
    if means_default(spec, value):
        layer.notes.append(f"{setting.source}: {written}: null is the default, {spec.default!r}")
        return spec.default
    translated = translate_value(spec.name, value)
    if translated is not value:
        layer.notes.append(f"{setting.source}: {written}: {value!r} is read as {translated!r}")
        return translated
    if setting.raw_text is not None and value is not None and spec.takes_text_only:
        return setting.raw_text
    return value


def _with_inner(current: Any, name: str, path: str, value: Any, source: Source) -> dict[str, Any]:
    """A copy of the mapping `current` with `value` put at the dotted `path`."""
    if not FIELDS[name].accepts_mapping:
        raise ConfigError(f"{source}: {name}.{path}: {name} is not a mapping ({FIELDS[name].type_text})")
    if current is not None and not isinstance(current, dict):
        raise ConfigError(f"{source}: {name}.{path}: {name} is set to {current!r}, which cannot be reached into; change it there")
    whole = copy.deepcopy(current) if current else {}
    *parents, last = path.split(".")
    place = whole
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise ConfigError(f"{source}: {name}.{path}: {parent} is not a mapping")
    place[last] = value
    return whole


def _unknown(key: str, section: str | None, source: Source) -> str:
    guess = nearest(key, [*FIELDS, *ALIASES, *SECTIONS])
    where = f" in section {section}" if section else ""
    hint = f"did you mean {guess}?" if guess else "`ebft-ds config explain --all` lists the fields"
    return f"{source}: unknown key {key}{where}; {hint}"
