"""Saving and loading everything a resume needs. Collective: all ranks call, all ranks learn how it ended.

A checkpoint folder holds DeepSpeed's shards under engine/, each rank's random state and cached reference features, and in the
manifest's meta the trainer's counters, the prompt stream and the rollout feed. DeepSpeed's own `latest` file is not used: it may
be written before all ranks have finished. The manifest is written last, by rank 0, after a barrier.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ebft_ds.checkpoint.manifest import FileRecord, begin, commit, read_manifest, seal_files
from ebft_ds.checkpoint.retention import clean_leftovers, prune
from ebft_ds.checkpoint.selection import resolve
from ebft_ds.checkpoint.space import writing
from ebft_ds.collectives import Collectives
from ebft_ds.engine.build import ZeroEngine
from ebft_ds.errors import CheckpointError, EbftError, PeerError
from ebft_ds.features.reference_cache import ReferenceCache

logger = logging.getLogger(__name__)

ENGINE_TAG = "engine"


def _cache_file(rank: int) -> str:
    return f"reference_features_rank_{rank}.safetensors"


class CheckpointStore:
    """The checkpoints of one run, under `output_dir/checkpoints`.

    Args:
        adapters_only: frozen base weights are left out (they are the model's own files).
        keep: newest checkpoints kept; None: all.
        reference_cache: saved and restored with the rest: a resumed run must not compute its features anew, in other rows.
    """

    def __init__(
        self,
        root: Path,
        collectives: Collectives,
        *,
        adapters_only: bool,
        keep: int | None,
        reference_cache: ReferenceCache | None = None,
    ) -> None:
        self.root = root
        self._collectives = collectives
        self._adapters_only = adapters_only
        self._keep = keep
        self._reference_cache = reference_cache

    def save(self, engine: ZeroEngine, step: int, meta: dict[str, Any]) -> Path:
        """Write `step_N`. `meta` (plain JSON) is rank 0's; returns the finished folder on every rank.

        Raises:
            CheckpointError: on every rank, when any rank could not write; earlier checkpoints stay as they were.
        """
        folder = Path(self._on_main(lambda: str(begin(self.root, step)), "starting a checkpoint"))
        records = self._on_all(lambda: self._write_share(engine, folder), "writing a checkpoint")
        merged = {name: record for share in records for name, record in share.items()}

        def publish() -> str:
            sealed = {name: msgspec.convert(record, FileRecord) for name, record in merged.items()}
            path = commit(folder, step=step, world_size=self._collectives.world_size, meta=meta, records=sealed)
            prune(self.root, self._keep)
            return str(path)

        return Path(self._on_main(publish, "finishing a checkpoint"))

    def _write_share(self, engine: ZeroEngine, folder: Path) -> dict[str, FileRecord]:
        """This rank's files and their checksums. DeepSpeed's save is itself collective; each rank seals what carries its rank."""
        rank = self._collectives.rank
        with writing(folder):
            with _failures_after_the_collective(engine):
                engine.deepspeed.save_checkpoint(
                    str(folder), tag=ENGINE_TAG, save_latest=False, exclude_frozen_parameters=self._adapters_only
                )
            torch.save(_random_state(), folder / f"random_rank_{rank}.pt")
            if self._reference_cache is not None:
                save_file(self._reference_cache.state_dict(), folder / _cache_file(rank))
        mark = f"zero_pp_rank_{rank}_"
        own = [] if self._reference_cache is None else [_cache_file(rank)]
        own += [p.relative_to(folder).as_posix() for p in (folder / ENGINE_TAG).iterdir() if p.name.startswith((mark, f"bf16_{mark}"))]
        return seal_files(folder, [*own, f"random_rank_{rank}.pt"])

    def find(self, wanted: str | None) -> Path | None:
        """The checkpoint to resume from, agreed on by all ranks before any of them loads; damaged ones are passed over with a warning."""

        def choose() -> str:
            if self.root.exists():
                clean_leftovers(self.root)
            resolution = resolve(wanted, self.root)
            for rejected in resolution.rejected:
                logger.warning("checkpoint passed over: %s", rejected)
            return str(resolution.path) if resolution.path is not None else ""

        chosen = self._on_main(choose, "choosing a checkpoint")
        return Path(chosen) if chosen else None

    def load(self, engine: ZeroEngine, folder: Path) -> dict[str, Any]:
        """Restore engine and random state from a verified folder; returns its meta.

        Raises:
            CheckpointError: on every rank; made by another number of ranks, or DeepSpeed could not load it.
        """

        def read() -> str:
            manifest = read_manifest(folder)
            return json.dumps([manifest.world_size, _cache_file(0) in manifest.files, manifest.meta])

        # Read once: a node that cannot see the file must not fail alone before the others enter a collective.
        saved_ranks, has_cache, meta = json.loads(self._on_main(read, "reading a checkpoint's manifest"))
        if saved_ranks != self._collectives.world_size:
            raise CheckpointError(
                f"{folder} was saved by {saved_ranks} ranks and this run has {self._collectives.world_size}: "
                f"resume with {saved_ranks} ranks, or start a new run from the exported model"
            )

        def restore() -> dict[str, Any]:
            path, _ = engine.deepspeed.load_checkpoint(
                str(folder), tag=ENGINE_TAG, load_module_strict=not self._adapters_only, load_lr_scheduler_states=False
            )
            if path is None:
                # DeepSpeed's way of saying that it found nothing; going on would train from scratch.
                raise CheckpointError(f"DeepSpeed found no engine state in {folder}")
            state = torch.load(folder / f"random_rank_{self._collectives.rank}.pt", weights_only=True)
            _set_random_state(state)
            self._restore_cache(folder if has_cache else None)
            return {}

        self._on_all(restore, "loading a checkpoint")
        restored: dict[str, Any] = meta
        return restored

    def _restore_cache(self, folder: Path | None) -> None:
        """This rank's part of the cache; nothing where the run keeps none, empty where the checkpoint was saved without one."""
        if self._reference_cache is None:
            return
        if folder is None:
            self._reference_cache.clear()
            if self._collectives.is_main:
                logger.info("the checkpoint holds no reference features: they are computed again as their prompts come up")
            return
        path = folder / _cache_file(self._collectives.rank)
        try:
            self._reference_cache.load_state_dict(load_file(path))
        except SafetensorError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def _on_main(self, action: Callable[[], str], what: str) -> str:
        """Runs rank 0's part and gives every rank its answer, or every rank an error."""
        answer = ""
        error: EbftError | None = None
        if self._collectives.is_main:
            try:
                answer = action()
            except EbftError as caught:
                error = caught
            except OSError as caught:
                error = CheckpointError(f"{what} failed: {caught}")
                error.__cause__ = caught
        failed, answer = self._collectives.broadcast((error is not None, answer), tuple[bool, str])
        if error is not None:
            raise error
        if failed:
            raise PeerError(f"rank 0 failed while {what}; its message names the cause")
        return answer

    def _on_all(self, action: Callable[[], dict[str, Any]], what: str) -> list[dict[str, Any]]:
        """Runs every rank's part; one failing rank fails all, after all have finished theirs."""
        error: Exception | None = None
        answer: dict[str, Any] = {}
        try:
            answer = action()
        except (EbftError, OSError, RuntimeError, ValueError, KeyError) as caught:
            error = caught
        told = self._collectives.all_gather({"error": f"{type(error).__name__}: {error}" if error else "", "answer": answer})
        if isinstance(error, EbftError):
            raise error
        if error is not None:
            raise CheckpointError(f"rank {self._collectives.rank} failed while {what}: {error}") from error
        failed = [f"rank {rank}: {share['error']}" for rank, share in enumerate(told) if share["error"]]
        if failed:
            raise CheckpointError(f"failed while {what}: {'; '.join(failed)}")
        return [share["answer"] for share in told]


@contextmanager
def _failures_after_the_collective(engine: ZeroEngine) -> Iterator[None]:
    """A rank that cannot write still walks DeepSpeed's save to its closing barrier, where the others wait for it, and raises then."""
    writer = engine.deepspeed.checkpoint_engine
    write, failures = writer.save, []

    def save(state_dict: Any, path: str) -> None:
        try:
            write(state_dict, path)
        except (OSError, RuntimeError) as error:
            failures.append(error)

    writer.save = save
    try:
        yield
    finally:
        writer.save = write
    if failures:
        raise failures[0]


def _random_state() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(internal), gauss]}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
