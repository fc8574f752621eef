"""Log-probs of given tokens through a chunked head: a [tokens, vocabulary] tensor never exists whole.

The head is a module, not a function over its weight, so that ZeRO-3's module hooks gather the (possibly tied) weight around
forward and backward. With a frozen head the gradient needs only e = W[token] - E_p[W], saved in the forward ([N, hidden]):
the backward is then free of vocabulary-sized work. A trained head recomputes each chunk's logits in the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class LogProbHead(nn.Linear):
    """An output embedding that can also return the log-probs of given tokens. Called with hidden states alone it is nn.Linear."""

    chunk_size: int = 512
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

    def forward(self, hidden: Tensor, targets: Tensor | None = None, inverse_temperature: Tensor | None = None) -> Any:
        """Logits [..., V]; with `targets` [N] and hidden [N, H]: (log-probs [N], entropy [N]), float32, natural log.

        `inverse_temperature` [N] scales the logits before the softmax. The entropy carries no gradient.
        """
        if targets is None:
            return super().forward(hidden)
        if inverse_temperature is None:
            inverse_temperature = torch.ones(targets.shape, device=hidden.device)
        frozen = not self.weight.requires_grad and (self.bias is None or not self.bias.requires_grad)
        if frozen and self.softcap is None:
            frozen_head: Any = _FrozenHeadLogProbs.apply
            return frozen_head(hidden, self.weight, self.bias, targets, inverse_temperature, self.chunk_size)
        trained_head: Any = _TrainedHeadLogProbs.apply
        return trained_head(hidden, self.weight, self.bias, targets, inverse_temperature, self.chunk_size, self.softcap)


def chunk_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, inverse_temperature: Tensor, softcap: float | None) -> Tensor:
    """Float32 logits [n, V] of one chunk, capped and scaled."""
    logits = nn.functional.linear(hidden, weight, bias).float()
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits * inverse_temperature[:, None]


def _log_softmax_stats(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log-prob of the target [n], entropy [n], probabilities [n, V]); the probabilities take the logits' memory."""
    target_logits = logits.gather(1, targets[:, None]).squeeze(1)
    log_normalizer = torch.logsumexp(logits, dim=1)
    probabilities = logits.sub(log_normalizer[:, None]).exp_()
    # H = logZ - E_p[logit]: no log-prob tensor beside the probabilities is needed.
    entropy = log_normalizer - torch.einsum("nv,nv->n", probabilities, logits)
    return target_logits - log_normalizer, entropy, probabilities


class _FrozenHeadLogProbs(torch.autograd.Function):
    """d logp / d hidden = (W[token] - E_p[W]) / T: computed in the forward, where the probabilities exist anyway."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, inverse_temperature: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        log_probs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(log_probs)
        needs_grad = hidden.requires_grad
        slopes = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device) if needs_grad else None
        for start in range(0, count, chunk):
            piece = slice(start, start + chunk)
            logits = chunk_logits(hidden[piece], weight, bias, inverse_temperature[piece], None)
            log_probs[piece], entropy[piece], probabilities = _log_softmax_stats(logits, targets[piece])
            if slopes is not None:
                expected = probabilities.to(weight.dtype) @ weight
                slopes[piece] = (weight[targets[piece]].float() - expected.float()) * inverse_temperature[piece, None]
        if slopes is not None:
            ctx.save_for_backward(slopes)
        ctx.dtype = hidden.dtype
        ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return (grad_log_probs[:, None] * slopes).to(ctx.dtype), None, None, None, None, None


class _TrainedHeadLogProbs(torch.autograd.Function):
    """Recomputes each chunk's logits in the backward and differentiates them there; weight gradients accumulate in float32."""

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
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        log_probs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(log_probs)
        for start in range(0, count, chunk):
            piece = slice(start, start + chunk)
            logits = chunk_logits(hidden[piece], weight, bias, inverse_temperature[piece], softcap)
            log_probs[piece], entropy[piece], _ = _log_softmax_stats(logits, targets[piece])
        ctx.save_for_backward(hidden, weight, bias, targets, inverse_temperature)
        ctx.chunk, ctx.softcap = chunk, softcap
        ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, inverse_temperature = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # Leaves of their own: the parameters' .grad and ZeRO-3's gradient hooks must only see the final sum.
        wanted = [t for t in (weight, bias) if t is not None and t.requires_grad]
        leaves = [t.detach().requires_grad_(True) for t in wanted]
        totals = [torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in wanted]
        by_id = {id(t): leaf for t, leaf in zip(wanted, leaves, strict=True)}
        for start in range(0, hidden.shape[0], ctx.chunk):
            piece = slice(start, start + ctx.chunk)
            with torch.enable_grad():
                chunk_hidden = hidden[piece].detach().requires_grad_(True)
                chunk_bias = None if bias is None else by_id.get(id(bias), bias)
                logits = chunk_logits(chunk_hidden, by_id.get(id(weight), weight), chunk_bias, inverse_temperature[piece], ctx.softcap)
                log_probs = logits.gather(1, targets[piece, None]).squeeze(1) - torch.logsumexp(logits, dim=1)
            grads = torch.autograd.grad(log_probs, [chunk_hidden, *leaves], grad_log_probs[piece])
            grad_hidden[piece] = grads[0]
            for total, grad in zip(totals, grads[1:], strict=True):
                total.add_(grad)
        final = {id(t): total.to(t.dtype) for t, total in zip(wanted, totals, strict=True)}
        return grad_hidden, final.get(id(weight)), None if bias is None else final.get(id(bias)), None, None, None, None
