"""The module inside an engine: one causal language model (or its truncated body) with the two forwards that training needs.

Everything goes through this module's `forward`, so that ZeRO-3's root hooks fire once per forward, whatever is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from ebft_ds.errors import ModelError
from ebft_ds.packing.rows import TokenRows
from ebft_ds.policy.logprobs import LogProbHead


@dataclass(frozen=True)
class FeatureWork:
    """Hidden states wanted: `layers` are hidden-state indices (k = output of block k; L = after the final norm)."""

    rows: TokenRows
    layers: Sequence[int]
    positions: Tensor
    """int64 [N]: flat positions into the rows."""
    use_adapters: bool = False


@dataclass(frozen=True)
class LogProbWork:
    """Log-probs wanted of `targets[i]` (int64 [N]), as predicted at `positions[i]`."""

    rows: TokenRows
    positions: Tensor
    """int64 [N]: flat positions into the rows."""
    targets: Tensor
    inverse_temperature: Tensor
    """float32 [N]."""
    use_adapters: bool = True
    entropy: bool = False
    """Whether the entropy at the positions is wanted as well."""


@dataclass(frozen=True)
class ScoreWork:
    """Rewards wanted of the sequences that end at `positions`."""

    rows: TokenRows
    positions: Tensor
    """int64 [N]: flat positions into the rows, from sequence lengths: never looked for by pad ids."""


class ScoreHead(nn.Linear):
    """The `score` head of a reward model: hidden states [N, H] of any precision to rewards [N], computed in float32."""

    @classmethod
    def adopt(cls, linear: nn.Linear) -> ScoreHead:
        """A head that owns the same Parameter objects as `linear`."""
        head = cls.__new__(cls)
        nn.Module.__init__(head)
        head.in_features, head.out_features = linear.in_features, linear.out_features
        head.weight = linear.weight
        head.register_parameter("bias", linear.bias)
        return head

    def forward(self, hidden: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(hidden.float(), self.weight.float(), bias).squeeze(-1)


class LanguageNetwork(nn.Module):
    """Wraps `model`: a causal LM, a reward model (a body with a ScoreHead), a PEFT model around one, or a bare body without a head.

    Args:
        depth: blocks of the checkpoint, where `model` holds only its first ones; hidden state `depth` is the one after the final norm.
    """

    def __init__(self, model: PreTrainedModel | PeftModel, depth: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.depth = self.num_layers if depth is None else depth

    @property
    def base_model(self) -> PreTrainedModel:
        """The transformers model without the PEFT wrapper (its layers may still hold adapters)."""
        model: PreTrainedModel = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        return model

    @property
    def body(self) -> PreTrainedModel:
        """The decoder stack: everything but the head."""
        body: PreTrainedModel = self.base_model.base_model
        return body

    @property
    def num_layers(self) -> int:
        return len(decoder_layers(self.body)[1])

    def forward(self, work: FeatureWork | LogProbWork | ScoreWork) -> Any:
        if isinstance(work, FeatureWork):
            return self._features(work)
        if isinstance(work, ScoreWork):
            return self._scores(work)
        return self._log_probs(work)

    def _adapters(self, enabled: bool) -> Any:
        if enabled or not isinstance(self.model, PeftModel):
            return nullcontext()
        return self.model.disable_adapter()

    def _run_body(self, rows: TokenRows) -> Tensor:
        """[B, T, H] after the final norm."""
        output: Tensor = self.body(**rows.body_inputs(), use_cache=False).last_hidden_state
        rows.check_forward(self.num_layers)
        return output

    def _log_probs(self, work: LogProbWork) -> tuple[Tensor, Tensor | None]:
        """(log-probs [N], entropy [N] where wanted), float32. Only the selected positions reach the head."""
        head = self.base_model.get_output_embeddings()
        with self._adapters(work.use_adapters):
            hidden = self._run_body(work.rows)
            selected = hidden.flatten(0, 1)[work.positions]
            log_probs, entropy = head(selected, work.targets, work.inverse_temperature, with_entropy=work.entropy)
        return log_probs, entropy

    def _scores(self, work: ScoreWork) -> Tensor:
        """[N], float32. Only the scored positions reach the head."""
        selected = self._run_body(work.rows).flatten(0, 1)[work.positions]
        rewards: Tensor = self.base_model.score(selected)
        return rewards

    def _features(self, work: FeatureWork) -> list[Tensor]:
        """One [N, H] tensor per wanted layer, without gradient; blocks above the deepest one are not run, and of the others only the
        wanted positions are kept."""
        captured: dict[int, Tensor] = {}
        total = self.depth
        deepest = max(work.layers)
        training = self.training
        self.eval()
        handles = []
        try:
            with torch.no_grad(), self._adapters(work.use_adapters), truncated(self.body, deepest):
                _, layers = decoder_layers(self.body)
                for index in set(work.layers) - {total}:
                    handles.append(layers[index - 1].register_forward_hook(_capture(captured, index, work.positions)))
                output = self._run_body(work.rows)
                if deepest == total:
                    captured[total] = output.flatten(0, 1)[work.positions]
        finally:
            for handle in handles:
                handle.remove()
            self.train(training)
        return [captured[index] for index in work.layers]


def _capture(into: dict[int, Tensor], index: int, positions: Tensor) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        states: Tensor = output[0] if isinstance(output, tuple) else output
        into[index] = states.flatten(0, 1)[positions]

    return hook


def decoder_layers(body: nn.Module) -> tuple[str, nn.ModuleList]:
    """Attribute name and list of the decoder's blocks."""
    for name in ("layers", "h", "blocks"):
        layers = getattr(body, name, None)
        if isinstance(layers, nn.ModuleList):
            return name, layers
    raise ModelError(f"{type(body).__name__} keeps its blocks in none of .layers, .h, .blocks: this architecture is not supported")


@contextmanager
def truncated(body: nn.Module, count: int) -> Iterator[None]:
    """Runs with the first `count` blocks only; the full list is back afterwards, also after an error.

    Leaving a forward early by an exception instead would leave ZeRO-3 parameters gathered and in flight.
    """
    name, layers = decoder_layers(body)
    if count >= len(layers):
        yield
        return
    setattr(body, name, layers[:count])
    try:
        yield
    finally:
        setattr(body, name, layers)


def install_score_head(model: PreTrainedModel) -> None:
    """Replaces a sequence classifier's `score` by a ScoreHead over the same parameters. Before PEFT and DeepSpeed see the model."""
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise ModelError(f"{type(model).__name__} has no linear head `score` with one output: not supported as a reward model")
    model.score = ScoreHead.adopt(head)


def install_log_prob_head(model: PreTrainedModel, chunk_size: int) -> None:
    """Replaces the output embedding by a LogProbHead over the same parameters. Before PEFT and DeepSpeed see the model."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(f"the output embedding of {type(model).__name__} is {type(head).__name__}, not a linear layer: not supported")
    text_config = model.config.get_text_config()
    for name in ("logit_scale", "logits_scaling"):
        if getattr(text_config, name, None) not in (None, 1, 1.0):
            # The model applies it after the head, where the chunked log-probs are not: they would be another model's.
            raise ModelError(f"{type(model).__name__} scales its logits ({name}={getattr(text_config, name)}): not supported")
    softcap = getattr(text_config, "final_logit_softcapping", None)
    model.set_output_embeddings(LogProbHead.adopt(head, chunk_size=chunk_size, softcap=softcap))
