"""What can be said about a run's servers before anything is loaded or started. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ebft_ds.config.engine_choice import rollout_engine_of, starts_servers
from ebft_ds.config.model_facts import ModelFacts
from ebft_ds.config.recipe import RecipeConfig
from ebft_ds.sidecar.command import ServerPlan
from ebft_ds.sidecar.endpoints import resolve_servers
from ebft_ds.sidecar.plans import server_plans
from ebft_ds.sidecar.ports import PortHold
from ebft_ds.sidecar.supported import check_installed, check_model, installed_vllm


def check_sidecar(config: RecipeConfig, environ: Mapping[str, str], *, on_cpu: bool, facts: ModelFacts | None) -> None:
    """Checks of the servers that a training will start or use. Errors: ConfigError."""
    if rollout_engine_of(config) != "vllm":
        return
    if starts_servers(config):
        check_plans(server_plans(config, on_cpu=on_cpu, environ=environ), on_cpu=on_cpu, facts=facts)
    else:
        resolve_servers(config, environ, on_cpu=on_cpu)


def check_plans(plans: Sequence[ServerPlan], *, on_cpu: bool, facts: ModelFacts | None) -> None:
    """Can these servers be started here? Errors: ConfigError."""
    check_installed(on_cpu=on_cpu, found=installed_vllm())
    check_model(facts, on_cpu=on_cpu)
    holds: list[PortHold] = []
    try:
        for plan in plans:
            holds.append(PortHold(plan.host, plan.port))
    finally:
        for hold in holds:
            hold.close()
