"""The embedded engine: a Hugging Face model in the rollout process, behind the same interface as a remote server.

Sequences wait in order of arrival and are decoded in lockstep. New ones join when at least half of the batch is free: the batch is then
filled up and prefilled anew, which is far cheaper than decoding half empty. A weight switch also prefills anew, so every token is
drawn from the weights it is stamped with, over a cache made by the same weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ebft_ds.errors import ModelError, RolloutError, WeightSyncError
from ebft_ds.packing.attention import install_packed_attention
from ebft_ds.rollout.decode import PREFILL_TOKENS, DecodeBatch
from ebft_ds.rollout.manifest import TensorSpec, WeightManifest
from ebft_ds.rollout.rows import PendingGroup, Row
from ebft_ds.rollout.spec import RolloutProcessSpec
from ebft_ds.rollout.staging import WeightStage, weight_specs
from ebft_ds.rollout.tensors import DTYPES
from ebft_ds.types import RolloutGroup, RolloutRequest

SCORE_CHUNK = 512
"""Positions whose logits are held at once when scoring."""


class TransformersEngine:
    """RolloutEngine and WeightReceiver over AutoModelForCausalLM."""

    def __init__(self, spec: RolloutProcessSpec, *, prefill_tokens: int = PREFILL_TOKENS) -> None:
        self._spec = spec
        self._prefill_tokens = prefill_tokens
        self._model_or_none: PreTrainedModel | None = None
        self._version = spec.initial_version
        self._tokens = 0
        self._groups: dict[int, PendingGroup] = {}
        self._waiting: deque[Row] = deque()
        self._batch: DecodeBatch | None = None
        self._stage: WeightStage | None = None

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def tokens_generated(self) -> int:
        return self._tokens

    @property
    def has_work(self) -> bool:
        return bool(self._groups)

    @property
    def vocab_size(self) -> int:
        return int(self._model.get_output_embeddings().weight.shape[0])

    @property
    def _model(self) -> PreTrainedModel:
        if self._model_or_none is None:
            raise RolloutError("the transformers engine is not started")
        return self._model_or_none

    def start(self) -> None:
        """Load the model, in eval mode and without gradients."""
        spec = self._spec
        try:
            model, loading = AutoModelForCausalLM.from_pretrained(
                spec.model_name_or_path,
                revision=spec.revision,
                dtype=DTYPES[spec.dtype],
                attn_implementation=spec.attn_implementation,
                trust_remote_code=spec.trust_remote_code,
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"rollout engine: cannot load {spec.model_name_or_path!r}: {error}") from error
        if loading["missing_keys"]:
            missing = sorted(loading["missing_keys"])
            raise ModelError(f"rollout engine: {spec.model_name_or_path!r} lacks weights, which would be random: {', '.join(missing[:5])}")
        install_packed_attention(model)  # as the trainer's: with it sdpa honours a soft cap, and log-probs are those of one model
        self._model_or_none = model.to(torch.device(spec.device)).eval().requires_grad_(False)

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        for request in requests:
            self._check(request)
            group = PendingGroup(request)
            self._groups[request.prompt.index] = group
            self._waiting.extend(group.rows)

    def cancel(self, indices: Sequence[int]) -> None:
        rows = [row for index in indices if index in self._groups for row in self._groups.pop(index).rows]
        gone = {id(row) for row in rows}
        self._waiting = deque(row for row in self._waiting if id(row) not in gone)
        if self._batch is not None:
            self._batch.remove(rows)

    def step(self) -> list[RolloutGroup]:
        """One token for every row of the batch."""
        self._fill()
        if self._batch is None:
            return []
        rows = list(self._batch.rows)
        self._batch.step(self._version)
        self._tokens += len(rows)
        if not self._batch.rows:
            self._batch = None
        indices = dict.fromkeys(row.request.prompt.index for row in rows if row.finish_reason is not None)
        return [self._groups.pop(index).group() for index in indices if self._groups[index].complete]

    @torch.no_grad()
    def score(self, token_ids: Sequence[int], temperature: float) -> list[float]:
        if len(token_ids) < 2 or temperature <= 0:
            raise RolloutError(f"score needs two tokens or more and a temperature above 0, got {len(token_ids)} and {temperature}")
        ids = torch.tensor([list(token_ids)], device=self._model.device)
        logits = self._model(input_ids=ids, use_cache=False).logits[0, :-1]
        found: list[float] = []
        for start in range(0, logits.shape[0], SCORE_CHUNK):
            chunk = torch.log_softmax(logits[start : start + SCORE_CHUNK].float() / temperature, dim=-1)
            found += chunk.gather(1, ids[0, start + 1 : start + 1 + chunk.shape[0], None]).squeeze(1).tolist()
        self._tokens += len(token_ids)
        return found

    def expected_weights(self) -> list[TensorSpec]:
        return weight_specs(self._model)

    def begin_update(self, manifest: WeightManifest) -> None:
        if self._stage is not None:
            raise WeightSyncError(
                f"weight push {manifest.version}: push {self._stage.manifest.version} is still open; finish or abort it first"
            )
        self._stage = WeightStage(self._model, manifest)

    def receive(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        if self._stage is None:
            raise WeightSyncError("a bucket of weights arrived without begin_update")
        self._stage.receive(tensors)

    def finish_update(self, version: int) -> None:
        stage = self._stage
        if stage is None:
            raise WeightSyncError(f"weight push {version} was finished without begin_update")
        self._stage = None
        stage.check_complete(version)
        stage.swap()
        self._version = version
        if self._batch is not None and stage.manifest.tensors:  # a push of no tensor only moves the version: caches stay right
            self._batch = self._new_batch(self._batch.rows)

    def abort_update(self) -> None:
        self._stage = None

    def stop(self) -> None:
        self._batch = self._stage = self._model_or_none = None
        self._groups.clear()
        self._waiting.clear()

    def _fill(self) -> None:
        """Let waiting rows in when half of the batch or more is free."""
        active = self._batch.rows if self._batch is not None else []
        free = self._spec.batch_size - len(active)
        if not self._waiting or (active and 2 * free < self._spec.batch_size):
            if not active:
                self._batch = None
            return
        joining = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        for row in joining:
            self._groups[row.request.prompt.index].start_clock()
        self._batch = self._new_batch([*active, *joining])

    def _new_batch(self, rows: list[Row]) -> DecodeBatch | None:
        return DecodeBatch(self._model, rows, self._prefill_tokens) if rows else None

    def _check(self, request: RolloutRequest) -> None:
        prompt = request.prompt
        where = f"request for prompt {prompt.prompt_id} (index {prompt.index})"
        if prompt.index in self._groups:
            raise RolloutError(f"{where}: one is already in flight under this index")
        if not prompt.token_ids or request.num_samples < 1 or request.max_new_tokens < 1 or request.sampling.temperature <= 0:
            raise RolloutError(f"{where}: needs a prompt, num_samples, max_new_tokens and a temperature, all above 0")
        if min(prompt.token_ids) < 0 or max(prompt.token_ids) >= self.vocab_size:
            raise RolloutError(f"{where}: a token id lies outside the model's vocabulary of {self.vocab_size}")
        context = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)  # not every architecture has a limit
        if context is not None and len(prompt.token_ids) + request.max_new_tokens > context:
            raise RolloutError(
                f"{where}: {len(prompt.token_ids)} prompt tokens and up to {request.max_new_tokens} new ones "
                f"exceed the model's context of {context}"
            )
