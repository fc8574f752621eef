"""The plain way to features and to the policy's log-probs, as the public EBFT trainers do it: right-padded rows with the prompt in each,
all layers, full logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ebft_ds.packing.padded import pad_rows
from ebft_ds.policy import LossDenominators, policy_loss


@dataclass(frozen=True)
class PlainBatch:
    """Rows of one micro-batch: prompts of one length, then completions."""

    input_ids: Tensor
    """int64 [B, T]."""
    attention_mask: Tensor
    completion_mask: Tensor
    """bool [B, T - prompt]."""
    prompt: int


def plain_batches(prompt: Sequence[int], completions: Sequence[Sequence[int]], rows: int | None, device: str) -> list[PlainBatch]:
    """One group's completions behind its prompt, `rows` at a time (None: all at once)."""
    size = rows or len(completions)
    batches = []
    for start in range(0, len(completions), size):
        padded = pad_rows([[*prompt, *ids] for ids in completions[start : start + size]], device=device)
        mask = padded.attention_mask[:, len(prompt) :].bool()
        batches.append(PlainBatch(padded.input_ids, padded.attention_mask, mask, len(prompt)))
    return batches


@torch.no_grad()
def plain_features(model: PreTrainedModel, batches: Sequence[PlainBatch], layers: Sequence[int]) -> Tensor:
    """[F, L * H] unit features: the mean over the completion of the chosen layers, out of the list of all of them."""
    features = []
    for batch in batches:
        output = model.base_model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, output_hidden_states=True, use_cache=False
        )
        chosen = torch.cat([output.hidden_states[k] for k in layers], dim=-1)[:, batch.prompt :].float()
        weights = batch.completion_mask[..., None].float()
        pooled = (chosen * weights).sum(dim=1) / weights.sum(dim=1)
        features.append(nn.functional.normalize(pooled, dim=-1))
    return torch.cat(features)


def plain_policy(
    model: Any, batches: Sequence[PlainBatch], advantages: Tensor, denominators: LossDenominators, *, logits: str
) -> list[Tensor]:
    """Forward and backward of the policy loss; gradients accumulate in the model. Log-probs [B, T - prompt] of each micro-batch.

    Args:
        logits: `all` positions, or those of the `completion` only.
    """
    found = []
    start = 0
    for batch in batches:
        width = batch.completion_mask.shape[1]
        keep = 0 if logits == "all" else width + 1
        output = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, logits_to_keep=keep)
        every = nn.functional.log_softmax(output.logits[:, :-1].float(), dim=-1)
        targets = batch.input_ids[:, -every.shape[1] :]
        log_probs = every.gather(2, targets[..., None]).squeeze(2)[:, -width:]
        rows = batch.input_ids.shape[0]
        result = policy_loss(
            log_probs,
            log_probs.detach(),
            advantages[start : start + rows],
            batch.completion_mask,
            loss_type="dapo",
            denominators=denominators,
        )
        result.loss.backward()
        found.append(log_probs.detach())
        start += rows
    return found
