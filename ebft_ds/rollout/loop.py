"""EBFTRolloutLoop, and the small protocol that a user's class can implement in its place.

A loop decides how requests become groups; the engine decides how tokens are drawn. `rollout_loop: package.module:Class` names the
class; it is built as `Class(context, **rollout_loop_kwargs)` inside the rollout process. Its methods are called from one control
thread, in short calls: `groups` and `submit` must not block. Weights go to `context.engine` directly, never through the loop.
A loop that raises ends the run with its traceback; one that neither hands out groups nor makes progress counts as lost after
`rollout_timeout` seconds.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from ebft_ds.errors import ConfigError
from ebft_ds.types import RolloutGroup, RolloutRequest


class LoopHealth(msgspec.Struct, frozen=True):
    """How a loop is doing."""

    progress: int
    """Grows whenever work gets done (tokens, turns, tool calls): a slow loop is told from a dead one by it."""
    pending: int
    """Requests taken and not yet handed out as groups."""


class EngineAccess(Protocol):
    """What a loop may do with the engine; thread-safe, nothing blocks."""

    @property
    def policy_version(self) -> int: ...
    @property
    def tokens_generated(self) -> int: ...
    def submit(self, requests: Sequence[RolloutRequest]) -> None: ...
    def cancel(self, indices: Sequence[int]) -> None: ...
    def finished(self) -> list[RolloutGroup]: ...


@dataclass(frozen=True)
class LoopContext:
    """What the process gives a loop."""

    engine: EngineAccess
    model_name_or_path: str
    revision: str | None
    trust_remote_code: bool
    dtype: str
    device: str
    batch_size: int
    vocab_size: int
    seed: int


class RolloutLoop(Protocol):
    """Prompts in, groups out."""

    def start(self) -> None:
        """Get ready; requests come only afterwards."""
        ...

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Take requests, in order. Each must come back as exactly one group from `groups`, unless it is cancelled."""
        ...

    def cancel(self, indices: Sequence[int]) -> None:
        """Forget the requests of these prompt indices."""
        ...

    def set_policy_version(self, version: int) -> None:
        """The engine now holds the weights of this version (called after each confirmed push)."""
        ...

    def groups(self) -> list[RolloutGroup]:
        """Groups finished since the last call; does not wait."""
        ...

    def health(self) -> LoopHealth:
        """Progress and pending work."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs, in msgpack types; requests in flight are not part of it (the feed submits them again)."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        ...

    def stop(self) -> None:
        """Let go of everything; may be called twice."""
        ...


LOOP_METHODS = tuple(name for name, member in vars(RolloutLoop).items() if callable(member) and not name.startswith("_"))


class EBFTRolloutLoop:
    """The default loop: one turn per prompt, every request straight to the engine."""

    def __init__(self, context: LoopContext) -> None:
        self._engine = context.engine
        self._pending = 0

    def start(self) -> None:
        pass

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        self._pending += len(requests)
        self._engine.submit(requests)

    def cancel(self, indices: Sequence[int]) -> None:
        self._engine.cancel(indices)

    def set_policy_version(self, version: int) -> None:
        pass

    def groups(self) -> list[RolloutGroup]:
        groups = self._engine.finished()
        self._pending -= len(groups)
        return groups

    def health(self) -> LoopHealth:
        return LoopHealth(progress=self._engine.tokens_generated, pending=self._pending)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise ConfigError(
                f"EBFTRolloutLoop keeps no state, but the checkpoint holds {sorted(state)}; was it made with another rollout_loop?"
            )

    def stop(self) -> None:
        pass


def load_loop(path: str | None, kwargs: dict[str, Any]) -> Callable[[LoopContext], RolloutLoop]:
    """What builds the loop that `rollout_loop` (None: EBFTRolloutLoop) and `rollout_loop_kwargs` describe. Loads no model.

    Raises:
        ConfigError: not `package.module:Class`, no such module or class, a class that lacks a method, or arguments that it does not take.
    """
    loop_class = EBFTRolloutLoop if path is None else _find_class(path)
    try:
        inspect.signature(loop_class).bind(None, **kwargs)
    except TypeError as error:
        raise ConfigError(f"rollout_loop_kwargs do not fit {path or 'EBFTRolloutLoop'}: {error}") from error
    return functools.partial(loop_class, **kwargs)


def _find_class(path: str) -> Callable[..., RolloutLoop]:
    module_name, colon, class_name = path.partition(":")
    if not (module_name and colon and class_name):
        raise ConfigError(f"rollout_loop {path!r} is not of the form package.module:Class")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"rollout_loop {path!r}: cannot import {module_name!r}: {error}") from error
    found = vars(module).get(class_name)
    if not isinstance(found, type):
        raise ConfigError(f"rollout_loop {path!r}: {module_name!r} has no class {class_name!r}")
    missing = [name for name in LOOP_METHODS if not callable(getattr(found, name, None))]
    if missing:
        raise ConfigError(f"rollout_loop {path!r}: {class_name} lacks {', '.join(missing)} (see ebft_ds.rollout.loop.RolloutLoop)")
    return found
