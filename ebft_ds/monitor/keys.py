"""Every key of metrics.jsonl, with its unit and meaning. docs/metrics.md is this table; a test holds them together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

CUSTOM_PREFIX = "custom/"
"""A callback's own keys start with this."""
REWARD_PREFIX = "rewards/"
"""Keys of each further objective: `rewards/<name>` (mean) and `rewards/<name>/std`, over the step's completions that got a reward."""
EVAL_PREFIX = "eval/"
"""A named evaluation set has its keys under `eval/<set>/`; subsets and sections are `subset/<name>` and `section/<name>` there."""


class MetricKey(NamedTuple):
    """One row of the table."""

    name: str
    unit: str
    meaning: str


_ROWS = [
    MetricKey("step", "steps", "Optimizer steps taken; strictly increasing from line to line."),
    MetricKey("epoch", "passes", "Passes over the prompts, as a fraction."),
    MetricKey(
        "num_prompts_seen",
        "prompts",
        "Prompts trained on since step 0, resumes included; once each, however often `num_iterations` uses them.",
    ),
    MetricKey("policy_version", "steps", "Version of the weights after this step."),
    MetricKey("loss", "-", "What the optimizer minimised: policy loss plus the weighted further terms, over the global batch."),
    MetricKey("grad_norm", "-", "Global L2 norm of the gradient before clipping."),
    MetricKey("learning_rate", "-", "Learning rate of the first parameter group in this step."),
    MetricKey("ce_loss", "nats", "Mean cross-entropy per reference token, before its coefficient."),
    MetricKey("entropy", "nats", "Mean entropy of the policy per trained token."),
    MetricKey("kl", "nats", "Mean KL estimate to the reference policy per trained token, before `beta`."),
    MetricKey("clip_ratio/low", "share", "Trained tokens (gspo: sequences) clipped at the lower bound."),
    MetricKey("clip_ratio/high", "share", "Trained tokens (gspo: sequences) clipped at the upper bound."),
    MetricKey("ebft/alignment", "-", "Mean doubled cosine between completion and reference features, before the coefficient."),
    MetricKey(
        "ebft/diversity", "-", "Mean doubled dot product with the sibling completions, before the coefficient; subtracted in the reward."
    ),
    MetricKey("ebft/reward", "-", "Mean feature-matching reward."),
    MetricKey("ebft/cfm_loss", "-", "Squared distance of the group's mean feature to the reference's, unwhitened, mean over groups."),
    MetricKey("ebft/fm_loss_unbiased", "-", "Unbiased estimate of the feature-matching loss, unwhitened, mean over groups of two or more."),
    MetricKey("ebft/gram_identity_share", "share", "Groups whose whitened Gram matrix is the identity, so that diversity is 0."),
    MetricKey(
        "ebft/min_singular_ratio", "-", "Smallest kept singular value over the largest, least of the step's groups (whitening only)."
    ),
    MetricKey("ebft/empty_completions", "completions", "Completions without any token, left out of their groups."),
    MetricKey("reward_std", "-", "Standard deviation of the reward within a group, mean over groups."),
    MetricKey("frac_reward_zero_std", "share", "Groups whose rewards are all equal (advantage 0)."),
    MetricKey("completions/mean_length", "tokens", "Mean completion length."),
    MetricKey("completions/clipped_ratio", "share", "Completions that ran into their token budget."),
    MetricKey(
        "sampling/importance_sampling_ratio/min",
        "-",
        "Smallest weight exp(trainer log-prob - engine log-prob), before the cap; the trainer as of the batch's first step.",
    ),
    MetricKey("sampling/importance_sampling_ratio/mean", "-", "Mean of that weight over trained tokens."),
    MetricKey("sampling/importance_sampling_ratio/max", "-", "Largest such weight."),
    MetricKey("sampling/sampling_logp_difference/mean", "nats", "Mean absolute gap between trainer and engine log-probs."),
    MetricKey("sampling/sampling_logp_difference/max", "nats", "Largest such gap."),
    MetricKey("staleness/mean", "steps", "Mean age of the trained groups' oldest tokens; it grows while `num_iterations` uses them again."),
    MetricKey("staleness/max", "steps", "Greatest such age."),
    MetricKey("staleness/dropped", "groups", "Groups dropped as too old since the last step; their prompts are rolled out again."),
    MetricKey("queue/depth", "groups", "Finished groups waiting when the step took its own."),
    MetricKey("sync/bytes", "bytes", "Weight bytes pushed to the rollout engines."),
    MetricKey("sync/seconds", "s", "Duration of the push, gathering included."),
    MetricKey("sync/pause_seconds", "s", "Time for which generation stood still."),
    MetricKey("sync/probe_mean_gap", "nats", "Mean log-prob gap between engine and trainer on the probe sequence."),
    MetricKey("sync/probe_max_gap", "nats", "Largest such gap."),
    MetricKey("sync/delta_survival", "share", "Norm of the update that the pushed dtype kept, over the norm of the update."),
    MetricKey("time/step", "s", "The whole step."),
    MetricKey("time/wait_rollout", "s", "Waiting for groups."),
    MetricKey("time/score", "s", "Feature forwards and rewards."),
    MetricKey("time/policy", "s", "Policy forwards and backwards."),
    MetricKey("time/optim", "s", "Gradient reduction, clipping and the optimizer."),
    MetricKey("time/sync", "s", "Weight push and probe."),
    MetricKey("time/save", "s", "Writing a checkpoint."),
    MetricKey("time/eval", "s", "Evaluation on held-out prompts."),
    MetricKey(
        "perf/tokens_per_s",
        "tokens/s",
        "Tokens trained on per second of the step, all ranks: every sequence with its own prompt, no padding, whatever of it was shared.",
    ),
    MetricKey("perf/rollout_tokens_per_s", "tokens/s", "Sampled tokens per second of generation."),
    MetricKey(
        "perf/mfu",
        "share",
        "FLOPs of the step's policy and feature passes over the hardware's peak (bf16) in the step's time. Only what must be computed "
        "counts: a shared prompt once, no padding, nothing twice. null where the peak is not known (CPU).",
    ),
    MetricKey("perf/padding_ratio", "share", "Padding among the tokens of the step's policy and feature forwards."),
    MetricKey(
        "perf/prefix_sharing_ratio",
        "-",
        "Tokens of the step's policy and feature forwards if every sequence brought its own prompt, over tokens computed, padding left "
        "out (1: nothing shared).",
    ),
    MetricKey(
        "memory/peak_gb",
        "GB",
        "Most memory used in the step by any rank: accelerator memory, or resident memory on CPU (1 GB = 1e9 bytes).",
    ),
    MetricKey("num_rows_seen", "rows", "Preference rows trained on since step 0, resumes included."),
    MetricKey("reward/accuracy", "share", "Pairs of the step that the rewards order as labelled, ties as half."),
    MetricKey("reward/tie_share", "share", "Pairs of the step with equal rewards."),
    MetricKey("reward/margin", "-", "Mean of chosen minus rejected reward over the step's pairs."),
    MetricKey("reward/chosen_mean", "-", "Mean reward of the step's chosen (best) responses."),
    MetricKey("reward/rejected_mean", "-", "Mean reward of the step's other responses."),
    MetricKey("reward/mean", "-", "Mean reward of all responses of the step."),
    MetricKey("reward/min", "-", "Smallest reward of the step."),
    MetricKey("reward/max", "-", "Largest reward of the step."),
    MetricKey("reward/pairs", "pairs", "Pairs in the step: K (K - 1) / 2 of a row of K responses."),
    MetricKey("eval/alignment", "-", "`ebft/alignment` on held-out prompts, never whitened."),
    MetricKey("eval/diversity", "-", "`ebft/diversity` on held-out prompts, never whitened."),
    MetricKey("eval/cfm_loss", "-", "`ebft/cfm_loss` on held-out prompts, trained pooling."),
    MetricKey("eval/fm_loss_unbiased", "-", "`ebft/fm_loss_unbiased` on held-out prompts, trained pooling."),
    MetricKey("eval/cfm_loss_other", "-", "The same under one pooling that is not trained."),
    MetricKey("eval/fm_loss_unbiased_other", "-", "The same under one pooling that is not trained."),
    MetricKey("eval/reference_ce", "nats", "Mean cross-entropy per held-out reference token."),
    MetricKey("eval/char_ngram_f", "share", "Character-trigram F1 between completion and reference, mean."),
    MetricKey("eval/mean_length", "tokens", "Mean length of the held-out completions."),
    MetricKey("eval/reference_mean_length", "tokens", "Mean length of the held-out references."),
    MetricKey("eval/ended_share", "share", "Held-out completions that ended by a stop token."),
    MetricKey("eval/distinct_share", "share", "Different completions among a prompt's, mean over prompts."),
    MetricKey("eval/prompts", "prompts", "Held-out prompts evaluated."),
    MetricKey("eval/completions", "completions", "Completions sampled for them."),
    MetricKey("eval/accuracy", "share", "Held-out pairs that the reward model orders as labelled, ties as half."),
    MetricKey("eval/tie_share", "share", "Held-out pairs with equal rewards."),
    MetricKey("eval/margin", "-", "Mean of chosen minus rejected reward over held-out pairs."),
    MetricKey("eval/loss", "nats", "The training loss on held-out rows, per pair (plackett_luce: per row)."),
    MetricKey("eval/chosen_mean", "-", "Mean reward of the held-out chosen (best) responses."),
    MetricKey("eval/chosen_std", "-", "Their standard deviation, unbiased."),
    MetricKey("eval/rejected_mean", "-", "Mean reward of the other held-out responses."),
    MetricKey("eval/rejected_std", "-", "Their standard deviation, unbiased."),
    MetricKey("eval/reward_mean", "-", "Mean reward of all held-out responses."),
    MetricKey("eval/reward_std", "-", "Their standard deviation, unbiased."),
    MetricKey("eval/best_of_n_accuracy", "share", "Held-out rows of more than two responses whose best one has the highest reward."),
    MetricKey("eval/ece", "share", "Expected calibration error of sigmoid of the absolute difference of rewards, over held-out pairs."),
    MetricKey("eval/pairs", "pairs", "Held-out pairs evaluated."),
    MetricKey("eval/rows", "rows", "Held-out preference rows evaluated."),
]

KEYS: dict[str, MetricKey] = {row.name: row for row in _ROWS}
"""Name -> row, in the order of the page."""


def unknown_keys(metrics: Iterable[str]) -> list[str]:
    """Keys that the table lacks and that no open prefix (`custom/`, `rewards/`, `eval/<set>/`) covers. For tests: a run never refuses
    a metric."""
    return [key for key in metrics if key not in KEYS and not key.startswith((CUSTOM_PREFIX, REWARD_PREFIX)) and not _of_named_eval(key)]


def _of_named_eval(key: str) -> bool:
    """`eval/<set>/<known>`, `eval/subset/<name>`, `eval/<set>/section/<name>`, ..."""
    if not key.startswith(EVAL_PREFIX):
        return False
    parts = key.removeprefix(EVAL_PREFIX).split("/")
    return bool({"subset", "section"} & set(parts[:-1])) or (len(parts) > 1 and f"{EVAL_PREFIX}{parts[-1]}" in KEYS)


def tensorboard_tag(key: str) -> str:
    """TensorBoard groups tags by what stands before the first slash; keys without one go to the group `train`."""
    return key if "/" in key else f"train/{key}"


def render_metrics_doc() -> str:
    """Text of docs/metrics.md: `print(render_metrics_doc(), end="")` writes the page again."""
    lines = [
        "# Metrics",
        "",
        "<!-- written by render_metrics_doc() in ebft_ds/monitor/keys.py; do not edit -->",
        "",
        "`metrics.jsonl` has one JSON object a step, with strictly increasing `step`. A key stands in a line only if the step measured it.",
        "NaN and infinity are written as `null`; numbers are not rounded. Ranks are reduced by sums (a mean is one sum over one count),",
        "so no value depends on the number of ranks. An evaluation's `eval/*` values stand in the object of the step after which it ran",
        "(step 0: before training); the line is rewritten in place if it was already there. On resume at step N, lines of later steps move",
        "to `metrics.replaced.jsonl`.",
        "",
        "TensorBoard (`tb/`) shows the same keys, grouped by what stands before the first slash; keys without one are under `train/`.",
        f"Keys of your own callbacks belong under `{CUSTOM_PREFIX}`. Further objectives (reward models and functions) appear as",
        f"`{REWARD_PREFIX}<name>` (mean) and `{REWARD_PREFIX}<name>/std`, over the completions of the step that got a reward. Of several",
        "evaluation sets each has its keys under `eval/<set>/`. Accuracies of preference rows by subset and section are",
        "`eval/subset/<name>` and `eval/section/<name>`.",
        "",
        "| key | unit | meaning |",
        "|---|---|---|",
    ]
    lines += [f"| `{row.name}` | {row.unit} | {row.meaning} |" for row in KEYS.values()]
    return "\n".join(lines) + "\n"
