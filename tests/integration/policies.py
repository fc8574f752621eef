"""A Hugging Face model whose weights are pushed, and its log-probs, which a server must then report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from ebft_ds.rollout.manifest import TensorSpec, WeightManifest
from ebft_ds.rollout.tensors import dtype_name

Named = list[tuple[str, Tensor]]


class Policy:
    """`folder`: the checkpoint that servers load; `scratch`: where checkpoint names are found out by saving."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._scratch = scratch
        self._random = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def move(self, *parts: str) -> None:
        """Change every parameter whose name has one of the parts in it; all without any."""
        for name, parameter in self.model.named_parameters():
            if not parts or any(part in name for part in parts):
                parameter.add_(torch.randn(parameter.shape, generator=self._random) * 0.03)

    def tensors(self, *parts: str) -> Named:
        """Under the checkpoint's names, experts one by one, tied heads once; those with one of the parts in their name, or all."""
        self.model.save_pretrained(self._scratch)
        found = [item for file in sorted(self._scratch.glob("*.safetensors")) for item in load_file(file).items()]
        return [(name, tensor) for name, tensor in found if not parts or any(part in name for part in parts)]

    @torch.no_grad()
    def log_probs(self, ids: Sequence[int]) -> Tensor:
        """Of ids[1:]: [len - 1]."""
        logits = self.model(torch.tensor([list(ids)])).logits[0, :-1]
        return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(list(ids[1:]))[:, None])[:, 0]


def manifest_of(version: int, tensors: Named, *, complete: bool) -> WeightManifest:
    return WeightManifest(version, [TensorSpec(n, dtype_name(t.dtype), list(t.shape)) for n, t in tensors], complete=complete)


def in_buckets(tensors: Named, size: int = 7) -> Iterator[Named]:
    for start in range(0, len(tensors), size):
        yield tensors[start : start + size]
