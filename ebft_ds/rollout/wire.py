"""Frames over a socket: a fixed prefix (header bytes, payload bytes), a msgpack header, raw payload bytes.

The socket is non-blocking and every wait has its own deadline: a thread that receives never holds up one that sends.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

_PREFIX = struct.Struct("<4sIQ")
_MAGIC = b"ebft"


class ChannelClosed(ConnectionError):
    """The other side is gone."""


class ChannelTimeout(TimeoutError):
    """The other side did not read or write in time."""


class Channel:
    """A framed, two-way message channel. One thread may receive; any thread may send."""

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        """`receives`: the union of message structs that the other side sends."""
        sock.setblocking(False)
        self._socket = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._send_lock = threading.Lock()
        self._broken = False

    def send(self, message: msgspec.Struct, payload: Sequence[memoryview] = (), timeout: float | None = None) -> None:
        """Send one frame whole.

        Raises:
            ChannelClosed: the other side is gone, or an earlier frame was cut short.
            ChannelTimeout: not taken within `timeout` seconds; the channel is of no use afterwards.
        """
        header = self._encoder.encode(message)
        parts = [memoryview(_PREFIX.pack(_MAGIC, len(header), sum(part.nbytes for part in payload))), memoryview(header), *payload]
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._send_lock:
            if self._broken:
                raise ChannelClosed("an earlier message was cut short")
            self._broken = True
            for part in parts:
                self._send_bytes(part.cast("B") if part.nbytes else part, deadline)
            self._broken = False

    def receive(self, timeout: float | None = None) -> tuple[Any, bytearray]:
        """The next message and its payload.

        Raises:
            ChannelClosed: the other side closed the channel or died.
            ChannelTimeout: nothing, or not the whole frame, within `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        magic, header_bytes, payload_bytes = _PREFIX.unpack(self._receive_bytes(_PREFIX.size, deadline))
        if magic != _MAGIC:
            raise ChannelClosed(f"not a frame of this protocol: {magic!r}")
        message = self._decoder.decode(self._receive_bytes(header_bytes, deadline))
        return message, self._receive_bytes(payload_bytes, deadline)

    def close(self) -> None:
        """Close both directions; a receive that waits elsewhere ends with ChannelClosed. May be called twice."""
        with contextlib.suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send_bytes(self, data: memoryview, deadline: float | None) -> None:
        while data.nbytes:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
            except OSError as error:
                raise ChannelClosed(str(error)) from error

    def _receive_bytes(self, count: int, deadline: float | None) -> bytearray:
        buffer = bytearray(count)
        view = memoryview(buffer)
        while view.nbytes:
            try:
                received = self._socket.recv_into(view)
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)
                continue
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if received == 0:
                raise ChannelClosed("the other side closed the connection")
            view = view[received:]
        return buffer

    def _wait(self, event: int, deadline: float | None) -> None:
        poller = select.poll()
        try:
            poller.register(self._socket, event)
        except (OSError, ValueError) as error:
            raise ChannelClosed("the connection was closed") from error
        left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        if not poller.poll(left):
            raise ChannelTimeout("no answer in time")
