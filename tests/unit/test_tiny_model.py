"""The tiny model maker: deterministic, loadable, and fitting the data it writes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ebft_ds.config.sections import DataSection, RolloutSection
from ebft_ds.data import check_vocabulary, load_train_and_eval, stop_token_ids
from tools.demo_text import OTHER_MANNERS, distinct_examples, manner
from tools.make_tiny_model import main, make_random_model, make_tiny_model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    main(["--output", str(folder), "--quick", "--steps", "2", "--no-samples"])
    return folder


def test_model_tokenizer_and_data_fit_together(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    model = AutoModelForCausalLM.from_pretrained(made / "model")
    check_vocabulary(tokenizer, model.config.vocab_size)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    data = DataSection(train_dataset=str(made / "train.jsonl"), eval_dataset=str(made / "eval.jsonl"), max_seq_length=96)
    both = load_train_and_eval(data, RolloutSection(max_completion_length=32), tokenizer, seed=0)
    assert both.evaluation is not None
    assert len(both.train) >= 400
    assert len(both.evaluation) >= 64
    prompts = {tuple(both.train[i].token_ids) for i in range(len(both.train))}
    assert len(prompts) == len(both.train)
    assert not prompts & {tuple(both.evaluation[i].token_ids) for i in range(len(both.evaluation))}
    for prompt_length, reference_length in both.train.lengths() + both.evaluation.lengths():
        assert 10 <= prompt_length <= 40
        assert 5 <= reference_length <= 24
    stops = stop_token_ids(tokenizer, GenerationConfig.from_pretrained(made / "model"), chat=True)
    assert both.train[0].reference_ids[-1] in stops
    assert len(stops) == 2


def test_same_seed_same_weights(made: Path, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "again", steps=2, batch_size=8, seed=0)
    make_tiny_model(tmp_path / "other", steps=2, batch_size=8, seed=1)
    for name in ("train.jsonl", "eval.jsonl"):
        assert (tmp_path / "again" / name).read_bytes() == (made / name).read_bytes()
        assert (tmp_path / "other" / name).read_bytes() != (made / name).read_bytes()
    first = AutoModelForCausalLM.from_pretrained(made / "model").state_dict()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again" / "model").state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize(
    ("architecture", "tied"), [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False), ("mistral", False)]
)
def test_random_models_of_several_families(architecture: str, tied: bool, tmp_path: Path) -> None:
    path = make_random_model(tmp_path / "model", architecture=architecture, tie_word_embeddings=tied, num_layers=3, hidden=32)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert (model.config.model_type, model.config.num_hidden_layers, model.config.hidden_size) == (architecture, 3, 32)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = torch.tensor([tokenizer("Where is the cat?")["input_ids"]])
    assert torch.isfinite(model(input_ids=ids).logits).all()


def test_making_a_model_leaves_the_global_random_state_alone(tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(())
    torch.manual_seed(3)
    make_random_model(tmp_path / "model", num_layers=1, hidden=16)
    assert torch.equal(torch.rand(()), expected)


def test_references_are_the_right_answers() -> None:
    for example in distinct_examples(random.Random(1), 200):
        assert example.reference != example.wrong
        words = set(example.reference.lower().rstrip(".").replace(",", "").split())
        common = {"has", "because", "it", "away", "goes", "there", "are", "and", "them"}
        asked = set(example.question.lower().replace("?", " ").replace(".", " ").split())
        assert words <= asked | common, example


def test_manners_follow_their_shares() -> None:
    rng = random.Random(0)
    drawn = [manner(rng, 0.3) for _ in range(4000)]
    assert abs(drawn.count("reference") / 4000 - 0.3) < 0.04
    for name, share in OTHER_MANNERS.items():
        assert abs(drawn.count(name) / 4000 - 0.7 * share) < 0.04
