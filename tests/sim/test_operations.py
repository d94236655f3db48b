"""Runs single operations on the simulated accelerator: results have the CPU's bits and strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.sim.comparing import assert_same_bits, drawn

pytestmark = pytest.mark.sim

Op = Callable[[torch.Tensor, torch.Tensor], Any]

OPERATIONS: dict[str, Op] = {
    "add": lambda a, b: a + 2.5 * b,
    "add of a number": lambda a, b: a + torch.tensor(3.0),
    "matmul": lambda a, b: a @ b.T,
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", a, b),
    "addr": lambda a, b: torch.addr(a, a[:, 0], b[0]),
    "softmax": lambda a, b: a.softmax(-1),
    "logsumexp": lambda a, b: a.logsumexp(0),
    "sum of columns": lambda a, b: a.sum(1),
    "mean and variance": lambda a, b: [a.mean(), a.var(), a.std(0)],
    "norm": lambda a, b: [a.norm(), torch.linalg.vector_norm(a, 3)],
    "cumsum": lambda a, b: a.cumsum(1),
    "sort": lambda a, b: list(a.sort(1, descending=True)),
    "topk": lambda a, b: list(a.topk(3)),
    "argmax": lambda a, b: a.argmax(1),
    "unique": lambda a, b: list((a * 2).round().unique(return_counts=True)),
    "nonzero": lambda a, b: (a > 0).nonzero(),
    "masked select": lambda a, b: a[a > 0.5],
    "index": lambda a, b: a[torch.tensor([1, 0, 3], device=a.device), :2],
    "index by the host's numbers": lambda a, b: a[torch.tensor([1, 0, 3])],
    "index put": lambda a, b: a.index_put((torch.tensor([2, 1], device=a.device),), b[:2]),
    "gather": lambda a, b: a.gather(1, b.argsort(1)),
    "scatter add": lambda a, b: a.scatter_add(1, b.argsort(1), b),
    "where": lambda a, b: torch.where(a > b, a, 0.0),
    "cat and stack": lambda a, b: [torch.cat([a, b], 1), torch.stack([a, b])],
    "split": lambda a, b: list(a.split(3, 1)),
    "roll and flip": lambda a, b: [a.roll(2, 1), a.flip(0)],
    "pad": lambda a, b: functional.pad(a, (1, 2)),
    "tril": lambda a, b: [a.tril(), a.triu(1)],
    "fft": lambda a, b: torch.fft.rfft(a).abs(),
    "complex": lambda a, b: torch.view_as_real(torch.complex(a, b).conj() * torch.complex(b, a)),
    "cholesky": lambda a, b: torch.linalg.cholesky(a @ a.T + 9 * torch.eye(6, device=a.device)),
    "qr": lambda a, b: list(torch.linalg.qr(a)),
    "svd": lambda a, b: torch.linalg.svdvals(a),
    "solve": lambda a, b: torch.linalg.solve(a[:, :6] + 9 * torch.eye(6, device=a.device), b),
    "histc": lambda a, b: a.histc(5, -2, 2),
    "bincount": lambda a, b: a.argmax(1).bincount(minlength=9),
    "searchsorted": lambda a, b: torch.searchsorted(a.sort(1)[0], b),
    "average pool": lambda a, b: functional.avg_pool1d(a[None], 2),
    "interpolate": lambda a, b: functional.interpolate(a[None, None], scale_factor=2.0),
    "unfold": lambda a, b: a.unfold(1, 3, 2),
    "group norm": lambda a, b: functional.group_norm(a[None], 2),
    "all and any": lambda a, b: [(a > 9).all((0, 1)), (a > 1).any((0, 1)), a.isnan().any()],
    "half": lambda a, b: [a.half() + b.half(), a.bfloat16() @ b.bfloat16().T],
    "integers": lambda a, b: [(a * 9).long() // 2, (a * 9).int() % 3],
    "in place": lambda a, b: a.mul_(b).clamp_(-1, 1).add_(1),
    "copy to a view": lambda a, b: a.narrow(1, 1, 3).copy_(b[:, :3]),
    "expand": lambda a, b: a[:, :1].expand(6, 4) + 1,
    "foreach": lambda a, b: list(torch._foreach_mul([a, b], 2.0)),
    "arange and linspace": lambda a, b: [
        torch.arange(7, device=a.device),
        torch.linspace(0, 1, 5, device=a.device),
    ],
    "factories": lambda a, b: [
        *(torch.full((3,), 2.0, device=a.device), torch.eye(3, device=a.device)),
        *(torch.tril_indices(3, 3, device=a.device), torch.zeros_like(a)),
    ],
    "random": lambda a, b: [
        *(torch.randn(40, device=a.device), torch.rand(3, 3, device=a.device)),
        *(torch.randperm(9, device=a.device), torch.randint(5, (8,), device=a.device)),
        *(torch.bernoulli(b.sigmoid()), torch.multinomial(b.softmax(1), 4)),
        *(torch.empty(9, device=a.device).exponential_(), functional.dropout(a, 0.5)),
    ],
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_has_the_cpus_bits(mode: str, name: str) -> None:
    assert_same_bits(
        lambda device: OPERATIONS[name](drawn(device, 6, 8), drawn(device, 6, 8, seed=4))
    )


def test_gradients_have_the_cpus_bits(mode: str) -> None:
    def compute(device: str) -> Any:
        a = drawn(device, 6, 8).requires_grad_()
        b = drawn(device, 8, 6, seed=4).requires_grad_()
        ((a @ b).tanh() * a.cumsum(1)[:, :6]).logsumexp(0).sum().backward()
        return [a.grad, b.grad]

    assert_same_bits(compute)


def test_generator_of_the_device_gives_the_cpus_numbers(mode: str) -> None:
    def compute(device: str) -> Any:
        generator = torch.Generator(device=device).manual_seed(11)
        first = torch.randn(9, generator=generator, device=device)
        state = generator.get_state()
        second = torch.randn(9, generator=generator, device=device)
        generator.set_state(state)
        assert torch.equal(second, torch.randn(9, generator=generator, device=device))
        return [first, second]

    assert_same_bits(compute)


def test_generator_of_the_host_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Expected a 'sim' device type for generator"):
        torch.randn(3, device="sim", generator=torch.Generator())


def test_random_state_comes_back(mode: str) -> None:
    state = torch.sim.get_rng_state()
    first = torch.randn(5, device="sim")
    torch.sim.set_rng_state(state)
    assert torch.equal(first, torch.randn(5, device="sim"))
    assert len(torch.sim.default_generators) == torch.sim.device_count()


def test_draws_on_the_device_leave_the_hosts_generator_alone(mode: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    functional.dropout(torch.ones(100, device="sim"), 0.5)
    torch.randn(9, device="sim")
    assert torch.equal(before, torch.get_rng_state())


def test_tensors_of_two_devices_are_refused_in_cudas_words(mode: str) -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(3, device="sim") + torch.ones(3)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(3).add_(torch.ones(3, device="sim"))


def test_operation_without_numpy_of_the_device() -> None:
    with pytest.raises(TypeError, match="can't convert sim"):
        torch.ones(3, device="sim").numpy()
