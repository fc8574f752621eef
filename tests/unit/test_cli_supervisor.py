"""The supervisor of the ranks, with small scripts in the place of training: exit codes, signals, stragglers, orphans."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ebft_ds.cli.exit_code import RankEnd, job_exit_code
from ebft_ds.cli.supervisor import Graces, RankSupervisor, usable_port
from ebft_ds.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent
QUICK = Graces(own_end=0.5, after_save=0.5, after_term=0.5)


def supervisor(folder: Path, body: str, world_size: int = 2, graces: Graces = QUICK, log_folder: Path | None = None) -> RankSupervisor:
    script = folder / "rank.py"
    script.write_text("import os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(body))
    return RankSupervisor([sys.executable, str(script)], world_size, graces=graces, log_folder=log_folder)


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [((0, 0), 0), ((0, 1), 1), ((1, 4), 4), ((4, 1), 4), ((3, 5), 3), ((-9, 1), 1), ((-9, 0), 1), ((7, 7), 7), ((1, 7), 7), ((-15, 6), 6)],
)
def test_the_most_telling_code_wins(codes: tuple[int, ...], expected: int) -> None:
    assert job_exit_code([RankEnd(rank, code) for rank, code in enumerate(codes)])[0] == expected


def test_codes_of_ranks_that_were_terminated_say_nothing() -> None:
    code, reason = job_exit_code([RankEnd(1, -9), RankEnd(0, 7, ended_by_us=True)])
    assert code == 1
    assert "rank 1 was killed by SIGKILL" in reason


def test_ranks_get_their_places(tmp_path: Path) -> None:
    body = f"""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "DS_ACCELERATOR")
    open({str(tmp_path)!r} + f"/out{{rank}}", "w").write(" ".join(os.environ[name] for name in names))
    """
    assert supervisor(tmp_path, body).run() == 0
    first, second = ((tmp_path / f"out{rank}").read_text().split() for rank in (0, 1))
    assert first[:5] == ["0", "0", "2", "2", "127.0.0.1"]
    assert second[:5] == ["1", "1", "2", "2", "127.0.0.1"]
    assert first[5] == second[5]
    assert first[7] == "cpu"


@pytest.mark.parametrize(("body", "expected"), [("sys.exit(0)", 0), ("sys.exit(5 if rank else 1)", 5), ("sys.exit(rank)", 1)])
def test_exit_codes(tmp_path: Path, body: str, expected: int) -> None:
    assert supervisor(tmp_path, body).run() == expected


def test_a_killed_rank_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert supervisor(tmp_path, "os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else sys.exit(1)").run() == 1
    assert "rank 1 was killed by SIGKILL" in capfd.readouterr().err


def test_a_rank_that_does_not_end_is_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank == 1:
        sys.exit(4)
    time.sleep(600)
    """
    started = time.monotonic()
    assert supervisor(tmp_path, body).run() == 4
    assert time.monotonic() - started < 60
    assert "SIGTERM" in capfd.readouterr().err


def test_the_record_outlives_a_rank_killed_while_winding_up(tmp_path: Path) -> None:
    body = f"""
    sys.path.insert(0, {str(ROOT)!r})
    from ebft_ds.train import report
    report(rank, 6 if rank == 1 else 1, "the checkpoint is damaged")
    os.kill(os.getpid(), signal.SIGKILL)
    """
    assert supervisor(tmp_path, body).run() == 6


def test_output_of_a_failed_rank_is_shown_and_logged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    assert supervisor(tmp_path, "print('line of', rank, flush=True)\nsys.exit(3 * rank)", log_folder=logs).run() == 3
    captured = capfd.readouterr()
    assert "line of 0" in captured.out
    assert "[rank 1] line of 1" in captured.err
    assert (logs / "rank_1.out").read_text() == "line of 1\n"


def test_a_message_that_all_ranks_have_is_shown_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = f"""
    sys.path.insert(0, {str(ROOT)!r})
    from ebft_ds.train import report
    report(rank, 3, "row 7 is bad")
    sys.exit(3)
    """
    assert supervisor(tmp_path, body).run() == 3
    assert capfd.readouterr().err.count("row 7 is bad") == 1


def test_log_folder_is_never_made_by_the_supervisor(tmp_path: Path) -> None:
    assert supervisor(tmp_path, "print('x')", log_folder=tmp_path / "logs").run() == 0
    assert not (tmp_path / "logs").exists()


MAIN = """
import sys
from pathlib import Path
from ebft_ds.cli.supervisor import Graces, RankSupervisor
script = sys.argv[1]
sys.exit(RankSupervisor([sys.executable, script], 2, graces=Graces(0.5, 0.5, 0.5)).run())
"""
RANKS = """
import os, signal, sys, time
rank, folder = os.environ["RANK"], os.path.dirname(os.path.abspath(__file__))
def note(number, frame):
    open(f"{folder}/got_{rank}", "a").write(signal.Signals(number).name + " ")
    if ON_TERM and number == signal.SIGTERM:
        sys.exit(7)
signal.signal(signal.SIGTERM, note)
signal.signal(signal.SIGUSR1, note)
open(f"{folder}/ready_{rank}.tmp", "w").write(str(os.getpid()))
os.replace(f"{folder}/ready_{rank}.tmp", f"{folder}/ready_{rank}")
while True:
    time.sleep(0.05)
"""


def start(folder: Path, *, ends_on_term: bool) -> tuple[subprocess.Popen[bytes], list[int]]:
    (folder / "main.py").write_text(MAIN)
    (folder / "ranks.py").write_text(RANKS.replace("ON_TERM", str(ends_on_term)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    process = subprocess.Popen([sys.executable, str(folder / "main.py"), str(folder / "ranks.py")], env=environment)
    wait_until(lambda: all((folder / f"ready_{rank}").exists() for rank in (0, 1)))
    return process, [int((folder / f"ready_{rank}").read_text()) for rank in (0, 1)]


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_reaches_all_ranks_once_and_ends_with_7(tmp_path: Path, number: signal.Signals) -> None:
    process, pids = start(tmp_path, ends_on_term=True)
    process.send_signal(number)
    assert process.wait(timeout=30) == 7
    assert [(tmp_path / f"got_{rank}").read_text() for rank in (0, 1)] == ["SIGTERM "] * 2
    assert gone(pids)


def test_usr1_is_passed_on_and_a_second_stop_kills(tmp_path: Path) -> None:
    process, pids = start(tmp_path, ends_on_term=False)
    process.send_signal(signal.SIGUSR1)
    wait_until(lambda: all((tmp_path / f"got_{rank}").exists() for rank in (0, 1)))
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: all("SIGTERM" in (tmp_path / f"got_{rank}").read_text() for rank in (0, 1)))
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 1
    assert gone(pids)
    assert (tmp_path / "got_0").read_text() == "SIGUSR1 SIGTERM "


def test_ranks_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    process, pids = start(tmp_path, ends_on_term=False)
    process.kill()
    process.wait(timeout=30)
    wait_until(lambda: gone(pids))


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"master_port {port} cannot be used") as caught:
            usable_port(port)
        assert caught.value.exit_code == 2
    assert usable_port(None) > 0
