"""A TCP port of this machine, taken for a server that starts later and may be started again."""

from __future__ import annotations

import errno
import socket

from ebft_ds.errors import ConfigError


class PortHold:
    """Keeps a port bound without listening, so that no other program and no outgoing connection is given it; the server, which sets
    SO_REUSEADDR as vLLM does, can bind and listen there all the same."""

    def __init__(self, host: str, port: int | None = None) -> None:
        """`port`: None for a free one. Errors: ConfigError if the host is none of this machine's or the port is in use."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            if port is not None:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a former server may linger
            self._socket.bind((host, port or 0))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except OSError as error:
            self._socket.close()
            raise ConfigError(_reason(host, port, error)) from None
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


def _reason(host: str, port: int | None, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"vllm_port {port} on {host} is in use by another program; name another one, or leave it out for a free one"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"vllm_host {host} is no address of this machine"
    if isinstance(error, socket.gaierror):
        return f"vllm_host {host} cannot be resolved: {error.strerror}"
    return f"vllm_host {host}, vllm_port {port}: {error.strerror}"
