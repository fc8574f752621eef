"""Checks of the vLLM sidecar: who starts it, devices, sizes, and how weights get there."""

from __future__ import annotations

from collections.abc import Iterator

from ebft_ds.config.check_context import Note, Surroundings
from ebft_ds.config.engine_choice import devices_of_one_server, rollout_engine_of, starts_servers, transport_of
from ebft_ds.config.recipe import RecipeConfig

SMALLEST_TEMPERATURE, LARGEST_TEMPERATURE = 0.01, 2.0
"""That vLLM samples at as asked: it raises lower ones without a word and refuses higher ones."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
LARGEST_LORA_RANK = 512
"""That vLLM holds."""


def check_vllm(config: RecipeConfig, around: Surroundings) -> Iterator[str]:
    """All findings about the sidecar."""
    yield from _check_choice(config)
    if rollout_engine_of(config) == "transformers":
        yield from _check_embedded(config)
        return
    yield from _check_sizes(config, around)
    yield from _check_transport(config, around)
    if starts_servers(config):
        yield from _check_devices(config, around)
    if config.vllm.vllm_colocate:
        yield from _check_colocation(config, around)


def _check_choice(config: RecipeConfig) -> Iterator[str]:
    vllm, engine = config.vllm, config.rollout.rollout_engine
    ways = {
        "vllm_launch": vllm.vllm_launch,
        "vllm_colocate": vllm.vllm_colocate,
        "vllm_server_base_url": bool(vllm.vllm_server_base_url),
    }
    chosen = [name for name, wanted in ways.items() if wanted]
    if vllm.vllm_server_base_url and starts_servers(config):
        yield (
            f"{chosen[0]} starts servers and vllm_server_base_url names running ones: remove one of them. "
            "(`ebft-ds serve` starts servers without vllm_launch)"
        )
    if engine == "vllm" and not chosen:
        yield (
            "rollout_engine: vllm needs a server: vllm_launch: true starts it with the run, vllm_server_base_url names a running one, "
            "and vllm_colocate: true shares one GPU"
        )
    if engine == "transformers" and chosen:
        yield f"rollout_engine: transformers contradicts {chosen[0]}; remove one of them"
    if vllm.vllm_server_base_url == []:
        yield "vllm_server_base_url is an empty list; name a server, or null for none"


def _check_embedded(config: RecipeConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.sync_mode == "adapter":
        yield "sync_mode: adapter needs the vllm engine; the embedded engine takes merged weights"
    if rollout.sync_transport != "auto":
        yield f"sync_transport: {rollout.sync_transport} is a way to vLLM servers; the embedded engine has its own, leave it out"
    idle = sorted(name for name in config.vllm.model_fields_set if name not in ("vllm_launch", "vllm_colocate", "vllm_server_base_url"))
    if idle and rollout.rollout_engine == "auto":
        yield Note(f"{', '.join(idle)}: no effect, since the embedded engine is used; vllm_launch: true starts a server")


def _check_sizes(config: RecipeConfig, around: Surroundings) -> Iterator[str]:
    vllm = config.vllm
    longest, needed = vllm.vllm_max_model_len, config.data.max_seq_length
    if longest is not None and longest < needed:
        yield f"vllm_max_model_len {longest} is below max_seq_length {needed}: the server would cut completions; raise it or leave it out"
    context = around.model.context_length if around.model else 0
    if longest is not None and context and longest > context:
        yield f"vllm_max_model_len {longest} exceeds the model's context of {context} tokens"
    if vllm.vllm_max_num_seqs is not None and vllm.vllm_max_num_seqs < config.rollout.num_generations:
        yield (
            f"vllm_max_num_seqs {vllm.vllm_max_num_seqs} is below num_generations {config.rollout.num_generations}: "
            "one prompt's completions would never run together; raise it or leave it out"
        )
    temperature = config.rollout.generation_kwargs.get("temperature", config.rollout.temperature)
    if isinstance(temperature, int | float) and not SMALLEST_TEMPERATURE <= temperature <= LARGEST_TEMPERATURE:
        yield f"temperature {temperature:g}: vLLM samples between {SMALLEST_TEMPERATURE:g} and {LARGEST_TEMPERATURE:g}"
    waits = (vllm.vllm_server_start_timeout if starts_servers(config) else 0.0) + config.rollout.rollout_start_timeout
    if waits >= config.engine.ddp_timeout:
        yield (
            f"vllm_server_start_timeout and rollout_start_timeout together ({waits:g} s) reach ddp_timeout "
            f"{config.engine.ddp_timeout:g} s: "
            "the other ranks would give up before rank 0 can say what is wrong; raise ddp_timeout"
        )
    if vllm.vllm_advertise_host is not None and starts_servers(config) and vllm.vllm_host in LOOPBACK:
        yield (
            f"vllm_advertise_host {vllm.vllm_advertise_host} names servers that are bound to {vllm.vllm_host}, where no other machine "
            "reaches them; set vllm_host (0.0.0.0), or leave it out"
        )
    if vllm.vllm_port is not None and vllm.vllm_port + vllm.vllm_num_servers - 1 > 65535:
        yield f"vllm_port {vllm.vllm_port} and the {vllm.vllm_num_servers - 1} after it: ports end at 65535"
    if config.rollout.rollout_device is not None:
        yield Note("rollout_device has no effect: it is the embedded engine's; the servers' GPUs are vllm_devices")


def _check_transport(config: RecipeConfig, around: Surroundings) -> Iterator[str]:
    rollout, peft = config.rollout, config.peft
    on_cpu = around.accelerators == 0
    transport = transport_of(config, on_cpu=on_cpu)
    if on_cpu and transport in ("nccl", "ipc"):
        yield f"sync_transport: {transport} moves weights between GPUs, and this run is on the CPU; use gloo or disk"
    if transport in ("nccl", "gloo") and rollout.sync_dir is not None:
        yield Note(f"sync_dir has no effect with sync_transport: {transport}")
    if rollout.sync_mode != "adapter":
        return
    if not peft.use_peft:
        yield "sync_mode: adapter pushes a LoRA adapter, and use_peft is false; use sync_mode: merged"
    if peft.use_dora:
        yield "sync_mode: adapter: vLLM does not serve DoRA; use sync_mode: merged"
    if peft.lora_modules_to_save:
        yield "sync_mode: adapter leaves out lora_modules_to_save, which are trained in full; use sync_mode: merged"
    if peft.lora_r > LARGEST_LORA_RANK:
        yield f"sync_mode: adapter: vLLM serves ranks up to {LARGEST_LORA_RANK}, and lora_r is {peft.lora_r}; use sync_mode: merged"
    if rollout.sync_transport != "auto":
        yield f"sync_transport: {rollout.sync_transport} has no meaning in sync_mode: adapter, which goes through files; leave it out"


def _check_devices(config: RecipeConfig, around: Surroundings) -> Iterator[str]:
    vllm = config.vllm
    devices = vllm.vllm_devices
    each = devices_of_one_server(config)
    if around.accelerators == 0:
        if devices:
            yield f"vllm_devices {devices}: this machine has no GPU, or the run is kept off it; leave it out"
        if vllm.vllm_tensor_parallel_size * vllm.vllm_data_parallel_size * vllm.vllm_pipeline_parallel_size > 1:
            yield "parallel sizes of the server (vllm_*_parallel_size) above 1 need GPUs; on the CPU use vllm_num_servers"
        return
    if vllm.vllm_colocate:
        return
    if devices is None:
        if around.accelerators:
            yield "vllm_devices is needed to start servers on a machine with GPUs (e.g. [7]): they must not share a rank's GPU unasked"
        return
    if len(set(devices)) != len(devices) or min(devices, default=0) < 0 or not devices:
        yield f"vllm_devices {devices}: distinct GPU numbers are needed"
    elif len(devices) != each * vllm.vllm_num_servers:
        yield (
            f"vllm_devices names {len(devices)} GPU(s); vllm_num_servers {vllm.vllm_num_servers} x parallel sizes {each} "
            f"needs {each * vllm.vllm_num_servers}"
        )


def _check_colocation(config: RecipeConfig, around: Surroundings) -> Iterator[str]:
    vllm = config.vllm
    if around.accelerators == 0:
        yield "vllm_colocate shares a GPU, and this run is on the CPU; use vllm_launch: true"
    if vllm.vllm_devices:
        yield "vllm_colocate uses the trainer's own GPU; leave out vllm_devices, or use vllm_launch: true"
    if vllm.vllm_num_servers > 1 or devices_of_one_server(config) > 1:
        yield "vllm_colocate is one server on one GPU: vllm_num_servers and the vllm_*_parallel_size must be 1"
    if config.rollout.max_staleness > 0:
        yield (
            f"vllm_colocate takes turns with the trainer, and max_staleness {config.rollout.max_staleness} would keep requests in flight "
            "over the server's sleep; set max_staleness: 0"
        )
    if around.world_size is not None and around.world_size > 1:
        yield f"vllm_colocate is for one rank on one GPU, and there are {around.world_size} ranks; use vllm_launch: true"
