"""A fault inside a server: `--worker-extension-cls tests.integration.faulty_worker.FaultyWorker`, armed through /collective_rpc."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class FaultyWorker:
    """Mixed into vLLM's worker."""

    weight_transfer_engine: Any

    def fail_next_load(self, after: str) -> None:
        """The next `load_weights` raises when it has passed that many tensors on."""
        model = self.weight_transfer_engine.model
        load = type(model).load_weights

        def failing(weights: Iterable[Any]) -> Any:
            del model.load_weights

            def some() -> Any:
                for i, weight in enumerate(weights):
                    if i == int(after):
                        raise RuntimeError("a fault in the middle of a load")
                    yield weight

            return load(model, some())

        model.load_weights = failing
