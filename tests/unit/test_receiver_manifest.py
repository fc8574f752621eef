"""What a server refuses before it touches a weight."""

from __future__ import annotations

import re

import pytest

from ebft_ds.errors import WeightSyncError
from ebft_ds.rollout.manifest import TensorSpec, WeightManifest
from ebft_ds.sidecar.manifest_check import LayerMap, check_manifest

Q, K, V = (f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv")
NORM, EMBED, HEAD = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"
CHECKPOINT = {
    name: TensorSpec(name, "bfloat16", shape)
    for name, shape in {Q: [64, 64], K: [32, 64], V: [32, 64], NORM: [64], EMBED: [512, 64], HEAD: [512, 64]}.items()
}
LAYERS = LayerMap(
    {
        "model.layers.0.self_attn.qkv_proj": frozenset({Q, K, V}),
        "model.norm": frozenset({NORM}),
        "model.embed_tokens": frozenset({EMBED}),
    },
    homeless=frozenset({HEAD}),
)


def manifest(*names: str, complete: bool = False, dtype: str = "float32", **shapes: list[int]) -> WeightManifest:
    return WeightManifest(3, [TensorSpec(name, dtype, CHECKPOINT[name].shape) for name in names], complete=complete)


def check(push: WeightManifest, *, whole_model: bool = True) -> None:
    check_manifest(push, CHECKPOINT, LAYERS, dtype="float32", whole_model=whole_model)


def test_whole_layers_pass() -> None:
    check(manifest(Q, K, V))
    check(manifest(NORM, dtype="bfloat16"))
    check(manifest(Q, K, V, NORM, EMBED, complete=True))


def test_a_part_of_a_fused_layer_is_refused_with_what_is_missing() -> None:
    with pytest.raises(WeightSyncError, match=f"qkv_proj only in part: {re.escape(Q)} came, missing: .*k_proj.*v_proj"):
        check(manifest(NORM, Q))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            [TensorSpec("base_model.model.model.norm.weight", "float32", [64])],
            "has no 'base_model.model.model.norm.weight' .nearest: model.norm",
        ),
        ([TensorSpec(NORM, "float32", [63])], r"shape \[63\]; the server's model has \[64\]"),
        ([TensorSpec(NORM, "float32", [])], r"shape \[\]"),
        ([TensorSpec(NORM, "float16", [64])], "is float16; the server computes in float32"),
        ([TensorSpec(NORM, "float32", [64])] * 2, "announced twice"),
        ([TensorSpec(HEAD, "float32", [512, 64])], "tied to another"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tensors: list[TensorSpec], message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        check(WeightManifest(3, tensors, complete=False))


def test_a_complete_push_must_bring_everything_that_has_a_place() -> None:
    with pytest.raises(WeightSyncError, match=f"leaves out {re.escape(EMBED)}, {re.escape(NORM)}"):
        check(manifest(Q, K, V, complete=True))


def test_a_pipeline_stage_does_not_mind_what_other_stages_take() -> None:
    check(manifest(Q, K, V, HEAD), whole_model=False)
