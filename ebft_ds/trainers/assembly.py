"""Building a run: from a checked configuration to engines, scorer, rollout side and evaluation, wired together."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ebft_ds.checkpoint.state import CheckpointStore
from ebft_ds.collectives import Collectives
from ebft_ds.config import RecipeConfig
from ebft_ds.config.derived import DerivedNumbers
from ebft_ds.data.chat import stop_token_ids
from ebft_ds.data.preflight import Preflight
from ebft_ds.data.requests import rollout_request, sampling_spec
from ebft_ds.data.split import TrainAndEval, eval_prompts
from ebft_ds.data.stream import PromptStream
from ebft_ds.engine.build import accelerator_count
from ebft_ds.errors import ConfigError
from ebft_ds.features.reference_cache import ReferenceCache
from ebft_ds.features.scorer import EBFTScorer
from ebft_ds.policy.batch import PolicyPacker
from ebft_ds.rollout.client import RolloutClient
from ebft_ds.rollout.feed import RolloutFeed
from ebft_ds.rollout.spec import RolloutProcessSpec
from ebft_ds.sync.push import WeightSync
from ebft_ds.trainers.engines import Engines, build_engines
from ebft_ds.trainers.evaluation import HeldOutEvaluation
from ebft_ds.trainers.policy_step import PolicyStep
from ebft_ds.trainers.rollout_desk import RolloutDesk
from ebft_ds.trainers.rollout_servers import RolloutServers
from ebft_ds.trainers.scorers import Scorers, build_scorers
from ebft_ds.trainers.stop_signal import StopSignal
from ebft_ds.trainers.weights import build_sync, start_servers, weight_transport
from ebft_ds.types import Prompt, RolloutRequest, SamplingSpec

logger = logging.getLogger(__name__)

EVAL_SEED_OFFSET = 1_000_003
"""Evaluation completions are drawn from other random streams than training ones."""


@dataclass(frozen=True)
class RunParts:
    """Everything the training loop uses."""

    collectives: Collectives
    derived: DerivedNumbers
    data: TrainAndEval
    tokenizer: PreTrainedTokenizerBase
    generation_config: GenerationConfig | None
    engines: Engines
    scorer: EBFTScorer
    reference_cache: ReferenceCache | None
    policy: PolicyStep
    desk: RolloutDesk
    sync: WeightSync
    servers: RolloutServers | None
    """Rank 0's vLLM servers; None on the other ranks, and with the embedded engine."""
    checkpoints: CheckpointStore
    evaluation: HeldOutEvaluation | None
    stream: PromptStream

    def close(self) -> None:
        """Ends the rollout side: its process, connections, and the servers that were started for it. May be called twice."""
        self.desk.close()
        self.sync.close()
        if self.servers is not None:
            self.servers.close()


def load_generation_config(config: RecipeConfig) -> GenerationConfig | None:
    """The checkpoint's generation configuration; None where it has none."""
    assert config.model.model_name_or_path is not None
    try:
        found: GenerationConfig = GenerationConfig.from_pretrained(config.model.model_name_or_path, revision=config.model.model_revision)
    except OSError:
        return None
    return found


def rollout_process_spec(config: RecipeConfig, log_path: Path, servers: RolloutServers | None = None) -> RolloutProcessSpec:
    """How rank 0 starts the rollout process."""
    rollout = config.rollout
    if servers is None and accelerator_count() and rollout.rollout_device is None and rollout.rollout_loop is None:
        raise ConfigError(
            "rollout_device is not set: with an accelerator present the embedded engine needs an explicit device, say cuda:7 or cpu"
        )
    assert config.model.model_name_or_path is not None
    return RolloutProcessSpec(
        model_name_or_path=config.model.model_name_or_path,
        revision=config.model.model_revision,
        trust_remote_code=config.model.trust_remote_code,
        dtype=rollout.rollout_dtype or config.model.dtype,
        device=rollout.rollout_device or "cpu",
        attn_implementation=config.model.attn_implementation,
        engine="transformers" if servers is None else "vllm",
        vllm=servers.client_spec() if servers is not None else None,
        batch_size=rollout.rollout_batch_size,
        threads=rollout.rollout_threads or 1,
        seed=config.run.seed,
        rollout_loop=rollout.rollout_loop,
        rollout_loop_kwargs=rollout.rollout_loop_kwargs,
        start_timeout=rollout.rollout_start_timeout,
        timeout=rollout.rollout_timeout,
        log_path=str(log_path),
    )


def build_parts(
    config: RecipeConfig,
    checked: Preflight,
    collectives: Collectives,
    stop: StopSignal,
    *,
    peft_config: PeftConfig | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> RunParts:
    """Everything but the loop; the rollout process is up when this returns."""
    assert config.run.output_dir is not None
    output_dir = Path(config.run.output_dir)
    generation_config = load_generation_config(config)
    chat_kwargs = config.data.chat_template_kwargs
    stops = config.rollout.stop_token_ids or stop_token_ids(
        checked.tokenizer, generation_config, chat=checked.data.train.is_chat, chat_template_kwargs=chat_kwargs
    )
    servers = start_servers(config, output_dir / "logs", collectives, stop)
    try:
        return _build_beside(config, checked, collectives, stop, servers, stops, generation_config, peft_config, optimizer)
    except BaseException:
        if servers is not None:
            servers.close()
        raise


def _build_beside(
    config: RecipeConfig,
    checked: Preflight,
    collectives: Collectives,
    stop: StopSignal,
    servers: RolloutServers | None,
    stops: list[int],
    generation_config: GenerationConfig | None,
    peft_config: PeftConfig | None,
    optimizer: torch.optim.Optimizer | None,
) -> RunParts:
    """Everything beside the servers, which may still be starting."""
    assert config.run.output_dir is not None
    output_dir = Path(config.run.output_dir)
    if servers is not None and servers.turns is not None:  # one GPU: the server's memory must be free before the engines take theirs
        servers.wait_ready()
        servers.turns.rollouts_end()
    client = RolloutClient(rollout_process_spec(config, output_dir / "logs" / "rollout.log", servers)) if collectives.is_main else None
    engines = build_engines(
        config,
        checked.derived,
        hidden_size=checked.facts.hidden_size or None,
        num_layers=checked.facts.num_layers,
        peft_config=peft_config,
        optimizer=optimizer,
    )
    stream = PromptStream(checked.data.train, seed=config.run.seed, shuffle=config.data.shuffle)
    sampling = sampling_spec(config.rollout, stop_token_ids=stops, seed=config.run.seed)
    feed = (
        RolloutFeed(
            client,
            stream,
            groups_per_step=checked.derived.groups_per_step,
            max_staleness=config.rollout.max_staleness,
            make_request=_training_requests(config, sampling),
            num_iterations=config.loss.num_iterations,
        )
        if client is not None
        else None
    )
    desk = RolloutDesk(
        feed, client, collectives, stop, servers.check if servers is not None else None, servers.turns if servers is not None else None
    )

    def start_rollouts() -> None:
        if servers is not None:
            servers.wait_ready()
        if client is not None:
            client.start()

    desk.on_main(start_rollouts)
    network = engines.actor.network
    transport = desk.on_main(lambda: weight_transport(client, servers, network))
    sync = build_sync(config, engines.actor, transport, collectives, stream, sampling.temperature)
    desk.repair_with(sync)
    scorers = build_scorers(config, engines, stops, collectives)
    policy = PolicyStep(
        engines.actor,
        engines.kl_reference,
        collectives,
        loss=config.loss,
        rollout=config.rollout,
        run=config.run,
        temperature=sampling.temperature,
        check_stop=desk.check_stop,
        packer=_policy_packer(config, engines),
    )
    return RunParts(
        collectives=collectives,
        derived=checked.derived,
        data=checked.data,
        tokenizer=checked.tokenizer,
        generation_config=generation_config,
        engines=engines,
        scorer=scorers.training,
        reference_cache=scorers.reference_cache,
        policy=policy,
        desk=desk,
        sync=sync,
        servers=servers,
        checkpoints=CheckpointStore(
            output_dir / "checkpoints",
            collectives,
            adapters_only=config.peft.use_peft,
            keep=config.checkpoint.save_total_limit,
            reference_cache=scorers.reference_cache,
        ),
        evaluation=_build_evaluation(config, checked, engines, scorers, stops, desk, collectives),
        stream=stream,
    )


def _training_requests(config: RecipeConfig, sampling: SamplingSpec) -> Any:
    def request(prompt: Prompt, attempt: int) -> RolloutRequest:
        return rollout_request(prompt, rollout=config.rollout, method=config.method, data=config.data, sampling=sampling, attempt=attempt)

    return request


def _build_evaluation(
    config: RecipeConfig,
    checked: Preflight,
    engines: Engines,
    scorers: Scorers,
    stops: list[int],
    desk: RolloutDesk,
    collectives: Collectives,
) -> HeldOutEvaluation | None:
    if checked.data.evaluation is None:
        return None
    sampling = sampling_spec(config.rollout, stop_token_ids=stops, seed=config.run.seed + EVAL_SEED_OFFSET)

    def request(prompt: Prompt) -> RolloutRequest:
        return rollout_request(
            prompt,
            rollout=config.rollout,
            method=config.method,
            data=config.data,
            sampling=sampling,
            num_samples=config.monitor.eval_num_generations,
        )

    return HeldOutEvaluation(
        eval_prompts(checked.data.evaluation, config.data.eval_max_prompts),
        request,
        scorers.held_out,
        scorers.other,
        engines.actor,
        desk,
        checked.tokenizer,
        collectives,
        packer=_policy_packer(config, engines),
    )


def _policy_packer(config: RecipeConfig, engines: Engines) -> PolicyPacker:
    return PolicyPacker.for_run(engines.packer, config.run, max_seq_length=config.data.max_seq_length)
