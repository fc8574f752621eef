"""A loss that is not finite stops all ranks before one of them starts the collective backward."""

from __future__ import annotations

import torch
from torch import Tensor

from ebft_ds.collectives import Collectives
from ebft_ds.errors import NumericsError, PeerError


def agree_finite(loss: Tensor, collectives: Collectives, where: str, batch: str) -> None:
    """Collective. `where` and `batch` say what the loss is of.

    Raises:
        NumericsError: on the ranks whose loss is not finite; PeerError: on the others.
    """
    finite = bool(torch.isfinite(loss))
    broken = collectives.max_int(0 if finite else collectives.rank + 1)
    if not finite:
        raise NumericsError(
            f"{where}: the loss is {float(loss.detach())} ({batch}). Nothing of this step was applied and earlier checkpoints are "
            "unharmed. Lower the learning rate, or look at this step's rows"
        )
    if broken:
        raise PeerError(f"{where}: the loss of rank {broken - 1} is not finite; its message has the details")
