"""Packed rows on a GPU: part of tools/gpu_check.py."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.gpu_report import close, need
from tools.random_model import make_random_model

LAYOUTS: list[list[tuple[int, tuple[int, ...]]]] = [
    [(300, (40, 70, 1, 200)), (90, ()), (17, (130, 5))],
    [(128, (128, 128))],
    [(700, (64, 64)), (3, (20,))],
]
"""(prompt, branches) of each group of three rows: lengths on and off the kernel's block size."""
VARIANTS: list[tuple[int | None, float | None]] = [(None, None), (50, None), (None, 5.0), (50, 5.0)]
"""(sliding window, soft cap)."""


@dataclass(frozen=True)
class PackedSequence:
    group: int
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]


def packed_kernel(backend: str, dtype: torch.dtype, device: str = "cuda") -> str:
    """One back end, forward and backward, grouped heads, windows and soft caps, against the dense mask in float32 on the CPU."""
    from ebft_ds.packing.attention import packed_attention
    from ebft_ds.packing.packed import PackedGroup, PackedLayout

    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for groups in LAYOUTS:
        starts = [sum(p + sum(b) for p, b in groups[:i]) for i in range(len(groups))]
        layout = PackedLayout(tuple(PackedGroup(start, prompt, branches) for start, (prompt, branches) in zip(starts, groups, strict=True)))
        inputs = [torch.randn(1, layout.length, heads, 64, generator=generator).transpose(1, 2) for heads in (8, 2, 2)]
        weights = torch.randn(1, layout.length, 8, 64, generator=generator)
        # rounded first, so that the comparison sees the kernel's rounding alone
        inputs, weights = [x.to(dtype).float() for x in inputs], weights.to(dtype).float()
        attentions = packed_attention(backend, device=device)(layout), packed_attention("dense", device="cpu")(layout)  # type: ignore[arg-type]
        for window, softcap in VARIANTS if dtype == torch.float32 else VARIANTS[::3]:  # each is compiled anew
            results = []
            for attention, where, what in zip(attentions, (device, "cpu"), (dtype, torch.float32), strict=True):
                given = [x.to(where, what, copy=True).requires_grad_() for x in inputs]
                output = attention(*given, scaling=0.1, dropout=0.0, sliding_window=window, softcap=softcap)
                gradients = torch.autograd.grad((output * weights.to(where, what)).sum(), given)
                results.append((output, *gradients))
            for found, wanted in zip(*results, strict=True):
                scale = float(wanted.detach().abs().max())
                gap = float((found.detach().float().cpu() - wanted.detach()).abs().max()) / scale
                allowed = 2e-3 if dtype == torch.float32 else 3e-2
                assert gap <= allowed, f"{layout.length} tokens, window {window}, cap {softcap}: relative difference {gap:.3g}"
                worst = max(worst, gap)
    return f"largest relative difference {worst:.2g}"


def _sequences() -> list[PackedSequence]:
    generator = torch.Generator().manual_seed(1)

    def ids(count: int) -> list[int]:
        tokens: list[int] = torch.randint(5, 90, (count,), generator=generator).tolist()
        return tokens

    prompts = [ids(70), ids(40)]
    return [PackedSequence(g, prompts[g], ids(length)) for g, length in ((0, 30), (0, 1), (0, 55), (1, 20), (1, 64))]


def _log_probs(network: Any, backend: str | None, device: str) -> tuple[Tensor, list[Tensor]]:
    """Log-probs of all completion tokens and their gradients; without a back end, of separate sequences."""
    from ebft_ds.engine.network import LogProbWork
    from ebft_ds.packing.attention import packed_attention
    from ebft_ds.packing.packer import RowPacker

    sequences = _sequences()
    packer = RowPacker() if backend is None else RowPacker("shared", packed_attention(backend, device=device))  # type: ignore[arg-type]
    batches = [packer.build([s], device=device) for s in sequences] if backend is None else [packer.build(sequences, device=device)]
    parts = [sequences] if backend is not None else [[s] for s in sequences]
    found = []
    for batch, members in zip(batches, parts, strict=True):
        positions = torch.tensor([place.predictor(t) for place in batch.places for t in range(place.branch_length)], device=device)
        targets = torch.tensor([token for s in members for token in s.completion_ids], device=device)
        found.append(network(LogProbWork(batch.rows, positions, targets, torch.ones(len(targets), device=device)))[0])
    log_probs = torch.cat(found)
    weights = torch.linspace(-1, 1, len(log_probs), device=device)
    network.zero_grad(set_to_none=True)
    (log_probs * weights).sum().backward()
    return log_probs, [parameter.grad for parameter in network.parameters() if parameter.grad is not None]


def _network(model: Path, device: str, checkpointing: dict[str, bool] | None, *, liger: bool = False) -> Any:
    from transformers import AutoModelForCausalLM

    from ebft_ds.engine.liger import apply_liger_kernels
    from ebft_ds.engine.network import LanguageNetwork, install_log_prob_head
    from ebft_ds.packing.attention import install_packed_attention

    causal_lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
    if liger:
        apply_liger_kernels(causal_lm)
    install_packed_attention(causal_lm)
    install_log_prob_head(causal_lm, chunk_size=64)
    if checkpointing is not None:
        causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    return LanguageNetwork(causal_lm).train()


def packed_network(model: Path, backend: str, device: str = "cuda") -> str:
    """Log-probs and gradients of a packed row equal those of separate sequences on the CPU, with and without checkpointing, float32."""
    folder = model.parent / "packed"
    if not folder.exists():
        make_random_model(folder, head_dim=64, num_layers=2)
    wanted, wanted_gradients = _log_probs(_network(folder, "cpu", None), None, "cpu")
    report = ""
    for checkpointing in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        found, gradients = _log_probs(_network(folder, device, checkpointing), backend, device)
        report = close(found, wanted, 2e-3)
        for gradient, other in zip(gradients, wanted_gradients, strict=True):
            close(gradient, other, 5e-3 * float(other.abs().max()) + 1e-4)
    return report


def liger(model: Path) -> str:
    """Liger's kernels give the log-probs and gradients of the model's own modules, packed rows, float32."""
    need("liger_kernel")
    folder = make_random_model(model.parent / "liger", head_dim=64, num_layers=2)
    wanted, wanted_gradients = _log_probs(_network(folder, "cuda", None), "auto", "cuda")
    wanted, wanted_gradients = wanted.detach().clone(), copy.deepcopy(wanted_gradients)
    found, gradients = _log_probs(_network(folder, "cuda", None, liger=True), "auto", "cuda")
    for gradient, other in zip(gradients, wanted_gradients, strict=True):
        close(gradient, other, 5e-3 * float(other.abs().max()) + 1e-4)
    return close(found, wanted, 2e-3)
