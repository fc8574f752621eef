"""Fifty pushes while requests are always in flight: none is lost, and every token is that of the version that its span names."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from ebft_ds.sidecar.api import Choice
from ebft_ds.sidecar.control import ControlLoop
from ebft_ds.sidecar.server import ServerProcess
from ebft_ds.sidecar.versions import VersionNames, new_run_token
from ebft_ds.sync.transports.gloo import GlooTransport
from tests.integration.policies import Policy, in_buckets, manifest_of
from tests.integration.test_weight_transports import SHORT_PROMPT, TIMEOUT, generate, log_probs_of
from tests.integration.vllm_server import started, tiny_plan

pytestmark = pytest.mark.timeout(1800)

PUSHES = 50
AT_ONCE = 6
TOKENS = 150


@pytest.fixture(scope="module")
def server(servable_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with started(tiny_plan(servable_model), tmp_path_factory.mktemp("in_flight") / "server.log") as server:
        yield server


def test_fifty_pushes_with_requests_in_flight(server: ServerProcess, servable_model: Path, tmp_path: Path) -> None:
    policy, control = Policy(servable_model, tmp_path / "saved"), ControlLoop()
    names = VersionNames(new_run_token())
    transport, api = GlooTransport([server.address], names, control), control.api(server.address)
    models: dict[int, torch.nn.Module] = {}
    flying: list[tuple[list[int], Future[Choice]]] = []
    landed: list[tuple[list[int], Choice]] = []
    asked = 0
    for version in range(1, PUSHES + 1):
        while len(flying) < AT_ONCE and version > 1:
            prompt = SHORT_PROMPT[: 3 + asked % 5]
            flying.append((prompt, control.start(generate(api, prompt, max_tokens=TOKENS, seed=asked))))
            asked += 1
        policy.move()
        models[version] = copy.deepcopy(policy.model)
        tensors = policy.tensors()
        result = transport.push(manifest_of(version, tensors, complete=True), in_buckets(tensors), TIMEOUT)
        assert (result.confirmed, result.lost) == (1, 0)
        landed += [(prompt, future.result()) for prompt, future in flying if future.done()]
        flying = [(prompt, future) for prompt, future in flying if not future.done()]
    landed += [(prompt, future.result(TIMEOUT)) for prompt, future in flying]
    transport.close()
    control.close()
    assert len(landed) == asked
    mixed = sum(check(prompt, choice, names, models) > 1 for prompt, choice in landed)
    assert mixed >= 10, f"only {mixed} of {asked} requests were in flight over a push"


def check(prompt: list[int], choice: Choice, names: VersionNames, models: dict[int, torch.nn.Module]) -> int:
    """Number of versions in the completion, after a look at each token's log-prob."""
    assert (choice.finish_reason, len(choice.token_ids)) == ("length", TOKENS)
    spans = choice.weight_versions or []
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == TOKENS
    versions = [names.version(span.version) for span in spans]
    assert versions == sorted(versions, key=lambda version: version or 0)
    found = torch.tensor(log_probs_of(choice))
    for span, version in zip(spans, versions, strict=True):
        assert version is not None
        with torch.no_grad():
            logits = models[version](torch.tensor([prompt + choice.token_ids])).logits[0, len(prompt) - 1 : -1]
        wanted = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0]
        assert (found - wanted)[span.start : span.end].abs().max() < 1e-3, f"tokens {span.start}-{span.end} are not version {version}'s"
    return len(spans)
