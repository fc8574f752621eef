"""Finding and building a rollout loop by name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ebft_ds.errors import ConfigError
from ebft_ds.rollout.loop import LOOP_METHODS, EBFTRolloutLoop, load_loop

LOOPS = "tests.integration.rollout_loops"


def test_the_protocol_is_the_documented_one() -> None:
    documented = {"start", "stop", "submit", "cancel", "set_policy_version", "groups", "health", "state_dict", "load_state_dict"}
    assert set(LOOP_METHODS) == documented


@pytest.mark.parametrize(
    ("path", "kwargs", "text"),
    [
        ("no-colon", {}, "package.module:Class"),
        (":Class", {}, "package.module:Class"),
        ("ebft_ds.nothing:Loop", {}, "cannot import 'ebft_ds.nothing'"),
        (f"{LOOPS}:Nothing", {}, "has no class 'Nothing'"),
        (f"{LOOPS}:os", {}, "has no class 'os'"),
        (f"{LOOPS}:LacksMethods", {}, "lacks cancel, set_policy_version, groups, health, state_dict, load_state_dict, stop"),
        (f"{LOOPS}:ShoutingLoop", {}, "'token'"),
        (f"{LOOPS}:ShoutingLoop", {"token": 1, "colour": 2}, "'colour'"),
        (None, {"token": 1}, "EBFTRolloutLoop"),
    ],
)
def test_a_loop_that_cannot_be_built_says_why(path: str | None, kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        load_loop(path, kwargs)


def test_the_default_loop_refuses_a_foreign_state() -> None:
    loop = EBFTRolloutLoop.__new__(EBFTRolloutLoop)
    loop.load_state_dict({})
    with pytest.raises(ConfigError, match="turns"):
        loop.load_state_dict({"turns": 3})
