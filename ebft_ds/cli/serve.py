"""`ebft-ds serve`: the vLLM servers of a recipe, in the foreground."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from ebft_ds.cli.exit_code import signal_name
from ebft_ds.cli.hardware import visible_devices
from ebft_ds.cli.train import OverridesArgument, RecipeArgument, show_notes
from ebft_ds.config import RecipeConfig, load_recipe
from ebft_ds.errors import ConfigError

POLL_SECONDS = 0.5
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Stop(BaseException):
    """A stop signal came. Not an Exception: no supervisor may take it for a failure."""


def serve(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    endpoints: Annotated[Path | None, typer.Option(help="File to write addresses and keys to once the servers are ready.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Folder of the servers' logs; default output_dir/logs, or vllm_logs.")] = None,
) -> None:
    """Start the recipe's vLLM servers and keep them up until Ctrl-C. Trainings attach with vllm_server_base_url=file:ENDPOINTS or a URL."""
    from ebft_ds.sidecar.endpoints import write_endpoints
    from ebft_ds.sidecar.supervisor import SidecarSupervisor

    loaded = load_recipe(recipe, overrides or [])
    show_notes(loaded.notes)
    if endpoints is not None and (endpoints.is_dir() or not endpoints.resolve().parent.is_dir()):
        raise ConfigError(f"--endpoints {endpoints}: this must be a file in a folder that exists")
    devices = visible_devices()
    config = serving_config(loaded.config, devices)
    plans = _checked_plans(config, devices, endpoints)
    folder = logs or (Path(config.run.output_dir) / "logs" if config.run.output_dir else Path("vllm_logs"))
    restarts, stopped_by = config.vllm.vllm_server_restarts, ""
    supervisor = SidecarSupervisor(
        plans,
        log_folder=folder,
        restarts=restarts,
        start_timeout=config.vllm.vllm_server_start_timeout,
        stop_grace=config.vllm.vllm_stop_grace,
    )
    # What was ignored stays ignored: nohup means it.
    previous = {n: signal.signal(n, _raise_stop) for n in STOP_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN}
    written = False
    try:
        _say(f"starting {len(plans)} server(s); logs in {folder}")
        supervisor.start()
        for address in supervisor.addresses:
            _say(f"ready: {address.url}")
        if endpoints is not None:
            write_endpoints(endpoints, supervisor.addresses)
            written = True
            _say(f"attach with vllm_server_base_url=file:{endpoints.resolve()}")
        while True:
            supervisor.check()
            time.sleep(POLL_SECONDS)
    except _Stop as stop:
        stopped_by = str(stop)
    finally:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # stopping is bounded, and must not be left half done
        if endpoints is not None and written:
            endpoints.unlink(missing_ok=True)  # nobody must attach to servers that are gone
        if stopped_by:
            _say(f"{stopped_by}: stopping the servers")
        supervisor.stop()
        for number, handler in previous.items():
            signal.signal(number, handler)


def serving_config(config: RecipeConfig, devices: list[str]) -> RecipeConfig:
    """The recipe as one that starts servers here, on the devices it names or on the first that suffice.

    Errors: ConfigError for a recipe whose server only a training can start, and for sizes or devices that do not fit.
    """
    from ebft_ds.config.check_context import Note, Surroundings
    from ebft_ds.config.checks_vllm import check_vllm
    from ebft_ds.config.engine_choice import devices_of_one_server
    from ebft_ds.config.model_facts import read_model_facts

    if config.vllm.vllm_colocate:
        raise ConfigError("vllm_colocate: such a server sleeps and wakes with its trainer, which starts it itself; run `ebft-ds train`")
    changes: dict[str, Any] = {"vllm_launch": True, "vllm_server_base_url": None, "rollout_engine": "vllm", "rollout_device": None}
    if devices and config.vllm.vllm_devices is None and all(name.isdigit() for name in devices):
        changes["vllm_devices"] = [int(name) for name in devices[: devices_of_one_server(config) * config.vllm.vllm_num_servers]]
    serving = config.replace(**changes)
    facts = read_model_facts(serving.model.model_name_or_path) if serving.model.model_name_or_path else None
    found = list(check_vllm(serving, Surroundings(accelerators=len(devices), model=facts)))
    show_notes([str(note) for note in found if isinstance(note, Note)])
    problems = [str(problem) for problem in found if not isinstance(problem, Note)]
    if problems:
        raise ConfigError("\n".join(problems))
    return serving


def _checked_plans(config: RecipeConfig, devices: list[str], endpoints: Path | None) -> Any:
    from ebft_ds.config.preflight import check_model_files
    from ebft_ds.sidecar.keys import given_key
    from ebft_ds.sidecar.plans import server_plans
    from ebft_ds.sidecar.preflight import check_plans

    facts = check_model_files(config)
    on_cpu = not devices
    plans = server_plans(config, on_cpu=on_cpu, environ=os.environ, visible_devices=devices, always_key=endpoints is not None)
    if plans[0].api_key is not None and endpoints is None and given_key(config.vllm.vllm_api_key_file, os.environ) is None:
        raise ConfigError(
            f"vllm_host {config.vllm.vllm_host} lets other machines in, so a key is made; --endpoints FILE tells trainings which, or give "
            "one yourself by vllm_api_key_file or EBFT_VLLM_API_KEY"
        )
    check_plans(plans, on_cpu=on_cpu, facts=facts)
    return plans


def _raise_stop(number: int, _frame: FrameType | None) -> None:
    for other in STOP_SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise _Stop(signal_name(number))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
