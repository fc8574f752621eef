"""The embedded engine against plain Hugging Face calls, on tiny random models in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from ebft_ds.errors import ModelError, RolloutError, WeightSyncError
from ebft_ds.rollout.manifest import TensorSpec, WeightManifest
from ebft_ds.rollout.spec import RolloutProcessSpec
from ebft_ds.rollout.transformers_engine import TransformersEngine
from ebft_ds.types import Prompt, Rollout, RolloutGroup, RolloutRequest, SamplingSpec

VOCAB = 61
SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.15}
HEADS = {"num_key_value_heads": 2, "head_dim": 8}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SMALL, **HEADS),
    "qwen2": Qwen2Config(**SMALL, num_key_value_heads=2),
    "qwen3": Qwen3Config(**SMALL, **HEADS),
    "gemma2": Gemma2Config(**SMALL, **HEADS, sliding_window=6, query_pre_attn_scalar=8),
    "gemma3": Gemma3TextConfig(**SMALL, **HEADS, sliding_window=6, query_pre_attn_scalar=8),
    "mistral": MistralConfig(**SMALL, **HEADS, sliding_window=6),
    "phi3": Phi3Config(**SMALL, num_key_value_heads=2, sliding_window=6),
    "gpt_neox": GPTNeoXConfig(**SMALL),
}


def make_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_model(CONFIGS["llama"]).save_pretrained(folder)
    return folder


def start(folder: Path, *, batch_size: int = 8, prefill_tokens: int = 4096, attention: str = "sdpa") -> TransformersEngine:
    spec = RolloutProcessSpec(model_name_or_path=str(folder), batch_size=batch_size, log_path="unused", attn_implementation=attention)
    engine = TransformersEngine(spec, prefill_tokens=prefill_tokens)
    engine.start()
    return engine


def request(
    index: int,
    prompt: list[int],
    n: int = 1,
    budget: int = 12,
    *,
    attempt: int = 0,
    stop: tuple[int, ...] = (2,),
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int = 5,
) -> RolloutRequest:
    sampling = SamplingSpec(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, stop_token_ids=list(stop), seed=seed)
    row = Prompt(prompt_id=index + 100, index=index, epoch=0, token_ids=prompt, reference_ids=[3, 2])
    return RolloutRequest(prompt=row, num_samples=n, max_new_tokens=budget, sampling=sampling, attempt=attempt)


def finish(engine: TransformersEngine, *requests: RolloutRequest) -> dict[int, RolloutGroup]:
    engine.submit(requests)
    found: dict[int, RolloutGroup] = {}
    while engine.has_work:
        found |= {group.prompt.index: group for group in engine.step()}
    return found


PROMPTS = [[1, 9, 4], [1, 30, 31, 32, 33, 34, 35, 36, 37], [1, 7, 7, 8, 50], [1, 60]]


def expected_logprobs(
    model: PreTrainedModel, prompt: list[int], rollout: Rollout, temperature: float, top_p: float, top_k: int
) -> list[float]:
    """An independent account: one plain forward, then filters token by token in Python."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + rollout.token_ids]), use_cache=False).logits[0].double()
    found = []
    for position, token in enumerate(rollout.token_ids, start=len(prompt)):
        probs = torch.softmax(logits[position - 1] / temperature, dim=-1)
        order = sorted(range(VOCAB), key=lambda i: -float(probs[i]))[: top_k or VOCAB]
        mass, kept, total = 0.0, [], float(probs[order].sum())
        for i in order:
            if mass / total < top_p:
                kept.append(i)
            mass += float(probs[i])
        assert token in kept
        found.append(float(torch.log(probs[token] / probs[kept].sum())))
    return found


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.7, 0.8, 0), (1.3, 1.0, 5), (0.6, 0.7, 9)])
def test_logprobs_are_those_of_the_distribution_sampled_from(llama: Path, temperature: float, top_p: float, top_k: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama)
    requests = [request(i, ids, 3, temperature=temperature, top_p=top_p, top_k=top_k) for i, ids in enumerate(PROMPTS)]
    for index, group in finish(start(llama, batch_size=7), *requests).items():
        for rollout in group.rollouts:
            wanted = expected_logprobs(model, PROMPTS[index], rollout, temperature, top_p, top_k)
            assert rollout.logprobs == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_matches_a_plain_forward(name: str, tmp_path: Path) -> None:
    """Different prompt lengths, rows that leave, prefill in slices, windows shorter than the sequences."""
    attention = "eager" if name == "gemma2" else "sdpa"  # transformers' own sdpa drops gemma2's soft cap
    make_model(CONFIGS[name]).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention).eval()
    engine = start(tmp_path, batch_size=5, prefill_tokens=10, attention="sdpa")
    requests = [request(i, ids, 2, budget=6 + 5 * i, temperature=0.9) for i, ids in enumerate(PROMPTS)]
    for index, group in finish(engine, *requests).items():
        for rollout in group.rollouts:
            assert rollout.logprobs == pytest.approx(expected_logprobs(model, PROMPTS[index], rollout, 0.9, 1.0, 0), abs=1e-5)


def test_top_k_of_one_equals_greedy_generate(llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama)
    groups = finish(start(llama), *[request(i, ids, 1, 20, top_k=1) for i, ids in enumerate(PROMPTS)])
    for index, prompt in enumerate(PROMPTS):
        greedy = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20, eos_token_id=2, pad_token_id=0)
        assert groups[index].rollouts[0].token_ids == greedy[0, len(prompt) :].tolist()
        assert groups[index].rollouts[0].logprobs == pytest.approx([0.0] * len(groups[index].rollouts[0].token_ids), abs=1e-6)


def test_frequencies_follow_the_probabilities(llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        probs = torch.softmax(model(torch.tensor([PROMPTS[0]])).logits[0, -1] / 0.8, dim=-1)
    n = 3000
    group = finish(start(llama, batch_size=n), request(0, PROMPTS[0], n, 1, temperature=0.8))[0]
    counts = torch.bincount(torch.tensor([rollout.token_ids[0] for rollout in group.rollouts]), minlength=VOCAB)
    error = (counts / n - probs) / torch.sqrt(probs * (1 - probs) / n)
    assert float(error.abs().max()) < 4.5


def test_a_completion_does_not_depend_on_its_batch(llama: Path) -> None:
    requests = [request(i, ids, 3) for i, ids in enumerate(PROMPTS)]
    together = finish(start(llama, batch_size=32), *requests)
    for one in requests:
        alone = finish(start(llama, batch_size=1), one)[one.prompt.index]
        for a, b in zip(alone.rollouts, together[one.prompt.index].rollouts, strict=True):
            assert a.token_ids == b.token_ids
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_samples_differ_and_a_rerun_is_equal(llama: Path) -> None:
    first = finish(start(llama), request(3, PROMPTS[0], 4))[3].rollouts
    again = finish(start(llama), request(3, PROMPTS[0], 4))[3].rollouts
    assert first == again
    assert len({tuple(rollout.token_ids) for rollout in first}) == 4
    for other in (request(4, PROMPTS[0], 4), request(3, PROMPTS[0], 4, attempt=1), request(3, PROMPTS[0], 4, seed=6)):
        rollouts = finish(start(llama), other)[other.prompt.index].rollouts
        assert [rollout.token_ids for rollout in rollouts] != [rollout.token_ids for rollout in first]


def test_budgets_are_per_prompt_and_stop_ids_end_a_row(llama: Path) -> None:
    everything = tuple(range(VOCAB))
    groups = finish(
        start(llama),
        request(0, PROMPTS[0], 3, 5, stop=()),
        request(1, PROMPTS[1], 2, 9, stop=()),
        request(2, PROMPTS[2], 2, 9, stop=everything),
    )
    assert [(len(r.token_ids), r.finish_reason) for r in groups[0].rollouts] == [(5, "length")] * 3
    assert [(len(r.token_ids), r.finish_reason) for r in groups[1].rollouts] == [(9, "length")] * 2
    assert [(len(r.token_ids), r.finish_reason) for r in groups[2].rollouts] == [(1, "stop")] * 2


def test_only_the_last_token_may_be_a_stop_id(llama: Path) -> None:
    stop = tuple(range(0, VOCAB, 7))
    rollouts = finish(start(llama), request(0, PROMPTS[0], 8, 30, stop=stop))[0].rollouts
    assert any(rollout.finish_reason == "stop" and len(rollout.token_ids) > 1 for rollout in rollouts)
    for rollout in rollouts:
        assert not set(rollout.token_ids[:-1]) & set(stop)
        assert (rollout.token_ids[-1] in stop) == (rollout.finish_reason == "stop")


def test_cancel_frees_the_rows_and_leaves_the_others_alone(llama: Path) -> None:
    wanted = finish(start(llama), request(0, PROMPTS[0], 2))[0]
    engine = start(llama, batch_size=4)
    engine.submit([request(0, PROMPTS[0], 2), request(1, PROMPTS[1], 2, 40, stop=()), request(2, PROMPTS[2], 2, 40, stop=())])
    engine.step()
    engine.cancel([1, 2, 99])
    groups = [group for _ in range(12) for group in engine.step()]
    assert [[r.token_ids for r in group.rollouts] for group in groups] == [[r.token_ids for r in wanted.rollouts]]
    assert not engine.has_work


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (request(0, [1, VOCAB]), "vocabulary"),
        (request(0, []), "needs a prompt"),
        (request(0, [1], 0), "needs a prompt"),
        (request(0, [1] * 100, 1, 29), "context of 128"),
    ],
)
def test_a_request_that_cannot_be_served_whole_is_refused(llama: Path, bad: RolloutRequest, text: str) -> None:
    with pytest.raises(RolloutError, match=text):
        start(llama).submit([bad])


def test_a_missing_model_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nothing-here"):
        start(tmp_path / "nothing-here")


def test_a_checkpoint_without_all_weights_is_a_model_error(llama: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama)
    model.save_pretrained(tmp_path, state_dict={name: t for name, t in model.state_dict().items() if name != "lm_head.weight"})
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        start(tmp_path)


def test_score_equals_a_plain_forward_at_temperature(llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama)
    ids = PROMPTS[1]
    with torch.no_grad():
        table = torch.log_softmax(model(torch.tensor([ids])).logits[0] / 0.7, dim=-1)
    wanted = [float(table[i, ids[i + 1]]) for i in range(len(ids) - 1)]
    assert start(llama).score(ids, 0.7) == pytest.approx(wanted, abs=1e-5)


def push(engine: TransformersEngine, model: PreTrainedModel, version: int) -> None:
    tensors = [(name, param.detach().clone()) for name, param in model.named_parameters()]
    engine.begin_update(manifest(tensors, version))
    engine.receive(tensors[:3])
    engine.receive(tensors[3:])
    engine.finish_update(version)


def manifest(tensors: list[tuple[str, torch.Tensor]], version: int) -> WeightManifest:
    return WeightManifest(version, [TensorSpec(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors])


def test_tokens_before_a_push_match_the_old_model_and_after_it_the_new(llama: Path) -> None:
    old = AutoModelForCausalLM.from_pretrained(llama)
    new = make_model(CONFIGS["llama"], seed=1)
    engine = start(llama, batch_size=4)
    engine.submit([request(0, PROMPTS[0], 2, 10, stop=()), request(1, PROMPTS[1], 2, 10, stop=()), request(2, PROMPTS[2], 1, 10, stop=())])
    for _ in range(4):
        engine.step()
    push(engine, new, 7)
    found: dict[int, RolloutGroup] = {}
    while engine.has_work:
        found |= {group.prompt.index: group for group in engine.step()}
    for index in (0, 1):
        for rollout in found[index].rollouts:
            assert [(span.start, span.end, span.policy_version) for span in rollout.spans] == [(0, 4, 0), (4, 10, 7)]
            before = expected_logprobs(old, PROMPTS[index], rollout, 1.0, 1.0, 0)
            after = expected_logprobs(new, PROMPTS[index], rollout, 1.0, 1.0, 0)
            assert rollout.logprobs == pytest.approx(before[:4] + after[4:], abs=1e-5)
    assert [(span.start, span.end, span.policy_version) for span in found[2].rollouts[0].spans] == [(0, 10, 7)]
    assert found[0].oldest_version == 0
    assert found[2].oldest_version == 7


def test_a_push_without_tensors_moves_the_version_only(llama: Path) -> None:
    wanted = finish(start(llama), request(0, PROMPTS[0], 2, 10, stop=()))[0]
    engine = start(llama)
    engine.submit([request(0, PROMPTS[0], 2, 10, stop=())])
    engine.step()
    engine.begin_update(WeightManifest(1, [], complete=False))
    engine.finish_update(1)
    groups = [group for _ in range(9) for group in engine.step()]
    for rollout, unmoved in zip(groups[0].rollouts, wanted.rollouts, strict=True):
        assert (rollout.token_ids, rollout.logprobs) == (unmoved.token_ids, unmoved.logprobs)
        assert [(span.start, span.end, span.policy_version) for span in rollout.spans] == [(0, 1, 0), (1, 10, 1)]


def test_a_refused_or_aborted_push_leaves_the_old_weights(llama: Path) -> None:
    engine = start(llama)
    wanted = engine.score(PROMPTS[1], 1.0)
    tensors = [(name, param.detach().clone()) for name, param in make_model(CONFIGS["llama"], seed=1).named_parameters()]
    name, first = tensors[0]
    with pytest.raises(WeightSyncError, match="leaves out"):
        engine.begin_update(manifest(tensors[1:], 1))
    with pytest.raises(WeightSyncError, match=r"no parameter 'base_model\.x'"):
        engine.begin_update(manifest([*tensors, ("base_model.x", first)], 1))
    with pytest.raises(WeightSyncError, match="shape"):
        engine.begin_update(manifest([(name, first[:-1]), *tensors[1:]], 1))
    with pytest.raises(WeightSyncError, match="bfloat16"):
        engine.begin_update(manifest([(name, first.bfloat16()), *tensors[1:]], 1))
    with pytest.raises(WeightSyncError, match="twice"):
        engine.begin_update(manifest([*tensors, tensors[0]], 1))
    engine.begin_update(manifest(tensors, 1))
    with pytest.raises(WeightSyncError, match="announced"):
        engine.receive([(name, first.reshape(-1))])
    engine.receive(tensors[:-1])
    with pytest.raises(WeightSyncError, match="never arrived"):
        engine.finish_update(1)
    engine.begin_update(manifest(tensors, 1))
    engine.receive(tensors)
    engine.abort_update()
    assert engine.score(PROMPTS[1], 1.0) == wanted
    assert engine.policy_version == 0


def test_tied_weights_come_once_and_stay_tied(tmp_path: Path) -> None:
    config = LlamaConfig(**SMALL, **HEADS, tie_word_embeddings=True)
    make_model(config).save_pretrained(tmp_path)
    engine = start(tmp_path)
    new = make_model(config, seed=1)
    names = [spec.name for spec in engine.expected_weights()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    push(engine, new, 3)
    with torch.no_grad():
        table = torch.log_softmax(new(torch.tensor([PROMPTS[1]])).logits[0], dim=-1)
    assert engine.score(PROMPTS[1], 1.0) == pytest.approx([float(table[i, t]) for i, t in enumerate(PROMPTS[1][1:])], abs=1e-5)
    both = [(name, param.detach()) for name, param in new.named_parameters(remove_duplicate=False)]
    with pytest.raises(WeightSyncError, match="tied"):
        engine.begin_update(manifest(both, 4))


def test_a_partial_push_keeps_the_rest(llama: Path) -> None:
    new = AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        new.lm_head.weight.mul_(1.5)
    engine = start(llama)
    tensors = [("lm_head.weight", new.lm_head.weight.detach())]
    engine.begin_update(WeightManifest(1, manifest(tensors, 1).tensors, complete=False))
    engine.receive(tensors)
    engine.finish_update(1)
    with torch.no_grad():
        table = torch.log_softmax(new(torch.tensor([PROMPTS[1]])).logits[0], dim=-1)
    assert engine.score(PROMPTS[1], 1.0) == pytest.approx([float(table[i, t]) for i, t in enumerate(PROMPTS[1][1:])], abs=1e-5)


def test_broken_weights_end_in_an_error_that_names_the_prompt(llama: Path) -> None:
    broken = make_model(CONFIGS["llama"], seed=1)
    with torch.no_grad():
        broken.lm_head.weight[3, 0] = float("nan")
    engine = start(llama)
    push(engine, broken, 1)
    engine.submit([request(0, PROMPTS[0])])
    with pytest.raises(RolloutError, match=r"prompt 100 .*not finite"):
        engine.step()
