"""Finding and reading DeepSpeed JSON files: the shipped ones (in a checkout or installed) and a user's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ebft_ds.errors import ConfigError

DEFAULT_FILES = {"actor": "zero3.json", "feature": "feature_zero3.json"}
"""Kind of engine -> shipped file used when the recipe names none."""


def shipped_folder() -> Path:
    """The folder of shipped files: inside the package when installed, beside it in a checkout (setup.py maps the one to the other)."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "ds_configs", package.parent / "ds_configs"):
        if (folder / DEFAULT_FILES["actor"]).is_file():
            return folder
    raise ConfigError(f"the installation is incomplete: no ds_configs folder in or beside {package}; install ebft_ds again")


def find_deepspeed_file(name: str) -> Path:
    """A path as given (relative to the current directory), or else a shipped file by its name (`zero3.json`, `ds_configs/zero3.json`)."""
    given = Path(name).expanduser()
    if given.is_file():
        return given
    shipped = shipped_folder()
    if given.parent in (Path(), Path("ds_configs")):
        for candidate in (shipped / given.name, shipped / f"{given.name}.json"):
            if candidate.is_file():
                return candidate
    known = ", ".join(sorted(path.name for path in shipped.glob("*.json")))
    raise ConfigError(f"DeepSpeed configuration {name} does not exist; shipped ones are {known}")


def read_deepspeed_file(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Errors: ConfigError with file and line; a key given twice counts."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from None
    except (UnicodeDecodeError, _DuplicateKey) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return content


class _DuplicateKey(ValueError):
    """A key given twice in one JSON object."""


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _DuplicateKey(f"{key} is given twice")
        found[key] = value
    return found
