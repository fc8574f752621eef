"""Real vLLM servers: the key on every route, deaths noticed and repaired, and nothing left after any end."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import psutil
import pytest

from ebft_ds.errors import RolloutError
from ebft_ds.sidecar.address import ServerAddress
from ebft_ds.sidecar.api import ServerRefused, VllmApi
from ebft_ds.sidecar.command import AdapterPlan, ServerPlan, server_command
from ebft_ds.sidecar.server import ServerProcess
from ebft_ds.sidecar.supported import check_server
from tests.integration.vllm_server import START_SECONDS, tiny_plan

pytestmark = pytest.mark.timeout(1500)

SAMPLING = {"max_tokens": 200, "min_tokens": 200, "temperature": 1.0, "n": 8, "detokenize": False}
GONE_SECONDS = 10.0


def until(condition: Callable[[], bool], what: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {timeout} s"
        time.sleep(0.1)


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=GONE_SECONDS)[1]


def named(processes: list[psutil.Process], part: str) -> psutil.Process:
    return next(process for process in processes if part in " ".join(process.cmdline()))


def ask(address: ServerAddress, *requests: tuple[str, str]) -> list[int]:
    """Status of each (method, path)."""

    async def all_of_them() -> list[int]:
        headers = {"Authorization": f"Bearer {address.api_key}"} if address.api_key else {}
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=60.0)) as session:
            found = []
            for method, path in requests:
                async with session.request(method, address.url + path, json={}) as response:
                    found.append(response.status)
            return found

    return asyncio.run(all_of_them())


def test_control_routes_are_closed_without_the_key_and_open_with_it(vllm_server: ServerProcess) -> None:
    stranger = ServerAddress(vllm_server.address.url)
    control = [
        ("POST", "/pause"),
        ("POST", "/resume"),
        ("POST", "/update_weights"),
        ("POST", "/start_weight_update"),
        ("GET", "/weight_info"),
        ("POST", "/collective_rpc"),
        ("POST", "/inference/v1/generate"),
        ("POST", "/invocations"),
        ("GET", "/openapi.json"),
        ("GET", "/metrics"),
        ("GET", "/server_info"),
    ]
    assert ask(stranger, *control) == [401] * len(control)
    assert ask(ServerAddress(stranger.url, "wrong"), *control) == [401] * len(control)
    assert ask(stranger, ("GET", "/health")) == [200]
    assert ask(vllm_server.address, ("GET", "/weight_info"), ("POST", "/pause"), ("POST", "/resume")) == [200, 200, 200]
    assert 401 not in ask(vllm_server.address, *control)


def test_a_started_server_is_one_that_we_support(vllm_server: ServerProcess) -> None:
    async def check(length: int, transport: str = "gloo") -> None:
        api = VllmApi(vllm_server.address)
        try:
            await check_server(api, transport, context_length=length)  # type: ignore[arg-type]
        finally:
            await api.close()

    asyncio.run(check(256))
    asyncio.run(check(256, "ipc"))
    with pytest.raises(RolloutError, match="its --max-model-len is 256, and max_seq_length is 257"):
        asyncio.run(check(257))
    with pytest.raises(RolloutError, match="it lacks /v1/load_lora_adapter"):
        asyncio.run(check(256, "adapter"))


def test_sampling_defaults_of_the_checkpoint_do_not_apply(vllm_server: ServerProcess) -> None:
    """`servable_model`'s generation configuration stops at two ids and samples; the server is to know nothing of it."""

    async def generate() -> tuple[str, int]:
        api = VllmApi(vllm_server.address)
        params = {"max_tokens": 64, "temperature": 1.0, "seed": 3, "logprobs": 0, "detokenize": False, "n": 4}
        answer = await api.generate([1, 2, 3], params, request_id="plain", model=None, timeout=60.0)
        await api.close()
        return answer.choices[0].finish_reason, sum(len(choice.token_ids) for choice in answer.choices)

    assert asyncio.run(generate())[0] in ("length", "stop")
    with pytest.raises(ServerRefused) as caught:
        asyncio.run(_prompt_of(vllm_server.address, 300))
    assert caught.value.status == 400


async def _prompt_of(address: ServerAddress, tokens: int) -> None:
    api = VllmApi(address)
    try:
        await api.generate([1] * tokens, {"max_tokens": 1}, request_id="overlong", model=None, timeout=60.0)
    finally:
        await api.close()


FLAGS = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
for argv in json.load(sys.stdin):
    make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
print("understood")
"""


def test_the_installed_vllm_understands_every_flag() -> None:
    """Those of GPU servers too, which do not start here."""
    plans = [
        ServerPlan(model="m", max_model_len=8, port=1, on_cpu=True, weight_transfer="ebft_disk", api_key="k", max_num_seqs=4),
        ServerPlan(model="m", max_model_len=8, port=1, adapters=AdapterPlan(16), enable_prefix_caching=False, enforce_eager=True),
        ServerPlan(model="m", max_model_len=8, port=1, weight_transfer="ipc", sleep_mode=True, revision="r", trust_remote_code=True),
        ServerPlan(model="m", max_model_len=8, port=1, weight_transfer="nccl", tensor_parallel_size=2, data_parallel_size=2),
    ]
    arguments = json.dumps([server_command(plan, {}).argv[4:] for plan in plans])
    parsed = subprocess.run([sys.executable, "-c", FLAGS], input=arguments, capture_output=True, text=True, timeout=300, check=False)
    assert parsed.stdout.strip().endswith("understood"), parsed.stderr[-3000:]


def test_a_model_that_cannot_be_loaded_is_reported_with_the_log(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "none_such", "architectures": ["NoneSuch"]}')
    server = ServerProcess(tiny_plan(tmp_path / "model"), tmp_path / "server.log", stop_grace=5.0)
    try:
        server.start()
        with pytest.raises(RolloutError, match=r"ended while it started \(exit code 1\)[\s\S]*none_such"):
            server.wait_ready(START_SECONDS)
    finally:
        server.stop()
