"""Floating-point operations that a way of computing needs at least: what the ratio of two ways could be on an ideal machine.

Counted are linear layers, attention over the pairs that a causal mask leaves, and the head; not norms, activations or softmaxes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from ebft_ds.engine.network import decoder_layers
from ebft_ds.packing.packed import PackedLayout, PackedRow
from ebft_ds.packing.rows import TokenRows


@dataclass(frozen=True)
class ModelShape:
    """Sizes that operations are counted from."""

    layers: int
    frozen: int
    """Frozen weights of a block's linear layers."""
    trained: int
    """Trained ones (say, of an adapter)."""
    attention_width: int
    """Heads times head dimension."""
    head: int
    """Hidden size times vocabulary."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelShape:
        """Of a causal language model with like blocks; adapters inside its blocks count as trained."""
        config = model.config.get_text_config()
        blocks = decoder_layers(model.base_model)[1]
        weights = [m.weight for m in blocks[0].modules() if isinstance(m, nn.Linear)]
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            layers=len(blocks),
            frozen=sum(w.numel() for w in weights if not w.requires_grad),
            trained=sum(w.numel() for w in weights if w.requires_grad),
            attention_width=config.num_attention_heads * head_dim,
            head=config.hidden_size * config.vocab_size,
        )

    def forward(self, tokens: int, pairs: int, *, layers: int | None = None, head_tokens: int = 0) -> float:
        """GFLOP of a forward: `pairs` counts (query, key) pairs over all sequences, `head_tokens` those that reach the head."""
        block = 2 * (self.frozen + self.trained) * tokens + 4 * self.attention_width * pairs
        return (block * (self.layers if layers is None else layers) + 2 * self.head * head_tokens) / 1e9

    def forward_backward(self, tokens: int, pairs: int, *, head_tokens: int) -> float:
        """GFLOP of forward and backward with a frozen head: frozen weights need no gradient of their own."""
        block = (4 * self.frozen + 6 * self.trained) * tokens + 12 * self.attention_width * pairs
        return (block * self.layers + 4 * self.head * head_tokens) / 1e9


def padded_pairs(widths: list[tuple[int, int]]) -> int:
    """Causal pairs of padded batches, given as (rows, width)."""
    return sum(rows * triangle(width) for rows, width in widths)


def row_pairs(rows: TokenRows) -> int:
    """Pairs of the rows of a forward, whatever their layout."""
    if isinstance(rows, PackedRow):
        return packed_pairs(rows.attention.layout)
    return padded_pairs([(rows.input_ids.shape[0], rows.input_ids.shape[1])])


def packed_pairs(layout: PackedLayout) -> int:
    """Pairs of a packed row: each prompt within itself, each branch with its prompt and itself."""
    return sum(
        triangle(group.prompt_length) + sum(length * group.prompt_length + triangle(length) for length in group.branch_lengths)
        for group in layout.groups
    )


def triangle(length: int) -> int:
    """Pairs of a causal sequence."""
    return length * (length + 1) // 2
