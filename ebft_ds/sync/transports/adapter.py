"""Pushes of the adapter alone: a PEFT folder per version, loaded by the servers under a name that is never used twice.

A name that is reloaded in place would serve cached blocks of the old adapter and corrupt requests in flight. Requests in flight keep the
adapter they began with; old ones are unloaded, and their folders removed, once no accepted token can come from them any more.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from ebft_ds.errors import RolloutError, WeightSyncError
from ebft_ds.rollout.manifest import WeightManifest
from ebft_ds.sidecar.address import ServerAddress
from ebft_ds.sidecar.api import ServerRefused, VllmApi
from ebft_ds.sidecar.control import ControlLoop
from ebft_ds.sidecar.versions import adapter_name
from ebft_ds.sync.transport import Bucket, PushResult
from ebft_ds.sync.transports.run_folder import RunFolder

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
CLEAN_SECONDS = 10.0


class AdapterTransport:
    """WeightTransport for `sync_mode: adapter`.

    Args:
        alias: `vllm_lora_alias` with the run token.
        adapter_config: what PEFT's adapter_config.json says.
        folder: seen by this process and every server under the same path.
        keep: versions kept loaded beside the current one (what requests in flight may still use).
    """

    def __init__(
        self,
        addresses: Sequence[ServerAddress],
        control: ControlLoop,
        *,
        alias: str,
        adapter_config: dict[str, Any],
        folder: RunFolder,
        keep: int,
    ) -> None:
        self._addresses = list(addresses)
        self._control = control
        self._alias = alias
        self._config = adapter_config
        self._folder = folder
        self._keep = keep
        self._versions: list[int] = []
        """Whose folders are there, oldest first."""
        self._confirmed: list[ServerAddress] = []

    @property
    def probe_temperature(self) -> float | None:
        return 1.0

    def stale(self, version: int) -> bool:
        found = self._control.each(self._addresses, lambda api: api.models(LOOK_SECONDS))
        answers = [answer for answer in found if not isinstance(answer, BaseException)]
        if not answers:
            raise RolloutError(f"no rollout server answers: {'; '.join(str(error) for error in found)}")
        return any(adapter_name(self._alias, version) not in models for models in answers)

    def push(self, manifest: WeightManifest, buckets: Iterable[Bucket], timeout: float) -> PushResult:
        tensors = {name: tensor for bucket in buckets for name, tensor in bucket}
        path = self._folder.path / adapter_name(self._alias, manifest.version)
        if manifest.tensors:
            self._write(path, tensors)
        elif self._versions:
            self._copy_last(path)
        if manifest.version not in self._versions:
            self._versions.append(manifest.version)
        outcomes = self._control.each(self._addresses, lambda api: self._load(api, path, timeout))
        refused = [error for error in outcomes if isinstance(error, ServerRefused)]
        if refused:
            raise WeightSyncError(f"adapter push {manifest.version} was refused: {refused[0]}")
        self._confirmed = [a for a, outcome in zip(self._addresses, outcomes, strict=True) if not isinstance(outcome, BaseException)]
        if not self._confirmed:
            raise RolloutError(f"adapter push {manifest.version}: no server is left: {outcomes[0]}")
        self._forget_old(manifest.version)
        return PushResult(pause_seconds=0.0, confirmed=len(self._confirmed), lost=len(self._addresses) - len(self._confirmed))

    def score(self, token_ids: Sequence[int], temperature: float, timeout: float) -> list[list[float]]:
        model = adapter_name(self._alias, self._versions[-1]) if self._versions else None
        holders = self._confirmed or self._addresses
        found = self._control.each(holders, lambda api: api.prompt_logprobs(token_ids, model=model, timeout=timeout))
        for address, answer in zip(holders, found, strict=True):
            if isinstance(answer, BaseException):
                logger.warning("%s did not score the probe: %s", address.url, answer)
        scores = [answer for answer in found if not isinstance(answer, BaseException)]
        if not scores:
            raise RolloutError(f"no rollout server scores the probe: {found[0]}")
        return scores

    def close(self) -> None:
        """Unloads what was loaded, where the servers still answer, and removes the folders."""
        for version in self._versions:
            self._unload(version)
        self._versions = []
        self._folder.close()

    async def _load(self, api: VllmApi, path: Path, timeout: float) -> None:
        """Load a version unless the server has it already (a retry, a repair of another server)."""
        if path.name not in await api.models(timeout):
            await api.load_adapter(path.name, str(path), timeout)

    def _write(self, path: Path, tensors: dict[str, Any]) -> None:
        """The whole folder under another name first: a server never sees half an adapter."""
        if path.exists():
            return
        staging = path.with_name(f"{path.name}.tmp")
        shutil.rmtree(staging, ignore_errors=True)
        try:
            staging.mkdir(parents=True)
            save_file(tensors, staging / "adapter_model.safetensors", metadata={"format": "pt"})
            (staging / "adapter_config.json").write_text(json.dumps(self._config, indent=1), encoding="utf-8")
            staging.rename(path)
        except OSError as error:
            shutil.rmtree(staging, ignore_errors=True)
            raise WeightSyncError(f"the adapter cannot be written to {path}: {error}; set sync_dir to a folder with room") from error

    def _copy_last(self, path: Path) -> None:
        """The same weights under the next version's name."""
        if not path.exists():
            shutil.copytree(self._folder.path / adapter_name(self._alias, self._versions[-1]), path)

    def _forget_old(self, current: int) -> None:
        old = [version for version in self._versions if version != current][: -self._keep or None]
        for version in old:
            self._unload(version)
            self._versions.remove(version)
            shutil.rmtree(self._folder.path / adapter_name(self._alias, version), ignore_errors=True)

    def _unload(self, version: int) -> None:
        """A server that has lost it (restarted) refuses, one that is away does not answer: both are as good as unloaded."""
        self._control.each(self._addresses, lambda api: api.unload_adapter(adapter_name(self._alias, version), CLEAN_SECONDS))
