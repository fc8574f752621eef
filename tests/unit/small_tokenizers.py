"""Real tokenizers, trained on the spot, in the variants that models in the wild come in."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "The grey cat sleeps under the old table in the kitchen.",
    "Hello there, how are you today? I am fine, thank you.",
    "Answer the question: what is the colour of the red lamp? The lamp is red.",
    "system user assistant You are a helpful assistant.",
]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|stop|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }} {{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant roles') }}{% endif %}{% endfor %}"
)
PLAIN_LABELS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"

SPECIAL = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|stop|>", "<|eot|>"]


def _wrap(core: Tokenizer, template: str | None, **tokens: Any) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **tokens)
    tokenizer.chat_template = template
    return tokenizer


def byte_level(
    template: str | None = None,
    *,
    adds_bos: bool = False,
    adds_eos: bool = False,
    bos: str | None = "<s>",
    eos: str | None = "</s>",
    pad: str | None = "<pad>",
    padding_side: str = "right",
) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM2 have it."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(TEXT * 3, trainer)
    core.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    if adds_bos or adds_eos:
        single = f"{'<s> ' if adds_bos else ''}$A{' </s>' if adds_eos else ''}"
        core.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("</s>", 1)])
    named = {"bos_token": bos, "eos_token": eos, "pad_token": pad, "padding_side": padding_side}
    return _wrap(core, template, **{key: value for key, value in named.items() if value is not None})


def sentencepiece_like(template: str | None = None) -> PreTrainedTokenizerFast:
    """Writes a space before every text and adds BOS, as Llama 2 and Mistral do."""
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>", "<unk>"], show_progress=False)
    core.train_from_iterator([*TEXT, "[INST] [/INST] A: Q:\n"], trainer)
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return _wrap(core, template, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def chatml() -> PreTrainedTokenizerFast:
    """BOS is the role marker and is never added (SmolLM2)."""
    return byte_level(CHATML, bos="<|im_start|>", eos="<|im_end|>")


def user(text: str) -> list[dict[str, str]]:
    """A one-message chat prompt."""
    return [{"role": "user", "content": text}]
