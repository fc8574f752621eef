"""The weight receiver inside every worker of a vLLM server.

One push: `Announce` is checked against the checkpoint and the fused layers, and starts a thread that takes the tensors into host memory;
generation goes on. `Apply`, with generation paused, puts them into the model: all workers of the server, or none. After any error the
server goes on with the weights that it had, and the next push finds it ready.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.v1.worker.gpu_worker import Worker

from ebft_ds.errors import WeightSyncError
from ebft_ds.rollout.manifest import TensorSpec
from ebft_ds.sidecar.manifest_check import LayerMap, check_manifest
from ebft_ds.sidecar.push_ops import METHOD, Abort, Announce, Apply, BucketFile, GlooWay, Op, Reply, Sealed, decode_op
from ebft_ds.sidecar.receiver_apply import Backup, apply_tensors
from ebft_ds.sidecar.receiver_checkpoint import checkpoint_specs, local_folder
from ebft_ds.sidecar.receiver_disk import DiskIntake
from ebft_ds.sidecar.receiver_gloo import GlooIntake
from ebft_ds.sidecar.receiver_intake import Intake
from ebft_ds.sidecar.receiver_layers import layer_map

logger = logging.getLogger("vllm.ebft_ds")  # vLLM shows its own loggers alone
NOT_THIS_WAY = "this server takes weights from ebft_ds's own transports (sync_transport gloo or disk), not through vLLM's weight routes"


class WeightReceiver(WeightTransferEngine[WeightTransferInitInfo, WeightTransferUpdateInfo]):
    """Registered with vLLM as `ebft_gloo` and `ebft_disk` (see plugin.py)."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = WeightTransferUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._checkpoint: dict[str, TensorSpec] | None = None
        self._layers: LayerMap | None = None
        self._intake: Intake | None = None
        self._ended: tuple[str, Reply] | None = None
        """The last push that ended, and how."""

    def handle(self, op: Op) -> Reply:
        """Do what the trainer asks, and say how the push stands. Raises nothing that a wrong push could cause."""
        if isinstance(op, Announce):
            return self._together(op.push_id, lambda: self._announce(op))
        intake = self._intake
        if intake is None or intake.announced.push_id != op.push_id:
            return self._ended[1] if self._ended is not None and self._ended[0] == op.push_id else Reply("none")
        if isinstance(op, Abort):
            self._end(op.push_id, Reply("failed", "the trainer gave the push up"))
            return Reply("none")
        if isinstance(op, BucketFile | Sealed):
            return self._together(op.push_id, lambda: intake.file(op))
        if isinstance(op, Apply):
            return self._apply(op.push_id, intake)
        return Reply(intake.state, intake.error, len(intake.tensors))

    def _announce(self, op: Announce) -> None:
        if self._intake is not None:
            logger.warning("push %s was not ended; %s takes its place", self._intake.announced.push_id, op.push_id)
            self._end(self._intake.announced.push_id, Reply("failed", f"push {op.push_id} took its place"))
        checkpoint, layers = self._model_facts()
        whole = self.parallel_config.pipeline_parallel_size == 1
        check_manifest(op.manifest, checkpoint, layers, dtype=str(self.model_config.dtype).removeprefix("torch."), whole_model=whole)
        touched = layers.touched(spec.name for spec in op.manifest.tensors)

        def back_up() -> Backup:
            return Backup(self.model, touched)

        if isinstance(op.way, GlooWay):
            parallel = self.parallel_config
            self._intake = GlooIntake(op, back_up, 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank)
        else:
            self._intake = DiskIntake(op, back_up)
        self._intake.start()

    def _model_facts(self) -> tuple[dict[str, TensorSpec], LayerMap]:
        """What the checkpoint holds and where it goes; found once."""
        if self._checkpoint is None or self._layers is None:
            if self.vllm_config.lora_config is not None:
                raise WeightSyncError(
                    "the server was started with --enable-lora and takes adapters (sync_mode: adapter), no merged weights"
                )
            started = time.monotonic()
            model, load = self.model_config, self.vllm_config.load_config
            self._checkpoint = checkpoint_specs(local_folder(model.model, model.revision, load.download_dir))
            self._layers = layer_map(self.model, self._checkpoint.values())
            logger.info(
                "%d checkpoint tensors go into %d layers here (found in %.2f s)",
                len(self._layers.of_name),
                len(self._layers.layers),
                time.monotonic() - started,
            )
        return self._checkpoint, self._layers

    def _apply(self, push_id: str, intake: Intake) -> Reply:
        reply = self._together(push_id, intake.join)
        if reply.error is not None:
            return reply
        assert isinstance(intake.prepared, Backup)
        assert self._layers is not None
        backup, elements = intake.prepared, self._layers.elements
        started = time.monotonic()
        error = self._agreed(lambda: apply_tensors(self.model, self.model_config, list(intake.tensors.items()), backup, elements))
        if error is not None:
            backup.restore()  # this worker may have been the one that succeeded
            self._end(push_id, Reply("failed", error))
        else:
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            took = time.monotonic() - started
            manifest = intake.announced.manifest
            logger.info(
                "version %d: %d tensors loaded into %d layers in %.2f s", manifest.version, len(intake.tensors), len(backup.layers), took
            )
            self._end(push_id, Reply("applied", tensors=len(intake.tensors)))
        assert self._ended is not None
        return self._answer(self._ended[1])

    def _together(self, push_id: str, step: Callable[[], None]) -> Reply:
        """One step on every worker of the server; an error on any of them ends the push on all."""
        error = self._agreed(step)
        if error is not None:
            self._end(push_id, Reply("failed", error))
            return self._answer(Reply("failed", error))
        intake = self._intake
        return Reply(intake.state if intake is not None else "none")

    def _agreed(self, step: Callable[[], None]) -> str | None:
        """The step's error on the first worker that has one; the same on every worker."""
        error: str | None = None
        try:
            step()
        except Exception as caught:
            expected = isinstance(caught, WeightSyncError)
            error = str(caught) if expected else f"{type(caught).__name__}: {caught}"
            logger.warning("weight push refused: %s", error, exc_info=not expected)
        for group in (get_tp_group(), get_pp_group()):
            if group.world_size > 1:
                errors: list[str | None] = [None] * group.world_size
                dist.all_gather_object(errors, error, group=group.cpu_group)
                error = next((e for e in errors if e is not None), None)
        return error

    def _answer(self, reply: Reply) -> Reply:
        """With several data-parallel engines vLLM passes on the first one's answers only, but any one's exception."""
        parallel = self.parallel_config
        if reply.error is not None and parallel.data_parallel_size > 1 and parallel.rank == parallel.world_size - 1:
            raise WeightSyncError(reply.error)
        return reply

    def _end(self, push_id: str, reply: Reply) -> None:
        self._ended = (push_id, reply)
        if self._intake is not None:
            self._intake.cancel()
        self._intake = None

    def shutdown(self) -> None:
        if self._intake is not None:
            self._end(self._intake.announced.push_id, Reply("failed", "the server ends"))

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        raise NotImplementedError(NOT_THIS_WAY)

    def start_weight_update(self) -> None:
        raise NotImplementedError(NOT_THIS_WAY)

    def receive_weights(self, update_info: WeightTransferUpdateInfo) -> None:
        raise NotImplementedError(NOT_THIS_WAY)

    def finish_weight_update(self) -> None:
        raise NotImplementedError(NOT_THIS_WAY)


def _push(worker: Any, op: str) -> dict[str, Any]:
    """The workers' method `METHOD`: takes an op as JSON, returns a `Reply`."""
    receiver = worker.weight_transfer_engine
    if not isinstance(receiver, WeightReceiver):
        raise NotImplementedError("this server was started with another --weight-transfer-config than ebft_gloo or ebft_disk")
    with set_current_vllm_config(worker.vllm_config):
        reply: dict[str, Any] = msgspec.to_builtins(receiver.handle(decode_op(op)))
    return reply


setattr(Worker, METHOD, _push)
