"""FLOPs of a training step, and what share of the hardware's peak they are."""

from __future__ import annotations

from dataclasses import dataclass

PEAK_TFLOPS: dict[str, float] = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "A10": 125.0,
    "RTX 4090": 165.0,
}
"""Part of a GPU's name -> dense bf16 TFLOP/s of its data sheet; the first match counts."""


@dataclass(frozen=True)
class ModelSizes:
    """Parameters that take part in matrix products. An embedding table does as the output head only."""

    blocks: int
    trained_blocks: int
    head: int
    trained_head: int
    feature_blocks: int
    """Blocks of the feature network up to the deepest layer in use."""

    def step_flops(self, *, tokens: int, head_positions: int, feature_tokens: int) -> float:
        """FLOPs of one step's matrix products, by the usual count of two per parameter and token (attention scores left out).

        Policy: forward 2P, backward through the activations 2P, weight gradients 2 per trained parameter (few with LoRA). Feature
        network: forward only. What is computed a second time (gradient checkpointing, a trained head's logits) is not counted.

        Args:
            tokens: through the policy's blocks; `head_positions`: of these, the ones that reach the head.
            feature_tokens: through the feature network.
        """
        blocks = tokens * (4 * self.blocks + 2 * self.trained_blocks)
        head = head_positions * (4 * self.head + 2 * self.trained_head)
        return float(blocks + head + 2 * feature_tokens * self.feature_blocks)


def peak_flops(device_name: str | None) -> float | None:
    """Peak FLOP/s of one device in bf16; None for CPUs and devices not in the table."""
    if device_name is None:
        return None
    return next((tflops * 1e12 for part, tflops in PEAK_TFLOPS.items() if part.lower() in device_name.lower()), None)


def model_flops_utilisation(flops: float, seconds: float, *, devices: int, device_name: str | None) -> float | None:
    """Share of the peak of `devices` devices; None where the peak is not known."""
    peak = peak_flops(device_name)
    return None if peak is None or seconds <= 0 else flops / (seconds * devices * peak)
