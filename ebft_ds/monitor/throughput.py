"""FLOPs of a training step, and what share of the hardware's peak they are."""

from __future__ import annotations

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


def training_flops(
    tokens: int,
    *,
    parameters: int,
    trained_parameters: int,
    feature_parameters: int = 0,
    feature_tokens: int = 0,
    recompute: bool = False,
) -> float:
    """FLOPs of one step's matrix products, by the usual count of two per parameter and token (attention scores left out).

    Policy: forward 2P, backward through the activations 2P, weight gradients 2 per trained parameter (few with LoRA), one more
    forward under gradient checkpointing. Feature network: forward only.
    """
    per_token = 4 * parameters + 2 * trained_parameters + (2 * parameters if recompute else 0)
    return float(tokens * per_token + 2 * feature_tokens * feature_parameters)


def peak_flops(device_name: str | None) -> float | None:
    """Peak FLOP/s of one device in bf16; None for CPUs and devices not in the table."""
    if device_name is None:
        return None
    return next((tflops * 1e12 for part, tflops in PEAK_TFLOPS.items() if part.lower() in device_name.lower()), None)


def model_flops_utilisation(flops: float, seconds: float, *, devices: int, device_name: str | None) -> float | None:
    """Share of the peak of `devices` devices; None where the peak is not known."""
    peak = peak_flops(device_name)
    return None if peak is None or seconds <= 0 else flops / (seconds * devices * peak)
