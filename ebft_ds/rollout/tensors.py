"""Tensors as raw bytes and back, in any dtype that weights have."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ebft_ds.rollout.manifest import TensorSpec

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Wire name -> dtype."""


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def to_bytes(tensors: Sequence[tuple[str, Tensor]]) -> tuple[list[TensorSpec], list[memoryview]]:
    """Specs and raw bytes (on the CPU) of named tensors; the views keep their tensors alive."""
    specs: list[TensorSpec] = []
    payload: list[memoryview] = []
    for name, tensor in tensors:
        flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        specs.append(TensorSpec(name, dtype_name(tensor.dtype), list(tensor.shape)))
        payload.append(flat.numpy().data)
    return specs, payload


def from_bytes(specs: Sequence[TensorSpec], payload: bytearray) -> list[tuple[str, Tensor]]:
    """The tensors of a payload, as views of it.

    Raises:
        ValueError: an unknown dtype, or a payload whose size is not that of the specs.
    """
    found: list[tuple[str, Tensor]] = []
    offset = 0
    for spec in specs:
        if spec.dtype not in DTYPES:
            raise ValueError(f"{spec.name}: unknown dtype {spec.dtype!r}")
        count = math.prod(spec.shape)
        if offset + spec.num_bytes > len(payload):
            raise ValueError(f"{spec.name}: the payload of {len(payload)} bytes ends too early")
        dtype = DTYPES[spec.dtype]
        flat = torch.frombuffer(payload, dtype=dtype, count=count, offset=offset) if count else torch.empty(0, dtype=dtype)
        found.append((spec.name, flat.reshape(spec.shape)))
        offset += spec.num_bytes
    if offset != len(payload):
        raise ValueError(f"{len(payload) - offset} bytes of the payload belong to no tensor")
    return found
