"""Where running servers are: from URLs of a recipe or from the file that `ebft-ds serve --endpoints` writes."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from ebft_ds.config.engine_choice import transport_of
from ebft_ds.config.recipe import RecipeConfig
from ebft_ds.errors import ConfigError
from ebft_ds.sidecar.address import ServerAddress, is_loopback
from ebft_ds.sidecar.auth import KEY_VARIABLE
from ebft_ds.sidecar.keys import given_key

FILE_PREFIX = "file:"
WILDCARDS = frozenset({"0.0.0.0", "::", "0"})
"""Addresses that a server may bind to and nobody can connect to."""


class _Server(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    api_key: str | None = None


class _Endpoints(msgspec.Struct, forbid_unknown_fields=True):
    servers: list[_Server]


def resolve_servers(config: RecipeConfig, environ: Mapping[str, str], *, on_cpu: bool = False) -> list[ServerAddress]:
    """Addresses and keys of the servers that `vllm_server_base_url` names: URLs, or `file:PATH` of an endpoints file.

    Errors: ConfigError for a URL that is none, that would expose the control routes (another host without a key), or that the recipe's
    transport cannot reach.
    """
    vllm = config.vllm
    named = vllm.vllm_server_base_url
    entries = [named] if isinstance(named, str) else list(named or [])
    if not entries:
        raise ConfigError("vllm_server_base_url names no server")
    key = given_key(vllm.vllm_api_key_file, environ)
    found: list[ServerAddress] = []
    for entry in entries:
        if entry.startswith(FILE_PREFIX):
            found += [_checked(server.url, server.api_key or key) for server in read_endpoints(Path(entry.removeprefix(FILE_PREFIX)))]
        else:
            found.append(_checked(entry, key))
    doubled = sorted({address.url for address in found if sum(other.url == address.url for other in found) > 1})
    if doubled:
        raise ConfigError(f"vllm_server_base_url names {', '.join(doubled)} more than once")
    _check_reach(config, found, on_cpu)
    return found


def normalised_url(url: str) -> str:
    """`http://host:port`. Accepts a missing scheme, a trailing slash and `/v1`. Errors: ConfigError for anything else."""
    text = url.strip() if "://" in url else f"http://{url.strip()}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"vllm_server_base_url {url!r} is no URL: {error}") from None
    example = "write http://HOST:PORT"
    if parts.username or parts.password:
        raise ConfigError(
            f"vllm_server_base_url {parts.hostname}: a key in the URL ends up in logs; use vllm_api_key_file or {KEY_VARIABLE}"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"vllm_server_base_url {url!r} is no URL of a server; {example}")
    if parts.path.rstrip("/") not in ("", "/v1"):
        raise ConfigError(f"vllm_server_base_url {url!r} has the path {parts.path}; the routes lie at the top: {example}")
    if parts.hostname in WILDCARDS:
        raise ConfigError(
            f"vllm_server_base_url {url!r}: {parts.hostname} is an address to bind to, not one to connect to; name the server's host "
            "(127.0.0.1 on the same machine)"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port or (443 if parts.scheme == 'https' else 80)}"


def _checked(url: str, key: str | None) -> ServerAddress:
    address = ServerAddress(normalised_url(url), key)
    if key is None and not address.is_local:
        raise ConfigError(
            f"vllm_server_base_url {address.url} is another machine and there is no key: whoever reaches that server could pause it, "
            f"replace its weights and run code in it. Start it with `ebft-ds serve`, which makes a key, and give it here by "
            f"vllm_api_key_file, {KEY_VARIABLE}, or vllm_server_base_url: file:ENDPOINTS"
        )
    return address


def _check_reach(config: RecipeConfig, servers: Sequence[ServerAddress], on_cpu: bool) -> None:
    transport = transport_of(config, on_cpu=on_cpu)
    remote = [address.url for address in servers if not address.is_local]
    if not remote:
        return
    if transport == "ipc":
        raise ConfigError(f"sync_transport: ipc works on one host, and {remote[0]} is another; use nccl, gloo or disk")
    if transport in ("disk", "adapter") and config.rollout.sync_dir is None:
        way = "sync_mode: adapter" if transport == "adapter" else "sync_transport: disk"
        raise ConfigError(f"{way} sends weights through files, and {remote[0]} is another host: set sync_dir to a folder that both see")


def write_endpoints(path: Path, servers: Sequence[ServerAddress]) -> None:
    """Write addresses and keys, readable by this user alone, at once or not at all. Errors: ConfigError."""
    for address in servers:
        if address.host in WILDCARDS:
            raise ConfigError(f"{address.url} cannot be connected to; set vllm_advertise_host")
    content = msgspec.json.format(msgspec.json.encode(_Endpoints([_Server(a.url, a.api_key) for a in servers])), indent=2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    except OSError as error:
        raise ConfigError(f"the endpoints file {path} cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, path)
    except OSError as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise ConfigError(f"the endpoints file {path} cannot be written: {error.strerror}") from None


def read_endpoints(path: Path) -> list[ServerAddress]:
    """Errors: ConfigError for a file that is missing or is no endpoints file."""
    place = path.expanduser()
    try:
        servers = msgspec.json.decode(place.read_bytes(), type=_Endpoints).servers
    except FileNotFoundError:
        raise ConfigError(
            f"endpoints file {place} does not exist; `ebft-ds serve RECIPE --endpoints {place}` writes it once it serves"
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"endpoints file {place} cannot be used: {error}") from None
    return [ServerAddress(server.url, server.api_key) for server in servers]


def advertised_host(host: str, advertise: str | None) -> str:
    """The name in a started server's URL. Errors: ConfigError where other nodes could not use it."""
    if advertise is not None:
        if advertise in WILDCARDS:
            raise ConfigError(f"vllm_advertise_host {advertise} is an address to bind to; give the name that other nodes know")
        return advertise
    if host not in WILDCARDS:
        return host
    found = routable_address()
    if found is None or is_loopback(found):
        raise ConfigError(f"vllm_host {host}: this machine's address was not found out; set vllm_advertise_host to it")
    return found


def routable_address() -> str | None:
    """This machine's address on the way to the outside; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # a documentation address
            address: str = probe.getsockname()[0]
        except OSError:
            return None
    return address
