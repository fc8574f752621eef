"""What a weight push consists of: announced before the first byte, so that an engine can refuse before it touches a weight."""

from __future__ import annotations

import math

import msgspec

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor of a push."""

    name: str
    """Parameter name as in the checkpoint (`AutoModelForCausalLM` names, no PEFT prefixes)."""
    dtype: str
    """`float32`, `bfloat16`, `float16` or `float64`."""
    shape: list[int]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


class WeightManifest(msgspec.Struct, frozen=True):
    """The tensors of one push and the policy version that they make. Tied weights appear once."""

    version: int
    tensors: list[TensorSpec]
    complete: bool = True
    """True: every parameter of the model must be listed. False: what is not listed keeps its value (say, frozen layers)."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)
