"""Liger's Triton kernels for norm, MLP and rotary embedding, in place of the model's own."""

from __future__ import annotations

import importlib
import importlib.util
import logging

from transformers import PreTrainedModel

from ebft_ds.engine.build import accelerator_count
from ebft_ds.errors import ConfigError

logger = logging.getLogger(__name__)


def apply_liger_kernels(model: PreTrainedModel) -> None:
    """Patches this model's modules. Its fused cross-entropy stays out: losses are not the model's here, and log-probs have a head of their
    own. (Liger puts its rotary function into transformers' file of the model type: all models of that type in this process use it.)

    Raises:
        ConfigError: no package, no GPU, or no kernels for this model type.
    """
    if importlib.util.find_spec("liger_kernel") is None:
        raise ConfigError("use_liger_kernel: true needs the package liger-kernel: pip install 'ebft_ds[liger]', or set it to false")
    if not accelerator_count():
        raise ConfigError("use_liger_kernel: true needs a GPU, and there is none: set it to false")
    patches = importlib.import_module("liger_kernel.transformers.monkey_patch")
    if model.config.model_type not in patches.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(f"use_liger_kernel: Liger has no kernels for {model.config.model_type} models: set it to false")
    patches._apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, cross_entropy=False)
    logger.info("Liger kernels in place of the norms, MLPs and rotary embeddings of %s", type(model).__name__)
