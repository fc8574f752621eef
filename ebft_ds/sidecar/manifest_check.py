"""Is a push that was announced one that this model can take? Checked against its checkpoint and its layers before anything is touched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ebft_ds.errors import WeightSyncError
from ebft_ds.rollout.manifest import TensorSpec, WeightManifest


@dataclass(frozen=True)
class LayerMap:
    """Which checkpoint tensors fill which layers of this worker's model."""

    layers: Mapping[str, frozenset[str]]
    """Layer (a module that owns parameters, maybe fused) -> names of all checkpoint tensors that go into it."""
    homeless: frozenset[str] = frozenset()
    """Checkpoint names that no layer of this worker takes: tied heads, other pipeline stages."""
    elements: Mapping[str, int] = field(default_factory=dict)
    """Layer -> how many elements all of them fill there."""
    of_name: Mapping[str, tuple[str, ...]] = field(init=False)
    """Checkpoint name -> layers."""

    def __post_init__(self) -> None:
        found: dict[str, list[str]] = {}
        for layer, names in self.layers.items():
            for name in names:
                found.setdefault(name, []).append(layer)
        object.__setattr__(self, "of_name", {name: tuple(layers) for name, layers in found.items()})

    def touched(self, names: Iterable[str]) -> set[str]:
        """Layers that these tensors go into."""
        return {layer for name in names for layer in self.of_name.get(name, ())}


def check_manifest(
    manifest: WeightManifest, checkpoint: Mapping[str, TensorSpec], layer_map: LayerMap, *, dtype: str, whole_model: bool
) -> None:
    """Raises WeightSyncError that names what does not fit.

    Args:
        checkpoint: the tensors of the model's own checkpoint.
        dtype: that the model computes in; a tensor may also come in its checkpoint's dtype.
        whole_model: this worker holds every layer (no pipeline stages), so a name without a layer has no home at all.
    """
    where = f"push {manifest.version}"
    seen: set[str] = set()
    for spec in manifest.tensors:
        if spec.name in seen:
            raise WeightSyncError(f"{where}: {spec.name} is announced twice")
        seen.add(spec.name)
        known = checkpoint.get(spec.name)
        if known is None:
            raise WeightSyncError(f"{where}: the server's model has no {spec.name!r} ({_nearest(spec.name, checkpoint)})")
        if spec.shape != known.shape:
            raise WeightSyncError(f"{where}: {spec.name} has shape {spec.shape}; the server's model has {known.shape}")
        if spec.dtype not in (dtype, known.dtype):
            raise WeightSyncError(f"{where}: {spec.name} is {spec.dtype}; the server computes in {dtype}: send that")
        if whole_model and spec.name in layer_map.homeless:
            raise WeightSyncError(
                f"{where}: {spec.name} goes into no layer of the server's model: is it tied to another? Then send that alone"
            )
    _check_whole_layers(where, seen, layer_map)
    if manifest.complete:
        missing = sorted(name for name in checkpoint if name not in seen and name in layer_map.of_name)
        if missing:
            raise WeightSyncError(f"{where} is announced as complete and leaves out {some(missing)}")


def _check_whole_layers(where: str, announced: set[str], layer_map: LayerMap) -> None:
    """vLLM fills what a fused layer did not get with uninitialised memory, so every touched layer must be brought whole."""
    for layer in sorted(layer_map.touched(announced)):
        missing = sorted(layer_map.layers[layer] - announced)
        if missing:
            brought = sorted(layer_map.layers[layer] & announced)
            raise WeightSyncError(f"{where} covers the server's layer {layer} only in part: {some(brought)} came, missing: {some(missing)}")


def some(names: list[str]) -> str:
    """At most three of them."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _nearest(name: str, checkpoint: Mapping[str, TensorSpec]) -> str:
    import difflib

    close = difflib.get_close_matches(name, checkpoint, n=1)
    return f"nearest: {close[0]}" if close else f"it has {len(checkpoint)} tensors"
