"""Checkpoints: files with an atomic, checksummed manifest. This module and those it imports load without torch."""

from __future__ import annotations

from ebft_ds.checkpoint.manifest import (
    FileRecord,
    Manifest,
    begin,
    commit,
    file_names,
    read_manifest,
    read_meta,
    seal_files,
    verify,
)
from ebft_ds.checkpoint.retention import clean_leftovers, prune
from ebft_ds.checkpoint.selection import Rejected, Resolution, find_usable, resolve
from ebft_ds.checkpoint.space import writing

__all__ = [
    "FileRecord",
    "Manifest",
    "Rejected",
    "Resolution",
    "begin",
    "clean_leftovers",
    "commit",
    "file_names",
    "find_usable",
    "prune",
    "read_manifest",
    "read_meta",
    "resolve",
    "seal_files",
    "verify",
    "writing",
]
