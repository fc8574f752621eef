"""How a policy version is written on a server: `<run token>:<number>`, so that another run's weights are never taken for ours."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

FRESH_VERSION = "default"
"""What a server reports before anybody has pushed to it: the weights of its own checkpoint."""


def new_run_token() -> str:
    """Distinct for every start of a trainer."""
    return f"ebft-{secrets.token_hex(6)}"


@dataclass(frozen=True)
class VersionNames:
    """Version numbers of one run and their names on the servers."""

    run_token: str

    def name(self, version: int) -> str:
        return f"{self.run_token}:{version}"

    def version(self, name: str) -> int | None:
        """None for a name that this run did not give: a restarted server's, another run's."""
        token, colon, number = name.rpartition(":")
        return int(number) if colon and token == self.run_token and number.isdecimal() else None


def adapter_name(alias: str, version: int) -> str:
    """Name of an adapter on the servers; `alias` holds the run token, so that a name is never used twice."""
    return f"{alias}-v{version}"
