"""The servers' key: given in a file or in the environment, or made anew."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from ebft_ds.errors import ConfigError
from ebft_ds.sidecar.auth import KEY_VARIABLE


def given_key(
    key_file: str | None, environ: Mapping[str, str], *, setting: str = "vllm_api_key_file", variable: str = KEY_VARIABLE
) -> str | None:
    """The key in `key_file`, else in the environment variable, else None. Errors: ConfigError for an unusable file or key.

    `setting`: what the user calls the file.
    """
    if key_file is None:
        return _usable(environ[variable], variable) if environ.get(variable) else None
    path = Path(key_file).expanduser()
    try:
        return _usable(path.read_text(encoding="utf-8").strip(), f"{setting} {path}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting} {path} cannot be read: {error}") from None


def new_key() -> str:
    """A key that nobody can guess."""
    return secrets.token_urlsafe(32)


def _usable(key: str, where: str) -> str:
    if not key or not key.isascii() or not key.isprintable() or any(character.isspace() for character in key):
        raise ConfigError(f"{where} holds no usable key: it must be one line of printable ASCII without spaces")
    return key
