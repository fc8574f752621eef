"""Reward functions: what they may return, their processes, deadlines, and how a bad one ends a run."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ebft_ds.errors import ConfigError, DataError
from ebft_ds.rewards.functions import CompletionTexts, call_reward_function, load_reward_function, pickled_function
from ebft_ds.rewards.workers import RewardFunctionPool
from tests.unit import reward_functions

HERE = "tests.unit.reward_functions"


def texts_of(completions: list[str]) -> CompletionTexts:
    count = len(completions)
    return CompletionTexts(
        [f"p{i // 2}" for i in range(count)], completions, ["bb"] * count, [[i, len(t)] for i, t in enumerate(completions)]
    )


def started(*functions: Any, workers: int = 1, timeout: float = 120.0) -> RewardFunctionPool:
    pool = RewardFunctionPool([f"{HERE}:{f}" if isinstance(f, str) else f for f in functions], workers, timeout)
    pool.start()
    return pool


def same(left: list[list[float]], right: list[list[float]]) -> bool:
    return repr(left) == repr(right)


TEXTS = texts_of(["a", "", "bb", "cccc", "dd", "e", "ffff", "g"])


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_any_number_of_workers_gives_the_rewards_of_a_plain_call(workers: int) -> None:
    functions = [reward_functions.length, reward_functions.reference_overlap, reward_functions.Scaled(0.5)]
    expected = [call_reward_function("f", function, TEXTS) for function in functions]
    pool = started("length", "reference_overlap", functions[2], workers=workers)
    try:
        assert pool.names == ["length", "reference_overlap", "Scaled"]
        assert same(pool.call(TEXTS, group_size=2), expected)
        assert same(pool.call(TEXTS, group_size=2), expected)
        assert pool.call(texts_of([]), group_size=2) == [[], [], []]
    finally:
        pool.close()
    assert math.isnan(expected[0][1])


def test_groups_stay_together_and_always_go_to_the_same_worker() -> None:
    pool = started("process_and_size", workers=2)
    try:
        first, second = pool.call(TEXTS, group_size=2), pool.call(TEXTS, group_size=2)
        assert first == second
        assert len(set(first[0][:4])) == 1 == len(set(first[0][4:]))
        assert first[0][0] != first[0][4]
        uneven = pool.call(texts_of(["a"] * 6), group_size=2)[0]
        assert [round(v % 1 * 1000) for v in uneven] == [2, 2, 4, 4, 4, 4]
        with pytest.raises(ValueError, match="whole groups of 3"):
            pool.call(TEXTS, group_size=3)
    finally:
        pool.close()


def test_functions_may_use_signals_and_processes_and_do_not_pay_for_torch() -> None:
    pool = started("with_alarm", "with_processes")
    try:
        assert pool.call(texts_of(["a", "b", "c"])) == [[1.0, 1.0, 1.0], [0.0, 1.0, 4.0]]
    finally:
        pool.close()
    loaded = "import sys; import ebft_ds.rewards.worker_process, ebft_ds.rewards.functions; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True).stdout.strip() == "False"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fail", r"reward function fail raised KeyError: 'no such answer'"),
        ("short", r"reward function short returned 1 rewards for \d completions"),
        ("infinite", r"reward function infinite returned an infinite reward"),
        ("no_number", r"reward function no_number raised ValueError"),
        ("die", r"the process of reward function die \(completions \d to \d of the step\) died: killed by SIGKILL"),
    ],
)
def test_a_bad_function_is_named_and_never_scored_as_zero(name: str, message: str) -> None:
    pool = started("length", name, workers=2)
    with pytest.raises(DataError, match=message) as raised:
        pool.call(TEXTS, group_size=2)
    assert raised.value.exit_code == 3
    assert not [child for child in psutil.Process().children() if "worker_process" in " ".join(child.cmdline())]


def test_a_hanging_function_is_ended_at_its_deadline_with_what_it_started(tmp_path: Path) -> None:
    pool = started("hang", workers=2, timeout=3.0)
    began = time.monotonic()
    with pytest.raises(DataError, match=r"hang \(completions 4 to 7 of the step\) has not returned within reward_timeout, 3 s"):
        pool.call(texts_of(["a"] * 7 + ["hang"]), group_size=2)
    assert time.monotonic() - began < 60
    pool = started("leaves_a_child_and_hangs", timeout=10.0)  # time for the child's process id
    with pytest.raises(DataError, match="leaves_a_child_and_hangs"):
        pool.call(texts_of([str(tmp_path / "pid")]))
    child = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_the_deadline_is_of_one_call() -> None:
    pool = started(*["nap"] * 5, timeout=2.0)
    began = time.monotonic()
    try:
        assert pool.call(texts_of(["a"])) == [[0.0]] * 5
        assert time.monotonic() - began > 2.0
    finally:
        pool.close()


def test_functions_that_cannot_be_loaded_or_sent() -> None:
    for spec, message in [
        (f"{HERE}:missing", "cannot be imported"),
        ("no_such_package.module:f", "cannot be imported"),
        (f"{HERE}:HERE_IS_NO_FUNCTION", "is not callable"),
    ]:
        pool = RewardFunctionPool([spec], 1, 30.0)
        with pytest.raises(ConfigError, match=message):
            pool.start()
        with pytest.raises(ConfigError, match=message):
            load_reward_function(spec)
    with pytest.raises(ConfigError, match=r"<lambda> cannot be sent to a worker process.*reward_num_workers: 1"):
        RewardFunctionPool([lambda **_: [1.0]], 2, 30.0)
    in_script = type("InScript", (), {"__module__": "__main__", "__call__": lambda self, **_: [1.0]})
    sys.modules["__main__"].InScript = in_script  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="InScript is defined in the script itself"):
        pickled_function(in_script())


def test_workers_die_with_their_parent() -> None:
    script = (
        "import os, sys, time\n"
        "from ebft_ds.rewards.workers import RewardFunctionPool\n"
        f"pool = RewardFunctionPool(['{HERE}:hang'] , 2, 600.0)\n"
        "pool.start()\n"
        "print(*(w.pid for w in pool._workers), flush=True)\n"
        "from ebft_ds.rewards.functions import CompletionTexts\n"
        "pool.call(CompletionTexts(['p'] * 2, ['hang'] * 2, [''] * 2, [[]] * 2))\n"
    )
    root = Path(__file__).resolve().parents[2]
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(root)}, cwd=root
    )
    assert parent.stdout is not None
    workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
