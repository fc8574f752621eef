"""Log-probs of given tokens through a chunked head: a [tokens, vocabulary] tensor never exists whole.

The head is a module, not a function over its weight, so that ZeRO-3's module hooks gather the (possibly tied) weight around
forward and backward. With a frozen head the gradient needs only e = W[token] - E_p[W], saved in the forward ([N, hidden]):
the backward is then free of vocabulary-sized work. A trained head recomputes each chunk's logits in the backward. Either way one
chunk's logits are all there is at a time: probabilities and gradients are written over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class LogProbHead(nn.Linear):
    """An output embedding that can also return the log-probs of given tokens. Called with hidden states alone it is nn.Linear."""

    chunk_size: int = 256
    softcap: float | None = None
    """tanh cap of the logits (Gemma 2), applied before the temperature."""

    @classmethod
    def adopt(cls, linear: nn.Linear, *, chunk_size: int, softcap: float | None) -> LogProbHead:
        """A head that owns the same Parameter objects as `linear` (so tied and ZeRO-3 partitioned weights stay what they are)."""
        head = cls.__new__(cls)
        nn.Module.__init__(head)
        head.in_features, head.out_features = linear.in_features, linear.out_features
        head.weight = linear.weight
        head.register_parameter("bias", linear.bias)
        head.chunk_size, head.softcap = chunk_size, softcap
        return head

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        inverse_temperature: Tensor | None = None,
        *,
        with_entropy: bool = False,
    ) -> Any:
        """Logits [..., V]; with `targets` [N] and hidden [N, H]: (log-probs [N], entropy [N] or None), float32, natural log.

        `inverse_temperature` [N] scales the logits before the softmax. The entropy carries no gradient and costs a pass over each chunk.
        """
        if targets is None:
            return super().forward(hidden)
        if inverse_temperature is None:
            inverse_temperature = torch.ones(targets.shape, device=hidden.device)
        frozen = not self.weight.requires_grad and (self.bias is None or not self.bias.requires_grad)
        way: Any = _FrozenHeadLogProbs.apply if frozen else _TrainedHeadLogProbs.apply
        return way(hidden, self.weight, self.bias, targets, inverse_temperature, self.chunk_size, self.softcap, with_entropy)


def chunk_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, inverse_temperature: Tensor, softcap: float | None) -> Tensor:
    """Float32 logits [n, V] of one chunk, capped and scaled; a tensor of its own, which the caller may overwrite."""
    logits = nn.functional.linear(hidden, weight, bias).float()
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    return logits.mul_(inverse_temperature[:, None])


_BLOCK_ROWS = 32
"""log-sum-exp and entropy need a second tensor beside the logits; of so many rows it is small, and on a CPU stays in the cache."""


@dataclass
class _Values:
    """What a forward fills in, chunk by chunk."""

    log_probs: Tensor
    log_normalizers: Tensor
    entropy: Tensor | None

    @classmethod
    def empty(cls, hidden: Tensor, with_entropy: bool) -> _Values:
        log_probs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        return cls(log_probs, torch.empty_like(log_probs), torch.empty_like(log_probs) if with_entropy else None)

    def take(self, piece: slice, logits: Tensor, targets: Tensor, *, leave_probabilities: bool) -> None:
        """Log-probs and the like of a chunk go to their places, and its probabilities over its logits where they are wanted."""
        log_normalizer = torch.cat([block.logsumexp(dim=1) for block in logits.split(_BLOCK_ROWS)])
        self.log_normalizers[piece] = log_normalizer
        self.log_probs[piece] = logits.gather(1, targets[:, None]).squeeze(1) - log_normalizer
        if self.entropy is not None:
            entropy = self.entropy[piece]
            for start in range(0, len(entropy), _BLOCK_ROWS):
                rows = slice(start, start + _BLOCK_ROWS)
                log_probs = logits[rows].sub_(log_normalizer[rows, None])
                probabilities = log_probs.exp()
                entropy[rows] = -log_probs.mul_(probabilities).sum(dim=1)
                log_probs.copy_(probabilities)
        elif leave_probabilities:
            logits.sub_(log_normalizer[:, None]).exp_()


def _cap_slope(logits: Tensor, inverse_temperature: Tensor, softcap: float | None) -> Tensor | None:
    """Derivative [n, V] of the cap at the scaled logits, 1 - tanh^2; None without a cap."""
    return None if softcap is None else (logits / (softcap * inverse_temperature[:, None])).square_().neg_().add_(1.0)


def _excess(probabilities: Tensor, targets: Tensor, cap_slope: Tensor | None) -> Tensor:
    """p - [v = target], written over p, times the cap's derivative: minus T d logp / d (the head's outputs).

    Not p @ W and W[target] apart: where p is near 1 they cancel, which bf16 does not survive.
    """
    probabilities.scatter_add_(1, targets[:, None], torch.full_like(targets, -1, dtype=probabilities.dtype)[:, None])
    return probabilities if cap_slope is None else probabilities.mul_(cap_slope)


class _FrozenHeadLogProbs(torch.autograd.Function):
    """d logp / d hidden = (W[token] - E_p[W]) / T: computed in the forward, where the probabilities exist anyway."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        inverse_temperature: Tensor,
        chunk: int,
        softcap: float | None,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        values = _Values.empty(hidden, with_entropy)
        slopes = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device) if hidden.requires_grad else None
        for start in range(0, hidden.shape[0], chunk):
            piece = slice(start, start + chunk)
            scale = inverse_temperature[piece]
            logits = chunk_logits(hidden[piece], weight, bias, scale, softcap)
            cap_slope = _cap_slope(logits, scale, softcap) if slopes is not None else None
            values.take(piece, logits, targets[piece], leave_probabilities=slopes is not None)
            if slopes is not None:
                excess = _excess(logits, targets[piece], cap_slope)
                slopes[piece] = (excess.to(weight.dtype) @ weight).float() * -scale[:, None]
                del excess
            del logits, cap_slope  # else they are still there while the next chunk's are made
        if slopes is not None:
            ctx.save_for_backward(slopes)
        ctx.dtype = hidden.dtype
        if values.entropy is not None:
            ctx.mark_non_differentiable(values.entropy)
        return values.log_probs, values.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return (grad_log_probs[:, None] * slopes).to(ctx.dtype), None, None, None, None, None, None, None


class _TrainedHeadLogProbs(torch.autograd.Function):
    """Recomputes each chunk's logits in the backward; weight gradients accumulate in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        inverse_temperature: Tensor,
        chunk: int,
        softcap: float | None,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        values = _Values.empty(hidden, with_entropy)
        for start in range(0, hidden.shape[0], chunk):
            piece = slice(start, start + chunk)
            logits = chunk_logits(hidden[piece], weight, bias, inverse_temperature[piece], softcap)
            values.take(piece, logits, targets[piece], leave_probabilities=False)
            del logits  # else it is still there while the next chunk's are made
        ctx.save_for_backward(hidden, weight, bias, targets, inverse_temperature, values.log_normalizers)
        ctx.chunk, ctx.softcap = chunk, softcap
        if values.entropy is not None:
            ctx.mark_non_differentiable(values.entropy)
        return values.log_probs, values.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, inverse_temperature, log_normalizers = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Sums in float32 outside the parameters: their .grad and ZeRO-3's gradient hooks must only see the final one.
        weight_sum = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if ctx.needs_input_grad[1] else None
        bias_sum = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device) if ctx.needs_input_grad[2] else None
        for start in range(0, hidden.shape[0], ctx.chunk):
            piece = slice(start, start + ctx.chunk)
            scale = inverse_temperature[piece]
            logits = chunk_logits(hidden[piece], weight, bias, scale, ctx.softcap)
            cap_slope = _cap_slope(logits, scale, ctx.softcap)
            excess = _excess(logits.sub_(log_normalizers[piece, None]).exp_(), targets[piece], cap_slope)
            # The factors of rows go to the smaller matrices: [n, hidden] instead of [n, V].
            factor = -(grad_log_probs[piece] * scale)[:, None]
            if bias_sum is not None:
                bias_sum.addmv_(excess.T, factor[:, 0])
            excess = excess.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[piece] = (excess @ weight).mul_(factor)
            if weight_sum is not None and weight.dtype == torch.float32:
                weight_sum.addmm_(excess.T, hidden[piece] * factor)
            elif weight_sum is not None:
                weight_sum.add_(excess.T @ (hidden[piece] * factor).to(weight.dtype))
            del logits, excess, cap_slope  # else they are still there while the next chunk's are made
        weight_grad = None if weight_sum is None else weight_sum.to(weight.dtype)
        return grad_hidden, weight_grad, None if bias_sum is None else bias_sum.to(bias.dtype), None, None, None, None, None
