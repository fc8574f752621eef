"""The order in which prompts are trained on: a function of (dataset, seed, position), so that every rank and every resume agree."""

from __future__ import annotations

import random
from typing import Any

from ebft_ds.data.prompts import PromptDataset
from ebft_ds.errors import CheckpointError
from ebft_ds.types import Prompt


class PromptStream:
    """Endless sequence of prompts with random access: each epoch is a permutation of the whole dataset.

    `position` is the index that `take` returns next; nothing else changes. The permutation depends on (seed, epoch) alone:
    not on global random state, not on Python's hash seed.
    """

    def __init__(self, dataset: PromptDataset, *, seed: int, shuffle: bool) -> None:
        self._dataset = dataset
        self._seed = seed
        self._shuffle = shuffle
        self._orders: dict[int, list[int]] = {}
        self.position = 0

    @property
    def prompts_per_epoch(self) -> int:
        return len(self._dataset)

    def prompt(self, index: int) -> Prompt:
        """The prompt at stream position `index` >= 0."""
        if index < 0:
            raise IndexError(f"stream position {index} is negative")
        epoch, offset = divmod(index, len(self._dataset))
        row = self._order(epoch)[offset] if self._shuffle else offset
        return self._dataset.prompt(row, index=index, epoch=epoch)

    def take(self) -> Prompt:
        """The prompt at `position`, which moves on by one."""
        prompt = self.prompt(self.position)
        self.position += 1
        return prompt

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            while len(self._orders) >= 2:  # prompts in flight may straddle an epoch's end
                del self._orders[next(iter(self._orders))]
            order = list(range(len(self._dataset)))
            random.Random(f"prompt order, seed {self._seed}, epoch {epoch}").shuffle(order)  # string seeds are hashed with SHA-512
            self._orders[epoch] = order
        return self._orders[epoch]

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "position": self.position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "rows": len(self._dataset),
            "fingerprint": self._dataset.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position. Raises `CheckpointError` if data, seed or order are not those the state was saved with."""
        own = self.state_dict()
        names = {
            "fingerprint": "the training data (rows, tokenizer or limits)",
            "rows": "the number of rows",
            "seed": "seed",
            "shuffle": "shuffle",
        }
        for key, meaning in names.items():
            if key not in state:
                raise CheckpointError(f"The saved prompt stream has no {key}: the checkpoint is damaged or from another version.")
            if state[key] != own[key]:
                raise CheckpointError(
                    f"The run was saved with other data: {meaning} was {state[key]}, now it is {own[key]}."
                    " Restore it, or start a new run from the exported model."
                )
        self.position = int(state["position"])
