"""From preference rows to token ids, with real tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from ebft_ds.config.sections import DataSection, RewardSection
from ebft_ds.data.encode import EncodedTexts, RowEncoder
from ebft_ds.data.preference import (
    EncodedResponses,
    PreferenceFields,
    PreferenceRow,
    RewardEncoder,
    RewardEncoding,
    Skipped,
    encode_for_reward,
    validate_preference_row,
)
from ebft_ds.data.preference.truncate import common_prefix, truncate
from ebft_ds.data.rows import ValidRow
from ebft_ds.errors import ConfigError, DataError, ModelError
from tests.unit.small_tokenizers import CHATML, LLAMA3, MISTRAL, PLAIN_LABELS, byte_level, sentencepiece_like, user
from tests.unit.test_chat_encoding import ANSWER, QUESTION, VARIANTS

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "reward_vectors.json").read_text(encoding="utf-8"))
OTHER = "The lamp is red."
STRIPPING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
REWRITING = (
    "{% set system = messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' %}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}"
    "[{{ system if loop.last or loop.revindex == 2 }}] {{ m.content }}{% else %} {{ m.content }}<|eot|>{% endif %}{% endfor %}"
)
TOOLS = "{% if tools %}<|start|>{{ tools | tojson }}<|stop|>{% endif %}" + CHATML


def encoder(tokenizer: PreTrainedTokenizerFast, max_length: int = 512, **settings: Any) -> RewardEncoder:
    return RewardEncoder(tokenizer, RewardEncoding(max_length=max_length, **settings))


def encode(tokenizer: PreTrainedTokenizerFast, prompt: Any, *responses: Any, max_length: int = 512, **settings: Any) -> EncodedResponses:
    row = validate_preference_row({"prompt": prompt, "responses": list(responses)}, PreferenceFields())
    result = encoder(tokenizer, max_length, **settings).encode(row)
    assert isinstance(result, EncodedResponses), result
    return result


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("answer", [ANSWER, "  indented\n    code", "a"])
def test_a_chat_is_its_rendering_up_to_the_end_token_as_ebft_encodes_it(name: str, answer: str) -> None:
    tokenizer = VARIANTS[name]
    encoded = encode(tokenizer, user(QUESTION), answer, OTHER)
    reference = RowEncoder(tokenizer).encode([ValidRow(user(QUESTION), answer)])[0]
    assert isinstance(reference, EncodedTexts)
    assert encoded.group[0] == reference.token_ids + reference.reference_ids
    assert encoded.prefix_length >= len(reference.token_ids) - 1


@pytest.mark.parametrize("name", VARIANTS)
def test_the_ids_of_rl_are_those_of_training(name: str) -> None:
    """`encode_one` on a prompt and a completion, and `encode_for_reward`, against the row of a dataset in its several forms."""
    tokenizer = VARIANTS[name]
    one = encoder(tokenizer).encode_one
    whole = [[*user(QUESTION), {"role": "assistant", "content": text}] for text in (ANSWER, OTHER)]
    for prompt, responses in ((user(QUESTION), [ANSWER, OTHER]), (None, whole), (QUESTION, [ANSWER, OTHER])):
        group = encode(tokenizer, prompt, *responses).group
        assert [one(prompt, response) for response in responses] == group
        again = encode_for_reward(tokenizer, RewardEncoding(max_length=512), prompt, responses)
        assert again.group == group
        assert encode_for_reward(tokenizer, RewardEncoding(max_length=512), prompt, responses[:1]).group == group[:1]
    assert [one(user(QUESTION), text) for text in (ANSWER, OTHER)] == [one(None, conversation) for conversation in whole]


@pytest.mark.parametrize("name", [n for n in VARIANTS if "BOS" in n or n in ("left padding", "sentencepiece")])
def test_exactly_one_bos_and_one_end_token(name: str) -> None:
    tokenizer = VARIANTS[name]
    bos = tokenizer.bos_token_id
    for prompt in (user(QUESTION), QUESTION, f"{tokenizer.bos_token}{QUESTION}", None):
        responses = [ANSWER, OTHER] if prompt else [QUESTION + ANSWER, OTHER]
        for ids in encode(tokenizer, prompt, *responses).group:
            assert ids[0] == bos
            assert ids.count(bos) == 1
            assert ids[-1] in encoder(tokenizer)._full.end_ids
            assert ids[-2] != ids[-1]


@pytest.mark.parametrize("pad", ["</s>", "<pad>", None])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_settings_of_the_tokenizer_change_nothing(pad: str | None, side: str) -> None:
    tokenizer = byte_level(CHATML, pad=pad, padding_side=side)
    tokenizer.backend_tokenizer.enable_truncation(4)
    assert encode(tokenizer, user(QUESTION), ANSWER, OTHER) == encode(byte_level(CHATML), user(QUESTION), ANSWER, OTHER)
    assert encode(tokenizer, QUESTION, ANSWER, OTHER) == encode(byte_level(), QUESTION, ANSWER, OTHER)


def test_texts_are_encoded_joined_so_that_the_boundary_does_not_matter() -> None:
    tokenizer = byte_level(adds_bos=True, adds_eos=True)
    rows = [("The grey c", ["at sleeps", "ow sleeps"]), ("The ", ["grey cat sleeps", "grey cow sleeps"])]
    rows.append((None, ["The grey cat sleeps", "The grey cow sleeps"]))
    first, *others = [encode(tokenizer, prompt, *responses) for prompt, responses in rows]
    assert all(other == first for other in others)
    assert first.group[0] == tokenizer("The grey cat sleeps")["input_ids"]  # this tokenizer adds BOS and EOS itself


def test_the_prefix_is_what_the_tokens_have_in_common() -> None:
    tokenizer = byte_level()
    encoded = encode(tokenizer, "The grey ", "cat", "cat sleeps", "cat and")
    assert encoded.prefix_length == common_prefix(encoded.group) == len(tokenizer("The grey cat")["input_ids"])
    group = encoded.whole_group()
    assert [[*group.prefix_ids, *branch] for branch in group.branches] == encoded.group
    same = encode(tokenizer, "The ", "cat", "cat", identical_pairs="keep")
    assert same.prefix_length == len(same.group[0]) - 1
    assert encode(tokenizer, None, "cat", "red").prefix_length == 0


@settings(max_examples=60, deadline=None)
@given(
    group=st.lists(st.lists(st.integers(3, 5), max_size=8).map(lambda ids: [*ids, 2]), min_size=1, max_size=4),
    prompt=st.lists(st.integers(3, 5), max_size=6),
    limit=st.integers(1, 9),
    mode=st.sampled_from(["keep_end", "keep_start"]),
)
def test_cut_rows_fit_and_end_as_they_did(group: list[list[int]], prompt: list[int], limit: int, mode: Any) -> None:
    group = [prompt + ids for ids in group]
    cut = truncate(group, limit, mode, {2}).group
    for before, after in zip(group, cut, strict=True):
        assert 1 <= len(after) <= limit
        assert after[-1] == 2
        if mode == "keep_end":
            assert before[-len(after) :] == after
        elif len(before) <= limit:
            assert after == before
        else:
            assert after == [*before[: limit - 1], 2]
    longest = max(map(len, group))
    if mode == "keep_end" and longest > limit and longest - limit <= common_prefix(group):
        assert {len(before) - len(after) for before, after in zip(group, cut, strict=True)} == {longest - limit}


def test_over_long_rows_lose_the_same_prompt_tokens() -> None:
    tokenizer = byte_level()
    prompt, long, short = "one two three four five six ", "The grey cat sleeps under the old table", "Hello"
    whole = encode(tokenizer, prompt, long, short)
    lengths = [len(ids) for ids in whole.group]
    limit = max(lengths) - 3
    assert encode(tokenizer, prompt, long, short, max_length=limit).group == [ids[3:] for ids in whole.group]
    tight = encode(tokenizer, prompt, long, short, max_length=8)
    assert tight.group == [ids[whole.prefix_length :][-8:] for ids in whole.group]
    kept = encode(tokenizer, prompt, long, short, max_length=limit, truncation_mode="keep_start")
    assert kept.group[0] == [*whole.group[0][: limit - 1], tokenizer.eos_token_id]
    assert kept.group[1] == whole.group[1]


def test_each_case_is_counted() -> None:
    tokenizer = byte_level()
    row = PreferenceRow("one two three four five six ", ["The grey cat sleeps", "Hello"])
    ends = encoder(tokenizer, 4)
    assert isinstance(ends.encode(row), EncodedResponses)
    counts = ends.counts
    assert (counts.rows, counts.used, counts.truncated, counts.responses_cut, counts.end_restored, counts.eos_added) == (1, 1, 1, 1, 0, 2)
    starts = encoder(tokenizer, 4, truncation_mode="keep_start")
    assert starts.encode(row) == Skipped("identical")
    assert (starts.counts.truncated, starts.counts.end_restored, starts.counts.identical, starts.counts.used) == (1, 2, 1, 0)
    drops = encoder(tokenizer, 4, truncation_mode="drop")
    assert drops.encode(row) == Skipped("too long")
    assert drops.counts.dropped == 1
    ends.counts.merge(starts.counts)
    assert ends.counts.summary() == (
        "1 of 2 preference rows used; 1 with identical responses; 2 over max_length, cut; 3 responses cut themselves;"
        " 2 responses given their end token back; 4 responses closed with an end token; 1 without a common prompt"
    )


def test_identical_pairs_and_empty_responses_as_the_recipe_says() -> None:
    tokenizer = byte_level(CHATML)
    same, empty = PreferenceRow("Q", ["a", "a</s>"]), PreferenceRow("Q", ["a", ""])
    assert encoder(tokenizer).encode(same) == Skipped("identical")
    assert isinstance(encoder(tokenizer, identical_pairs="keep").encode(same), EncodedResponses)
    kept = encoder(tokenizer).encode(empty)
    assert isinstance(kept, EncodedResponses)
    assert kept.group[1] == [*tokenizer("Q")["input_ids"], tokenizer.eos_token_id]
    dropping = encoder(tokenizer, empty_responses="drop")
    assert dropping.encode(empty) == Skipped("empty")
    assert dropping.encode(
        PreferenceRow(user("Q"), [[{"role": "assistant", "content": " "}], [{"role": "assistant", "content": "b"}]])
    ) == (Skipped("empty"))
    assert dropping.counts.empty == 2
    assert encoder(byte_level(), close=False).encode(PreferenceRow(None, ["a", ""])) == Skipped("empty")


@pytest.mark.parametrize("end", ["<|im_end|>", "<|im_end|>\n"])
def test_an_end_token_that_a_response_brings_is_not_doubled(end: str) -> None:
    tokenizer = byte_level(CHATML)
    assert encode(tokenizer, user(QUESTION), ANSWER + end, OTHER) == encode(tokenizer, user(QUESTION), ANSWER, OTHER)
    plain = encoder(byte_level())
    plain.encode(PreferenceRow("Q", ["a</s>", "b"]))
    assert plain.counts.eos_added == 1


def test_templates_without_an_end_token_get_eos() -> None:
    tokenizer = byte_level(PLAIN_LABELS)
    ids = encode(tokenizer, user("Q"), "good", "bad").group[0]
    assert tokenizer.decode(ids) == "user: Q\nassistant: good</s>"
    assert tokenizer.decode(encode(tokenizer, user("Q"), "good", "bad", close=False).group[0]) == "user: Q\nassistant: good"


def test_responses_may_stay_open() -> None:
    for template in (CHATML, LLAMA3):
        tokenizer = byte_level(template)
        closed, left = (encode(tokenizer, user("Q"), "good", "bad", close=close).group for close in (True, False))
        assert [ids[:-1] for ids in closed] == left


def test_thinking_is_stripped_from_earlier_turns_as_the_template_does_it() -> None:
    """The prompt's rendering (with a generation prompt that opens a thought) is no prefix of the conversation's."""
    tokenizer = byte_level(STRIPPING)
    turns = [*user("Q"), {"role": "assistant", "content": "<think>long</think>A"}, *user("R")]
    ids = encode(tokenizer, turns, "<think>short</think>B", "C").group
    im = "<|im_start|>{}\n{}<|im_end|>"
    shared = "\n".join([im.format("user", "Q"), im.format("assistant", "A"), im.format("user", "R")])
    assert tokenizer.decode(ids[0]) == shared + "\n" + im.format("assistant", "<think>short</think>B")
    assert tokenizer.decode(ids[1]) == shared + "\n" + im.format("assistant", "C")


CALLS = (
    "{% for m in messages %}<|start|>{{ m.role }}<|stop|>\n\n{% if m.tool_calls %}{{ m.tool_calls[0].name }}<|eom|>"
    "{% else %}{{ m.content }}<|eot|>{% if m.tail %}{{ m.tail }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}"
)
MARKED = CALLS.replace("<|start|>{{ m.role }}<|stop|>\n\n", "{{ '<|start|>' if m.role == 'user' else '<|stop|>' }}")


@pytest.mark.parametrize("template", [CALLS, MARKED], ids=["roles in words", "roles as tokens"])
def test_turns_that_end_with_another_token_are_kept_whole_and_closed(template: str) -> None:
    """Llama 3.1 closes tool calls with a token of their own; the last end token is then the user's."""
    tokenizer = byte_level(template)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|eom|>"]})
    calls = [[{"role": "assistant", "content": "", "tool_calls": [{"name": name}]}] for name in ("look", "")]
    own = encoder(tokenizer)
    result = own.encode(PreferenceRow(user("Q"), calls))
    assert isinstance(result, EncodedResponses)
    texts = [tokenizer.decode(ids) for ids in result.group]
    head = (template == CALLS and "<|start|>assistant<|stop|>\n\n") or "<|stop|>"
    assert [text.partition("Q<|eot|>")[2] for text in texts] == [f"{head}look<|eom|><|eot|>", f"{head}<|eom|><|eot|>"]
    assert own.counts.eos_added == 2


def test_what_a_template_writes_behind_the_end_token_is_cut() -> None:
    tokenizer = byte_level(CALLS)
    for tail in (" \n", "<|stop|>\n"):
        said = {"role": "assistant", "content": "good", "tail": tail}
        assert encoder(tokenizer).encode_one(user("Q"), [said]) == encoder(tokenizer).encode_one(user("Q"), "good")
    worded = encoder(tokenizer).encode_one(user("Q"), [{"role": "assistant", "content": "good", "tail": "and more"}])
    assert tokenizer.decode(worded).endswith("good<|eot|>and more<|eot|>")


def test_system_prompts_that_the_template_moves() -> None:
    tokenizer = byte_level(REWRITING)
    system = [{"role": "system", "content": "Be brief."}, *user("Q")]
    assert tokenizer.decode(encode(tokenizer, system, "good", "bad").group[0]) == "[Be brief.] Q good<|eot|>"
    assert encode(tokenizer, user("Q"), "good", "bad", system_prompt="Be brief.") == encode(tokenizer, system, "good", "bad")
    assert tokenizer.decode(encode(tokenizer, user("Q"), "good", "bad").group[0]) == "[You are a helpful assistant.] Q good<|eot|>"


def test_tools_reach_the_template() -> None:
    tokenizer = byte_level(TOOLS)
    tools = [{"name": "f", "strict": None}]
    row = validate_preference_row({"prompt": user("Q"), "chosen": "a", "rejected": "b", "tools": tools}, PreferenceFields())
    encoded = encoder(tokenizer).encode(row)
    assert isinstance(encoded, EncodedResponses)
    assert tokenizer.decode(encoded.group[0]).startswith('<|start|>[{"name": "f"}]<|stop|><|im_start|>user')
    assert encoder(tokenizer).encode_one(user("Q"), "a", tools) == encoded.group[0]


def test_a_row_that_the_template_refuses_is_skipped_and_counted() -> None:
    mistral = encoder(sentencepiece_like(MISTRAL))
    row = validate_preference_row({"prompt": [{"role": "system", "content": "s"}, *user("Q")], "responses": ["a", "b"]}, PreferenceFields())
    skipped = mistral.encode(row, where="row 7 of x")
    assert isinstance(skipped, Skipped)
    assert skipped.is_bad
    assert "only user and assistant roles" in skipped.reason
    assert mistral.counts.bad_rows == 1
    assert str(mistral.counts.first_bad).startswith("row 7 of x is refused")
    with pytest.raises(DataError, match="only user and assistant roles"):
        mistral.encode_one([{"role": "system", "content": "s"}], "a")


def test_what_cannot_be_encoded_at_all_is_an_error() -> None:
    with pytest.raises(DataError, match=r"row 3 is a chat prompt, but the tokenizer .* no chat template"):
        encoder(byte_level()).encode(PreferenceRow(user("Q"), [[{"role": "assistant", "content": "a"}]] * 2), where="row 3")
    with pytest.raises(ModelError, match="reference_end: none"):
        encoder(byte_level(eos=None)).encode(PreferenceRow("Q", ["a", "b"]))
    with pytest.raises(DataError, match="over max_length 2, and truncation_mode is drop"):
        encoder(byte_level(), 2, truncation_mode="drop").encode_one("The grey cat", "sleeps")
    with pytest.raises(ConfigError, match="add_generation_prompt is set by the encoder"):
        encoder(byte_level(), chat_template_kwargs={"add_generation_prompt": True})
    with pytest.raises(ConfigError, match="max_length 0"):
        RewardEncoding(max_length=0)


def test_the_recipes_template_leaves_the_given_tokenizer_alone() -> None:
    tokenizer = byte_level(CHATML)
    own = encoder(tokenizer, chat_template=LLAMA3)
    assert tokenizer.chat_template == CHATML
    assert own.tokenizer.chat_template == LLAMA3
    assert own.encode_one(user("Q"), "a") == encoder(byte_level(LLAMA3)).encode_one(user("Q"), "a")
    assert own.fingerprint == encoder(byte_level(CHATML), chat_template=LLAMA3, mean=1.0, std=2.0).fingerprint
    assert own.fingerprint != encoder(tokenizer).fingerprint
    assert own.fingerprint is own.fingerprint, "a large vocabulary takes seconds"


@pytest.mark.parametrize("case", VECTORS["truncation"], ids=lambda case: f"{case['mode']}-{len(case['ids'])}")
def test_truncation_vectors(case: dict[str, Any]) -> None:
    """EasyDeL's rule but for the end token, which keep_start puts back."""
    own = {1: 9, 2: 1}  # the vectors' end token is 2, this tokenizer's is 1
    ids, out = ([own.get(token, token) for token in tokens] for tokens in (case["ids"], case["out"]))
    expected = [token for token, one in zip(out, case["mask"], strict=True) if one]
    if not case["eos_kept"]:
        expected[-1] = ids[-1]
    strict = encoder(byte_level(), case["max_length"], truncation_mode=case["mode"], identical_pairs="keep")
    result = strict.encode(PreferenceRow(None, [], token_ids=[ids, ids]))
    assert isinstance(result, EncodedResponses)
    assert result.group == [expected, expected]


@pytest.mark.parametrize("case", [c for c in VECTORS["pool_index"] if c["correct"] is not None], ids=lambda case: case["name"])
def test_the_scored_token_comes_from_the_mask(case: dict[str, Any]) -> None:
    columns = {f"{kind}_{side}": case[kind] for kind in ("input_ids", "attention_mask") for side in ("chosen", "rejected")}
    row = validate_preference_row(columns, PreferenceFields())
    encoded = encoder(byte_level(), identical_pairs="keep").encode(row)
    assert isinstance(encoded, EncodedResponses)
    before = sum(case["attention_mask"][: case["correct"]])
    assert len(encoded.group[0]) - 1 == before
    assert encoded.group[0][-1] == case["input_ids"][case["correct"]]


def test_tokenised_rows_are_taken_as_they_are() -> None:
    own = encoder(byte_level())
    encoded = own.encode(PreferenceRow(None, [], token_ids=[[5, 6, 7], [5, 6, 1]], margin=2.0, subset="x"), number=4)
    assert encoded == EncodedResponses([[5, 6, 7], [5, 6, 1]], 2, margin=2.0, subset="x", row=4)
    assert own.counts.without_end == 1
    skipped = own.encode(PreferenceRow(None, [], token_ids=[[5], [100_000]]))
    assert isinstance(skipped, Skipped)
    assert "has the token 100000" in skipped.reason


def test_the_recipe_is_saved_with_the_model(tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text(LLAMA3, encoding="utf-8")
    data = DataSection(max_seq_length=77, chat_template=str(tmp_path / "template.jinja"), system_prompt="s", reference_end="none")
    recipe = RewardEncoding.of(RewardSection(truncation_mode="drop", identical_pairs="keep"), data)
    assert recipe.chat_template == LLAMA3
    assert not recipe.close
    recipe.save(tmp_path)
    assert RewardEncoding.load(tmp_path) == recipe
    with pytest.raises(ModelError, match=r"no readable reward_encoding\.json .* Give a reward model"):
        RewardEncoding.load(tmp_path / "nowhere")
    for content in ('{"max_length": 5, "new_rule": 1}', "{}", '{"max_length": 0}', "nonsense"):
        (tmp_path / "reward_encoding.json").write_text(content, encoding="utf-8")
        with pytest.raises(ModelError, match="is no encoding recipe"):
            RewardEncoding.load(tmp_path)
