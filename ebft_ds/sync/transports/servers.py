"""What all pushes to vLLM servers have in common: which server holds which version, and who is scored."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from ebft_ds.errors import RolloutError, WeightSyncError
from ebft_ds.rollout.manifest import WeightManifest
from ebft_ds.sidecar.address import ServerAddress
from ebft_ds.sidecar.control import ControlLoop
from ebft_ds.sidecar.versions import FRESH_VERSION, VersionNames
from ebft_ds.sync.transport import Bucket, PushResult
from ebft_ds.sync.transports.deadline import Deadline

logger = logging.getLogger(__name__)

BROKEN_SUFFIX = ":broken"
"""Label of a server whose model is in pieces."""
LOOK_SECONDS = 5.0
"""For a question that a live server answers at once."""


class ServerTransport(ABC):
    """WeightTransport for a list of servers; subclasses move the bytes."""

    def __init__(
        self, addresses: Sequence[ServerAddress], names: VersionNames, control: ControlLoop, *, look_seconds: float = LOOK_SECONDS
    ) -> None:
        if not addresses:
            raise ValueError("a transport needs a server")
        self.addresses = list(addresses)
        self.names = names
        self.control = control
        self.look_seconds = look_seconds
        self.holds: dict[str, int] = {}
        """Server's URL -> version of ours that it is known to hold."""
        self._same_weights = {0}
        """Versions that have the weights of the last push."""

    @property
    def probe_temperature(self) -> float | None:
        return 1.0

    def stale(self, version: int) -> bool:
        found = self._look()
        if version == 0:
            for address, name in found.items():
                if name == FRESH_VERSION:  # the checkpoint that the trainer starts from; labelled, it is told from a restart later on
                    self._label(address, 0)
        return any(self.holds.get(address.url) != version for address in found)

    def push(self, manifest: WeightManifest, buckets: Iterable[Bucket], timeout: float) -> PushResult:
        deadline = Deadline(timeout)
        found = self._look()
        self._refuse_broken(manifest.version, found)
        if not manifest.tensors:
            return self._relabel(manifest.version, found)
        if not manifest.complete:
            self._refuse_foreign(manifest.version, found)
        for address in found:  # whatever happens now, what they hold is known again only after a confirmation
            self.holds.pop(address.url, None)
        pauses = self.move(manifest, buckets, list(found), deadline)
        for url in pauses:
            self.holds[url] = manifest.version
        self._same_weights = {manifest.version}
        return PushResult(max(pauses.values()), confirmed=len(pauses), lost=len(self.addresses) - len(pauses))

    @abstractmethod
    def move(
        self, manifest: WeightManifest, buckets: Iterable[Bucket], servers: list[ServerAddress], deadline: Deadline
    ) -> dict[str, float]:
        """Bring the tensors into the servers that answered: URL -> seconds of pause of each that confirmed, at least one.

        Raises like WeightTransport.push.
        """

    def score(self, token_ids: Sequence[int], temperature: float, timeout: float) -> list[list[float]]:
        if temperature != 1.0:
            raise ValueError(f"servers score at temperature 1, not {temperature:g}")
        holders = [address for address in self.addresses if address.url in self.holds]
        if not holders:
            raise RolloutError("no rollout server is known to hold the run's weights")
        found = self.control.each(holders, lambda api: api.prompt_logprobs(token_ids, timeout=timeout))
        scores = [answer for answer in found if not isinstance(answer, BaseException)]
        for address, answer in zip(holders, found, strict=True):
            if isinstance(answer, BaseException):
                logger.warning("%s did not score the probe: %s", address.url, answer)
        if not scores:
            raise RolloutError(f"no rollout server scores the probe: {found[0]}")
        return scores

    def close(self) -> None:  # noqa: B027  not every way has something to release
        """May be called twice."""

    def _look(self) -> dict[ServerAddress, str]:
        """The servers that answer and the names of the weights they hold. Errors: RolloutError if none answers."""
        answers = self.control.each(self.addresses, lambda api: api.weight_version(self.look_seconds))
        found: dict[ServerAddress, str] = {}
        for address, answer in zip(self.addresses, answers, strict=True):
            self.holds.pop(address.url, None)
            if isinstance(answer, BaseException):
                continue
            found[address] = answer
            version = self.names.version(answer)
            if version is not None:
                self.holds[address.url] = version
        if not found:
            raise RolloutError(f"no rollout server answers: {'; '.join(str(answer) for answer in answers)}")
        return found

    def _label(self, address: ServerAddress, version: int) -> None:
        outcome = self.control.each([address], lambda api: api.set_weight_version(self.names.name(version), self.look_seconds))[0]
        if isinstance(outcome, BaseException):
            logger.warning("%s could not be labelled with version %d: %s", address.url, version, outcome)
        else:
            self.holds[address.url] = version

    def _relabel(self, version: int, found: dict[ServerAddress, str]) -> PushResult:
        """The weights have not moved since the last push: servers that hold that one get the new version's name."""
        holders = [address for address in found if self.holds.get(address.url) in self._same_weights]
        for address in holders:
            self._label(address, version)
        self._same_weights.add(version)
        confirmed = sum(self.holds.get(address.url) == version for address in holders)
        if not confirmed:
            raise WeightSyncError(
                f"version {version} has the weights of the one before it, which no server holds: they need a complete push"
            )
        return PushResult(0.0, confirmed=confirmed, lost=len(self.addresses) - confirmed)

    def _refuse_broken(self, version: int, found: dict[ServerAddress, str]) -> None:
        """vLLM's own receiving engines cannot be trusted after a push that broke on the way: what they hold of it counts again."""
        for address, name in found.items():
            if name.endswith(BROKEN_SUFFIX):
                raise WeightSyncError(
                    f"push {version} to {address.url}: an earlier push broke on the way and has left vLLM's engine there in pieces; "
                    "restart that server (with sync_transport gloo or disk a server keeps its old weights)"
                )

    def _refuse_foreign(self, version: int, found: dict[ServerAddress, str]) -> None:
        """A push of what training changes completes the checkpoint or an earlier push of this run, nothing else."""
        for address, name in found.items():
            if name != FRESH_VERSION and not name.startswith(f"{self.names.run_token}:"):
                raise WeightSyncError(
                    f"push {version} to {address.url}: the server holds {name!r}, not weights of this run: does another run push to it? "
                    f"A complete push, as at the start of a run, makes it ours"
                )
