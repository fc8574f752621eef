"""Fixtures of the integration tests."""

from __future__ import annotations

import gc

import pytest

from tests.integration.vllm_server import servable_model, vllm_server

__all__ = ["servable_model", "vllm_server"]


@pytest.fixture(autouse=True, scope="module")
def _no_long_collections() -> None:
    """After two thousand tests a full collection walks a million objects, and stands in the way of what a test does at a certain moment
    for a second (0.8 s measured). What is alive now is left alone from here on."""
    gc.collect()
    gc.freeze()
