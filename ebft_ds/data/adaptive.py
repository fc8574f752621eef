"""How many tokens a completion may have."""

from __future__ import annotations

import math

from ebft_ds.errors import DataError


def completion_budget(
    reference_length: int,
    *,
    max_completion_length: int,
    adaptive: bool,
    multiplier: float,
    floor: int,
    prompt_length: int,
    max_seq_length: int,
) -> int:
    """Token budget of one prompt's completions (METHOD section 4).

    min(max_completion_length, max(floor, ceil(multiplier * reference_length))), or max_completion_length where not `adaptive`;
    never more than what max_seq_length leaves behind the prompt. All lengths in tokens, the reference's closing token included.
    Raises `DataError` if the prompt leaves no room at all.
    """
    room = max_seq_length - prompt_length
    if room < 1:
        raise DataError(f"A prompt of {prompt_length} tokens leaves no room for a completion within max_seq_length {max_seq_length}.")
    budget = max_completion_length
    if adaptive:
        # The subtraction keeps ceil(1.1 * 50) at 55: the product is 55.00000000000001 in floating point.
        budget = min(budget, max(floor, math.ceil(multiplier * reference_length - 1e-9)))
    return min(budget, room)
