"""All servers of a run: started together, watched, started again when they die, stopped together."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ebft_ds.errors import RolloutError
from ebft_ds.sidecar.address import ServerAddress
from ebft_ds.sidecar.command import ServerPlan
from ebft_ds.sidecar.server import ServerProcess
from ebft_ds.sidecar.watched import refuses

logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.3
JOIN_SECONDS = 5.0
DEAF_SECONDS = 8.0
"""That a live process may refuse connections: longer than an orderly end takes."""


class SidecarSupervisor:
    """Used from one thread. Each server has a keeper thread that starts and watches it."""

    def __init__(
        self,
        plans: Sequence[ServerPlan],
        *,
        log_folder: Path,
        restarts: int = 2,
        start_timeout: float = 600.0,
        stop_grace: float = 10.0,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """`restarts`: of each server. Errors: ConfigError for a port in use; ports are taken here and held until `stop`."""
        servers: list[ServerProcess] = []
        try:
            for index, plan in enumerate(plans):
                servers.append(ServerProcess(plan, log_folder / f"vllm_{index}.log", stop_grace=stop_grace, environ=environ))
        except BaseException:
            for server in servers:
                server.stop()
            raise
        self._keepers = [_Keeper(server, restarts, start_timeout) for server in servers]

    @property
    def addresses(self) -> list[ServerAddress]:
        """Stay the same over restarts."""
        return [keeper.server.address for keeper in self._keepers]

    @property
    def servers(self) -> list[ServerProcess]:
        return [keeper.server for keeper in self._keepers]

    def start(self) -> None:
        """Start all at once and wait until all are ready. Errors: RolloutError of the first that fails; all are stopped then."""
        try:
            for keeper in self._keepers:
                keeper.launch()
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def _wait_until_ready(self) -> None:
        while not all(keeper.ready.wait(WATCH_SECONDS) for keeper in self._keepers):
            self.check()

    def check(self) -> None:
        """Errors: RolloutError once a server is dead for good: it failed to start, or died more often than it may be started again."""
        for keeper in self._keepers:
            if keeper.failure is not None:
                raise RolloutError(keeper.failure)

    def all_ready(self) -> bool:
        """Are all servers up now, as far as is known?"""
        return all(keeper.ready.is_set() for keeper in self._keepers)

    def restarted(self) -> int:
        """How often servers were started again."""
        return sum(keeper.restarted for keeper in self._keepers)

    def stop(self) -> None:
        """Stop all at once; may be called twice, and while `start` waits in an interrupted main thread."""
        stoppers = [threading.Thread(target=keeper.stop, name="vllm-stop") for keeper in self._keepers]
        for stopper in stoppers:
            stopper.start()
        for stopper in stoppers:
            stopper.join()


class _Keeper:
    """One server and the thread that keeps it up."""

    def __init__(self, server: ServerProcess, restarts: int, start_timeout: float) -> None:
        self.server = server
        self.ready = threading.Event()
        self.failure: str | None = None
        self.restarted = 0
        self._restarts = restarts
        self._start_timeout = start_timeout
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._guarded, args=(self._keep,), name=f"keeper of {server.name}", daemon=True)

    def launch(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self.server.stop()
        if self._thread.is_alive():
            self._thread.join(JOIN_SECONDS)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  a keeper that dies silently would leave a run waiting for a server
            if not self._stopping.is_set():
                self.failure = str(error) if isinstance(error, RolloutError) else f"{self.server.name}: {error!r}"

    def _keep(self) -> None:
        self._bring_up()
        logger.info("%s is ready", self.server.name)
        refusals = 0
        while not self._stopping.wait(WATCH_SECONDS):
            # A front whose engine core has died stops to listen, and may wait for ever for its last connections to end.
            refusals = refusals + 1 if refuses(self.server.address.url) else 0
            if not self.server.alive() or refusals * WATCH_SECONDS > DEAF_SECONDS:
                refusals = 0
                self._revive()

    def _revive(self) -> None:
        """Start it again, as often as it may be. Errors: RolloutError for the last failure."""
        self.ready.clear()
        how = "it takes no connections any more" if self.server.alive() else self.server.end_in_words()
        what = f"{self.server.name} died ({how})"
        while True:
            if self.restarted >= self._restarts:
                raise RolloutError(
                    f"{what} and was started again {self.restarted} time(s) (vllm_server_restarts); {self.server.log_tail()}"
                )
            self.restarted += 1
            logger.warning("%s; it is started again (%d of %d)", what.splitlines()[0], self.restarted, self._restarts)
            try:
                self._bring_up()
            except RolloutError as error:
                if self._stopping.is_set():
                    raise
                what = str(error)
                continue
            logger.warning("%s is ready again, with the weights of its checkpoint", self.server.name)
            return

    def _bring_up(self) -> None:
        self.server.start()
        self.server.wait_ready(self._start_timeout)
        self.ready.set()
