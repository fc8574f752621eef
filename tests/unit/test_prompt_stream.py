"""The order of prompts: complete, seeded, and the same for every rank and after every resume."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebft_ds.config.sections import DataSection, RolloutSection
from ebft_ds.data import PromptDataset, PromptStream, load_prompt_dataset
from ebft_ds.errors import CheckpointError
from tests.unit.small_tokenizers import byte_level


@cache
def dataset(count: int, word: str = "question") -> PromptDataset:
    rows = [{"prompt": f"{word} {i}", "ground_truth": f"answer {i}"} for i in range(count)]
    return load_prompt_dataset(DataSection(max_seq_length=64), RolloutSection(max_completion_length=16), byte_level(), source=rows)


def ids(stream: PromptStream, start: int, stop: int) -> list[int]:
    return [stream.prompt(i).prompt_id for i in range(start, stop)]


@settings(max_examples=25, deadline=None)
@given(count=st.sampled_from([1, 2, 7, 30]), seed=st.integers(0, 2**31), shuffle=st.booleans(), epoch=st.integers(0, 5))
def test_an_epoch_is_every_prompt_once(count: int, seed: int, shuffle: bool, epoch: int) -> None:
    stream = PromptStream(dataset(count), seed=seed, shuffle=shuffle)
    prompts = [stream.prompt(i) for i in range(epoch * count, (epoch + 1) * count)]
    assert sorted(p.prompt_id for p in prompts) == list(range(count))
    assert {p.epoch for p in prompts} == {epoch}
    assert [p.index for p in prompts] == list(range(epoch * count, (epoch + 1) * count))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), stops=st.lists(st.integers(0, 40), max_size=4))
def test_resumed_equals_uninterrupted(seed: int, stops: list[int]) -> None:
    whole = PromptStream(dataset(30), seed=seed, shuffle=True)
    expected = [whole.take() for _ in range(sum(stops) + 5)]
    got = []
    state = PromptStream(dataset(30), seed=seed, shuffle=True).state_dict()
    for stop in [*stops, 5]:
        stream = PromptStream(dataset(30), seed=seed, shuffle=True)
        stream.load_state_dict(state)
        got += [stream.take() for _ in range(stop)]
        state = stream.state_dict()
    assert got == expected


def test_access_in_any_order_gives_the_same_prompts() -> None:
    forward = PromptStream(dataset(30), seed=5, shuffle=True)
    expected = ids(forward, 0, 120)
    jumping = PromptStream(dataset(30), seed=5, shuffle=True)
    order = list(range(120))
    random.Random(0).shuffle(order)
    assert {i: jumping.prompt(i).prompt_id for i in order} == dict(enumerate(expected))


def test_epochs_and_seeds_differ_and_file_order_is_kept_without_shuffling() -> None:
    stream = PromptStream(dataset(30), seed=5, shuffle=True)
    assert ids(stream, 0, 30) != ids(stream, 30, 60)
    assert ids(stream, 0, 30) != ids(PromptStream(dataset(30), seed=6, shuffle=True), 0, 30)
    assert ids(PromptStream(dataset(30), seed=5, shuffle=False), 0, 60) == [*range(30), *range(30)]


def test_global_random_state_is_neither_read_nor_changed() -> None:
    random.seed(1)
    torch.manual_seed(1)
    first = ids(PromptStream(dataset(30), seed=5, shuffle=True), 0, 30)
    drawn = (random.random(), torch.rand(()).item())
    random.seed(1)
    torch.manual_seed(1)
    assert (random.random(), torch.rand(()).item()) == drawn
    assert ids(PromptStream(dataset(30), seed=5, shuffle=True), 0, 30) == first


def test_other_processes_see_the_same_order() -> None:
    program = (
        "from tests.unit.test_prompt_stream import *\n"
        "print(dataset(30).fingerprint, ids(PromptStream(dataset(30), seed=5, shuffle=True), 0, 60))"
    )
    own = f"{dataset(30).fingerprint} {ids(PromptStream(dataset(30), seed=5, shuffle=True), 0, 60)}"
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == own


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: PromptStream(dataset(30, "other"), seed=5, shuffle=True), "training data"),
        (lambda: PromptStream(dataset(7), seed=5, shuffle=True), "training data"),
        (lambda: PromptStream(dataset(30), seed=6, shuffle=True), "seed was 5, now it is 6"),
        (lambda: PromptStream(dataset(30), seed=5, shuffle=False), "shuffle was True"),
    ],
)
def test_state_of_another_stream_is_refused(other: object, message: str) -> None:
    state = PromptStream(dataset(30), seed=5, shuffle=True).state_dict()
    stream = other()  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=message):
        stream.load_state_dict(state)
    with pytest.raises(CheckpointError, match="has no fingerprint"):
        stream.load_state_dict({"position": 3})


def test_negative_positions_are_refused() -> None:
    with pytest.raises(IndexError):
        PromptStream(dataset(7), seed=0, shuffle=True).prompt(-1)
