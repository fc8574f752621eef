"""What a trainer and the receiver inside a server say to each other during a push.

The trainer calls the workers' method `METHOD` by vLLM's route /collective_rpc with one op, as JSON, and every worker returns a `Reply`.
vLLM's own weight routes are not used: they wrap a worker's error in their own text, leave an update open for good when it fails, and with
several workers one that raises puts all later answers out of step.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ebft_ds.rollout.manifest import WeightManifest

METHOD = "ebft_push"


class GlooWay(msgspec.Struct, frozen=True, tag_field="way", tag="gloo"):
    """Tensors come by broadcast from rank 0 of a gloo group of its own, whose TCP store also says which tensors come next."""

    host: str
    port: int
    """Of the trainer's TCP store."""
    world_size: int
    """Trainer plus workers."""


class DiskWay(msgspec.Struct, frozen=True, tag_field="way", tag="disk"):
    """Tensors come in safetensors files, named one by one by `BucketFile` and all together by `Sealed`."""

    folder: str


class Announce(msgspec.Struct, frozen=True, tag_field="op", tag="announce"):
    """Check a push that is to come, and begin to receive it. Drops any other push that has not ended."""

    push_id: str
    manifest: WeightManifest
    seconds: float
    """Time that the whole push has."""
    way: GlooWay | DiskWay


class BucketFile(msgspec.Struct, frozen=True, tag_field="op", tag="bucket"):
    """One file is complete."""

    push_id: str
    file: str
    """Name inside the folder."""
    num_bytes: int
    sha256: str


class Sealed(msgspec.Struct, frozen=True, tag_field="op", tag="sealed"):
    """All files are there, and this file lists them (`FileManifest`)."""

    push_id: str
    file: str
    sha256: str


class Status(msgspec.Struct, frozen=True, tag_field="op", tag="status"):
    """How far is it?"""

    push_id: str


class Apply(msgspec.Struct, frozen=True, tag_field="op", tag="apply"):
    """Put the received tensors into the model. Generation must be paused."""

    push_id: str


class Abort(msgspec.Struct, frozen=True, tag_field="op", tag="abort"):
    """Forget this push."""

    push_id: str


Op = Announce | BucketFile | Sealed | Status | Apply | Abort
State = Literal["none", "receiving", "received", "applied", "failed"]


class Reply(msgspec.Struct, frozen=True):
    """One worker's answer. `state` is that of the push asked about; `none`: this worker does not know it (any more)."""

    state: State
    error: str | None = None
    """The first error of any worker of the server, for a push that failed."""
    tensors: int = 0
    """Received so far."""


class Replies(msgspec.Struct, frozen=True):
    """The route's answer."""

    results: list[Reply]


class FileManifest(msgspec.Struct, frozen=True):
    """The file that `Sealed` names."""

    version: int
    files: list[BucketFile]


def decode_op(text: str | bytes) -> Op:
    """Raises msgspec.ValidationError (a ValueError) for anything that is no op."""
    return msgspec.json.decode(text, type=Op)
