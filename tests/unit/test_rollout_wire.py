"""Frames and tensors over a socket pair."""

from __future__ import annotations

import socket
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebft_ds.rollout.messages import Bucket, Heartbeat, Stop, ToProcess
from ebft_ds.rollout.tensors import DTYPES, from_bytes, to_bytes
from ebft_ds.rollout.wire import Channel, ChannelClosed, ChannelTimeout


@given(st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=3)), max_size=6), st.integers(0, 99))
@settings(deadline=None)
def test_tensors_come_back_bit_for_bit(kinds: list[tuple[str, list[int]]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = [(f"t{i}", torch.randn(shape, generator=generator).to(DTYPES[dtype])) for i, (dtype, shape) in enumerate(kinds)]
    specs, payload = to_bytes(tensors)
    found = from_bytes(specs, bytearray(b"".join(payload)))
    for (name, sent), (other, got) in zip(tensors, found, strict=True):
        assert name == other
        assert got.dtype == sent.dtype
        assert torch.equal(got, sent)


def test_a_payload_of_another_size_is_refused() -> None:
    specs, payload = to_bytes([("a", torch.ones(3)), ("b", torch.ones(2).bfloat16())])
    whole = bytearray(b"".join(payload))
    with pytest.raises(ValueError, match="b: the payload of 15 bytes ends too early"):
        from_bytes(specs, whole[:-1])
    with pytest.raises(ValueError, match="4 bytes of the payload belong to no tensor"):
        from_bytes(specs, whole + bytes(4))


def test_frames_larger_than_the_socket_buffer_arrive_whole_and_in_order() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(ours, ToProcess), Channel(theirs, ToProcess)
    tensors = [("w", torch.arange(3_000_000, dtype=torch.float32))]
    specs, payload = to_bytes(tensors)

    def send() -> None:
        for number in range(3):
            sender.send(Bucket(number, specs), payload, timeout=30.0)

    thread = threading.Thread(target=send)
    thread.start()
    for number in range(3):
        message, got = receiver.receive(timeout=30.0)
        assert message.id == number
        assert torch.equal(from_bytes(message.tensors, got)[0][1], tensors[0][1])
    thread.join()


def test_every_wait_has_an_end() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours, Heartbeat)
    with pytest.raises(ChannelTimeout):
        channel.receive(timeout=0.01)
    with pytest.raises(ChannelTimeout):
        channel.send(Stop(), [memoryview(bytearray(10_000_000))], timeout=0.01)
    with pytest.raises(ChannelClosed, match="cut short"):
        channel.send(Stop())
    theirs.close()
    with pytest.raises(ChannelClosed):
        channel.receive(timeout=1.0)


def test_closing_wakes_a_receiver() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours, ToProcess)
    errors: list[BaseException] = []

    def receive() -> None:
        try:
            channel.receive()
        except ChannelClosed as error:
            errors.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    channel.close()
    thread.join(5.0)
    assert len(errors) == 1
    theirs.close()


def test_what_is_not_a_frame_is_refused() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ChannelClosed, match="not a frame"):
        Channel(ours, ToProcess).receive(timeout=1.0)
    theirs.close()
