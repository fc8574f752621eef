"""`config.resolved.yaml`: the whole configuration of a run with versions, commit and command. It is a recipe itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from ebft_ds.config.recipe import RecipeConfig


def write_resolved(
    path: str | os.PathLike[str],
    config: RecipeConfig,
    command: Sequence[str],
    versions: Mapping[str, str],
    git_commit: str | None,
) -> None:
    """Write the configuration as a recipe by sections, headed by comments on where it came from. Atomic: a reader never sees half."""
    target = Path(path)
    lines = ["# The configuration of this run, every field stated. `ebft-ds train` takes this file as a recipe.", "#"]
    lines.append("# command: " + " ".join(_quoted(part) for part in command))
    lines.append(f"# git_commit: {git_commit or 'unknown'}")
    lines += [f"# {name}: {version}" for name, version in versions.items()]
    body = resolved_text(config)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as stream:
        stream.write("\n".join(lines) + "\n\n" + body)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, target)


def resolved_text(config: RecipeConfig, *, explicit_only: bool = False) -> str:
    """The configuration as YAML by sections; with `explicit_only` just the fields that somebody set."""
    sections = config.sections()
    if explicit_only:
        stated = config.explicit()
        sections = {name: {key: value for key, value in fields.items() if key in stated} for name, fields in sections.items()}
    shown = {name: fields for name, fields in sections.items() if fields}
    return yaml.safe_dump(shown, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True) if shown else ""


def _quoted(part: str) -> str:
    text = part.replace("\n", "\\n")
    return f"'{text}'" if " " in text else text
