"""YAML as recipes use it: with line numbers, duplicate keys refused, and numbers read as YAML 1.2 reads them.

PyYAML follows YAML 1.1, where `1e-4` is text, `010` is eight and `2026-01-01` is a date. Here `1e-4` is a float, `010` is ten
and dates are text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from ebft_ds.config.sections import SECTIONS
from ebft_ds.config.settings import Setting, Source
from ebft_ds.errors import ConfigError

INCLUDE_KEY = "include"

_INT = re.compile(r"^[-+]?[0-9][0-9_]*$")
_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$")
_REPLACED = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"}


class RecipeYamlLoader(yaml.SafeLoader):
    """SafeLoader with the number rules above."""


RecipeYamlLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag not in _REPLACED]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
RecipeYamlLoader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
RecipeYamlLoader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def _decimal(loader: RecipeYamlLoader, node: ScalarNode) -> int:
    return int(str(loader.construct_scalar(node)), 10)


RecipeYamlLoader.add_constructor("tag:yaml.org,2002:int", _decimal)


def parse_value(text: str, origin: str) -> Any:
    """The value of a `key=value` override. Errors: ConfigError naming `origin`."""
    loader = RecipeYamlLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_duplicates(node, origin)
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: the value is not valid YAML: {_reason(error)}; quote it") from None
    finally:
        loader.dispose()


def read_yaml_settings(path: Path, shown: str) -> tuple[list[Setting], list[str]]:
    """The settings of a recipe file (sections taken apart, each with its line), and the files it includes.

    Errors: ConfigError with file and line: unreadable file, bad YAML, a key given twice, a recipe that is no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read recipe {shown}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"recipe {shown} is not UTF-8 text: {error}") from None
    loader = RecipeYamlLoader(text)
    try:
        return _settings(loader, shown)
    except yaml.YAMLError as error:
        raise ConfigError(f"{shown}:{_line(error)}: not valid YAML: {_reason(error)}") from None
    finally:
        loader.dispose()


def _settings(loader: RecipeYamlLoader, shown: str) -> tuple[list[Setting], list[str]]:
    root = loader.get_single_node()
    if root is None:
        return [], []
    if not isinstance(root, MappingNode):
        kind = "a list" if isinstance(root, SequenceNode) else "a single value"
        raise ConfigError(f"{shown}:{root.start_mark.line + 1}: a recipe is a mapping of fields, not {kind}")
    _refuse_duplicates(root, shown)
    settings: list[Setting] = []
    includes: list[str] = []
    for key, value, line in _pairs(loader, root, shown):
        if key == INCLUDE_KEY:
            includes = _includes(loader.construct_object(value, deep=True), f"{shown}:{line}")
        elif key in SECTIONS and isinstance(value, MappingNode):
            for inner_key, inner, inner_line in _pairs(loader, value, shown):
                settings.append(Setting(f"{key}.{inner_key}", loader.construct_object(inner, deep=True), Source(shown, inner_line)))
        else:
            settings.append(Setting(key, loader.construct_object(value, deep=True), Source(shown, line)))
    return settings, includes


def _pairs(loader: RecipeYamlLoader, node: MappingNode, shown: str) -> list[tuple[str, Node, int]]:
    loader.flatten_mapping(node)
    found: list[tuple[str, Node, int]] = []
    for key_node, value in node.value:
        line = key_node.start_mark.line + 1
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise ConfigError(f"{shown}:{line}: key {key!r} is not text; quote it")
        found.append((key, value, line))
    return found


def _includes(value: Any, where: str) -> list[str]:
    files = [value] if isinstance(value, str) else value
    if not isinstance(files, list) or not all(isinstance(item, str) for item in files):
        raise ConfigError(f"{where}: include takes a file name or a list of them, not {value!r}")
    return files


def _refuse_duplicates(node: Node, shown: str) -> None:
    pending, visited = [node], set()
    while pending:
        current = pending.pop()
        if id(current) in visited:
            continue
        visited.add(id(current))
        if isinstance(current, SequenceNode):
            pending.extend(current.value)
        if not isinstance(current, MappingNode):
            continue
        lines: dict[str, int] = {}
        for key_node, value in current.value:
            pending.append(value)
            if not isinstance(key_node, ScalarNode) or key_node.value == "<<":
                continue
            line = key_node.start_mark.line + 1
            if key_node.value in lines:
                raise ConfigError(f"{shown}:{line}: {key_node.value} is given twice (first in line {lines[key_node.value]})")
            lines[key_node.value] = line


def _line(error: yaml.YAMLError) -> int:
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    return mark.line + 1 if mark else 1


def _reason(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        return " ".join(part for part in (error.context, error.problem) if part)
    return str(error)
