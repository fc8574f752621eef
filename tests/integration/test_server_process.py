"""Processes around a server: who ends when, and that nothing is left. A small tree of processes stands in for vLLM."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ebft_ds.errors import ConfigError, RolloutError
from ebft_ds.sidecar.command import ServerPlan
from ebft_ds.sidecar.ports import PortHold
from ebft_ds.sidecar.server import ServerProcess
from ebft_ds.sidecar.supervisor import SidecarSupervisor

ROOT = Path(__file__).resolve().parent.parent.parent
PLAN = ServerPlan(model="none", max_model_len=8, on_cpu=True)

TREE = """
import os, signal, subprocess, sys, time
folder, role = sys.argv[1], sys.argv[2]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if role == "front":
    for child in ("core", "stray"):
        subprocess.Popen([sys.executable, __file__, folder, child], start_new_session=child == "stray")
open(f"{folder}/{role}.tmp", "w").write(str(os.getpid()))
os.rename(f"{folder}/{role}.tmp", f"{folder}/{role}.pid")
while not (role == "front" and os.path.exists(f"{folder}/leave")):
    time.sleep(0.05)
sys.exit(3)
"""
"""A front with two children, one of them in a session of its own; all of them ignore SIGTERM."""

ROLES = ("front", "core", "stray")


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[list[str]]:
    """The command; whatever of it is left over is killed."""
    script = tmp_path / "tree.py"
    script.write_text(TREE)
    yield [sys.executable, str(script), str(tmp_path), "front"]
    for path in tmp_path.glob("*.pid"):
        try:
            os.kill(int(path.read_text()), signal.SIGKILL)
        except ProcessLookupError:
            continue


def until(condition: Callable[[], bool], what: str, timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {timeout} s"
        time.sleep(0.05)


def members(folder: Path) -> list[psutil.Process]:
    """The tree's processes, once all have said who they are."""
    until(lambda: all((folder / f"{role}.pid").exists() for role in ROLES), "complete tree")
    return [psutil.Process(int((folder / f"{role}.pid").read_text())) for role in ROLES]


def gone(processes: list[psutil.Process], timeout: float = 10.0) -> bool:
    return not psutil.wait_procs(processes, timeout=timeout)[1]


def test_stop_ends_a_tree_that_ignores_sigterm(tree: list[str], tmp_path: Path) -> None:
    server = ServerProcess(PLAN, tmp_path / "server.log", stop_grace=0.5, command=tree)
    server.start()
    processes = members(tmp_path)
    assert server.alive()
    assert server.pid() == processes[0].pid
    server.stop()
    server.stop()
    assert gone(processes)
    assert not server.alive()
    assert server.end_in_words() == "killed by SIGKILL"
    with pytest.raises(RolloutError, match="has been stopped"):
        server.start()


def test_what_the_first_process_leaves_behind_is_ended_and_it_can_start_again(tree: list[str], tmp_path: Path) -> None:
    server = ServerProcess(PLAN, tmp_path / "server.log", stop_grace=0.5, command=tree)
    try:
        server.start()
        processes = members(tmp_path)
        (tmp_path / "leave").touch()
        until(lambda: not server.alive(), "end noticed")
        assert gone(processes)
        assert server.end_in_words() == "exit code 3"
        (tmp_path / "leave").unlink()
        for role in ROLES:
            (tmp_path / f"{role}.pid").unlink()
        server.start()
        assert members(tmp_path)[0].pid == server.pid()
    finally:
        server.stop()
    assert (tmp_path / "server.log").read_text().count("=== ") == 2  # one log, appended to


def test_killing_the_guard_leaves_nothing_after_stop(tree: list[str], tmp_path: Path) -> None:
    server = ServerProcess(PLAN, tmp_path / "server.log", stop_grace=0.5, command=tree)
    server.start()
    processes = members(tmp_path)
    guard = processes[0].parent()
    assert guard is not None
    guard.kill()
    until(lambda: not server.alive(), "end noticed")
    server.stop()
    assert gone(processes[:2])  # one that had made a session of its own is out of reach then


PARENT = """
import sys, time
from pathlib import Path
from ebft_ds.sidecar.command import ServerPlan
from ebft_ds.sidecar.server import ServerProcess
server = ServerProcess(ServerPlan(model="none", max_model_len=8, on_cpu=True), Path(sys.argv[1]), stop_grace=0.5, command=sys.argv[2:])
server.start()
(Path(sys.argv[1]).parent / "place").write_text(server._folder.name)
time.sleep(600)
"""


def test_killing_the_parent_ends_everything(tree: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "server.log"), *tree]
    parent = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        processes = members(tmp_path)
        guard = processes[0].parent()
        assert guard is not None
        until((tmp_path / "place").exists, "working directory")
    finally:
        parent.kill()
        parent.wait()
    assert gone([*processes, guard])
    assert not Path((tmp_path / "place").read_text()).exists()  # the servers' empty working directory


def test_a_server_that_dies_at_its_start_shows_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(5)"]
    server = ServerProcess(PLAN, tmp_path / "server.log", command=command)
    try:
        server.start()
        with pytest.raises(RolloutError, match=r"ended while it started \(exit code 5\)[\s\S]*no such model"):
            server.wait_ready(60.0)
    finally:
        server.stop()


def test_a_server_that_never_answers_is_given_up(tree: list[str], tmp_path: Path) -> None:
    server = ServerProcess(PLAN, tmp_path / "server.log", stop_grace=0.5, command=tree)
    try:
        server.start()
        with pytest.raises(RolloutError, match=r"not ready after 0.5 s \(vllm_server_start_timeout\)"):
            server.wait_ready(0.5)
    finally:
        server.stop()


def test_a_supervisor_whose_servers_fail_leaves_nothing(tmp_path: Path) -> None:
    missing = ServerPlan(model="none", max_model_len=8, on_cpu=True, extra_env={"PYTHONHOME": str(tmp_path / "nowhere")})
    supervisor = SidecarSupervisor([missing, missing], log_folder=tmp_path, restarts=3, start_timeout=60.0, stop_grace=0.5)
    ports = {int(address.url.rpartition(":")[2]) for address in supervisor.addresses}
    assert len(ports) == 2
    with pytest.raises(RolloutError, match="ended while it started"):
        supervisor.start()
    with pytest.raises(RolloutError, match="ended while it started"):
        supervisor.check()
    for port in ports:
        PortHold("127.0.0.1", port).close()  # given back


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"vllm_port {port} on 127.0.0.1 is in use"):
            PortHold("127.0.0.1", port)
        plans = [PLAN, ServerPlan(model="none", max_model_len=8, port=port)]
        with pytest.raises(ConfigError, match="in use"):
            SidecarSupervisor(plans, log_folder=tmp_path)


def test_a_held_port_is_the_servers_alone() -> None:
    hold = PortHold("127.0.0.1")
    try:
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", hold.port))
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", hold.port))
            server.listen()
            with socket.create_connection(("127.0.0.1", hold.port), timeout=5.0):
                pass
    finally:
        hold.close()


def test_a_host_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="no address of this machine"):
        PortHold("198.51.100.7")


SHARED = """
import os, sys, time
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
open(sys.argv[1] + ".tmp", "w").write(memory.name)
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
time.sleep(600)
"""


def test_shared_memory_of_a_killed_server_is_removed(tmp_path: Path) -> None:
    name = tmp_path / "name"
    server = ServerProcess(PLAN, tmp_path / "server.log", stop_grace=0.5, command=[sys.executable, "-c", SHARED, str(name)])
    try:
        server.start()
        until(name.exists, "shared memory")
        memory = Path("/dev/shm") / name.read_text()
        assert memory.exists()
        pid = server.pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(lambda: not server.alive(), "end noticed")
        assert not memory.exists()
    finally:
        server.stop()
