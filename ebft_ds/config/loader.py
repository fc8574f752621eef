"""Recipes: YAML layers, then `key=value` overrides. The environment plays no part."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ebft_ds.config.async_ebft import AsyncEBFTConfig
from ebft_ds.config.recipe import RecipeConfig
from ebft_ds.config.reward import RewardConfig
from ebft_ds.config.settings import Layer, Setting, Source, read_settings
from ebft_ds.config.yaml_text import parse_value, read_yaml_settings
from ebft_ds.errors import ConfigError

logger = logging.getLogger(__name__)

CONFIGS: dict[str, type[RecipeConfig]] = {kind.MODE: kind for kind in (AsyncEBFTConfig, RewardConfig)}
"""`mode` -> the class of its recipes."""


@dataclass(frozen=True)
class LoadedRecipe:
    """A configuration and where it came from."""

    config: RecipeConfig
    """Of the class that the recipe's `mode` names."""
    sources: dict[str, Source] = field(default_factory=dict)
    """Field -> file and line (or override) that set it; a field not in here has its default."""
    files: list[Path] = field(default_factory=list)
    """The recipe and everything it includes, in the order they were laid over each other."""
    overrides: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a user should know: aliases used, foreign fields that ask for nothing."""


def load_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = (), *, mode: str | None = None) -> LoadedRecipe:
    """Read a recipe with its includes and lay the overrides over it.

    `mode`: the only one that is wanted; a recipe that states none counts as one of it.

    `include: [base.yaml]` is relative to the including file; later files and the file itself win. Dataset and model paths are
    relative to the current directory. Errors: ConfigError that names file and line (or the override) of everything wrong.
    """
    layer, files = _layer_of_file(Path(path).expanduser(), ())
    layer = _overrides_layer(overrides, layer).laid_over(layer)
    for note in layer.notes:
        logger.info(note)
    stated = str(layer.values.get("mode", mode or AsyncEBFTConfig.MODE))
    if mode is not None and stated != mode:
        raise ConfigError(f"{layer.sources.get('mode', path)}: mode: {stated}, but this command trains recipes of mode: {mode}")
    kind = CONFIGS.get(stated, AsyncEBFTConfig)  # an unknown mode is refused by its field
    config = kind.from_layer(layer)
    return LoadedRecipe(config, dict(layer.sources), files, list(overrides), list(dict.fromkeys(layer.notes)))


def _layer_of_file(path: Path, chain: tuple[Path, ...]) -> tuple[Layer, list[Path]]:
    real = path.resolve()
    if real in chain:
        raise ConfigError(f"{path} includes itself by way of {' -> '.join(str(item) for item in (*chain, real))}")
    settings, includes = read_yaml_settings(path, str(path))
    layer, files = Layer(), []
    for include in includes:
        below, below_files = _layer_of_file(path.parent / Path(include).expanduser(), (*chain, real))
        layer = below.laid_over(layer)
        files += below_files
    return read_settings(settings, layer).laid_over(layer), [*files, path]


def _overrides_layer(overrides: Sequence[str], base: Layer) -> Layer:
    settings = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"override {text!r} is not of the form key=value")
        origin = f"override {text}"
        settings.append(Setting(key.strip(), parse_value(value, origin), Source(origin), raw_text=value))
    return read_settings(settings, base)
