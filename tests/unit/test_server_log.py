"""The part of a server's log that an error message shows."""

from __future__ import annotations

from pathlib import Path

from ebft_ds.sidecar.server_log import TAIL_LINES, log_end


def test_the_root_cause_far_up_is_shown_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "vllm_0.log"
    old = ["=== first start", "ValueError: of a former start"]
    cause = ["(Worker pid=7) ERROR 11-30 18:36:52 [executor.py:1063] RuntimeError: out of blocks"] * 3
    path.write_text("\n".join([*old, "", "=== second start", "loading", *cause, *(f"frame {i}" for i in range(100)), "server ends"]))
    lines = log_end(path).splitlines()
    assert lines[0] == f"errors in {path}:"
    assert lines[1:3] == ["  RuntimeError: out of blocks", "  its end:"]
    assert lines[-1] == "  server ends"
    assert len(lines) == 3 + TAIL_LINES
    assert "former" not in log_end(path)


def test_a_short_log_is_shown_whole(tmp_path: Path) -> None:
    path = tmp_path / "vllm_0.log"
    path.write_bytes(b"=== start\nValueError: \xff\n")
    assert log_end(path).splitlines() == [f"the end of {path}:", "  ValueError: \\xff"]


def test_a_missing_log_is_said(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in log_end(tmp_path / "none.log")
