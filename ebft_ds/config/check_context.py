"""What a check may know beside the recipe, and how it marks a finding that does not stop the run."""

from __future__ import annotations

from dataclasses import dataclass

from ebft_ds.config.model_facts import ModelFacts


@dataclass(frozen=True)
class Surroundings:
    """What a check may know beside the recipe; None: unknown, and what depends on it is not checked."""

    world_size: int | None = None
    accelerators: int | None = None
    """GPUs of this machine; 0: the run is on the CPU."""
    model: ModelFacts | None = None
    reward_functions: int = 0
    """Further objectives given to the trainer as objects, beside those that the recipe names."""
    evaluation_given: bool = False
    """Held-out rows were given to the trainer as objects."""


class Note(str):
    """A finding that does not stop the run."""

    __slots__ = ()
