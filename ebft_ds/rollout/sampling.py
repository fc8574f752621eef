"""Drawing a token: temperature, top-k, top-p and min-p in float32, the log-prob of what is really sampled from, one stream per sample."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ebft_ds.types import SamplingSpec


def uniform(seed: int, index: int, attempt: int, sample: int, position: int) -> float:
    """The random number in (0, 1) for one token: a hash of where it stands, so it depends on nothing else in the batch.

    A counter-based stream needs no state: dropped rows, recomputed caches and restarts cannot shift it.
    """
    digest = hashlib.blake2b(struct.pack("<qqqqq", seed, index, attempt, sample, position), digest_size=4).digest()
    return (int.from_bytes(digest, "little") + 0.5) / 2**32


def sampling_logprobs(logits: Float[Tensor, "b v"], specs: Sequence[SamplingSpec]) -> Float[Tensor, "b v"]:
    """Log-probs of the distribution that row i is drawn from under specs[i]; -inf for filtered tokens.

    Filters in the order of transformers: temperature, top-k, top-p, min-p; each leaves at least the likeliest token.
    """

    def column(values: list[float]) -> Float[Tensor, "b 1"]:
        return torch.tensor(values, dtype=torch.float32, device=logits.device).unsqueeze(1)

    scores = logits.float() / column([spec.temperature for spec in specs])
    if any(spec.top_k > 0 for spec in specs):
        scores = _keep_top_k(scores, [spec.top_k for spec in specs])
    if any(spec.top_p < 1 for spec in specs):
        scores = _keep_top_p(scores, column([spec.top_p for spec in specs]))
    if any(spec.min_p > 0 for spec in specs):
        probs = torch.softmax(scores, dim=-1)
        floor = column([spec.min_p for spec in specs]) * probs.max(dim=-1, keepdim=True).values
        scores = scores.masked_fill(probs < floor, -torch.inf)
    return torch.log_softmax(scores, dim=-1)


def _keep_top_k(scores: Float[Tensor, "b v"], top_k: list[int]) -> Float[Tensor, "b v"]:
    """Keep the top_k[i] likeliest tokens of row i, ties at the end included; 0 keeps all."""
    vocab = scores.shape[-1]
    limited = [0 < k < vocab for k in top_k]
    if not any(limited):
        return scores
    largest = torch.topk(scores, max(k for k, limit in zip(top_k, limited, strict=True) if limit), dim=-1).values
    picks = torch.tensor([[k - 1 if limit else 0] for k, limit in zip(top_k, limited, strict=True)], device=scores.device)
    remove = torch.tensor(limited, device=scores.device).unsqueeze(1) & (scores < largest.gather(1, picks))
    return scores.masked_fill(remove, -torch.inf)


def _keep_top_p(scores: Float[Tensor, "b v"], top_p: Float[Tensor, "b 1"]) -> Float[Tensor, "b v"]:
    """Keep the smallest set of likeliest tokens whose probability reaches top_p; rows with top_p 1 stay whole."""
    ordered, order = torch.sort(scores, dim=-1, descending=True)
    probs = torch.softmax(ordered, dim=-1)
    before = torch.cumsum(probs, dim=-1) - probs
    remove = (before >= top_p) & (top_p < 1)
    remove[:, 0] = False
    return scores.masked_fill(torch.zeros_like(remove).scatter(1, order, remove), -torch.inf)


def draw(logprobs: Float[Tensor, "b v"], uniforms: Sequence[float]) -> Int[Tensor, " b"]:
    """Token of row i by inversion at uniforms[i]. Accumulated in float64: a float32 sum over a large vocabulary shifts the tail.

    The target lies strictly below the last sum and the first larger sum is taken, so a token of probability 0 is never drawn.
    """
    sums = torch.cumsum(logprobs.double().exp(), dim=-1)
    targets = torch.tensor(uniforms, dtype=torch.float64, device=logprobs.device).unsqueeze(1) * sums[:, -1:]
    return torch.searchsorted(sums, targets, right=True).squeeze(1)
