"""Servers of `ebft-ds serve` and of a supervisor, killed and stopped: deaths are noticed and repaired, and nothing is left."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from ebft_ds.config import AsyncEBFTConfig
from ebft_ds.errors import RolloutError
from ebft_ds.sidecar.address import ServerAddress
from ebft_ds.sidecar.api import VllmApi
from ebft_ds.sidecar.endpoints import resolve_servers
from ebft_ds.sidecar.server import ServerProcess
from ebft_ds.sidecar.supervisor import SidecarSupervisor
from tests.integration.cli_runs import environment
from tests.integration.test_serving import SAMPLING, ask, gone, named, until
from tests.integration.vllm_server import START_SECONDS, group_members, tiny_plan

pytestmark = pytest.mark.timeout(1500)


class InFlight:
    """Long requests that keep a server busy; how they end is the server's business."""

    def __init__(self, address: ServerAddress, count: int = 24) -> None:
        self._address = address
        self._count = count
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        asyncio.run(self._until_running())

    async def _run(self) -> None:
        api = VllmApi(self._address)
        work = (api.generate([1, 2, 3], SAMPLING, request_id=f"long-{i}", model=None, timeout=300.0) for i in range(self._count))
        await asyncio.gather(*work, return_exceptions=True)
        await api.close()

    async def _until_running(self) -> None:
        headers = {"Authorization": f"Bearer {self._address.api_key}"} if self._address.api_key else {}
        deadline = time.monotonic() + 60.0
        async with aiohttp.ClientSession(headers=headers) as session:
            while True:
                async with session.get(self._address.url + "/metrics") as response:
                    lines = (await response.text()).splitlines()
                if any(line.startswith("vllm:num_requests_running") and not line.endswith(" 0.0") for line in lines):
                    return
                assert time.monotonic() < deadline, "no request runs"
                await asyncio.sleep(0.1)

    def join(self) -> bool:
        """Has every client got its answer or its error?"""
        self._thread.join(30.0)
        return not self._thread.is_alive()


def test_kills_are_noticed_repaired_and_at_last_reported(servable_model: Path, tmp_path: Path) -> None:
    supervisor = SidecarSupervisor(
        [tiny_plan(servable_model)], log_folder=tmp_path, restarts=2, start_timeout=START_SECONDS, stop_grace=5.0
    )
    server = supervisor.servers[0]
    try:
        supervisor.start()
        for count, victim in enumerate(("VLLM::Worker", "api_server"), start=1):
            kill_one(server, victim, lambda count=count: supervisor.restarted() == count)
            until(supervisor.all_ready, "new server", START_SECONDS)
            supervisor.check()
            assert _answers(server.address)
        kill_one(server, "VLLM::EngineCore", lambda: not server.alive())
        until(lambda: _complaint(supervisor) is not None, "report of the end", 30.0)
        assert re.search(r"died \(.*\) and was started again 2 time\(s\)[\s\S]*(the end of|its end)", _complaint(supervisor) or "")
    finally:
        supervisor.stop()


def kill_one(server: ServerProcess, victim: str, noticed: Callable[[], bool]) -> None:
    """Kill one of the server's processes: that must be noticed, and the others end."""
    pid = server.pid()
    assert pid is not None
    members = group_members(pid)
    assert len(members) >= 3
    named(members, victim).kill()
    until(noticed, f"reaction to the end of {victim}", 60.0)
    assert gone(members), f"something was left after {victim} was killed"


def _complaint(supervisor: SidecarSupervisor) -> str | None:
    try:
        supervisor.check()
    except RolloutError as error:
        return str(error)
    return None


def _answers(address: ServerAddress) -> bool:
    async def version() -> bool:
        api = VllmApi(address)
        try:
            return await api.weight_version(5.0) == "default"
        except RolloutError:
            return False
        finally:
            await api.close()

    return asyncio.run(version())


class Serve:
    """`ebft-ds serve` as a user starts it."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.endpoints = folder / "endpoints.json"
        recipe = folder / "recipe.yaml"
        recipe.write_text(
            f"model: {{model_name_or_path: {model}, dtype: float32}}\nmax_seq_length: 256\nmax_completion_length: 200\n"
            "vllm: {max_num_seqs: 16, kv_cache_memory_bytes: 67108864, stop_grace: 5.0, server_start_timeout: 420.0}\n"
        )
        self.log = open(folder / "serve.log", "w")  # noqa: SIM115  closed in `end`
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ebft_ds.cli.app", "serve", str(recipe), "--endpoints", str(self.endpoints), "--logs", str(folder)],
            env=environment(),
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.said()
            return self.endpoints.exists()

        until(ready, "endpoints file", START_SECONDS)

    def said(self) -> str:
        return Path(self.log.name).read_text()

    def address(self) -> ServerAddress:
        return resolve_servers(AsyncEBFTConfig(vllm_server_base_url=f"file:{self.endpoints}"), {})[0]

    def below(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # the guard ends the rest
            self.process.wait()
        self.log.close()


@pytest.fixture
def two_serving(servable_model: Path, tmp_path: Path) -> Iterator[tuple[Serve, Serve]]:
    """Two runs on one machine, started at once."""
    folders = (tmp_path / "a", tmp_path / "b")
    for folder in folders:
        folder.mkdir()
    runs = (Serve(servable_model, folders[0]), Serve(servable_model, folders[1]))
    try:
        for run in runs:
            run.wait_ready()
        yield runs
    finally:
        for run in runs:
            run.end()


def test_two_runs_do_not_collide_and_each_ends_without_a_trace(two_serving: tuple[Serve, Serve]) -> None:
    killed, stopped = two_serving
    theirs, ours = killed.address(), stopped.address()
    assert theirs.url != ours.url
    assert theirs.api_key != ours.api_key
    assert ask(ServerAddress(ours.url, theirs.api_key), ("GET", "/weight_info")) == [401]

    members = killed.below()
    assert len(members) >= 4  # guard, front, core, worker
    killed.process.send_signal(signal.SIGKILL)
    assert gone(members)
    assert _answers(ours)

    requests, members = InFlight(ours), stopped.below()
    started = time.monotonic()
    stopped.process.send_signal(signal.SIGTERM)
    assert stopped.process.wait(timeout=45.0) == 0, stopped.said()
    assert time.monotonic() - started < 30.0  # three graces of five seconds, and the sweep
    assert gone(members)
    assert requests.join()
    assert not stopped.endpoints.exists()
    assert "SIGTERM: stopping the servers" in stopped.said()
