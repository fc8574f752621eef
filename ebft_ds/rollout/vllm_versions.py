"""Which versions a server may hold to be asked, and which tokens may be taken from an answer."""

from __future__ import annotations

from ebft_ds.rollout.vllm_answer import ForeignVersion
from ebft_ds.sidecar.versions import FRESH_VERSION, VersionNames, adapter_name
from ebft_ds.types import PolicyVersion


class VersionBook:
    """What rank 0 has said about versions: the current one, and the one that a push is bringing."""

    def __init__(self, names: VersionNames, initial: PolicyVersion, *, adapter_alias: str | None = None) -> None:
        self.current = initial
        self.incoming: PolicyVersion | None = None
        self._names = names
        self._alias = adapter_alias
        self._told = {initial}

    @property
    def uses_adapters(self) -> bool:
        return self._alias is not None

    def expect(self, version: PolicyVersion) -> None:
        """A push of `version` has begun."""
        self.incoming = version
        self._told.add(version)

    def confirm(self, version: PolicyVersion) -> None:
        """The push is over."""
        self._told.add(version)
        self.current, self.incoming = version, None

    def held(self, label: str, models: dict[str, int | None]) -> PolicyVersion | None:
        """The version that a server can be asked for now (the current one rather than the incoming); None: it holds other weights.

        Args:
            label: the version that the server reports. models: names that requests may use there (looked at with adapters only).
        """
        for version in (self.current, self.incoming):
            if version is not None and self._holds(version, label, models):
                return version
        return None

    def model(self, version: PolicyVersion) -> str | None:
        """What a request for this version names; None: the served model itself."""
        return adapter_name(self._alias, version) if self._alias is not None else None

    def taken(self, name: str, *, asked: PolicyVersion, oldest: PolicyVersion) -> PolicyVersion:
        """The policy version of tokens labelled `name`.

        Args:
            asked: version that the request was sent for. oldest: version that was current then.

        Raises:
            ForeignVersion: not of this run, never announced, or older than what was asked for.
        """
        if self._alias is not None:
            if not self._is_base(name):
                raise ForeignVersion(f"the adapter stood on weights labelled {name!r}, which are not this run's")
            return asked
        version = self._names.version(name)
        if version is None or version not in self._told or version < oldest:
            raise ForeignVersion(f"tokens were sampled by weights labelled {name!r}; wanted were {self._names.name(oldest)!r} or newer")
        return version

    def wanted(self) -> str:
        """What a server must hold, for a message."""
        versions = [version for version in (self.current, self.incoming) if version is not None]
        return " or ".join(self.model(version) or self._names.name(version) for version in versions)

    def _holds(self, version: PolicyVersion, label: str, models: dict[str, int | None]) -> bool:
        model = self.model(version)
        return self._names.version(label) == version if model is None else model in models and self._is_base(label)

    def _is_base(self, label: str) -> bool:
        """Weights that adapters may stand on: the checkpoint's own, whether or not this run has labelled them."""
        return label == FRESH_VERSION or self._names.version(label) is not None
