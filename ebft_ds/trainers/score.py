"""The work of `ebft-ds score` on one rank: a reward model in a frozen ZeRO-3 engine, and rows from a file or over HTTP."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from ebft_ds.collectives import Collectives
from ebft_ds.config.deepspeed import build_deepspeed_config
from ebft_ds.config.derived_reward import derive_reward
from ebft_ds.config.model_facts import read_model_facts
from ebft_ds.data.preference import RewardEncoder, RewardEncoding
from ebft_ds.data.preference.recipe import FILE_NAME as ENCODING_FILE
from ebft_ds.data.preflight import load_tokenizer
from ebft_ds.engine.build import init_distributed
from ebft_ds.errors import ConfigError, NumericsError, Preempted
from ebft_ds.monitor.logging_setup import setup_logging
from ebft_ds.packing.rows import RowStyle
from ebft_ds.trainers.inputs import agree
from ebft_ds.trainers.reward_engine import RewardEngine, load_frozen_reward_engine
from ebft_ds.trainers.reward_evaluation import RewardScale
from ebft_ds.trainers.reward_objective import encoding_folder
from ebft_ds.trainers.score_file import FileScores, OpenFiles, open_files
from ebft_ds.trainers.score_front import ScoreFront, Work
from ebft_ds.trainers.score_job import ScoreJob, ScoreServer, server_key
from ebft_ds.trainers.score_rounds import ScoreRounds
from ebft_ds.trainers.score_rows import ScoreEncoder, measured_scale
from ebft_ds.trainers.stop_signal import StopSignal

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.25
"""Between two signs of life of an idle server's rank 0."""


def run_score_job(job: ScoreJob) -> None:
    """Collective. Returns when the file is done, or when a server has been asked to stop.

    Raises:
        ConfigError, ModelError, DataError: by what is asked for, on the ranks that found it; the others raise PeerError.
        Preempted: a file's scoring was stopped; what was scored is written.
    """
    config = job.recipe()
    with StopSignal() as stop:
        collectives = init_distributed(config.engine.ddp_timeout)
        setup_logging(collectives.rank, collectives.world_size, config.monitor.log_level, None)
        recipe: ScoreRecipe = agree(collectives, lambda: read_recipe(job))
        files = agree(collectives, lambda: _rank_zero_files(job, recipe.encoding, collectives))
        try:
            reward = _load_engine(job, collectives)
            rounds = ScoreRounds(reward, collectives, stop, token_budget=job.token_budget)
            if collectives.is_main:
                _lead(job, rounds, recipe, reward.packer.style, files, collectives)
            else:
                rounds.follow()
        finally:
            if files is not None:
                files.output.close()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


@dataclass(frozen=True)
class ScoreRecipe:
    """What the model's files say about scoring with it."""

    tokenizer: PreTrainedTokenizerBase
    encoding: RewardEncoding
    scale: RewardScale | None


def read_recipe(job: ScoreJob) -> ScoreRecipe:
    """Not collective; reads no weights.

    Raises:
        ConfigError: as load_encoding, and a token budget that the model's longest input does not fit into.
        ModelError: as load_encoding and measured_scale; no tokenizer.
    """
    encoding = load_encoding(job)
    scale = wanted_scale(job, encoding)
    if job.token_budget < encoding.max_length:
        raise ConfigError(f"--token-budget {job.token_budget} is below the model's max_length of {encoding.max_length} tokens")
    tokenizer = load_tokenizer(job.model, job.revision, job.trust_remote_code)
    RewardEncoder(tokenizer, encoding)  # refuses wrong template arguments
    return ScoreRecipe(tokenizer, encoding, scale)


def load_encoding(job: ScoreJob) -> RewardEncoding:
    """How the model's rows are encoded. Errors: ConfigError for a --max-length that contradicts the model, ModelError without either."""
    if job.max_length is None:
        return RewardEncoding.load(encoding_folder(job.model))
    if (encoding_folder(job.model) / ENCODING_FILE).is_file():
        raise ConfigError(f"--max-length: {job.model} brings its own encoding ({ENCODING_FILE}); leave the option out")
    return RewardEncoding(max_length=job.max_length)


def wanted_scale(job: ScoreJob, encoding: RewardEncoding) -> RewardScale | None:
    """The scale of normalised scores, where the command or the model asks for them. Errors: as measured_scale, if the command does."""
    if encoding.normalize and encoding.mean is None and not job.normalize:
        logger.warning("the model was trained with normalize_rewards, but its rewards were never measured: scores are raw only")
        return None
    return measured_scale(encoding) if job.normalize or encoding.normalize else None


def _rank_zero_files(job: ScoreJob, encoding: RewardEncoding, collectives: Collectives) -> OpenFiles | None:
    if isinstance(job.work, ScoreServer) or not collectives.is_main:
        return None
    return open_files(job, job.work, encoding)


def _load_engine(job: ScoreJob, collectives: Collectives) -> RewardEngine:
    config = job.recipe()
    facts = read_model_facts(job.model)
    numbers = derive_reward(config, collectives.world_size)
    deepspeed_config = build_deepspeed_config(config, numbers, "feature", facts.hidden_size if facts is not None else None)
    return load_frozen_reward_engine(config, job.model, deepspeed_config)


def _lead(
    job: ScoreJob, rounds: ScoreRounds, recipe: ScoreRecipe, style: RowStyle, files: OpenFiles | None, collectives: Collectives
) -> None:
    """Rank 0's part; whatever ends it, the other ranks are told."""
    try:
        encoder = ScoreEncoder(recipe.tokenizer, recipe.encoding, style=style, token_budget=job.token_budget)
        if files is not None:
            FileScores(files, encoder, rounds, recipe.scale, batch=job.batch).run()
        else:
            assert isinstance(job.work, ScoreServer)
            facts = {"model": job.model, "ranks": collectives.world_size, "max_rows": job.work.max_rows}
            key = server_key(job.work)
            front = ScoreFront(encoder.encode, job.work, key, recipe.scale, facts)
            try:
                _say(f"ready: {front.url}")
                serve_requests(front, rounds, job.batch)
            finally:
                front.close()
    except Preempted as error:
        rounds.finish(stopped=str(error))
        raise
    except BaseException as error:
        rounds.finish(failure=str(error) or type(error).__name__)
        raise
    rounds.finish()


def serve_requests(front: ScoreFront, rounds: ScoreRounds, batch: int) -> None:
    """Rank 0: rounds of whatever waits, until a stop signal has come and all requests are answered."""
    while not (rounds.stop_wanted and front.idle):
        work = front.take(batch, IDLE_SECONDS)
        if rounds.stop_wanted:
            front.refuse()
        answer_together(work, rounds)


def answer_together(work: Sequence[Work], rounds: ScoreRounds) -> None:
    """One round for all requests. Where a reward is not finite, one for each of them: the others get theirs."""
    try:
        rewards = iter(rounds.lead([group for request in work for group in request.groups]))
    except NumericsError as error:
        if len(work) == 1:
            work[0].answer.set_exception(error)
        else:
            for request in work:
                answer_together([request], rounds)
        return
    for request in work:
        request.answer.set_result([next(rewards) for _ in request.groups])


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
