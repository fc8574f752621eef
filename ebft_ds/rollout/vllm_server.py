"""One vLLM server as the engine sees it: looked at about once a second, asked only while it holds the right weights."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Literal

from ebft_ds.errors import RolloutError
from ebft_ds.rollout.pacing import Pacer
from ebft_ds.rollout.vllm_versions import VersionBook
from ebft_ds.sidecar.api import VllmApi
from ebft_ds.types import PolicyVersion

logger = logging.getLogger(__name__)

LOOK_PAUSE_SECONDS = 1.0
LOOK_SECONDS = 5.0
"""How long a look may take: the engine core answers between two of its steps."""
PROBE_SECONDS = 15.0
COOL_SECONDS = 0.25
"""Pause after a failure; doubled with each further one, up to COOL_LIMIT_SECONDS."""
COOL_LIMIT_SECONDS = 10.0

State = Literal["usable", "stale", "unreachable"]


class Server:
    """State, load and pace of one server. Lives on the engine's event loop; `state` and `in_flight` may be read from any thread.

    A look asks for `/weight_info`, which the engine core itself answers: it shows a core that lives, not just an HTTP front. That it
    works is shown by its count of tokens. After a request that got no answer in time, that count must move, or one token must be
    generated, before the server is asked again.
    """

    def __init__(self, api: VllmApi, book: VersionBook, *, cap: int | None, changed: Callable[[], None]) -> None:
        """`changed`: called after every look."""
        self.api = api
        self.url = api.address.url
        self.pacer = Pacer(cap)
        self.in_flight = 0
        """Requests."""
        self.samples = 0
        """Completions that those requests make: what balancing goes by."""
        self.max_model_len: int | None = None
        self.last_error = "not looked at yet"
        self.last_answer = time.monotonic()
        self.signs_of_life = 0
        """Looks that found it working on requests."""
        self._book = book
        self._changed = changed
        self._reachable = False
        self._label = ""
        self._models: dict[str, int | None] = {}
        self._doubts = 0
        self._settled_doubts = -1
        """Doubts that were there when the last good look began; below `_doubts`: something has failed since."""
        self._hung = False
        self._tokens: float | None = None
        self._last_state: State = "unreachable"
        self._failures = 0
        self._failed_at = float("-inf")
        self._look_now = asyncio.Event()

    @property
    def state(self) -> State:
        """By the last look."""
        if not self._reachable or self._hung:
            return "unreachable"
        return "usable" if self.held is not None else "stale"

    @property
    def held(self) -> PolicyVersion | None:
        """Version that requests can be sent for."""
        return self._book.held(self._label, self._models)

    @property
    def has_room(self) -> bool:
        """True if one more request may be sent now."""
        sure = self._settled_doubts == self._doubts
        return self.state == "usable" and sure and self.in_flight < self.pacer.limit and time.monotonic() >= self.cool_until

    @property
    def cool_until(self) -> float:
        """Without this, a server that fails at once would be the one with the least load, and get every request."""
        if self._failures == 0:
            return float("-inf")
        return self._failed_at + min(COOL_LIMIT_SECONDS, COOL_SECONDS * 2.0 ** (self._failures - 1))

    def describe(self) -> str:
        """For an error message."""
        if self.state == "usable":
            return f"{self.url}: usable"
        if self.state == "stale":
            return f"{self.url}: answers, but holds {self._label!r} and not {self._book.wanted()!r}"
        return f"{self.url}: {self.last_error}"

    def succeeded(self, in_flight: int, seconds: float, tokens: int) -> None:
        """A good answer came. See Pacer.answered."""
        self._failures = 0
        self._hung = False
        self.last_answer = time.monotonic()
        self.pacer.answered(in_flight, seconds, tokens)

    def failed(self, error: RolloutError, *, sent_at: float) -> None:
        """A request failed. Nothing is sent until a look has found the server right; one incident counts once, whatever it took along."""
        self.last_error = str(error)
        if sent_at >= self._failed_at:
            self._failures += 1
            self._failed_at = time.monotonic()
            logger.warning("rollout server: %s", error)
        self.look_soon(doubt=True)

    def hangs(self, error: RolloutError, *, sent_at: float) -> None:
        """A request got no answer within its time: only a generated token will show that the server works."""
        self._hung = True
        self.pacer.overloaded()
        self.failed(error, sent_at=sent_at)

    def look_soon(self, *, doubt: bool = False) -> None:
        """Look at once. `doubt`: what was seen before may be wrong by now."""
        self._doubts += doubt
        self._look_now.set()

    async def watch(self) -> None:
        """Look, for ever."""
        while True:
            await self.look()
            self._changed()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look_now.wait(), LOOK_PAUSE_SECONDS)
            self._look_now.clear()

    async def look(self) -> None:
        """Ask the server what it holds."""
        doubts = self._doubts
        try:
            label = await self.api.weight_version(LOOK_SECONDS)
            if self.max_model_len is None or self._book.uses_adapters:
                self._models = await self.api.models(LOOK_SECONDS)
                self.max_model_len = next((length for length in self._models.values() if length is not None), None)
            works = await self._works()
        except RolloutError as error:
            self.last_error = str(error)
            self._reachable = False
            self.max_model_len = None  # what comes back may be another one
        else:
            self._label = label
            self._settled_doubts = doubts
            self._reachable = True
            self.last_answer = time.monotonic()
            self.signs_of_life += works
        if self.state != self._last_state:
            self._last_state = self.state
            logger.warning("rollout server is %s now. %s", self.state, self.describe())

    async def _works(self) -> bool:
        """True if the engine works on requests: its count of tokens has moved since the last look (where it keeps one).

        Ends the suspicion that it hangs; if the count stands still, only a token will do that.
        """
        if not (self.in_flight or self._hung):
            return False
        tokens = await self.api.tokens_processed(LOOK_SECONDS)
        moved = tokens is not None and tokens != self._tokens
        self._tokens = tokens
        if self._hung and not moved:
            await self._generate_one()
        self._hung = False
        return moved or (tokens is None and self.in_flight > 0)

    async def _generate_one(self) -> None:
        held = self._book.held(self._label, self._models)
        model = self._book.model(held) if held is not None else None
        params = {"max_tokens": 1, "temperature": 1.0, "detokenize": False}
        request_id = f"alive-{time.monotonic_ns()}"
        await self.api.generate([0], params, request_id=request_id, model=model, timeout=PROBE_SECONDS)
