"""What flows through the system: prompts, rollouts, groups, scored groups. Plain data, no torch.

The structs are msgspec structs, so that one definition serves in memory, on the pipe to the rollout process and in
checkpoints. Token ids are used end to end: nothing here is ever decoded and encoded again.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PolicyVersion = int
"""Number of optimizer steps taken when the weights were read (METHOD section 5)."""

FinishReason = Literal["stop", "length"]
"""`stop`: a stop id was sampled (and is part of the completion). `length`: the token budget ran out."""


class Prompt(msgspec.Struct, frozen=True):
    """One tokenised training row: the prompt and its reference completion."""

    prompt_id: int
    """Row number in the dataset; stable over epochs and resumes."""
    index: int
    """Position in the prompt stream, unique in a run (negative: an evaluation prompt)."""
    epoch: int
    """Pass over the dataset, from 0."""
    token_ids: list[int]
    """The encoded prompt, with exactly one BOS where the tokenizer has one."""
    reference_ids: list[int]
    """The encoded reference, closed with the template's end-of-turn token (or EOS)."""


class SamplingSpec(msgspec.Struct, frozen=True):
    """Everything that decides how completions are drawn. Sent whole with every request: an engine's defaults never apply."""

    temperature: float
    top_p: float
    top_k: int
    """0: off."""
    min_p: float
    stop_token_ids: list[int]
    seed: int
    """Of the run. Sample j of prompt index i, attempt a, draws from a stream seeded by (seed, i, a, j)."""


class RolloutRequest(msgspec.Struct, frozen=True):
    """n completions wanted for one prompt."""

    prompt: Prompt
    num_samples: int
    max_new_tokens: int
    sampling: SamplingSpec
    attempt: int = 0
    """Grows when a group was dropped as stale and its prompt is rolled out again."""


class TokenSpan(msgspec.Struct, frozen=True):
    """Completion tokens [start, end) that share an origin."""

    start: int
    end: int
    policy_version: PolicyVersion
    """Version of the weights that produced the tokens (of no meaning when not sampled)."""
    sampled: bool = True
    """False: inserted by an environment (tool output, user turn), not drawn from the policy and never trained."""


class Rollout(msgspec.Struct, frozen=True):
    """One completion."""

    token_ids: list[int]
    """As sampled, a sampled stop id included."""
    logprobs: list[float]
    """Per token, natural log, of the distribution it was drawn from (after temperature, top-p, top-k); 0.0 where not sampled."""
    spans: list[TokenSpan]
    """Cover [0, len(token_ids)) without gaps, in order."""
    finish_reason: FinishReason

    @property
    def sampled_mask(self) -> list[bool]:
        """Per token: drawn from the policy, so trained on."""
        mask = [False] * len(self.token_ids)
        for span in self.spans:
            mask[span.start : span.end] = [span.sampled] * (span.end - span.start)
        return mask

    @property
    def oldest_version(self) -> PolicyVersion | None:
        """Oldest policy version among the sampled tokens; None if there is none."""
        return min((span.policy_version for span in self.spans if span.sampled and span.end > span.start), default=None)


class RolloutGroup(msgspec.Struct, frozen=True):
    """One prompt, its n completions and its reference: the unit of scoring. Advantages are still pending."""

    prompt: Prompt
    rollouts: list[Rollout]
    attempt: int = 0
    generation_seconds: float = 0.0

    @property
    def oldest_version(self) -> PolicyVersion | None:
        versions = [v for r in self.rollouts if (v := r.oldest_version) is not None]
        return min(versions, default=None)


class ScoredGroup(msgspec.Struct, frozen=True):
    """A group after scoring. Lists have one entry per completion; NaN never appears: an unusable completion has valid False."""

    group: RolloutGroup
    reward: list[float]
    alignment: list[float]
    """Doubled cosine with the reference (METHOD section 1), before the coefficient."""
    diversity: list[float]
    """Doubled mean dot product with the siblings, before the coefficient."""
    valid: list[bool]
    """False: left out of the group's statistics (no token at all); its advantage is 0."""
    cfm_loss: float
    fm_loss_unbiased: float
    """NaN for fewer than two valid completions."""
