"""vLLM loads this in every process of a server (entry point group `vllm.general_plugins`): it makes our weight receiver known there."""

from __future__ import annotations

import logging

BACKENDS = ("ebft_gloo", "ebft_disk")
"""Names for `--weight-transfer-config`. One receiver stands behind both: the announcement of a push says how its tensors come."""


def register() -> None:
    """Idempotent, imports no torch, and never keeps a server from starting: a server without the receiver says so at the first push."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

        known = Factory._registry  # there is no public way to ask
        for name in BACKENDS:
            if name not in known:
                Factory.register_engine(name, "ebft_ds.sidecar.receiver", "WeightReceiver")
    except Exception:
        logging.getLogger("vllm.ebft_ds").exception("ebft_ds: the weight receiver could not be registered")
