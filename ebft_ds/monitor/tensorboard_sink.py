"""TensorBoard event files, written synchronously with TensorBoard's own record writer: an error shows where it happens."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ebft_ds.monitor.reliability import Figure

logger = logging.getLogger(__name__)

MAX_PENDING_EVENTS = 10_000
HISTOGRAM_BUCKETS = 30


class TensorBoardSink:
    """Scalars, texts, histograms and figures of one run under `folder`.

    On resume after step N, TensorBoard forgets the points of later steps.

    A failed write is reported once; the points wait and go to a new event file as soon as one can be written.
    """

    def __init__(self, folder: Path, *, start_step: int) -> None:
        self._folder = folder
        self._purge_step = start_step + 1 if start_step > 0 else None
        self._file: Any = None
        self._records: Any = None
        self._pending: list[bytes] = []
        self._failing = False

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One point per tag. NaN is kept: TensorBoard marks it."""
        from tensorboard.compat.proto import summary_pb2

        self._put(step, [summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])

    def text(self, tag: str, text: str, step: int) -> None:
        """A Markdown text."""
        from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
        from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData

        plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text", content=TextPluginData(version=0).SerializeToString())
        shape = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)])
        tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[text.encode(errors="replace")], tensor_shape=shape)
        metadata = summary_pb2.SummaryMetadata(plugin_data=plugin)
        self._put(step, [summary_pb2.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])

    def histogram(self, tag: str, values: Sequence[float], step: int) -> None:
        """The distribution of the finite values; nothing is written without one."""
        from tensorboard.compat.proto import histogram_pb2, summary_pb2

        known = [value for value in values if math.isfinite(value)]
        if not known:
            return
        low, high = min(known), max(known)
        buckets = HISTOGRAM_BUCKETS if high > low else 1
        counts = [0] * buckets
        for value in known:
            counts[min(int((value - low) / (high - low) * buckets), buckets - 1) if buckets > 1 else 0] += 1
        histogram = histogram_pb2.HistogramProto(
            min=low,
            max=high,
            num=len(known),
            sum=math.fsum(known),
            sum_squares=math.fsum(value * value for value in known),
            bucket_limit=[low + (high - low) * (i + 1) / buckets for i in range(buckets)],
            bucket=counts,
        )
        self._put(step, [summary_pb2.Summary.Value(tag=tag, histo=histogram)])

    def figure(self, tag: str, figure: Figure, step: int) -> None:
        """An image."""
        from tensorboard.compat.proto import summary_pb2

        image = summary_pb2.Summary.Image(height=figure.height, width=figure.width, colorspace=3, encoded_image_string=figure.png)
        self._put(step, [summary_pb2.Summary.Value(tag=tag, image=image)])

    def close(self) -> None:
        self._flush()
        self._drop_file()
        if self._pending:
            logger.warning("TensorBoard: %d steps could not be written to %s", len(self._pending), self._folder)

    def _put(self, step: int, values: list[Any]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        event = event_pb2.Event(wall_time=time.time(), step=step, summary=summary_pb2.Summary(value=values))
        self._pending = [*self._pending[-MAX_PENDING_EVENTS + 1 :], event.SerializeToString()]
        self._flush()

    def _flush(self) -> None:
        try:
            if self._records is None:
                self._open()
            for record in self._pending:
                self._records.write(record)
            self._records.flush()
        except OSError as error:
            self._drop_file()  # a half record ends a file for its readers; the retry starts a new one
            if not self._failing:
                logger.warning(
                    "TensorBoard files in %s cannot be written (%s); the run goes on and tries again", self._folder, error.strerror
                )
            self._failing = True
            return
        self._failing = False
        self._pending.clear()

    def _open(self) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = self._next_path().open("xb", buffering=1024 * 1024)
        self._records = RecordWriter(self._file)
        now = time.time()
        self._records.write(event_pb2.Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        if self._purge_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._records.write(event_pb2.Event(wall_time=now, step=self._purge_step, session_log=start).SerializeToString())
            self._records.flush()
            self._purge_step = None  # a later file of this run must not make TensorBoard forget this run's own points

    def _next_path(self) -> Path:
        """TensorBoard reads files in the order of their names, so the seconds in a name exceed those of every file before it."""
        earlier = [int(part) for path in self._folder.glob("events.out.tfevents.*") if (part := path.name.split(".")[3]).isdigit()]
        seconds = max([int(time.time()), *(second + 1 for second in earlier)])
        return self._folder / f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}"

    def _drop_file(self) -> None:
        file, self._file, self._records = self._file, None, None
        if file is not None:
            try:
                file.close()
            except OSError as error:  # the buffer still holds what could not be written
                logger.debug("closing a TensorBoard file: %s", error)
