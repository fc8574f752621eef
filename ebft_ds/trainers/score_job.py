"""What `ebft-ds score` asks of its ranks. Loads without torch."""

from __future__ import annotations

import os

import msgspec

from ebft_ds.config import RewardConfig
from ebft_ds.errors import ConfigError
from ebft_ds.sidecar.address import is_loopback
from ebft_ds.sidecar.keys import given_key

KEY_VARIABLE = "EBFT_SCORE_API_KEY"
"""Environment variable that holds a scorer's key."""


class ScoreFile(msgspec.Struct, frozen=True, kw_only=True, tag="file"):
    """Rows of a file, scores to another one."""

    input: str
    output: str
    overwrite: bool = False
    skip_bad_rows: bool = False


class ScoreServer(msgspec.Struct, frozen=True, kw_only=True, tag="server"):
    """Rows over HTTP."""

    host: str = "127.0.0.1"
    port: int | None = None
    """None: a free one."""
    key_file: str | None = None
    """The key itself is never here: every user of a machine can read command lines."""
    max_rows: int = 1024
    """Most rows in one request."""
    max_body_mb: float = 16.0


class ScoreJob(msgspec.Struct, frozen=True, kw_only=True):
    """A reward model and what it is to score."""

    work: ScoreFile | ScoreServer
    model: str
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: str
    max_length: int | None = None
    """For models that bring no reward_encoding.json."""
    token_budget: int = 16384
    """Most tokens in one forward on one rank."""
    batch: int = 128
    """Rows between two writes, or in one round of a server."""
    normalize: bool = False
    deepspeed: str | None = None
    """JSON file of the frozen engine."""

    def recipe(self) -> RewardConfig:
        """The same as a recipe, for the parts that take one. Errors: ConfigError for a value that is not allowed."""
        return RewardConfig(
            model_name_or_path=self.model,
            model_revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            dtype=self.dtype,
            feature_deepspeed=self.deepspeed,
        )


def server_key(server: ScoreServer) -> str | None:
    """The key that requests must bring; None: none, on loopback only. Errors: ConfigError."""
    key = given_key(server.key_file, os.environ, setting="--key-file", variable=KEY_VARIABLE)
    if key is None and not is_loopback(server.host):
        raise ConfigError(f"--host {server.host} lets other machines in: give a key in {KEY_VARIABLE} or --key-file, or stay on 127.0.0.1")
    return key
