"""Attention of one group without any mask or copied keys, on the CPU: the parts are merged by their log-sum-exp.

A branch token sees all of its prompt and a causal piece of its branch. Both parts are plain kernel calls (all branches of a group see
the prompt in one), and their softmax over different keys is one softmax once each is weighted by its share of the sum:

    out = out_prompt * exp(lse_prompt - lse) + out_branch * exp(lse_branch - lse),  lse = log(exp(lse_prompt) + exp(lse_branch))

The kernel's backward forms its probabilities from the log-sum-exp it is given, so with the merged one each part's gradient is exact.
Compared with keys [prompt; branch] and a mask per branch this saves the copies, which autograd would keep for every block: 28 MB a
block at a prompt of 1,024 and 17 branches of 64, and 10-15 % of the time there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def kernel_takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the CPU kernel computes such tensors; called by itself it reads others wrongly, without a word."""
    same_width = query.shape[-1] == key.shape[-1] == value.shape[-1]
    return query.device.type == "cpu" and same_width and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1


def merged_attention(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float | None) -> Tensor:
    """Tokens of one group: `lengths` of its prompt (at least 1) and of its branches (at least 1 each, at least one branch).

    query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, Hq, T, D].
    """
    output: Tensor = _MergedAttention.apply(query, key, value, lengths, scale)  # type: ignore[no-untyped-call]
    return output


class _MergedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float | None) -> Tensor:
        prompt = lengths[0]
        pieces = list(zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True))
        prompt_output, prompt_lse = _forward(*pieces[0], 0.0, True, scale=scale)
        own = [_forward(*piece, 0.0, True, scale=scale) for piece in pieces[1:]]
        own_output, own_lse = (torch.cat(parts, dim=2) for parts in zip(*own, strict=True))
        output, lse = _forward(query[:, :, prompt:], *pieces[0][1:], 0.0, False, scale=scale)
        merged = torch.logaddexp(lse, own_lse)
        output = torch.lerp(output, own_output, (own_lse - merged).exp_()[..., None].to(output.dtype))
        # laid out as [1, T, H, D], which is what the layer goes on with
        whole = torch.cat([prompt_output.transpose(1, 2), output.transpose(1, 2)], dim=1).transpose(1, 2)
        ctx.save_for_backward(query, key, value, whole, torch.cat([prompt_lse, merged], dim=2))
        ctx.lengths, ctx.scale = lengths, scale
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        prompt, scale = ctx.lengths[0], ctx.scale
        pieces = zip(*(x.split(ctx.lengths, dim=2) for x in (gradient, query, key, value, output, lse)), strict=True)
        own = [_backward(*piece, 0.0, True, scale=scale) for piece in pieces]
        branch_gradient, branch_query, branch_output, branch_lse = (x[:, :, prompt:] for x in (gradient, query, output, lse))
        prompt_key, prompt_value = key[:, :, :prompt], value[:, :, :prompt]
        seen = _backward(branch_gradient, branch_query, prompt_key, prompt_value, branch_output, branch_lse, 0.0, False, scale=scale)
        query_gradient, key_gradient, value_gradient = (torch.cat(parts, dim=2) for parts in zip(*own, strict=True))
        query_gradient[:, :, prompt:] += seen[0]
        key_gradient[:, :, :prompt] += seen[1]
        value_gradient[:, :, :prompt] += seen[2]
        return query_gradient, key_gradient, value_gradient, None, None
