"""Who may reach a server: the middleware, keys, URLs and endpoints files."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from typing import Any

import pytest

from ebft_ds.config import AsyncEBFTConfig
from ebft_ds.errors import ConfigError
from ebft_ds.sidecar.address import ServerAddress
from ebft_ds.sidecar.auth import KEY_VARIABLE, RequireKey
from ebft_ds.sidecar.endpoints import advertised_host, normalised_url, read_endpoints, resolve_servers, write_endpoints
from ebft_ds.sidecar.keys import given_key, new_key


async def answers(middleware: RequireKey, scope: dict[str, Any]) -> list[dict[str, Any]]:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    await middleware(scope, receive, send)
    return sent


def status(path: str, *headers: tuple[bytes, bytes], kind: str = "http", method: str = "GET") -> Any:
    """200 if the request came through to the application, else what the middleware said."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    first = asyncio.run(
        answers(RequireKey(application, "right"), {"type": kind, "path": path, "method": method, "headers": list(headers)})
    )[0]
    return first.get("status", first["type"])


@pytest.mark.parametrize("path", ["/pause", "/update_weights", "/collective_rpc", "/v1/models", "/openapi.json", "/health/x", "/"])
def test_nothing_but_health_is_open(path: str) -> None:
    assert status(path) == 401
    assert status(path, method="OPTIONS") == 401
    assert status(path, (b"authorization", b"Bearer wrong")) == 401
    assert status(path, (b"authorization", b"right")) == 401
    assert status(path, (b"authorization", b"Bearer right"), (b"authorization", b"Bearer wrong")) == 401
    assert status(path, (b"authorization", b"Bearer right")) == 200


def test_health_and_lifespan_pass_and_websockets_do_not() -> None:
    assert status("/health") == 200
    assert status("", kind="lifespan") == 200
    assert status("/v1/realtime", kind="websocket") == "websocket.close"
    assert status("/health", kind="websocket") == "websocket.close"


def test_no_server_comes_up_without_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match=KEY_VARIABLE):
        RequireKey(None)  # type: ignore[arg-type]


def recipe(url: str | list[str], **fields: Any) -> AsyncEBFTConfig:
    return AsyncEBFTConfig(vllm_server_base_url=url, **fields)


@pytest.mark.parametrize(
    ("written", "url"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("localhost:8000/", "http://localhost:8000"),
        ("http://node7:8000/v1/", "http://node7:8000"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("http://node7", "http://node7:80"),
        ("https://node7", "https://node7:443"),
    ],
)
def test_urls_are_normalised(written: str, url: str) -> None:
    assert normalised_url(written) == url


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("http://0.0.0.0:8000", "an address to bind to"),
        ("http://[::]:8000", "an address to bind to"),
        ("ftp://node7:8000", "no URL of a server"),
        ("http://node7:99999", "is no URL"),
        ("http://node7:8000/v1/completions", "has the path"),
        ("http://me:secret@node7:8000", "a key in the URL ends up in logs"),
        ("", "no URL of a server"),
    ],
)
def test_what_is_no_url_is_refused_with_the_reason(written: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        normalised_url(written)
    assert "secret" not in str(caught.value)


def test_a_server_of_another_machine_needs_a_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"http://node7:8000 is another machine and there is no key"):
        resolve_servers(recipe("http://node7:8000"), {})
    key_file = tmp_path / "key"
    key_file.write_text("abc\n")
    assert resolve_servers(recipe("http://node7:8000", vllm_api_key_file=str(key_file)), {})[0].api_key == "abc"
    assert resolve_servers(recipe("http://node7:8000"), {KEY_VARIABLE: "xyz"})[0].api_key == "xyz"
    assert [a.api_key for a in resolve_servers(recipe(["http://127.0.0.1:1", "http://localhost:2"]), {})] == [None, None]


def test_a_server_counts_once() -> None:
    with pytest.raises(ConfigError, match="more than once"):
        resolve_servers(recipe(["http://127.0.0.1:1", "127.0.0.1:1/v1"]), {})


def test_transports_that_need_one_host_or_a_shared_folder_say_so() -> None:
    environ = {KEY_VARIABLE: "k"}
    with pytest.raises(ConfigError, match="sync_transport: ipc works on one host"):
        resolve_servers(recipe("http://node7:1", sync_transport="ipc"), environ)
    with pytest.raises(ConfigError, match="set sync_dir"):
        resolve_servers(recipe("http://node7:1", sync_transport="disk"), environ)
    with pytest.raises(ConfigError, match="set sync_dir"):
        resolve_servers(recipe("http://node7:1", sync_mode="adapter"), environ)
    resolve_servers(recipe("http://node7:1", sync_transport="disk", sync_dir="/shared"), environ)
    resolve_servers(recipe("http://127.0.0.1:1", sync_transport="disk"), {})


def test_an_endpoints_file_is_private_and_brings_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "run" / "endpoints.json"
    written = [ServerAddress("http://node7:8000", "secret"), ServerAddress("http://node7:8001", "secret")]
    write_endpoints(path, written)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_endpoints(path) == written
    assert resolve_servers(recipe(f"file:{path}"), {}) == written
    assert list(path.parent.iterdir()) == [path]


def test_an_endpoints_file_names_no_wildcard(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vllm_advertise_host"):
        write_endpoints(tmp_path / "e.json", [ServerAddress("http://0.0.0.0:8000", "k")])
    assert not (tmp_path / "e.json").exists()
    address = advertised_host("0.0.0.0", "node7")
    assert address == "node7"
    with pytest.raises(ConfigError, match="an address to bind to"):
        advertised_host("0.0.0.0", "0.0.0.0")
    assert advertised_host("127.0.0.1", None) == "127.0.0.1"


def test_unusable_endpoints_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_servers(recipe(f"file:{tmp_path / 'missing'}"), {})
    (tmp_path / "half").write_text('{"servers": [')
    with pytest.raises(ConfigError, match="cannot be used"):
        read_endpoints(tmp_path / "half")


def test_keys(tmp_path: Path) -> None:
    assert given_key(None, {}) is None
    assert new_key() != new_key()
    for content in ("", "two words", "two\nlines"):
        (tmp_path / "key").write_text(content)
        with pytest.raises(ConfigError, match="no usable key"):
            given_key(str(tmp_path / "key"), {})
    with pytest.raises(ConfigError, match="cannot be read"):
        given_key(str(tmp_path / "missing"), {})


def test_a_key_reaches_no_text() -> None:
    assert "secret" not in repr(ServerAddress("http://node7:1", "secret"))
