"""The moment of a push in which a server's generation stands still: pause, put the weights in, label them, resume."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from aiohttp import ClientConnectorError

from ebft_ds.errors import RolloutError, WeightSyncError
from ebft_ds.sidecar.api import ServerUnreachable, VllmApi
from ebft_ds.sidecar.push_ops import Apply, Reply, Status
from ebft_ds.sidecar.versions import FRESH_VERSION
from ebft_ds.sync.transports.deadline import Deadline

AFTER_SECONDS = 20.0
"""For leaving a server in a known state, even when the push has run out of time."""
ATTEMPT_SECONDS = 5.0


@dataclass(frozen=True)
class Switch:
    """One push's switch. A server is resumed whatever happened, unless its weights may not be what its label says."""

    apply: Apply
    status: Status
    version_name: str
    deadline: Deadline

    async def run(self, api: VllmApi) -> float:
        """Seconds of standstill.

        Raises:
            WeightSyncError: it refused, and generates with its old weights.
            ServerUnreachable: it did not answer; what it holds is unknown.
        """
        started = time.monotonic()
        try:
            await api.pause("keep", self.deadline.left)
        except RolloutError:
            await self._insist(api, "resume")
            raise
        error = await self._put_in(api)
        if error is None:
            await self._insist(api, "label")
        await self._insist(api, "resume")
        if error is not None:
            raise WeightSyncError(error)
        seconds = time.monotonic() - started
        await self._still_the_same(api)
        return seconds

    async def _still_the_same(self, api: VllmApi) -> None:
        """A server that was started again between the switch and its label carries the label over its checkpoint's weights."""
        replies = await api.push_op(self.status, AFTER_SECONDS)
        if any(reply.state != "applied" for reply in replies):
            await self._insist(api, "unlabel")
            raise ServerUnreachable(f"{api.address.url} was started again in the middle of a push")

    async def _put_in(self, api: VllmApi) -> str | None:
        """None: the new weights are in. A text: the old ones are. ServerUnreachable: it cannot be told."""
        try:
            replies = await api.push_op(self.apply, self.deadline.left)
        except ServerUnreachable:
            replies = await self._look_after(api)
        except RolloutError as error:
            return str(error)
        errors = [reply.error or "it has dropped the push" for reply in replies if reply.state != "applied"]
        return errors[0] if errors else None

    async def _look_after(self, api: VllmApi) -> list[Reply]:
        """A server that was too slow may still be at it: its next answer comes after that."""
        return await api.push_op(self.status, AFTER_SECONDS)

    async def _insist(self, api: VllmApi, what: str) -> None:
        """Again and again for a while: half a switch is worse than a slow one. Not with a server that is not there any more."""
        limit = Deadline(AFTER_SECONDS)
        while True:
            try:
                if what == "label":
                    await api.set_weight_version(self.version_name, ATTEMPT_SECONDS)
                elif what == "unlabel":
                    await api.set_weight_version(FRESH_VERSION, ATTEMPT_SECONDS)
                else:
                    await api.resume(ATTEMPT_SECONDS)
                return
            except RolloutError as error:
                gone = isinstance(error, ServerUnreachable) and isinstance(error.__cause__, ConnectionRefusedError | ClientConnectorError)
                if gone or not limit.left:
                    raise ServerUnreachable(f"{api.address.url} could not be {what}ed after a push: {error}") from error
                await asyncio.sleep(0.1)
