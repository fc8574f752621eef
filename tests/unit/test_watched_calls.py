"""A call to a server that stops to listen while the call waits ends soon; one to a server that is only slow does not."""

from __future__ import annotations

import asyncio

import pytest

import ebft_ds.sidecar.watched as watched_module
from ebft_ds.sidecar.address import ServerAddress
from ebft_ds.sidecar.api import ServerUnreachable, VllmApi


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_module, "LOOK_SECONDS", 0.02)


def pause(*, closes: bool) -> str:
    """What becomes of a control call that the server answers only when told to, listening meanwhile or not."""

    async def run() -> str:
        release = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if await reader.readline():  # a mere look connects and leaves
                await release.wait()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        api = VllmApi(ServerAddress(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        call = asyncio.ensure_future(api.pause("keep", 30.0))
        while not any(t.get_name() for t in asyncio.all_tasks() if "answer" in repr(t)):
            await asyncio.sleep(0.01)
        if closes:
            server.close()
        else:
            asyncio.get_running_loop().call_later(0.5, release.set)  # many looks later
        try:
            await asyncio.wait_for(call, 20.0)
            return "answered"
        except ServerUnreachable as error:
            return str(error)
        finally:
            release.set()
            await api.close()
            server.close()

    return asyncio.run(run())


def test_a_server_that_stops_to_listen_is_given_up() -> None:
    assert "takes no connections any more" in pause(closes=True)


def test_a_slow_server_is_waited_for() -> None:
    assert pause(closes=False) == "answered"
