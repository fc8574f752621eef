"""The chunked log-prob head against log_softmax of full logits, float64 where the head allows it and float32 otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ebft_ds.policy.logprobs import LogProbHead

COUNT, HIDDEN, VOCAB = 7, 5, 23


class Case:
    """A linear head, its LogProbHead over the same parameters, and inputs."""

    def __init__(self, *, bias: bool, trained: bool, chunk: int, softcap: float | None) -> None:
        torch.manual_seed(3)
        self.linear = nn.Linear(HIDDEN, VOCAB, bias=bias).requires_grad_(trained)
        self.head = LogProbHead.adopt(self.linear, chunk_size=chunk, softcap=softcap)
        self.hidden = (2 * torch.randn(COUNT, HIDDEN)).requires_grad_(True)
        self.targets = torch.randint(VOCAB, (COUNT,))
        self.inverse_temperature = torch.rand(COUNT) + 0.5
        self.slopes = torch.randn(COUNT)
        self.softcap = softcap

    def plain(self) -> tuple[Tensor, Tensor]:
        logits = self.linear(self.hidden)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        log_p = torch.log_softmax(logits * self.inverse_temperature[:, None], dim=1)
        return log_p.gather(1, self.targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(dim=1)

    def chunked(self) -> tuple[Tensor, Tensor]:
        log_probs, entropy = self.head(self.hidden, self.targets, self.inverse_temperature, with_entropy=True)
        return log_probs, entropy

    def gradients(self, log_probs: Tensor) -> list[Tensor]:
        wanted = [self.hidden, *(p for p in self.linear.parameters() if p.requires_grad)]
        return list(torch.autograd.grad((log_probs * self.slopes).sum(), wanted))


@pytest.mark.parametrize("chunk", [1, 2, 3, 6, COUNT, 50])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_are_those_of_full_logits(bias: bool, trained: bool, softcap: float | None, chunk: int) -> None:
    case = Case(bias=bias, trained=trained, chunk=chunk, softcap=softcap)
    wanted, wanted_entropy = case.plain()
    found, entropy = case.chunked()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, wanted_entropy, rtol=1e-5, atol=1e-5)
    assert not entropy.requires_grad
    expected = case.gradients(wanted)
    assert len(expected) == 1 + trained * (1 + bias)
    for one, other in zip(case.gradients(found), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_trained_bias_over_a_frozen_weight_gets_its_gradient() -> None:
    case = Case(bias=True, trained=False, chunk=3, softcap=None)
    case.linear.bias.requires_grad_(True)
    for one, other in zip(case.gradients(case.chunked()[0]), case.gradients(case.plain()[0]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_without_targets_it_is_the_linear_layer_it_replaced() -> None:
    case = Case(bias=True, trained=True, chunk=3, softcap=1.5)
    assert torch.equal(case.head(case.hidden), case.linear(case.hidden))
    assert case.head.weight is case.linear.weight


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_a_chunk_has_one_tensor_of_logits(trained: bool, with_entropy: bool) -> None:
    count, chunk = 150, 100
    torch.manual_seed(0)
    head = LogProbHead.adopt(nn.Linear(HIDDEN, VOCAB, bias=False).requires_grad_(trained), chunk_size=chunk, softcap=None)
    hidden, targets = torch.randn(count, HIDDEN, requires_grad=True), torch.randint(VOCAB, (count,))
    with LogitSizedResults() as seen:
        log_probs, entropy = head(hidden, targets, with_entropy=with_entropy)
    assert (entropy is not None) == with_entropy
    assert max(seen.rows) == chunk
    assert seen.rows.count(chunk) == 1
    assert sum(rows > 32 for rows in seen.rows) == 2, "one tensor for each of the two chunks; the entropy's are small"
    wanted = torch.log_softmax(head(hidden), dim=1)
    torch.testing.assert_close(log_probs, wanted.gather(1, targets[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    if entropy is not None:
        torch.testing.assert_close(entropy, -(wanted.exp() * wanted).sum(dim=1), rtol=1e-5, atol=1e-5)


def test_temperature_defaults_to_one() -> None:
    case = Case(bias=False, trained=True, chunk=3, softcap=None)
    case.inverse_temperature = torch.ones(COUNT)
    torch.testing.assert_close(case.head(case.hidden, case.targets)[0], case.plain()[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("trained", [False, True])
def test_the_gradient_of_a_sure_token_survives_bf16(trained: bool) -> None:
    """Where p is near 1, W[token] and E_p[W] nearly cancel; each rounded to bf16 they would leave noise."""
    torch.manual_seed(1)
    linear = nn.Linear(64, VOCAB, bias=False, dtype=torch.bfloat16).requires_grad_(trained)
    with torch.no_grad():
        linear.weight.normal_()
    targets = torch.tensor([3, 11, 17])
    hidden = (linear.weight[targets] * 0.12).detach().requires_grad_(True)
    log_probs, _ = LogProbHead.adopt(linear, chunk_size=2, softcap=None)(hidden, targets)
    assert (log_probs > -0.1).all()
    (found,) = torch.autograd.grad(log_probs.sum(), [hidden])
    exact_hidden = hidden.detach().double().requires_grad_(True)
    exact = torch.log_softmax(exact_hidden @ linear.weight.detach().double().T, dim=1)[torch.arange(3), targets]
    (wanted,) = torch.autograd.grad(exact.sum(), [exact_hidden])
    assert (found.double() - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_a_frozen_head_saves_nothing_of_the_vocabularys_size(softcap: float | None) -> None:
    saved: list[torch.Size] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor.shape)
        return tensor

    case = Case(bias=True, trained=False, chunk=2, softcap=softcap)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        case.chunked()
    assert saved == [(COUNT, HIDDEN)]


class LargestLogits(TorchDispatchMode):
    """Most rows of any tensor with a vocabulary axis that an operation returned."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.dim() == 2 and tensor.shape[1] == VOCAB:
                self.rows = max(self.rows, tensor.shape[0])
        return result


class LogitSizedResults(TorchDispatchMode):
    """Rows of each new [n, VOCAB] tensor that an operation made; what is written in place is not new."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves(args) if isinstance(tensor, Tensor)}
        for tensor in tree_leaves(result):
            sized = isinstance(tensor, Tensor) and tensor.dim() == 2 and tensor.shape[1] == VOCAB
            if sized and tensor.untyped_storage().data_ptr() not in known:
                self.rows.append(tensor.shape[0])
        return result


@pytest.mark.parametrize("trained", [False, True])
def test_logits_exist_only_chunk_by_chunk(trained: bool) -> None:
    case = Case(bias=False, trained=trained, chunk=2, softcap=None)
    with LargestLogits() as seen:
        log_probs, _ = case.chunked()
    # autograd runs outside the mode's thread-local stack only on other threads; on the CPU it is this one
    with seen:
        (log_probs * case.slopes).sum().backward()
    # [HIDDEN, VOCAB] transposes of the weight are the weight, not logits
    assert seen.rows <= max(2, HIDDEN)
    assert seen.rows < COUNT
