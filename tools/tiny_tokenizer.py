"""A byte-level BPE tokenizer with a chat template, trained on text given to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD, USER, ASSISTANT, SYSTEM, END = "<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"
SPECIAL = (PAD, BOS, EOS, SYSTEM, USER, ASSISTANT, END)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer(
    texts: Iterable[str], *, vocab_size: int = 1024, adds_bos: bool = True, chat_template: str | None = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """Train the tokenizer. Any text encodes: all 256 bytes are in the vocabulary, which may stay below `vocab_size`.

    `adds_bos`: plain encoding starts with BOS, as with Llama 3, whose template also brings one.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, core.token_to_id(BOS))])
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=BOS, eos_token=EOS, pad_token=PAD, model_max_length=512)
    tokenizer.chat_template = chat_template
    return tokenizer
