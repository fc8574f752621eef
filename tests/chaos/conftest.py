"""The servable model, from the integration tests' fixtures."""

from tests.integration.vllm_server import servable_model

__all__ = ["servable_model"]
