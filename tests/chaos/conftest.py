"""Fixtures, from the integration tests."""

from tests.integration.vllm_server import servable_model, vllm_server

__all__ = ["servable_model", "vllm_server"]
