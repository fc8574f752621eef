"""A batch of rows over one key/value cache: prefill, one token for every row, drop the finished.

Left padding with explicit positions, public transformers calls only. Rows with the same tokens (the samples of a fresh prompt) are
prefilled once and expanded. Prefill runs over slices of columns, so that its activations stay within a token budget.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ebft_ds.errors import RolloutError
from ebft_ds.rollout.rows import Row
from ebft_ds.rollout.sampling import draw, sampling_logprobs

PREFILL_TOKENS = 8192
"""Most padded tokens in one prefill forward."""


class DecodeBatch:
    """Rows in lockstep; `logits` are those of each row's next token, made with the weights that the batch was filled with."""

    def __init__(self, model: PreTrainedModel, rows: list[Row], prefill_tokens: int = PREFILL_TOKENS) -> None:
        self.rows = rows
        self._model = model
        unique = list(dict.fromkeys(row.sequence for row in rows))
        place = {sequence: number for number, sequence in enumerate(unique)}
        copies = torch.tensor([place[row.sequence] for row in rows], device=model.device)
        input_ids, mask = left_pad([list(sequence) for sequence in unique], model.device)
        self._cache = DynamicCache(config=model.config)
        logits = self._prefill(input_ids, mask, max(1, prefill_tokens // len(unique)))
        if len(unique) < len(rows):
            self._cache.batch_select_indices(copies)
        self._mask = mask[copies]
        self._logits = logits[copies]

    def step(self, policy_version: int) -> None:
        """Draw one token for every row; finished rows leave, the others are forwarded.

        Raises:
            RolloutError: logits that are not finite.
        """
        logprobs = sampling_logprobs(self._logits, [row.request.sampling for row in self.rows])
        self._refuse_nan(logprobs)
        tokens = draw(logprobs, [row.next_uniform() for row in self.rows])
        chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
        for row, token, logprob in zip(self.rows, tokens.tolist(), chosen.tolist(), strict=True):
            row.append(token, logprob, policy_version)
        alive = [number for number, row in enumerate(self.rows) if row.finish_reason is None]
        tokens = tokens[self._keep(alive)] if len(alive) < len(self.rows) else tokens
        if self.rows:
            self._forward(tokens)

    def remove(self, rows: list[Row]) -> None:
        """Take rows out at a token boundary."""
        alive = [number for number, row in enumerate(self.rows) if row not in rows]
        if len(alive) < len(self.rows):
            self._logits = self._logits[self._keep(alive)]

    def _keep(self, alive: list[int]) -> Int[Tensor, " kept"]:
        index = torch.tensor(alive, dtype=torch.long, device=self._mask.device)
        self.rows = [self.rows[number] for number in alive]
        self._mask = self._mask[index]
        if alive:
            self._cache.batch_select_indices(index)
        return index

    def _prefill(self, input_ids: Int[Tensor, "b t"], mask: Int[Tensor, "b t"], width: int) -> Float[Tensor, "b v"]:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = None
        for start in range(0, input_ids.shape[1], width):
            end = min(start + width, input_ids.shape[1])
            logits = self._run(input_ids[:, start:end], mask[:, :end], positions[:, start:end])
        assert logits is not None
        return logits

    def _forward(self, tokens: Int[Tensor, " b"]) -> None:
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self.rows), 1)], dim=1)
        self._logits = self._run(tokens.unsqueeze(1), self._mask, self._mask.sum(1, keepdim=True) - 1)

    @torch.no_grad()
    def _run(self, input_ids: Int[Tensor, "b q"], mask: Int[Tensor, "b k"], positions: Int[Tensor, "b q"]) -> Float[Tensor, "b v"]:
        """Logits after the last of the new tokens; the cache grows by all of them."""
        output = self._model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits
        return logits[:, -1]

    def _refuse_nan(self, logprobs: Float[Tensor, "b v"]) -> None:
        broken = torch.isnan(logprobs).any(dim=-1)
        if bool(broken.any()):
            row = self.rows[int(broken.nonzero()[0])]
            prompt = row.request.prompt
            raise RolloutError(
                f"prompt {prompt.prompt_id} (index {prompt.index}), sample {row.sample}, token {len(row.token_ids)}: "
                "the model's logits are not finite; the pushed weights are broken or the dtype overflows"
            )


def left_pad(sequences: list[list[int]], device: torch.device) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:
    """Ids (pads are 0 and masked by length, whatever id 0 means) and mask."""
    width = max(len(sequence) for sequence in sequences)
    ids = [[0] * (width - len(sequence)) + sequence for sequence in sequences]
    mask = [[0] * (width - len(sequence)) + [1] * len(sequence) for sequence in sequences]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
