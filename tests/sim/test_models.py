"""Trains models on the simulated accelerator: parameters have the CPU's bits after some steps."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.sim.comparing import assert_same_bits, drawn

pytestmark = pytest.mark.sim


def _train(
    model: nn.Module,
    device: str,
    batch: torch.Tensor,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    steps: int = 4,
) -> list[Any]:
    model = model.to(device)
    torch.manual_seed(9)  # the CPU's generator has drawn the weights, the device's has not
    stepper = optimizer(model.parameters())
    for _ in range(steps):
        stepper.zero_grad()
        out = model(batch)
        loss = (out[0] if isinstance(out, tuple) else out).square().mean()
        loss.backward()
        stepper.step()
    return [list(model.parameters()), list(model.buffers()), loss]


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 8)
    )


@pytest.mark.parametrize("variant", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
def test_mlp_with_dropout_and_adamw_has_the_cpus_bits(mode: str, variant: dict[str, bool]) -> None:
    def compute(device: str) -> Any:
        adamw = lambda given: torch.optim.AdamW(given, lr=1e-2, **variant)  # noqa: E731
        return _train(_mlp(), device, drawn(device, 16, 32), adamw)

    assert_same_bits(compute)


@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam],
    ids=lambda optimizer: optimizer.__name__,
)
def test_mlp_with_another_optimizer_has_the_cpus_bits(mode: str, optimizer: Any) -> None:
    def compute(device: str) -> Any:
        return _train(_mlp(), device, drawn(device, 16, 32), lambda p: optimizer(p, foreach=False))

    assert_same_bits(compute)


def _convnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Dropout2d(0.3), nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )


def test_convnet_with_batch_norm_has_the_cpus_bits(mode: str) -> None:
    def compute(device: str) -> Any:
        sgd = lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9)  # noqa: E731
        return _train(_convnet(), device, drawn(device, 4, 3, 12, 12), sgd)

    assert_same_bits(compute)


def test_transposed_convolution_has_the_cpus_bits(mode: str) -> None:
    def compute(device: str) -> Any:
        model = nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2)
        return _train(model, device, drawn(device, 2, 4, 6, 6), torch.optim.SGD)

    assert_same_bits(compute)


def test_transformer_layer_has_the_cpus_bits(mode: str) -> None:
    def compute(device: str) -> Any:
        model = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        with sdpa_kernel(SDPBackend.MATH):
            return _train(model, device, drawn(device, 4, 10, 32), torch.optim.AdamW)

    assert_same_bits(compute)


@pytest.fixture
def plain_cpu() -> Iterator[None]:
    """Keep the CPU from its fused recurrent kernels, which round in another way."""
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(True)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("bidirectional", [False, True], ids=["one way", "both ways"])
def test_recurrent_layers_have_the_cpus_bits(
    mode: str, plain_cpu: None, kind: Any, bidirectional: bool
) -> None:
    def compute(device: str) -> Any:
        model = kind(12, 20, num_layers=2, batch_first=True, bidirectional=bidirectional)
        return _train(model, device, drawn(device, 4, 7, 12), torch.optim.SGD)

    assert_same_bits(compute)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell], ids=lambda kind: kind.__name__)
def test_recurrent_cells_have_the_cpus_bits(mode: str, kind: Any) -> None:
    def compute(device: str) -> Any:
        return _train(kind(12, 20), device, drawn(device, 4, 12), torch.optim.SGD)

    assert_same_bits(compute)


def test_embedding_with_cross_entropy_has_the_cpus_bits(mode: str) -> None:
    def compute(device: str) -> Any:
        model = nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(16 * 5, 10)).to(device)
        words = torch.arange(40, device=device).reshape(8, 5)
        labels = torch.arange(8, device=device)
        loss = nn.functional.cross_entropy(model(words), labels)
        loss.backward()
        return [loss, [p.grad for p in model.parameters()]]

    assert_same_bits(compute)


def test_autocast_with_a_scaler_computes_in_the_lower_precision(mode: str) -> None:
    model = _mlp().to("sim")
    stepper = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        out = model(drawn("sim", 16, 32))
        loss = out.float().square().mean()
    assert out.dtype == torch.bfloat16
    scaler.scale(loss).backward()
    before = model[0].weight.detach().clone()
    scaler.step(stepper)
    scaler.update()
    assert not torch.equal(before, model[0].weight)
    assert model[0].weight.isfinite().all()


@pytest.mark.parametrize("where", ["cpu", "sim:0"])
def test_checkpoint_comes_back_where_it_is_mapped_to(mode: str, where: str) -> None:
    model = _mlp().to("sim")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, map_location=where)
    for name, value in model.state_dict().items():
        assert str(loaded[name].device) == where
        assert torch.equal(loaded[name].cpu(), value.cpu())


def test_deepcopy_and_module_to_keep_the_parameters(mode: str) -> None:
    model = _mlp().to("sim")
    twin = copy.deepcopy(model)
    assert torch.equal(twin[0].weight, model[0].weight)
    kept = twin[0].weight
    assert twin.to("cpu")[0].weight is kept  # the same parameter, with other data
    assert kept.device.type == "cpu"
    assert torch.equal(kept, model[0].weight.cpu())
