"""Log-probs of given tokens and their gradient: log_softmax over full logits, against the chunked head; frozen and trained head."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from ebft_ds.policy.logprobs import LogProbHead
from tools.benchmarks.comparison import Way, compare
from tools.benchmarks.models import CHUNK
from tools.benchmarks.turns import Report
from tools.benchmarks.workload import add_machine_arguments, machine_settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=CHUNK, help="positions per chunk of ours")
    add_machine_arguments(parser)


def run(model: Path, options: argparse.Namespace) -> Report:
    config = AutoConfig.from_pretrained(model).get_text_config()
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(options.positions, config.hidden_size, generator=generator)
    weight = torch.randn(config.vocab_size, config.hidden_size, generator=generator) / config.hidden_size**0.5
    targets = torch.randint(config.vocab_size, (options.positions,), generator=generator).to(options.device)
    slopes = torch.randn(options.positions, generator=generator).to(options.device)  # what the loss's gradient stands for
    dtype = getattr(torch, options.dtype)
    pairs = []
    for trained in (False, True):
        kind = "trained head" if trained else "frozen head"
        plain = nn.Linear(config.hidden_size, config.vocab_size, bias=False, device=options.device, dtype=dtype)
        plain.load_state_dict({"weight": weight.to(dtype)})
        plain.requires_grad_(trained)
        ours = LogProbHead.adopt(plain, chunk_size=options.chunk, softcap=None)
        inputs = hidden.to(options.device, dtype).requires_grad_(True)
        pairs.append(
            (
                _way(f"plain, {kind}", _FullLogits(plain), inputs, targets, slopes),
                _way(f"ours, {kind}", ours, inputs, targets, slopes),
            )
        )
    settings: dict[str, str | int | float] = {
        "model": model.name,
        "positions": options.positions,
        "vocabulary": config.vocab_size,
        "hidden": config.hidden_size,
        "chunk": options.chunk,
    }
    return compare("logprobs", settings | machine_settings(options), pairs, options, label=True)


class _FullLogits(nn.Module):
    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, None]:
        log_probs = nn.functional.log_softmax(self.head(hidden).float(), dim=-1)
        return log_probs.gather(1, targets[:, None]).squeeze(1), None


def _way(name: str, head: nn.Module, hidden: Tensor, targets: Tensor, slopes: Tensor) -> Way:
    def release() -> None:
        head.zero_grad(set_to_none=True)
        hidden.grad = None

    def run() -> dict[str, Tensor]:
        release()
        log_probs, _ = head(hidden, targets)
        (log_probs * slopes).sum().backward()
        assert hidden.grad is not None
        found = {"log-probs": log_probs.detach(), "gradient of the hidden states": hidden.grad}
        return found | {f"gradient {i} of the head": p.grad for i, p in enumerate(head.parameters()) if p.grad is not None}

    return Way(name, run, {}, release=release)
