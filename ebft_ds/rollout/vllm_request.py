"""What is asked of a vLLM server for one group: every sampling field said, nothing left to a server's or a checkpoint's default."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

from ebft_ds.errors import RolloutError
from ebft_ds.types import RolloutRequest

TEMPERATURES = (0.01, 2.0)
"""vLLM raises a lower temperature to 0.01 without a word, and refuses a higher one."""


def describe(request: RolloutRequest) -> str:
    """The request, for an error message."""
    return f"request for prompt {request.prompt.prompt_id} (index {request.prompt.index}, attempt {request.attempt})"


def check_request(request: RolloutRequest, *, vocab_size: int, max_model_len: int | None) -> None:
    """Raises RolloutError for a request that a server would refuse, cut or change. `max_model_len`: None where not known yet."""
    prompt, sampling, where = request.prompt.token_ids, request.sampling, describe(request)
    if not prompt or request.num_samples < 1 or request.max_new_tokens < 1:
        raise RolloutError(f"{where}: needs a prompt, num_samples and max_new_tokens, all above 0")
    low, high = TEMPERATURES
    if not low <= sampling.temperature <= high:
        raise RolloutError(f"{where}: temperature {sampling.temperature:g} is outside vLLM's range of {low:g} to {high:g}")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise RolloutError(f"{where}: a token id lies outside the model's vocabulary of {vocab_size}")
    if max_model_len is not None and len(prompt) + request.max_new_tokens > max_model_len:
        raise RolloutError(
            f"{where}: {len(prompt)} prompt tokens and up to {request.max_new_tokens} new ones exceed the servers' context of "
            f"{max_model_len}, and would be cut there: raise vllm_max_model_len, or lower max_completion_length or max_prompt_length"
        )


def sampling_params(request: RolloutRequest, *, vocab_size: int) -> dict[str, Any]:
    """The request's `sampling_params`. The stop ids are ours alone: EOS ends a completion only where it is one of them.

    Stop ids that the model cannot produce are left out: vLLM refuses them.
    """
    sampling = request.sampling
    return {
        "n": request.num_samples,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "watermarking": False,
        "seed": group_seed(sampling.seed, request.prompt.index, request.attempt),
        "max_tokens": request.max_new_tokens,
        "min_tokens": 0,
        "stop_token_ids": [token for token in sampling.stop_token_ids if token < vocab_size],
        "ignore_eos": True,
        "logprobs": 0,  # of the sampled token alone
        "detokenize": False,
    }


def group_seed(seed: int, index: int, attempt: int) -> int:
    """Seed of a group's first sample; vLLM gives sample j this seed + j. In [0, 2^62): vLLM takes -1 for "none".

    A hash: the n seeds of one prompt stay clear of another's, and a rerun gets the same ones.
    """
    digest = hashlib.blake2b(struct.pack("<qqq", seed, index, attempt), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
