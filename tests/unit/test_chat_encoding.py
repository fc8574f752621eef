"""Chat templates, BOS and the end of references, with real tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, PreTrainedTokenizerFast

from ebft_ds.data.chat import assistant_turn, end_of_turn_id, set_chat_template, stop_token_ids
from ebft_ds.data.encode import EncodedTexts, RowEncoder
from ebft_ds.data.rows import BadRow, ValidRow
from ebft_ds.errors import ConfigError, ModelError
from tests.unit.small_tokenizers import (
    CHATML,
    LLAMA3,
    MISTRAL,
    PLAIN_LABELS,
    THINKING,
    byte_level,
    chatml,
    sentencepiece_like,
    user,
)

QUESTION, ANSWER = "Where does the cat sleep?", "The cat sleeps under the table."


def encode(tokenizer: PreTrainedTokenizerFast, prompt: Any, reference: str = ANSWER, **options: Any) -> EncodedTexts:
    result = RowEncoder(tokenizer, **options).encode([ValidRow(prompt, reference)])[0]
    assert isinstance(result, EncodedTexts), result
    return result


def rendering(tokenizer: PreTrainedTokenizerFast, answer: str, **kwargs: Any) -> list[int]:
    """The full conversation as the template writes it, up to and including the last special token."""
    text = tokenizer.apply_chat_template([*user(QUESTION), {"role": "assistant", "content": answer}], tokenize=False, **kwargs)
    return tokenizer(text.rstrip("\n"), add_special_tokens=False)["input_ids"]


VARIANTS = {
    "chatml": byte_level(CHATML, eos="<|im_end|>"),
    "bos is the role marker": chatml(),
    "adds BOS, template has it": byte_level(LLAMA3, adds_bos=True),
    "pad is eos": byte_level(CHATML, pad="</s>"),
    "left padding": byte_level(LLAMA3, adds_bos=True, padding_side="left"),
    "adds BOS and EOS": byte_level(LLAMA3, adds_bos=True, adds_eos=True),
    "template writes a thinking block": byte_level(THINKING),
    "sentencepiece": sentencepiece_like(MISTRAL),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("answer", [ANSWER, "  indented\n    code", "a"])
def test_prompt_and_reference_are_the_rendered_conversation(name: str, answer: str) -> None:
    tokenizer = VARIANTS[name]
    row = encode(tokenizer, user(QUESTION), answer)
    assert row.token_ids + row.reference_ids == rendering(tokenizer, answer)


@pytest.mark.parametrize("name", [n for n in VARIANTS if "BOS" in n or n in ("left padding", "sentencepiece")])
def test_exactly_one_bos(name: str) -> None:
    tokenizer = VARIANTS[name]
    bos = tokenizer.bos_token_id
    for prompt in (user(QUESTION), QUESTION, f"{tokenizer.bos_token}{QUESTION}"):
        row = encode(tokenizer, prompt)
        assert row.token_ids[0] == bos
        assert row.token_ids.count(bos) == 1
        assert bos not in row.reference_ids


def test_bos_is_added_where_the_tokenizer_adds_it_and_the_template_does_not() -> None:
    row = encode(byte_level(CHATML, adds_bos=True), user(QUESTION))
    assert row.token_ids.count(0) == 1
    assert row.token_ids[0] == 0


def test_no_bos_is_invented_where_the_tokenizer_adds_none() -> None:
    assert 0 not in encode(byte_level(CHATML), user(QUESTION)).token_ids
    assert encode(byte_level(), "Hello").token_ids == byte_level()("Hello")["input_ids"]


def test_plain_prompts_have_no_trailing_eos_and_references_one() -> None:
    tokenizer = byte_level(adds_bos=True, adds_eos=True)
    row = encode(tokenizer, "Q: where?\nA:", " under the table")
    eos = tokenizer.eos_token_id
    assert eos not in row.token_ids
    assert row.reference_ids[-1] == eos
    assert row.reference_ids.count(eos) == 1
    assert tokenizer.decode(row.token_ids + row.reference_ids) == "<s>Q: where?\nA: under the table</s>"


@pytest.mark.parametrize("tail", ["<|im_end|>", "<|im_end|>\n"])
def test_a_reference_that_is_closed_already_is_not_closed_twice(tail: str) -> None:
    tokenizer = VARIANTS["chatml"]
    assert encode(tokenizer, user(QUESTION), ANSWER + tail) == encode(tokenizer, user(QUESTION), ANSWER)
    plain = byte_level()
    assert encode(plain, "Q", "answer</s>") == encode(plain, "Q", "answer")


def test_reference_end_none_leaves_the_text_as_it_is() -> None:
    tokenizer = VARIANTS["chatml"]
    row = encode(tokenizer, user(QUESTION), close_references=False)
    assert row.reference_ids == tokenizer(ANSWER, add_special_tokens=False)["input_ids"]


def test_system_prompt_only_where_the_row_brings_none() -> None:
    tokenizer = VARIANTS["chatml"]
    with_system = encode(tokenizer, user(QUESTION), system_prompt="You are a helpful assistant.")
    own = [{"role": "system", "content": "You are a helpful assistant."}, *user(QUESTION)]
    assert with_system == encode(tokenizer, own) == encode(tokenizer, own, system_prompt="Another.")
    assert len(with_system.token_ids) > len(encode(tokenizer, user(QUESTION)).token_ids)


def test_chat_template_kwargs_reach_the_template() -> None:
    tokenizer = VARIANTS["template writes a thinking block"]
    on, off = encode(tokenizer, user(QUESTION)), encode(tokenizer, user(QUESTION), chat_template_kwargs={"enable_thinking": False})
    think = tokenizer.convert_tokens_to_ids("<think>")
    assert think in on.reference_ids
    assert think not in off.reference_ids
    assert on.token_ids + on.reference_ids == off.token_ids + off.reference_ids
    with pytest.raises(ConfigError, match="add_generation_prompt is set by the encoder"):
        RowEncoder(tokenizer, chat_template_kwargs={"add_generation_prompt": False})


def test_a_row_the_template_refuses_is_named_and_the_others_are_kept() -> None:
    system = [{"role": "system", "content": "Be brief."}, *user(QUESTION)]
    rows = [ValidRow(user(QUESTION), ANSWER), ValidRow(system, ANSWER), ValidRow("plain", ANSWER)]
    first, second, third = RowEncoder(sentencepiece_like(MISTRAL)).encode(rows)
    assert isinstance(first, EncodedTexts)
    assert isinstance(third, EncodedTexts)
    assert isinstance(second, BadRow)
    assert "only user and assistant roles" in str(second)


def test_sentencepiece_reference_has_no_second_space() -> None:
    tokenizer = sentencepiece_like()
    row = encode(tokenizer, "Q: where is the cat?\nA:", " under the table")
    whole = tokenizer("Q: where is the cat?\nA: under the table")["input_ids"]
    assert row.token_ids + row.reference_ids == [*whole, tokenizer.eos_token_id]


def test_tokens_survive_where_decoding_and_encoding_would_change_them() -> None:
    """The boundary between prompt and reference is a token boundary, whatever the tokenizer would merge over it."""
    tokenizer = byte_level()
    row = encode(tokenizer, "The grey c", "at sleeps", close_references=False)
    joined = row.token_ids + row.reference_ids
    again = tokenizer(tokenizer.decode(joined), add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(joined) == "The grey cat sleeps"
    assert again != joined
    assert row.token_ids == tokenizer("The grey c")["input_ids"]
    assert row.reference_ids == tokenizer("at sleeps")["input_ids"]


def test_the_tokenizers_own_truncation_and_padding_never_apply() -> None:
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    short, long = RowEncoder(tokenizer).encode([ValidRow("Hi", "x"), ValidRow("Hello there, how are you today?", "x")])
    assert isinstance(short, EncodedTexts)
    assert isinstance(long, EncodedTexts)
    assert len(short.token_ids) <= 2
    assert tokenizer.decode(long.token_ids) == "Hello there, how are you today?"


@pytest.mark.parametrize(
    ("template", "end"), [(CHATML, "<|im_end|>"), (LLAMA3, "<|eot|>"), (THINKING, "<|im_end|>"), (PLAIN_LABELS, "</s>"), (None, "</s>")]
)
def test_end_of_turn(template: str | None, end: str) -> None:
    tokenizer = byte_level(template)
    assert end_of_turn_id(tokenizer) == tokenizer.convert_tokens_to_ids(end)


def test_the_turn_is_found_out_from_the_template() -> None:
    llama = assistant_turn(byte_level(LLAMA3))
    assert (llama.before, llama.after, llama.strips_left, llama.strips_right) == ("", "", True, True)
    mistral = assistant_turn(sentencepiece_like(MISTRAL))
    assert (mistral.before, mistral.after, mistral.strips_left, mistral.strips_right) == (" ", " ", False, False)
    assert assistant_turn(byte_level(THINKING)).before == "<think>\n\n</think>\n\n"


def test_a_template_that_cannot_render_an_answer_is_an_error() -> None:
    with pytest.raises(ModelError, match="fails on one user and one assistant message: broken"):
        assistant_turn(byte_level("{{ raise_exception('broken') }}"))
    with pytest.raises(ModelError, match="leaves out the assistant"):
        assistant_turn(byte_level("always the same"))


def test_stop_token_ids() -> None:
    tokenizer = byte_level(LLAMA3)
    eos, eot = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|eot|>")
    several = GenerationConfig(eos_token_id=[eos, 5])
    assert stop_token_ids(tokenizer, several, chat=True) == sorted({eos, 5, eot})
    assert stop_token_ids(tokenizer, several, chat=False) == sorted({eos, 5})
    assert stop_token_ids(tokenizer, GenerationConfig(eos_token_id=eos), chat=True) == sorted({eos, eot})
    assert stop_token_ids(tokenizer, None, chat=False) == [eos]
    with pytest.raises(ModelError, match="No stop token"):
        stop_token_ids(byte_level(eos=None), GenerationConfig(), chat=False)


def test_references_cannot_be_closed_without_an_eos() -> None:
    tokenizer = byte_level(eos=None)
    with pytest.raises(ModelError, match="reference_end: none"):
        encode(tokenizer, "Q")
    assert encode(tokenizer, "Q", close_references=False).reference_ids


def test_chat_template_from_text_or_file(tmp_path: Path) -> None:
    tokenizer = byte_level()
    set_chat_template(tokenizer, None)
    assert tokenizer.chat_template is None
    set_chat_template(tokenizer, CHATML)
    assert tokenizer.chat_template == CHATML
    (tmp_path / "template.jinja").write_text(LLAMA3, encoding="utf-8")
    set_chat_template(tokenizer, str(tmp_path / "template.jinja"))
    assert tokenizer.chat_template == LLAMA3
    with pytest.raises(ConfigError, match=r"nowhere\.jinja cannot be read"):
        set_chat_template(tokenizer, str(tmp_path / "nowhere.jinja"))
