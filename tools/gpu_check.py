"""Prove the GPU paths on one GPU in a few minutes: python tools/gpu_check.py

Needs torch with CUDA, transformers and peft; what needs DeepSpeed is skipped, and says so, where it is not installed. One line a
check: ok, FAILED with the numbers, or skipped with the reason. Exit code 1 if any check failed, 2 without a GPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

if __package__ in (None, ""):  # started as a script: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from tools import gpu_check_packed as packed
from tools.gpu_check_reward import reward_model
from tools.gpu_report import Skip, close, need
from tools.random_model import make_random_model

PACKED_BACKENDS = ("flex", "split", "dense")
ROWS = [[5, 9, 14, 22, 7, 31], [8, 3, 44, 12], [6, 6, 19, 2, 90, 41, 17, 33]]


def log_prob_head(model: Path) -> str:
    """Chunked log-probs and their gradients on the GPU against full logits, frozen and trained head, float32."""
    from ebft_ds.policy.logprobs import LogProbHead

    torch.manual_seed(0)
    linear = torch.nn.Linear(256, 8192, bias=False, device="cuda")
    hidden = torch.randn(700, 256, device="cuda", requires_grad=True)
    targets = torch.randint(0, 8192, (700,), device="cuda")
    inverse = torch.full((700,), 1 / 0.7, device="cuda")
    reports = []
    for frozen in (True, False):
        linear.weight.requires_grad_(not frozen)
        found, _ = LogProbHead.adopt(linear, chunk_size=128, softcap=None)(hidden, targets, inverse)
        (gradient,) = torch.autograd.grad(found.sum(), hidden)
        full = torch.log_softmax(linear(hidden) / 0.7, dim=-1).gather(1, targets[:, None])[:, 0]
        (wanted,) = torch.autograd.grad(full.sum(), hidden)
        reports += [close(found, full, 1e-3), close(gradient, wanted, 1e-3)]
    return "; ".join(reports)


def head_memory(model: Path) -> str:
    """4,096 positions of a 49k vocabulary in bf16: peak extra memory against the full-logits way."""
    from ebft_ds.policy.logprobs import LogProbHead

    linear = torch.nn.Linear(576, 49152, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    hidden = torch.randn(4096, 576, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 49152, (4096,), device="cuda")

    def peak(work: Callable[[], torch.Tensor]) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work().sum().backward()
        hidden.grad = None
        return torch.cuda.max_memory_allocated() - before

    chunked = peak(lambda: LogProbHead.adopt(linear, chunk_size=256, softcap=None)(hidden, targets)[0])
    full = peak(lambda: torch.log_softmax(linear(hidden).float(), dim=-1).gather(1, targets[:, None]))
    assert chunked < 0.35 * full, f"chunked {chunked / 1e6:.0f} MB, full {full / 1e6:.0f} MB"
    return f"chunked {chunked / 1e6:.0f} MB, full {full / 1e6:.0f} MB"


def feature_rewards(model: Path) -> str:
    """Group rewards with whitening on the GPU equal those on the CPU."""
    from ebft_ds.rewards.feature_matching import group_feature_rewards

    torch.manual_seed(0)
    completions = torch.nn.functional.normalize(torch.randn(8, 4, 1728), dim=-1)
    references = torch.nn.functional.normalize(torch.randn(8, 1728), dim=-1)
    on_cpu = group_feature_rewards(completions, references, whitening="feature")
    on_gpu = group_feature_rewards(completions.cuda(), references.cuda(), whitening="feature")
    return close(on_gpu.reward, on_cpu.reward, 1e-5)


def embedded_engine(model: Path) -> str:
    """The embedded rollout engine on the GPU: its log-probs are a plain forward's."""
    from transformers import AutoModelForCausalLM

    from ebft_ds.rollout.spec import RolloutProcessSpec
    from ebft_ds.rollout.transformers_engine import TransformersEngine

    engine = TransformersEngine(RolloutProcessSpec(model_name_or_path=str(model), dtype="float32", device="cuda:0", log_path=os.devnull))
    engine.start()
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    reports = []
    for row in ROWS:
        with torch.no_grad():
            logits = plain(torch.tensor([row])).logits[0, :-1] / 0.7
        wanted = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0]
        reports.append(close(torch.tensor(engine.score(row, 0.7)), wanted, 1e-3))
    engine.stop()
    return reports[-1]


def zero_engine(model: Path, dtype: str, offload: bool) -> str:
    """A ZeRO-3 engine over nccl: log-probs and features of a plain forward, a finite step, frozen weights untouched."""
    need("deepspeed")
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from ebft_ds.config import AsyncEBFTConfig
    from ebft_ds.config.derived import derive
    from ebft_ds.engine.build import init_distributed
    from ebft_ds.engine.network import FeatureWork, LogProbWork
    from ebft_ds.packing.padded import pad_rows
    from ebft_ds.trainers.engines import build_engines

    init_distributed(120.0)
    assert dist.get_backend() == "nccl"
    zero = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}} if offload else {}
    config = AsyncEBFTConfig(
        model_name_or_path=str(model),
        dtype=dtype,
        use_peft=True,
        lora_r=4,
        learning_rate=1e-2,
        max_steps=2,
        max_seq_length=128,
        max_completion_length=32,
        deepspeed={"zero_optimization": {"stage3_param_persistence_threshold": 0} | zero},
    )
    engines = build_engines(config, derive(config, 1), hidden_size=64, num_layers=4, peft_config=None, optimizer=None)
    actor = engines.actor
    rows = pad_rows(ROWS, device=actor.device)
    width = rows.input_ids.shape[1]
    positions = torch.tensor([b * width + t for b, row in enumerate(ROWS) for t in range(len(row) - 1)], device=actor.device)
    work = LogProbWork(rows, positions, rows.input_ids.flatten()[positions + 1], torch.ones(len(positions), device=actor.device))
    log_probs, _ = actor.log_probs(work)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    wanted = []
    for row in ROWS:
        with torch.no_grad():
            logits = plain(torch.tensor([row])).logits[0, :-1]
        wanted.append(torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0])
    report = close(log_probs, torch.cat(wanted), 1e-3 if dtype == "float32" else 0.3)
    before = actor.features(FeatureWork(rows, engines.layer_indices, rows.flat_positions()))
    actor.backward(-log_probs.mean(), last=True)
    norm, _ = actor.step(0)
    assert norm > 0
    after = actor.features(FeatureWork(rows, engines.layer_indices, rows.flat_positions()))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "the step moved the frozen features"
    return report


def vllm_push(model: Path, transport: str) -> str:
    """A vLLM server on a GPU takes moved weights by this transport, and its log-probs are then those of the moved model, float32."""
    need("vllm")
    if transport == "nccl" and torch.cuda.device_count() < 2:
        raise Skip("nccl needs a GPU for the trainer and another one for the server")
    from transformers import AutoModelForCausalLM

    from ebft_ds.rollout.manifest import TensorSpec, WeightManifest
    from ebft_ds.sidecar.command import ServerPlan
    from ebft_ds.sidecar.control import ControlLoop
    from ebft_ds.sidecar.server import ServerProcess
    from ebft_ds.sidecar.versions import VersionNames, new_run_token
    from ebft_ds.sync.transports.disk import DiskTransport
    from ebft_ds.sync.transports.gloo import GlooTransport
    from ebft_ds.sync.transports.servers import ServerTransport

    served = make_random_model(model.parent / f"served_{transport}", head_dim=64, num_layers=2)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    plan = ServerPlan(
        model=str(served),
        max_model_len=256,
        api_key="gpu-check",
        devices=(visible[1 if transport == "nccl" else 0],),
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=64 * 2**20,
        enforce_eager=True,
        weight_transfer={"nccl": "nccl", "ipc": "ipc", "gloo": "ebft_gloo", "disk": "ebft_disk"}[transport],  # type: ignore[arg-type]
    )
    plain = AutoModelForCausalLM.from_pretrained(served, dtype=torch.float32).eval()
    server, control, names = ServerProcess(plan, model.parent / f"{transport}.log"), ControlLoop(), VersionNames(new_run_token())
    try:
        server.start()
        server.wait_ready(300.0)
        way: ServerTransport
        if transport == "gloo":
            way = GlooTransport([server.address], names, control)
        elif transport == "disk":
            way = DiskTransport([server.address], names, control, sync_dir=model.parent / "pushes")
        else:
            from ebft_ds.sync.transports.vllm_native import native_transport

            way = native_transport("nccl" if transport == "nccl" else "ipc", [server.address], names, control)
        reports = []
        for version in (1, 2):
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.03)
            tensors = [(name, parameter.detach().clone()) for name, parameter in plain.named_parameters()]
            specs = [TensorSpec(name, "float32", list(tensor.shape)) for name, tensor in tensors]
            result = way.push(WeightManifest(version, specs), iter([tensors[:7], tensors[7:]]), 120.0)
            [scored] = way.score(ROWS[0], 1.0, 60.0)
            with torch.no_grad():
                logits = plain(torch.tensor([ROWS[0]])).logits[0, :-1]
            wanted = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(ROWS[0][1:])[:, None])[:, 0]
            reports.append(f"{close(torch.tensor(scored), wanted, 5e-3)}, paused {result.pause_seconds:.2f} s")
        way.close()
        return reports[-1]
    finally:
        server.stop()
        control.close()


def _push_check(kind: str) -> Callable[[Path], str]:
    return lambda model: vllm_push(model, kind)


def _kernel_check(backend: str, dtype: str) -> Callable[[Path], str]:
    return lambda model: packed.packed_kernel(backend, getattr(torch, dtype))


def _network_check(backend: str) -> Callable[[Path], str]:
    return lambda model: packed.packed_network(model, backend)


def main() -> int:
    """Run every check; see the module's text for the exit codes."""
    if not torch.cuda.is_available():
        print("no GPU: nothing was checked")
        return 2
    checks: list[tuple[str, Callable[[Path], str]]] = [
        ("log-prob head", log_prob_head),
        ("log-prob head memory, bf16", head_memory),
        ("group rewards", feature_rewards),
        *((f"packed attention, {name}, {kind}", _kernel_check(name, kind)) for name in PACKED_BACKENDS for kind in ("float32", "bfloat16")),
        *((f"packed policy, {name}", _network_check(name)) for name in PACKED_BACKENDS),
        ("packed policy, Liger kernels", packed.liger),
        ("embedded rollout engine", embedded_engine),
        ("ZeRO-3 engine, float32", lambda model: zero_engine(model, "float32", False)),
        ("ZeRO-3 engine, bf16", lambda model: zero_engine(model, "bfloat16", False)),
        ("ZeRO-3 engine, bf16, CPU offload", lambda model: zero_engine(model, "bfloat16", True)),
        ("reward model, float32", lambda model: reward_model(model, "float32")),
        ("reward model, bf16", lambda model: reward_model(model, "bfloat16")),
        *((f"vLLM server, push by {kind}", _push_check(kind)) for kind in ("gloo", "disk", "ipc", "nccl")),
    ]
    failed = 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        model = make_random_model(Path(folder) / "model")
        for name, check in checks:
            started = time.monotonic()
            try:
                result = f"ok       {check(model)}"
            except Skip as reason:
                result = f"skipped  {reason}"
            except Exception as error:  # noqa: BLE001  the other checks still run
                failed += 1
                result = f"FAILED   {type(error).__name__}: {error}"
                traceback.print_exc()
            print(f"{name:36s} {result}  ({time.monotonic() - started:.1f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
