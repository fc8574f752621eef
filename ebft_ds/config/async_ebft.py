"""AsyncEBFTConfig: asynchronous (or, with `max_staleness: 0`, synchronous) EBFT."""

from __future__ import annotations

from typing import Any, ClassVar

from ebft_ds.config.recipe import RecipeConfig


class AsyncEBFTConfig(RecipeConfig):
    """A recipe of `mode: async`; see RecipeConfig for what the constructor takes."""

    MODE: ClassVar[str] = "async"

    def __init__(self, **settings: Any) -> None:  # written out for type checkers, which would take sections for the only arguments
        super().__init__(**settings)
