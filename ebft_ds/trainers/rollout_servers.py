"""Rank 0's vLLM servers of one run: started with it or found at given addresses, watched, and reached by a weight transport."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from peft import PeftModel

from ebft_ds.config import RecipeConfig
from ebft_ds.config.engine_choice import Transport, starts_servers, transport_of
from ebft_ds.errors import ConfigError, Preempted, RolloutError
from ebft_ds.rollout.client import RolloutClient
from ebft_ds.rollout.spec import VllmClientSpec
from ebft_ds.sidecar.address import ServerAddress
from ebft_ds.sidecar.control import ControlLoop
from ebft_ds.sidecar.endpoints import resolve_servers
from ebft_ds.sidecar.plans import server_plans
from ebft_ds.sidecar.supervisor import SidecarSupervisor
from ebft_ds.sidecar.supported import check_installed, check_log_probs, check_server, installed_vllm
from ebft_ds.sidecar.versions import VersionNames, new_run_token
from ebft_ds.sync.transport import WeightTransport
from ebft_ds.sync.transports.adapter import AdapterTransport
from ebft_ds.sync.transports.announced import AnnouncedTransport
from ebft_ds.sync.transports.colocated import ColocatedTransport, Turns
from ebft_ds.sync.transports.deadline import in_thread
from ebft_ds.sync.transports.disk import DiskTransport
from ebft_ds.sync.transports.gloo import GlooTransport
from ebft_ds.sync.transports.restarting import RestartingTransport
from ebft_ds.sync.transports.run_folder import RunFolder
from ebft_ds.trainers.stop_signal import StopSignal

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
LOOK_SECONDS = 5.0


class RolloutServers:
    """The servers, from the moment the run begins. Built on rank 0 alone; starting goes on in the background until `wait_ready`."""

    def __init__(self, config: RecipeConfig, log_folder: Path, stop: StopSignal, *, on_cpu: bool) -> None:
        """Errors: ConfigError for addresses, keys, devices or ports that cannot be used."""
        self._config = config
        self._stop = stop
        self._kind: Transport = transport_of(config, on_cpu=on_cpu)
        self._names = VersionNames(new_run_token())
        self._control = ControlLoop()
        self._supervisor: SidecarSupervisor | None = None
        self._starting: concurrent.futures.Future[None] | None = None
        if starts_servers(config):
            check_installed(on_cpu=on_cpu, found=installed_vllm())
            vllm = config.vllm
            plans = server_plans(config, on_cpu=on_cpu, environ=os.environ)
            self._supervisor = SidecarSupervisor(
                plans,
                log_folder=log_folder,
                restarts=vllm.vllm_server_restarts,
                start_timeout=vllm.vllm_server_start_timeout,
                stop_grace=vllm.vllm_stop_grace,
            )
            self.addresses: list[ServerAddress] = self._supervisor.addresses
            self._starting = in_thread(self._supervisor.start, "vllm-start")
        else:
            self.addresses = resolve_servers(config, os.environ, on_cpu=on_cpu)

    @functools.cached_property
    def turns(self) -> Turns | None:
        """Of the GPU that trainer and server share; None where they do not."""
        if not self._config.vllm.vllm_colocate:
            return None
        from ebft_ds.sync.transports.vllm_ipc import GpuTurns  # imports vLLM

        return GpuTurns(self.addresses, self._control, timeout=self._config.rollout.sync_timeout)

    def wait_ready(self) -> None:
        """Errors: RolloutError for servers that do not start or answer, or are not tested ones; Preempted for a stop signal meanwhile."""
        while self._starting is not None and not self._starting.done():
            concurrent.futures.wait([self._starting], timeout=POLL_SECONDS)
            if self._stop.requested:
                raise Preempted("a stop signal arrived while the rollout servers started; nothing had been trained")
        if self._starting is not None:
            self._starting.result()
        length = self._config.data.max_seq_length
        for outcome in self._control.each(self.addresses, lambda api: check_server(api, self._kind, context_length=length)):
            if isinstance(outcome, BaseException):
                raise outcome
        for outcome in self._control.each(self.addresses, check_log_probs):
            if isinstance(outcome, BaseException):
                raise outcome
        logger.info("rollout servers: %s; weights by %s", ", ".join(a.url for a in self.addresses), self._kind)

    def client_spec(self) -> VllmClientSpec:
        """What the rollout process needs to know."""
        vllm = self._config.vllm
        restarts = self._supervisor is not None and vllm.vllm_server_restarts > 0
        return VllmClientSpec(
            servers=self.addresses,
            run_token=self._names.run_token,
            adapter_alias=self._alias if self._kind == "adapter" else None,
            request_timeout=vllm.vllm_request_timeout,
            request_retries=vllm.vllm_request_retries,
            max_concurrency=vllm.vllm_max_concurrency,
            # A server that is started again by us is worth waiting for; whether it comes up is watched by the supervisor.
            reconnect_timeout=vllm.vllm_server_start_timeout if restarts else vllm.vllm_reconnect_timeout,
        )

    def transport(self, client: RolloutClient, model: Any) -> WeightTransport:
        """How weights get to the servers, with the rollout process kept informed. `model`: the trained one, for an adapter's settings."""
        inner = self._plain_transport(model)
        if self.turns is not None:
            inner = ColocatedTransport(inner, self.turns)
        if self._supervisor is not None:
            inner = RestartingTransport(inner, self)
        return AnnouncedTransport(inner, client)

    def check(self) -> None:
        """Errors: RolloutError once a server is dead for good."""
        if self._supervisor is not None:
            self._supervisor.check()

    def wait_up(self) -> None:
        """Until a server answers again; the others get their weights when they do. Errors: RolloutError when one is dead for good, the
        time is over, or the run is to stop."""
        timeout = self._config.vllm.vllm_server_start_timeout
        deadline = time.monotonic() + timeout
        while True:
            self.check()
            answers = self._control.each(self.addresses, lambda api: api.weight_version(LOOK_SECONDS))
            down = [str(answer) for answer in answers if isinstance(answer, BaseException)]
            if len(down) < len(answers):
                return
            if self._stop.requested:
                raise RolloutError("a stop signal arrived while the rollout servers were started again")
            if time.monotonic() > deadline:
                raise RolloutError(f"servers were not up again after {timeout:g} s: {'; '.join(down)}")
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Stop what was started; may be called twice."""
        if self._supervisor is not None:
            self._supervisor.stop()
        self._control.close()

    @property
    def _alias(self) -> str:
        return f"{self._config.vllm.vllm_lora_alias}-{self._names.run_token}"

    def _plain_transport(self, model: Any) -> WeightTransport:
        rollout = self._config.rollout
        match self._kind:
            case "gloo":
                return GlooTransport(self.addresses, self._names, self._control, sync_host=rollout.sync_host)
            case "disk":
                return DiskTransport(self.addresses, self._names, self._control, sync_dir=self._sync_dir())
            case "adapter":
                return AdapterTransport(
                    self.addresses,
                    self._control,
                    alias=self._alias,
                    adapter_config=adapter_settings(model),
                    folder=RunFolder(self._sync_dir(), self._names.run_token, shared=False),
                    keep=rollout.max_staleness,
                )
            case "nccl" | "ipc":
                from ebft_ds.sync.transports.vllm_native import native_transport  # imports vLLM, which only these two need here

                return native_transport(self._kind, self.addresses, self._names, self._control, sync_host=rollout.sync_host)

    def _sync_dir(self) -> Path:
        named = self._config.rollout.sync_dir
        if named is not None:
            return Path(named).expanduser().resolve()
        if not all(address.is_local for address in self.addresses):
            raise ConfigError(f"sync_dir is needed to push by {self._kind} to servers on other machines: a folder that all of them share")
        shared = Path("/dev/shm")
        return (shared if shared.is_dir() else Path(tempfile.gettempdir())) / f"ebft_ds_{os.getuid()}"


def adapter_settings(model: Any) -> dict[str, Any]:
    """The adapter_config.json of a PEFT model, in JSON types."""
    assert isinstance(model, PeftModel)
    settings: dict[str, Any] = model.peft_config["default"].to_dict()
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
    return {key: getattr(value, "value", value) for key, value in plain.items()} | {"inference_mode": True}
