"""The package's exceptions. Each one is also the stdlib type a caller would expect, and carries the exit code it ends a run with.

An error message says what is wrong, where, and what to do next. Exit codes are part of the public interface:
0 done, 2 bad usage or configuration, 3 bad data, 4 rollout engine lost, 5 weight sync failed, 6 checkpoint unusable,
7 preempted after saving; 1 is everything unforeseen.
"""

from __future__ import annotations

from typing import ClassVar


class EbftError(Exception):
    """Base of all errors raised on purpose by this package."""

    exit_code: ClassVar[int] = 1


class ConfigError(EbftError, ValueError):
    """A recipe, an override, a DeepSpeed JSON or an argument that cannot work."""

    exit_code = 2


class ModelError(EbftError, ValueError):
    """A model or tokenizer that is missing, unreadable, or does not fit the configuration."""

    exit_code = 2


class DataError(EbftError, ValueError):
    """A dataset, a row or a field that cannot be used."""

    exit_code = 3


class RolloutError(EbftError, RuntimeError):
    """The rollout process or engine died, raised, or stayed silent past its deadline."""

    exit_code = 4


class WeightSyncError(EbftError, RuntimeError):
    """A weight push was refused, did not arrive, or arrived with other numbers than the trainer's."""

    exit_code = 5


class CheckpointError(EbftError, RuntimeError):
    """A checkpoint that is damaged, incomplete, or belongs to another run or world size."""

    exit_code = 6


class NumericsError(EbftError, ArithmeticError):
    """A non-finite loss, gradient, feature or log-prob; names step, rank and quantity."""


class PeerError(EbftError, RuntimeError):
    """Another rank reported an error; this rank stops without starting a further collective."""


class Preempted(EbftError):
    """A stop signal was agreed on by all ranks, and the run was saved."""

    exit_code = 7
