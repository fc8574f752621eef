"""EBFTScorer on one, two and three real ranks, against rewards from plain per-sequence forwards in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ebft_ds.collectives import Collectives
from ebft_ds.errors import NumericsError
from ebft_ds.features import pool_features
from ebft_ds.features.eos import feature_span, resolve_feature_eos
from ebft_ds.features.network import FeatureNetwork
from ebft_ds.features.reference_cache import ReferenceCache
from ebft_ds.features.scorer import EBFTScorer, Scores
from ebft_ds.features.spans import TokenRange, feature_spans
from ebft_ds.monitor.metrics import MetricsAccumulator
from ebft_ds.packing.attention import packed_attention
from ebft_ds.packing.packer import RowPacker
from ebft_ds.packing.padded import PaddedRows
from ebft_ds.packing.rows import Place, RowStyle, TokenRows
from ebft_ds.rewards import FeatureRewards, group_feature_rewards
from ebft_ds.sync.source import full_numel
from ebft_ds.types import RolloutGroup
from tests.distributed.engines import make_config, make_engines, make_group, make_policy
from tests.distributed.ranks import RankAnswers, run_ranks
from tests.distributed.small import EOS, LAYERS, small_model, token_rows

FIELDS = ("reward", "alignment", "diversity", "diversity_to_siblings", "cfm_loss", "fm_loss_unbiased")
FEATURE_LAYERS = [1, 2]
BUDGETS = [24, 60, 4096]
METHODS = ["completion_mean", "last_token", "mean_pooling", "concat"]
ORDER = [3, 0, 4, 2, 1]
STYLES: dict[str, list[RowStyle]] = {"lora": ["padded", "unshared", "shared"], "copy": ["padded", "shared"]}
CACHED_STYLES: dict[str, list[RowStyle]] = {"lora": ["padded", "shared"], "copy": ["shared"]}
MODES: dict[str, dict[str, Any]] = {"lora": {"use_peft": True, "lora_r": 4}, "copy": {}}
JOBS = [("lora", 1), ("lora", 2), ("lora", 3), ("copy", 1), ("copy", 2), ("copy", 3)]


def five_groups() -> list[RolloutGroup]:
    groups = []
    for g in range(5):
        prompt, reference, *completions = token_rows(g, [3 + g, 4 + 2 * g, 5, 3 + g, 7, 4])
        groups.append(make_group(g, prompt, completions, [*reference, EOS]))
    return groups


def even_groups() -> list[RolloutGroup]:
    """Equal lengths, and a multiple of every world size: no plan gains by splitting one."""
    groups = []
    for g in range(6):
        prompt, reference, *completions = token_rows(20 + g, [9, 4, 5, 3, 7, 4])
        groups.append(make_group(g, prompt, completions, [*reference, EOS]))
    return groups


def odd_group() -> RolloutGroup:
    """Completions: plain, its duplicate, empty, only EOS, another, the plain one again."""
    prompt, reference, plain, other = token_rows(9, [4, 6, 5, 3])
    return make_group(9, prompt, [plain, plain, [], [EOS], other, plain], [*reference, EOS])


@dataclass
class Watched:
    """A feature network that counts what it forwards and can be told to break."""

    network: FeatureNetwork
    broken: bool = False
    rows: list[list[int]] = field(default_factory=list)
    """Tokens of every row but the dummies."""
    forwards: int = 0

    @property
    def device(self) -> torch.device:
        return self.network.device

    def hidden_states(self, rows: TokenRows, layers: Sequence[int], positions: Tensor) -> list[Tensor]:
        mask = rows.attention_mask.bool() if isinstance(rows, PaddedRows) else torch.ones_like(rows.input_ids, dtype=torch.bool)
        found = [ids[real].tolist() for ids, real in zip(rows.input_ids, mask, strict=True)]
        self.rows += [row for row in found if row != [0]]
        self.forwards += 1
        states = self.network.hidden_states(rows, layers, positions)
        return [s * torch.nan for s in states] if self.broken else states

    def identity(self, layers: Sequence[int]) -> str:
        return self.network.identity(layers)

    def take(self) -> tuple[list[list[int]], int]:
        """Rows and forwards since the last call."""
        taken, self.rows, self.forwards = (self.rows, self.forwards), [], 0
        return taken


class CountedCollectives(Collectives):
    """Notes how many rows each exchange brings to this rank."""

    def exchange_rows(self, rows: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        EXCHANGED.append((sum(send_counts), sum(receive_counts)))
        return super().exchange_rows(rows, send_counts, receive_counts)


EXCHANGED: list[tuple[int, int]] = []


def take_exchanged() -> list[tuple[int, int]]:
    taken = list(EXCHANGED)
    EXCHANGED.clear()
    return taken


def packed(scores: Scores) -> dict[str, Any]:
    counts = ("empty_completions", "real_tokens", "padded_tokens", "unshared_tokens", "cached_references")
    return {name: getattr(scores.rewards, name) for name in (*FIELDS, "mask", "whitening_kept_ratio")} | {
        name: getattr(scores, name) for name in counts
    }


def packer(style: RowStyle) -> RowPacker:
    return RowPacker() if style == "padded" else RowPacker(style, packed_attention("auto", device="cpu"))


class Bench:
    """Engines of one rank and scorers over them."""

    def __init__(self, collectives: Collectives, model: Path, mode: str) -> None:
        self.collectives = CountedCollectives(collectives.rank, collectives.world_size, collectives.group)
        self.config = make_config(model, ebft_feature_layers=FEATURE_LAYERS, **MODES[mode])
        self.engines = make_engines(self.config, collectives.world_size, LAYERS)
        self.network = Watched(self.engines.feature_network)

    def scorer(
        self,
        style: RowStyle,
        method: str = "completion_mean",
        budget: int = 4096,
        whitening: bool | str = False,
        cache: ReferenceCache | None = None,
    ) -> EBFTScorer:
        return EBFTScorer(
            self.engines.layer_indices,
            method,
            whitening,
            1.0,
            0.5,
            self.network,
            eos_ids=[EOS],
            token_budget=budget,
            packer=packer(style),
            reference_cache=cache,
            collectives=self.collectives,
        )

    def score(self, chosen: list[RolloutGroup], style: RowStyle, *options: Any, **named: Any) -> dict[str, Any]:
        return packed(self.scorer(style, *options, **named).score(chosen))


def run(collectives: Collectives, model: Path, mode: str) -> dict[Any, Any]:
    bench = Bench(collectives, model, mode)
    answer: dict[Any, Any] = {}
    for style in STYLES[mode]:
        answer |= {(style, label): found for label, found in plain_scores(bench, style).items()}
    answer["cache"] = {style: with_cache(bench, style) for style in CACHED_STYLES[mode]}
    answer["identity"] = identities(bench, model)
    answer |= breaking(bench)
    if mode == "lora":
        answer |= between_steps(bench.config, bench.engines, bench.collectives, lambda: bench.score(five_groups(), "shared")["reward"])
    return answer


def plain_scores(bench: Bench, style: RowStyle) -> dict[str, Any]:
    """Without a cache: poolings, budgets, whitening, a split group, odd groups."""
    groups, network = five_groups(), bench.network
    answer: dict[str, Any] = {f"budget {budget}": bench.score(groups, style, budget=budget) for budget in BUDGETS}
    answer |= {method: bench.score(groups, style, method) for method in METHODS}
    network.take(), take_exchanged()
    for method in ("completion_mean", "last_token"):
        answer[f"even {method}"] = bench.score(even_groups(), style, method)
        answer[f"even {method} rows"], answer[f"even {method} forwards"] = network.take()
    answer["even exchanged"] = take_exchanged()
    for kind in ("feature", "sample"):
        answer[f"whitened {kind}"] = bench.score(groups, style, budget=24, whitening=kind)
    answer["permuted"] = bench.score([groups[g] for g in ORDER], style, whitening="feature")
    take_exchanged()
    answer["one group"] = bench.score(groups[:1], style, budget=24)
    answer["one group exchanged"] = take_exchanged()
    answer["one group whitened"] = bench.score(groups[:1], style, budget=24, whitening="feature")
    answer["odd"] = bench.score([odd_group()], style)
    answer["odd last_token"] = bench.score([odd_group()], style, "last_token")
    return answer


def with_cache(bench: Bench, style: RowStyle) -> dict[str, Any]:
    """The same groups again and again, in another order, with another reference; then from the saved state."""
    groups, network, collectives = five_groups(), bench.network, bench.collectives
    cache = ReferenceCache(1.0, collectives)
    scorer = bench.scorer(style, cache=cache)
    answer: dict[str, Any] = {"without": bench.score(groups, style), "first": packed(scorer.score(groups))}
    network.take(), take_exchanged()
    answer["again"] = packed(scorer.score(groups))
    answer["again rows"] = network.take()[0]
    answer["again exchanged"] = take_exchanged()
    even = ReferenceCache(1.0, collectives)
    bench.score(even_groups(), style, cache=even)
    network.take()
    answer["even"] = bench.score(even_groups(), style, cache=even)
    answer["even rows"] = network.take()[0]
    answer["permuted"] = packed(scorer.score([groups[g] for g in ORDER]))
    answer["other pooling"] = bench.score(groups, style, "last_token", cache=cache)
    answer["other pooling again"] = bench.score(groups, style, "last_token", cache=cache)
    answer["whitened"] = bench.score(groups, style, "completion_mean", 4096, "feature", cache)
    changed = [make_group(0, groups[0].prompt.token_ids, [r.token_ids for r in groups[0].rollouts], [31, 32, EOS]), *groups[1:]]
    answer["changed"] = packed(scorer.score(changed))

    restored = ReferenceCache(1.0, collectives)
    restored.load_state_dict(cache.state_dict())
    prompt, reference, *completions = token_rows(12, [4, 6, 5, 3, 2, 7])
    later = [*changed[2:], make_group(12, prompt, completions, [*reference, EOS])]
    answer["uninterrupted"] = [packed(scorer.score(chosen)) for chosen in (later, changed)]
    answer["resumed"] = [bench.score(chosen, style, cache=restored) for chosen in (later, changed)]
    answer["same state"] = all(torch.equal(cache.state_dict()[name], value) for name, value in restored.state_dict().items())

    network.take(), take_exchanged()
    silent = [make_group(g.prompt.index, g.prompt.token_ids, [[], []], g.prompt.reference_ids) for g in groups]
    answer["all empty"] = packed(scorer.score(silent))
    answer["all empty rows"], answer["all empty forwards"] = network.take()
    answer["all empty exchanged"] = take_exchanged()
    answer["twin"] = twins(bench, style)
    answer["small"] = small_cache(bench, style)
    return answer


def twins(bench: Bench, style: RowStyle) -> dict[str, Any]:
    """Two groups of one prompt in a step."""
    cache = ReferenceCache(1.0, bench.collectives)
    scorer = bench.scorer(style, cache=cache)
    pair = [five_groups()[1], five_groups()[1], five_groups()[2]]
    found = [packed(scorer.score(pair)) for _ in range(2)]
    return {"scores": found, "held": sum(bench.collectives.all_gather(len(cache)))}


def small_cache(bench: Bench, style: RowStyle) -> dict[str, Any]:
    """Room for two features on each rank."""
    width = len(FEATURE_LAYERS) * 32 * 4
    cache = ReferenceCache(2 * width / 2**20, bench.collectives)
    scorer = bench.scorer(style, cache=cache)
    held, scores = [], []
    for chosen in (five_groups(), five_groups()[:2], five_groups(), five_groups()):
        scores.append(packed(scorer.score(chosen)))
        held.append((len(cache), cache.held_bytes <= cache.limit_bytes))
    return {"held": held, "scores": scores}


def identities(bench: Bench, model: Path) -> list[str]:
    """Of the network twice, of other layers, and of one with other weights."""
    network = bench.engines.feature_network
    other = make_engines(make_config(model.parent / "other", **MODES["copy"]), bench.collectives.world_size, LAYERS).feature_network
    return [network.identity([1, 2]), network.identity([1, 2]), network.identity([1]), other.identity([1, 2])]


def breaking(bench: Bench) -> dict[str, Any]:
    """One rank's network gives NaN, also into a cache; then it works again."""
    collectives, groups = bench.collectives, five_groups()
    cache = ReferenceCache(1.0, collectives)
    scorer = bench.scorer("shared", cache=cache)
    bench.network.broken = collectives.rank == collectives.world_size - 1
    answer: dict[str, Any] = {"errors": [error_of(lambda g=chosen: scorer.score(g)) for chosen in (groups, groups[:1])]}  # type: ignore[misc]
    bench.network.broken = False
    return answer | {"after errors": packed(scorer.score(groups))}


def between_steps(config: Any, engines: Any, collectives: Collectives, rewards: Any) -> dict[str, Any]:
    """Scores, trains a step and scores again, twice."""
    policy, actor = make_policy(config, engines, collectives), engines.actor
    found, whole = [], 0
    for step in range(2):
        found.append(rewards())
        whole += sum(p.numel() != 0 and full_numel(p) > 1 for p in actor.network.parameters() if not p.requires_grad)
        policy.on_groups(step, five_groups(), torch.ones(5, 4), rl_coef=1.0, ce_coef=0.0, metrics=MetricsAccumulator())
        actor.step(step)
    found.append(rewards())
    return {"rewards between steps": found, "frozen parameters left whole": whole}


def error_of(action: Any) -> str:
    try:
        action()
    except NumericsError as error:
        return str(error)
    return "no error"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    small_model(folder / "other", seed=1)
    return small_model(folder / "model")


@pytest.fixture(scope="module")
def answers(model: Path) -> RankAnswers:
    """By (mode, world size)."""
    return RankAnswers(lambda job: run_ranks(job[1], run, model, job[0]))


def plain_rewards(model: Path, groups: list[RolloutGroup], method: str, whitening: Any = None) -> FeatureRewards:
    """From one unpadded forward per sequence of an ordinary Hugging Face model."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    eos = resolve_feature_eos(method)

    def feature(prompt: list[int], completion: list[int]) -> Tensor:
        span = feature_span(len(prompt), completion, [EOS], eos)
        if span is None:
            return torch.zeros(1)
        with torch.no_grad():
            states = network(torch.tensor([prompt + completion]), output_hidden_states=True).hidden_states
        spans = feature_spans([Place(0, len(prompt), len(prompt), len(completion))], [TokenRange(*span)], method)
        return pool_features([states[k][0, spans.positions] for k in FEATURE_LAYERS], spans)[0]

    references = torch.stack([feature(g.prompt.token_ids, g.prompt.reference_ids) for g in groups])
    completions = torch.stack(
        [torch.stack([feature(g.prompt.token_ids, r.token_ids).expand_as(references[0]) for r in g.rollouts]) for g in groups]
    )
    mask = torch.tensor([[bool(r.token_ids) for r in g.rollouts] for g in groups])
    return group_feature_rewards(completions, references, diversity_coef=0.5, whitening=whitening, mask=mask)


def assert_same(found: dict[str, Any], wanted: FeatureRewards, order: Sequence[int] | None = None) -> None:
    for name in FIELDS:
        expected = getattr(wanted, name)
        torch.testing.assert_close(found[name], expected if order is None else expected[list(order)], rtol=1e-5, atol=1e-5)


def assert_same_bits(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert all(torch.equal(found[name], wanted[name]) for name in FIELDS)


def cases(styles: dict[str, list[RowStyle]]) -> Any:
    found = [pytest.param(job, style, id=f"{job[0]}-{job[1]}-{style}") for job in JOBS for style in styles[job[0]]]
    return pytest.mark.parametrize(("job", "style"), found)


every_job = pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job[0]}-{job[1]}")
every_case = cases(STYLES)
every_cached_case = cases(CACHED_STYLES)


@every_case
def test_rewards_are_those_of_plain_forwards(answers: RankAnswers, model: Path, job: Any, style: str) -> None:
    for method in METHODS:
        wanted = plain_rewards(model, five_groups(), method)
        assert wanted.reward.std() > 0.05, "rewards that do not differ would prove nothing"
        for answer in answers[job]:
            assert_same(answer[style, method], wanted)


@every_case
def test_budgets_that_force_splits_do_not_matter_whitened_or_not(answers: RankAnswers, model: Path, job: Any, style: str) -> None:
    wanted = plain_rewards(model, five_groups(), "completion_mean")
    whitened = {kind: plain_rewards(model, five_groups(), "completion_mean", kind) for kind in ("feature", "sample")}
    assert all(rewards.whitening_kept_ratio.min() > 1e-2 for rewards in whitened.values())
    for answer in answers[job]:
        for budget in BUDGETS:
            assert_same(answer[style, f"budget {budget}"], wanted)
        for kind, rewards in whitened.items():
            found = answer[style, f"whitened {kind}"]
            assert_same(found, rewards)
            torch.testing.assert_close(found["whitening_kept_ratio"], rewards.whitening_kept_ratio, rtol=1e-4, atol=1e-5)
        assert_same(answer[style, "permuted"], whitened["feature"], ORDER)


@every_case
def test_fewer_groups_than_ranks_score_the_same(answers: RankAnswers, model: Path, job: Any, style: str) -> None:
    for label, kind in (("one group", None), ("one group whitened", "feature")):
        wanted = plain_rewards(model, five_groups()[:1], "completion_mean", kind)
        for answer in answers[job]:
            assert_same(answer[style, label], wanted)


@every_job
def test_all_ranks_return_identical_scores(answers: RankAnswers, job: Any) -> None:
    first, *others = answers[job]
    for other in others:
        for style in STYLES[job[0]]:
            for label in (*METHODS, "permuted", "one group whitened", "odd"):
                found, wanted = other[style, label], first[style, label]
                assert all(torch.equal(found[name], wanted[name]) for name in FIELDS if not name.endswith("unbiased"))
                assert found["padded_tokens"] == wanted["padded_tokens"]


@every_case
def test_empty_eos_only_and_duplicate_completions(answers: RankAnswers, model: Path, job: Any, style: str) -> None:
    for label, method in (("odd", "completion_mean"), ("odd last_token", "last_token")):
        wanted = plain_rewards(model, [odd_group()], method)
        for answer in answers[job]:
            found = answer[style, label]
            assert_same(found, wanted)
            assert found["mask"].tolist() == [[True, True, False, True, True, True]]
            assert found["empty_completions"] == 1
            reward = found["reward"][0]
            assert reward[2] == 0
            assert reward[0] == reward[1] == reward[5], "duplicates share one feature: not even rounding may part them"


def branches(group: RolloutGroup, method: str) -> list[list[int]]:
    """What of a group must be forwarded behind its prompt, once each."""
    found = {tuple(ids) for ids in (group.prompt.reference_ids, *(r.token_ids for r in group.rollouts)) if ids}
    if method == "last_token":  # its feature leaves a final EOS out
        found = {ids[:-1] if ids[-1] == EOS and len(ids) > 1 else ids for ids in found}
    return [list(ids) for ids in found]


@every_case
def test_every_branch_is_forwarded_once_and_shared_prompts_once_a_group(answers: RankAnswers, job: Any, style: str) -> None:
    ranks = answers[job]
    for method in ("completion_mean", "last_token"):
        rows = [row for answer in ranks for row in answer[style, f"even {method} rows"]]
        sequences = [(g.prompt.token_ids, ids) for g in even_groups() for ids in branches(g, method)]
        unshared = sum(len(prompt) + len(ids) for prompt, ids in sequences)
        if style == "padded":
            assert sorted(rows) == sorted(prompt + ids for prompt, ids in sequences)
        prompts = sum(len(g.prompt.token_ids) for g in even_groups())
        tokens = prompts + sum(len(ids) for _, ids in sequences) if style == "shared" else unshared
        assert sum(map(len, rows)) == tokens
        for answer in ranks:
            found = answer[style, f"even {method}"]
            assert (found["unshared_tokens"], found["real_tokens"]) == (unshared, tokens)
            assert answer[style, f"even {method} forwards"] == ranks[0][style, f"even {method} forwards"], "ZeRO-3 forwards are collectives"
    odd = odd_group()
    assert ranks[0][style, "odd"]["unshared_tokens"] == sum(len(odd.prompt.token_ids) + len(i) for i in branches(odd, "completion_mean"))


@every_job
def test_no_forward_pads_beyond_its_budget(answers: RankAnswers, job: Any) -> None:
    for answer in answers[job]:
        found = answer["padded", "budget 24"]
        assert found["real_tokens"] <= found["padded_tokens"] <= 2 * found["real_tokens"]
        for style in STYLES[job[0]][1:]:
            found = answer[style, "budget 24"]
            assert found["real_tokens"] == found["padded_tokens"]


@every_job
def test_features_travel_only_for_split_groups_and_only_to_their_owner(answers: RankAnswers, job: Any) -> None:
    ranks = answers[job]
    for answer in ranks:
        assert all(answer[style, "even exchanged"] == [] for style in STYLES[job[0]]), "whole groups: rewards alone travel"
    if len(ranks) == 1:
        return
    for style in STYLES[job[0]]:
        exchanged = [answer[style, "one group exchanged"] for answer in ranks]
        if exchanged[0]:
            sent, received = (sum(counts[0][side] for counts in exchanged) for side in (0, 1))
            assert sent == received < 5
            assert sum(counts[0][1] > 0 for counts in exchanged) == 1, "one rank makes the rewards"
    assert any(answer["padded", "one group exchanged"] for answer in ranks), "this group must have been split"


@every_cached_case
def test_a_cached_reference_is_not_forwarded_and_changes_no_reward(answers: RankAnswers, model: Path, job: Any, style: str) -> None:
    ranks = [answer["cache"][style] for answer in answers[job]]
    whitened = plain_rewards(model, five_groups(), "completion_mean", "feature")
    for answer in ranks:
        assert_same_bits(answer["first"], answer["without"])
        assert answer["first"]["cached_references"] == 0
        assert answer["again"]["cached_references"] == answer["permuted"]["cached_references"] == 5
        for name in FIELDS:
            torch.testing.assert_close(answer["again"][name], answer["without"][name], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(answer["permuted"][name], answer["without"][name][ORDER], rtol=1e-5, atol=1e-5)
        assert answer["whitened"]["cached_references"] == 5
        assert_same(answer["whitened"], whitened)
    if style == "padded":
        rows = [row for answer in ranks for row in answer["again rows"]]
        assert sorted(rows) == sorted(g.prompt.token_ids + r.token_ids for g in five_groups() for r in g.rollouts)
    even = even_groups()
    completions = [(g.prompt.token_ids, r.token_ids) for g in even for r in g.rollouts]
    prompts = sum(len(g.prompt.token_ids) for g in even) if style == "shared" else sum(len(prompt) for prompt, _ in completions)
    assert sum(len(row) for answer in ranks for row in answer["even rows"]) == prompts + sum(len(ids) for _, ids in completions)
    if len(ranks) == 1:
        assert ranks[0]["again exchanged"] == []


@every_cached_case
def test_another_reference_or_pooling_misses(answers: RankAnswers, model: Path, job: Any, style: str) -> None:
    changed = [make_group(0, five_groups()[0].prompt.token_ids, [r.token_ids for r in five_groups()[0].rollouts], [31, 32, EOS])]
    for answer in (answer["cache"][style] for answer in answers[job]):
        assert answer["changed"]["cached_references"] == 4
        assert_same(answer["changed"], plain_rewards(model, changed + five_groups()[1:], "completion_mean"))
        assert [answer[label]["cached_references"] for label in ("other pooling", "other pooling again")] == [0, 5]
        for label in ("other pooling", "other pooling again"):
            assert_same(answer[label], plain_rewards(model, five_groups(), "last_token"))


@every_cached_case
def test_a_resumed_cache_gives_the_same_bits(answers: RankAnswers, job: Any, style: str) -> None:
    for answer in (answer["cache"][style] for answer in answers[job]):
        for found, wanted in zip(answer["resumed"], answer["uninterrupted"], strict=True):
            assert_same_bits(found, wanted)
            assert found["cached_references"] == wanted["cached_references"] >= 3
        assert answer["same state"]


@every_cached_case
def test_nothing_to_forward_is_one_dummy_forward_on_every_rank(answers: RankAnswers, job: Any, style: str) -> None:
    for answer in (answer["cache"][style] for answer in answers[job]):
        assert (answer["all empty rows"], answer["all empty forwards"], answer["all empty exchanged"]) == ([], 1, [])
        found = answer["all empty"]
        assert not found["mask"].any()
        assert found["cached_references"] == 5
        assert found["real_tokens"] == 0
        assert torch.equal(found["reward"], torch.zeros(5, 2))


@every_cached_case
def test_one_prompt_twice_in_a_step_is_kept_once(answers: RankAnswers, model: Path, job: Any, style: str) -> None:
    wanted = plain_rewards(model, [five_groups()[g] for g in (1, 1, 2)], "completion_mean")
    for answer in (answer["cache"][style]["twin"] for answer in answers[job]):
        assert [found["cached_references"] for found in answer["scores"]] == [0, 3]
        assert answer["held"] == 2
        for found in answer["scores"]:
            assert_same(found, wanted)


@every_cached_case
def test_a_small_cache_keeps_its_bound_and_changes_no_reward(answers: RankAnswers, model: Path, job: Any, style: str) -> None:
    wanted = plain_rewards(model, five_groups(), "completion_mean")
    ranks = [answer["cache"][style]["small"] for answer in answers[job]]
    for answer in ranks:
        for held, bounded in answer["held"]:
            assert held <= 2
            assert bounded
        for found in (answer["scores"][0], *answer["scores"][2:]):
            assert_same(found, wanted)
        assert all(found["cached_references"] < 5 for found in answer["scores"]) or len(ranks) > 2
    assert sum(answer["held"][-1][0] for answer in ranks) >= 2


@every_job
def test_an_identity_tells_networks_apart_and_is_stable(answers: RankAnswers, job: Any) -> None:
    for answer in answers[job]:
        found, again, other_layers, other_weights = answer["identity"]
        assert found == again
        assert len({found, other_layers, other_weights}) == 3
    assert len({answer["identity"][0] for mode in MODES for answer in answers[mode, job[1]]}) == 1, "adapters off or a copy: one network"


@every_job
def test_a_nan_feature_on_one_rank_is_an_error_on_all_and_is_not_kept(answers: RankAnswers, job: Any) -> None:
    ranks = answers[job]
    for errors in zip(*(answer["errors"] for answer in ranks), strict=True):
        assert len(set(errors)) == 1
        assert "non-finite feature" in errors[0]
        assert "prompt " in errors[0]
        assert f"on rank {0 if len(ranks) == 1 else ''}" in errors[0]
    for answer in ranks:
        for name in FIELDS:
            torch.testing.assert_close(answer["after errors"][name], answer["shared", "budget 4096"][name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_scoring_between_train_steps_sees_the_base_model_and_leaves_it_partitioned(answers: RankAnswers, world_size: int) -> None:
    for answer in answers["lora", world_size]:
        first, *later = answer["rewards between steps"]
        assert all(torch.equal(first, other) for other in later)
        if world_size > 1:
            assert answer["frozen parameters left whole"] == 0
