"""metrics.jsonl and TensorBoard on real files: resume, merging, NaN, a full disk."""

from __future__ import annotations

import errno
import io
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ebft_ds.errors import ConfigError
from ebft_ds.monitor import MetricsWriter, draw_reliability, read_metrics
from ebft_ds.monitor.jsonl import LineSink, trim_after
from ebft_ds.rewards.calibration import calibration_bins


def steps_of(path: Path) -> list[int]:
    return [values["step"] for values in read_metrics(path)]


def scalar_points(output_dir: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(output_dir / "tb"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_one_object_a_step_on_disk_at_once(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=False, start_step=0)
    writer.write(1, {"loss": 0.1 + 0.2, "policy_version": 1, "note": "x"})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 0.30000000000000004, "policy_version": 1, "note": "x"}\n'
    writer.write(2, {"loss": np.float32(0.5)})
    assert read_metrics(tmp_path)[1] == {"step": 2, "loss": 0.5}
    writer.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), None])
def test_values_that_json_cannot_hold_are_null(tmp_path: Path, value: Any) -> None:
    with MetricsWriter(tmp_path, tensorboard=True, start_step=0) as writer:
        writer.write(1, {"loss": value})
    assert json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail) == {"step": 1, "loss": None}


def test_an_evaluation_merges_into_the_object_of_its_step(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=True, start_step=0) as writer:
        writer.write(0, {"eval/alignment": 1.0})
        writer.write(1, {"loss": 3.25})
        writer.write(1, {"eval/alignment": 1.5, "loss": 3.0})
        writer.write(2, {"loss": 2.0})
    assert read_metrics(tmp_path) == [
        {"step": 0, "eval/alignment": 1.0},
        {"step": 1, "loss": 3.0, "eval/alignment": 1.5},
        {"step": 2, "loss": 2.0},
    ]
    assert scalar_points(tmp_path, "eval/alignment") == [(0, 1.0), (1, 1.5)]
    assert scalar_points(tmp_path, "train/loss") == [(1, 3.25), (2, 2.0)]


def test_steps_cannot_go_back(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False, start_step=0) as writer:
        writer.write(3, {})
        with pytest.raises(ValueError, match="step 2 come after those of step 3"):
            writer.write(2, {})


def test_resume_moves_later_lines_out_and_tensorboard_forgets_them(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=True, start_step=0) as writer:
        for step in range(1, 8):
            writer.write(step, {"loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')  # killed in the middle of a line
    with MetricsWriter(tmp_path, tensorboard=True, start_step=4) as writer:
        assert writer.moved_lines == 4
        writer.write(4, {"eval/alignment": 1.0})
        for step in range(5, 10):
            writer.write(step, {"loss": float(step * 10)})
    expected = [1.0, 2.0, 3.0, 4.0, 50.0, 60.0, 70.0, 80.0, 90.0]
    assert [values["loss"] for values in read_metrics(tmp_path)] == expected
    assert steps_of(tmp_path) == list(range(1, 10))
    assert read_metrics(tmp_path)[3]["eval/alignment"] == 1.0
    assert scalar_points(tmp_path, "train/loss") == list(enumerate(expected, start=1))
    replaced = (tmp_path / "metrics.replaced.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in replaced[:3]] == [5, 6, 7]
    assert replaced[3] == '{"step": 8, "lo'


def test_three_resumes_keep_tensorboard_in_order(tmp_path: Path) -> None:
    for start in (0, 2, 1, 3):
        with MetricsWriter(tmp_path, tensorboard=True, start_step=start) as writer:
            for step in range(start + 1, start + 4):
                writer.write(step, {"loss": float(start)})
    steps = [step for step, _ in scalar_points(tmp_path, "train/loss")]
    assert steps == steps_of(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_the_configuration_is_shown_as_text(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=True, start_step=0) as writer:
        writer.write_text("config", "seed: 1\nmodel: x")
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert events.Tensors("config")[0].tensor_proto.string_val == [b"    seed: 1\n    model: x"]
    assert events.summary_metadata["config"].plugin_data.plugin_name == "text"


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        MetricsWriter(tmp_path / "file" / "run", tensorboard=False, start_step=0)


def test_a_full_disk_costs_neither_the_run_nor_the_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=True, start_step=0)
    writer.write(1, {"loss": 1.0})
    real_write = os.pwrite

    def half_then_full(descriptor: int, data: Any, offset: int) -> int:
        real_write(descriptor, bytes(data)[:5], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "pwrite", half_then_full)
        patch.setattr("tensorboard.summary.writer.record_writer.RecordWriter.write", lambda self, data: half_then_full(1, b"", 0))
        writer.write(1, {"eval/alignment": 1.0})
        writer.write(2, {"loss": 2.0})
        writer.write(3, {"loss": 3.0})
    assert [record.message.count("No space left") for record in caplog.records] == [1, 1]
    writer.write(4, {"loss": 4.0})
    writer.close()
    assert read_metrics(tmp_path) == [
        {"step": 1, "loss": 1.0, "eval/alignment": 1.0},
        *({"step": step, "loss": float(step)} for step in (2, 3, 4)),
    ]
    assert scalar_points(tmp_path, "train/loss") == [(step, float(step)) for step in (1, 2, 3, 4)]
    assert scalar_points(tmp_path, "eval/alignment") == [(1, 1.0)]


def test_a_disk_that_stays_full_gives_up_the_oldest_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ebft_ds.monitor.jsonl.MAX_PENDING_LINES", 3)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sink = LineSink(tmp_path / "x.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        for number in range(5):
            sink.append(str(number).encode())
    with caplog.at_level(logging.WARNING):
        sink.close()
    assert (tmp_path / "x.jsonl").read_bytes() == b"2\n3\n4\n"
    assert "2 lines could not be written" in caplog.text


@settings(deadline=None, max_examples=50)
@given(
    steps=st.lists(st.integers(0, 12), max_size=15),
    junk=st.sampled_from([b"", b"{", b"[1]\n", b'{"step": "x"}\n', b"\xff\n"]),
    resume=st.integers(0, 12),
    unique=st.booleans(),
)
def test_trimming_leaves_ordered_steps_and_loses_nothing(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], junk: bytes, resume: int, unique: bool
) -> None:
    path = tmp_path_factory.mktemp("trim") / "m.jsonl"
    content = b"".join(b'{"step": %d, "n": %d}\n' % (step, number) for number, step in enumerate(steps)) + junk
    path.write_bytes(content)
    moved = trim_after(path, resume, unique=unique)
    kept = read_metrics(path)
    replaced_path = path.with_name("m.replaced.jsonl")
    replaced = replaced_path.read_bytes() if replaced_path.exists() else b""
    kept_steps = [values["step"] for values in kept]
    assert kept_steps == sorted(set(kept_steps) if unique else kept_steps)
    assert all(step <= resume for step in kept_steps)
    assert len(kept) + moved == len(steps) + bool(junk)
    assert sorted((path.read_bytes() + replaced).split()) == sorted(content.split())
    assert trim_after(path, resume, unique=unique) == 0


def test_histograms_and_figures_reach_tensorboard(tmp_path: Path) -> None:
    from PIL import Image

    bins = calibration_bins([1.0, -0.5, 0.0, 3.0], 4)
    with MetricsWriter(tmp_path, tensorboard=True, start_step=0) as writer:
        writer.histogram("eval/chosen_rewards", [0.0, 1.0, 1.0, 4.0, math.nan], 2)
        writer.histogram("eval/constant", [2.0, 2.0], 2)
        writer.histogram("eval/none", [math.inf], 2)
        writer.figure("eval/reliability", draw_reliability(bins, 0.25), 2)
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert set(events.Tags()["histograms"]) == {"eval/chosen_rewards", "eval/constant"}
    found = events.Histograms("eval/chosen_rewards")[0]
    assert (found.step, found.histogram_value.num, found.histogram_value.max) == (2, 4, 4.0)
    assert sum(found.histogram_value.bucket) == 4
    assert len(found.histogram_value.bucket) == len(found.histogram_value.bucket_limit) > 1
    assert events.Histograms("eval/constant")[0].histogram_value.bucket == [2]
    image = events.Images("eval/reliability")[0]
    shown = Image.open(io.BytesIO(image.encoded_image_string))
    assert shown.size == (image.width, image.height)
    assert len(shown.getcolors() or []) > 4, "bars, lines and text"


def test_without_tensorboard_figures_go_nowhere(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False, start_step=0) as writer:
        writer.histogram("eval/chosen_rewards", [0.0, 1.0], 1)
        writer.figure("eval/reliability", draw_reliability(calibration_bins([]), math.nan), 1)
    assert not (tmp_path / "tb").exists()
