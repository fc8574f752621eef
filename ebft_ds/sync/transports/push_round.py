"""One push to the receivers inside the servers: announce, send, wait until all have everything, switch; or give up everywhere."""

from __future__ import annotations

import concurrent.futures
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol, TypeVar

from ebft_ds.errors import EbftError, RolloutError, WeightSyncError
from ebft_ds.rollout.manifest import TensorSpec, WeightManifest
from ebft_ds.rollout.tensors import dtype_name
from ebft_ds.sidecar.address import ServerAddress
from ebft_ds.sidecar.api import ServerUnreachable, VllmApi
from ebft_ds.sidecar.control import ControlLoop
from ebft_ds.sidecar.push_ops import Abort, Announce, Apply, DiskWay, GlooWay, Reply, Status
from ebft_ds.sync.transport import Bucket
from ebft_ds.sync.transports.deadline import Deadline
from ebft_ds.sync.transports.switch import Switch

logger = logging.getLogger(__name__)
T = TypeVar("T")

LOOK_SECONDS = 5.0
POLL_SECONDS = 0.02


class SenderError(WeightSyncError):
    """The trainer's own side of a push failed; no server is to blame."""


def new_push_id(version_name: str) -> str:
    """Distinct for every attempt."""
    return f"{version_name}/{secrets.token_hex(4)}"


class Way(Protocol):
    """How the bytes of one push travel. Its blocking work happens in threads of its own."""

    def open(self, server: ServerAddress, num_workers: int, deadline: Deadline) -> GlooWay | DiskWay:
        """What the announcement says to this server."""
        ...

    def connect(self, server: ServerAddress, deadline: Deadline) -> Future[None]:
        """After the server has taken the announcement."""
        ...

    def send(self, bucket: Bucket, servers: Iterable[ServerAddress], deadline: Deadline) -> dict[ServerAddress, Future[None]]:
        """One bucket to every server. The tensors are let go of when the futures are done."""
        ...

    def seal(self, servers: Iterable[ServerAddress], deadline: Deadline) -> dict[ServerAddress, Future[None]]:
        """No more buckets will come."""
        ...

    def close(self) -> None:
        """Release everything, also after a failure; may be called twice."""
        ...


class PushRound:
    """`version_name`: what the servers are labelled with. Use `run` once."""

    def __init__(
        self,
        control: ControlLoop,
        way: Way,
        manifest: WeightManifest,
        push_id: str,
        version_name: str,
        servers: Iterable[ServerAddress],
        deadline: Deadline,
    ) -> None:
        self._control = control
        self._way = way
        self._manifest = manifest
        self._name = version_name
        self._servers = list(servers)
        self._deadline = deadline
        self._push_id = push_id
        self._lost: dict[ServerAddress, BaseException] = {}
        self._unsent: dict[str, TensorSpec] = {spec.name: spec for spec in manifest.tensors}

    def run(self, buckets: Iterable[Bucket]) -> dict[str, float]:
        """URL of every server that confirmed -> seconds that its generation stood still. Raises like WeightTransport.push."""
        try:
            self._announce()
            self._send(buckets)
            self._await_received()
            return self._switch()
        except BaseException:
            self._abort()
            raise
        finally:
            self._way.close()

    def _announce(self) -> None:
        workers = self._each(lambda api: api.num_workers(self._deadline.share), "asking for its workers")
        ways = {server: self._way.open(server, count, self._deadline) for server, count in workers.items()}

        def announce(api: VllmApi) -> Awaitable[list[Reply]]:
            op = Announce(self._push_id, self._manifest, self._deadline.left, ways[api.address])
            return api.push_op(op, self._deadline.share)

        self._check_replies(self._each(announce, "announcing"))
        self._wait({server: self._way.connect(server, self._deadline) for server in self._servers}, "connecting")

    def _send(self, buckets: Iterable[Bucket]) -> None:
        """At most two buckets exist: one on its way, and the one that is being gathered meanwhile."""
        sending: dict[ServerAddress, Future[None]] = {}
        iterator = iter(buckets)
        try:
            for bucket in iterator:
                self._wait(sending, "sending")
                self._check_bucket(bucket)
                sending = self._way.send(bucket, list(self._servers), self._deadline)
            self._wait(sending, "sending")
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:  # the other ranks wait for rank 0 to go on or to give up
                close()
        if self._unsent:
            raise WeightSyncError(
                f"push {self._manifest.version}: {next(iter(self._unsent))} and {len(self._unsent) - 1} more were not sent"
            )
        self._wait(self._way.seal(list(self._servers), self._deadline), "sending")

    def _check_bucket(self, bucket: Bucket) -> None:
        for name, tensor in bucket:
            announced = self._unsent.pop(name, None)
            found = TensorSpec(name, dtype_name(tensor.dtype), list(tensor.shape))
            if found != announced:
                raise WeightSyncError(
                    f"push {self._manifest.version}: {name} came as {found.dtype} {found.shape}, "
                    + (f"announced was {announced.dtype} {announced.shape}" if announced else "which is not announced, or came before")
                )

    def _await_received(self) -> None:
        """Servers may be behind the sender; asking them costs no pause."""
        limit = Deadline(self._deadline.share)
        while True:
            replies = self._each(lambda api: api.push_op(Status(self._push_id), self._deadline.share), "receiving")
            self._check_replies(replies)
            late = [server for server, found in replies.items() if any(reply.state == "receiving" for reply in found)]
            if not late:
                return
            if not limit.left:
                self._sort({server: TimeoutError("it still waits for tensors that were sent") for server in late}, "receiving")
                return
            time.sleep(POLL_SECONDS)

    def _switch(self) -> dict[str, float]:
        switch = Switch(Apply(self._push_id), Status(self._push_id), self._name, self._deadline)
        outcomes = dict(zip(self._servers, self._control.each(self._servers, switch.run), strict=True))
        pauses = {server.url: outcome for server, outcome in outcomes.items() if isinstance(outcome, float)}
        self._sort({server: outcome for server, outcome in outcomes.items() if isinstance(outcome, BaseException)}, "switching")
        return pauses

    def _abort(self) -> None:
        """On every server; one that does not answer gives up by itself when the time is over."""

        async def abort(api: VllmApi) -> None:
            with suppress(RolloutError):
                await api.push_op(Abort(self._push_id), LOOK_SECONDS)

        self._control.each([*self._servers, *self._lost], abort)

    # Outcomes

    def _each(self, work: Callable[[VllmApi], Awaitable[T]], what: str) -> dict[ServerAddress, T]:
        """The answers; servers that could not be reached are dropped."""
        outcomes = dict(zip(self._servers, self._control.each(self._servers, work), strict=True))
        self._sort({server: outcome for server, outcome in outcomes.items() if isinstance(outcome, BaseException)}, what)
        return {server: outcome for server, outcome in outcomes.items() if not isinstance(outcome, BaseException)}

    def _check_replies(self, replies: Mapping[ServerAddress, list[Reply]]) -> None:
        for server, found in replies.items():
            for reply in found:
                if reply.error is not None:
                    raise WeightSyncError(f"{server.url} refused weight push {self._manifest.version}: {reply.error}")
                if reply.state == "none":
                    raise WeightSyncError(
                        f"{server.url} knows nothing of weight push {self._manifest.version}: did another trainer push to it?"
                    )

    def _wait(self, futures: Mapping[ServerAddress, Future[None]], what: str) -> None:
        limit = self._deadline.share
        concurrent.futures.wait(futures.values(), timeout=limit)
        failed: dict[ServerAddress, BaseException] = {}
        for server, future in futures.items():
            if not future.done():
                failed[server] = TimeoutError(f"not done within {limit:.1f} s, of {self._deadline.seconds:g} s for the whole push")
            elif (error := future.exception()) is not None:
                failed[server] = error
        self._sort(failed, what)

    def _sort(self, failed: Mapping[ServerAddress, BaseException], what: str) -> None:
        """A server that is gone is dropped while another one is left; one that answers and has failed fails the push."""
        for server, error in failed.items():
            if isinstance(error, SenderError) or not isinstance(error, EbftError | TimeoutError):
                raise error
            problem = self._problem(server, error)
            if problem is not None:
                raise WeightSyncError(f"{server.url} refused weight push {self._manifest.version} ({what}): {problem}") from error
            logger.warning("%s is left out of weight push %d (%s): %s", server.url, self._manifest.version, what, error)
            self._lost[server] = error
            self._servers.remove(server)
        if not self._servers:
            errors = "; ".join(f"{server.url}: {error}" for server, error in self._lost.items())
            message = f"weight push {self._manifest.version} ({what}): no server is left: {errors}"
            if any(isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError) for error in self._lost.values()):
                raise WeightSyncError(message)
            raise RolloutError(message)

    def _problem(self, server: ServerAddress, error: BaseException) -> str | None:
        """What the server itself says about a failure; None if it says nothing: it is gone, or stands still."""
        if isinstance(error, TimeoutError) or (isinstance(error, ServerUnreachable) and isinstance(error.__cause__, TimeoutError)):
            return None
        try:
            replies = self._control.run(self._control.api(server).push_op(Status(self._push_id), LOOK_SECONDS))
        except ServerUnreachable:
            return None
        except RolloutError as refusal:
            if self._answers(server):
                return str(error) if not isinstance(error, ServerUnreachable) else str(refusal)
            return None
        return next((reply.error for reply in replies if reply.error is not None), str(error))

    def _answers(self, server: ServerAddress) -> bool:
        """A server whose engine has died still refuses for a moment."""
        try:
            self._control.run(self._control.api(server).weight_version(LOOK_SECONDS))
        except RolloutError:
            return False
        return True
