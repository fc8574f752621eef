"""What a forward takes and where its tokens lie, whatever the layout: right-padded rows or one packed row.

Positions into a batch are flat: token t of row b of [B, T] ids is b * T + t. So whoever wants hidden states or log-probs of some
tokens asks for positions, and never sees how the sequences were laid out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

RowStyle = Literal["shared", "unshared", "padded"]
"""`shared`: a group's prompt once, its branches behind it. `unshared`: whole sequences one after the other. `padded`: a row each."""


class TokenRows(Protocol):
    """Token ids of one forward, with what the body needs to see each sequence as if it were alone."""

    @property
    def input_ids(self) -> Tensor:
        """int64 [B, T]."""
        ...

    @property
    def real_tokens(self) -> int:
        """Tokens without padding."""
        ...

    def body_inputs(self) -> dict[str, Any]:
        """Keyword arguments of the decoder stack's forward."""
        ...

    def check_forward(self, num_blocks: int) -> None:
        """After a forward through `num_blocks` blocks: ModelError if some block did not keep the sequences apart."""
        ...


class RowSequence(Protocol):
    """A prompt and what follows it: a completion or the reference. Sequences of one group have the same prompt."""

    @property
    def group(self) -> int: ...

    @property
    def prompt_ids(self) -> Sequence[int]: ...

    @property
    def completion_ids(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class Place:
    """Where one sequence lies in the flat positions of a batch; in shared rows several places have the same prompt."""

    prompt_start: int
    prompt_length: int
    branch_start: int
    branch_length: int

    def flat(self, position: int) -> int:
        """Flat position of the sequence's own position (0: first prompt token)."""
        if position < self.prompt_length:
            return self.prompt_start + position
        return self.branch_start + position - self.prompt_length

    def predictor(self, offset: int) -> int:
        """Flat position whose logits predict completion token `offset`; the prompt must not be empty for offset 0."""
        return self.flat(self.prompt_length + offset - 1)


@dataclass(frozen=True)
class RowBatch:
    """Rows of one forward, and the place of each of its sequences, in the order they were given."""

    rows: TokenRows
    places: list[Place]
    unshared_tokens: int
    """Real tokens that the same sequences take without sharing: prompts counted once per sequence."""
