"""The pad token of an exported reward model: no response ends with it, or there is none."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ebft_ds.data.preference import RewardEncoding
from ebft_ds.trainers.reward_padding import tokenizer_with_pad
from tests.unit.small_tokenizers import CHATML, LLAMA3, byte_level, sentencepiece_like

ENCODING = RewardEncoding(max_length=64)


def pad_of(tokenizer: PreTrainedTokenizerBase, vocab_size: int = 10_000) -> str | None:
    return tokenizer_with_pad(tokenizer, ENCODING, vocab_size).pad_token  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("tokenizer", "pad"),
    [
        (byte_level(CHATML), "<pad>"),
        (byte_level(CHATML, pad="</s>"), "<pad>"),
        (byte_level(CHATML, pad="<|im_end|>"), "<pad>"),
        (byte_level(LLAMA3, pad=None), "<pad>"),
        (sentencepiece_like(), "<s>"),
    ],
)
def test_pad_is_the_tokenizers_own_unless_responses_end_with_it(tokenizer: PreTrainedTokenizerFast, pad: str, tmp_path: Path) -> None:
    before = tokenizer.pad_token
    changed = tokenizer_with_pad(tokenizer, ENCODING, 10_000)
    assert (changed.pad_token, tokenizer.pad_token) == (pad, before)
    assert changed.get_vocab() == tokenizer.get_vocab()
    changed.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token == pad


def test_tokens_outside_the_embedding_are_no_choice() -> None:
    tokenizer = byte_level(CHATML, pad="</s>", bos=None)
    assert pad_of(tokenizer, vocab_size=2) == "<s>"


def test_without_such_a_token_there_is_no_pad_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_level(pad="</s>", bos="</s>")
    with caplog.at_level(logging.WARNING):
        assert tokenizer_with_pad(tokenizer, ENCODING, 2).pad_token_id == 0  # "<s>" is special, whatever it is called
        assert not caplog.records
        only_eos = PreTrainedTokenizerFast(tokenizer_object=sentencepiece_like().backend_tokenizer, eos_token="the", pad_token="the")
        assert tokenizer_with_pad(only_eos, ENCODING, 0).pad_token_id is None
    assert len(caplog.records) == 1
    assert "one row at a time" in caplog.text
