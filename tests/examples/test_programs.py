"""Each program of examples/programs.py gives what plain torch code gives, which knows no graphs."""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from examples import programs
from workers.graph.runner import Loaded
from workers.hardware.accelerator import Accelerator
from workers.residents.context import Context

OPS = Path(programs.__file__).parent / "graphs"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in a resident: how many there are changes the order of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- plain code ---------------------------------------------------------------------------------


def digits() -> tuple[torch.Tensor, ...]:
    found = load_digits()
    x, y = torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)
    return x[:1500], y[:1500], x[1500:], y[1500:]


def two_layers(seed: int, width: int = 32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def trained(model: nn.Module, x: Any, y: Any, *, seed: int, steps: int = 60) -> nn.Module:
    dice, opt = torch.Generator().manual_seed(seed), torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(steps):
        chosen = torch.randint(len(x), (128,), generator=dice)
        opt.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        opt.step()
    return model


def right(model: Any, x: Any, y: Any) -> float:
    with torch.no_grad():
        return (F.softmax(model(x), -1).argmax(-1) == y).float().mean().item()


def ensemble() -> Any:
    x, y, x_test, y_test = digits()
    mean, scale = x.mean(0), x.std(0) + 0.1
    x, x_test = (x - mean) / scale, (x_test - mean) / scale
    down, across = torch.randint(-1, 2, (2, 1500), generator=torch.Generator().manual_seed(5))
    moved = [
        torch.roll(torch.roll(x[n].view(8, 8), int(down[n]), 0), int(across[n]), 1).flatten()
        for n in range(1500)
    ]
    x, y = torch.cat([x, torch.stack(moved)]), torch.cat([y, y])
    models = [trained(two_layers(seed), x, y, seed=1) for seed in range(11, 16)]
    with torch.no_grad():
        mixed = torch.stack([F.softmax(model(x_test), -1) for model in models]).sum(0)
    together = (mixed.argmax(-1) == y_test).float().mean().item()
    return {"each": [right(model, x_test, y_test) for model in models], "together": together}


def text() -> Any:
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    letters = b"".join(file.read_bytes() for file in files)[:300_000]
    tokens = [letter if letter < 128 else 0 for letter in letters]
    train, test = tokens[:270_000], tokens[270_000:]
    counts = torch.full((128, 128), 0.5, dtype=torch.float64)
    for one, other in itertools.pairwise(train):
        counts[one, other] += 1
    chances = counts / counts.sum(1, keepdim=True)
    bits = [-chances[one, other].log2() for one, other in itertools.pairwise(test)]
    return {"bits": torch.stack(bits).mean().item()}


def sweep() -> Any:
    """All eight are trained to the end of their rung, one after the other."""
    x, y, x_test, y_test = digits()
    left = []
    for lr in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 100.0):
        torch.manual_seed(0)
        model = nn.Linear(64, 10)
        left.append((0.0, lr, model, torch.optim.SGD(model.parameters(), lr)))
    for epochs in (5, 10, 20):
        rung = []
        for _, lr, model, opt in left:
            for _ in range(epochs):
                opt.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                opt.step()
            rung.append((loss.item(), lr, model, opt))
        left = sorted(rung, key=lambda run: run[0])[: len(rung) // 2]
    ((_, lr, model, _),) = left
    return {"lr": lr, "accuracy": right(model, x_test, y_test)}


def k_fold() -> Any:
    x, y, _, _ = digits()
    found = []
    for n in range(5):
        held = torch.arange(1500) % 5 == n
        # The rest in the order in which the other folds follow each other.
        rest = torch.cat([torch.arange(m, 1500, 5) for m in range(5) if m != n])
        torch.manual_seed(3)
        model = trained(nn.Linear(64, 10), x[rest], y[rest], seed=3, steps=80)
        found.append(right(model, x[held], y[held]))
    return spread(found)


def spread(values: list[float]) -> Any:
    mean = sum(values) / len(values)
    deviation = (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
    return {"mean": mean, "deviation": deviation}


def features() -> Any:
    x, y, x_test, y_test = digits()
    weights = torch.randn(64, 200, generator=torch.Generator().manual_seed(2)) / 8
    h, h_test = torch.tanh(x @ weights).double(), torch.tanh(x_test @ weights).double()
    wanted = torch.zeros(1500, 10, dtype=torch.float64)
    wanted[torch.arange(1500), y] = 1
    grown = torch.cat([h, 0.1**0.5 * torch.eye(200, dtype=torch.float64)])
    w = torch.linalg.lstsq(grown, torch.cat([wanted, wanted.new_zeros(200, 10)])).solution
    return {"accuracy": ((h_test @ w).argmax(1) == y_test).float().mean().item()}


def k_means() -> Any:
    x, _, _, _ = digits()
    centers = x[torch.randperm(1500, generator=torch.Generator().manual_seed(4))[:10]].clone()
    for _ in range(8):
        nearest = torch.cdist(x, centers).min(1)
        inertia = nearest.values.square().sum().item()
        for n in range(10):
            if (nearest.indices == n).any():
                centers[n] = x[nearest.indices == n].mean(0)
    return {"inertia": inertia}


def directions() -> Any:
    """By the singular values, not by iteration."""
    x, _, _, _ = digits()
    values = torch.linalg.svdvals((x - x.mean(0)).double()).square()
    return {"part": (values[0] / values.sum()).item()}


def distillation() -> Any:
    x, y, x_test, y_test = digits()
    teacher = trained(two_layers(21, 128), x, y, seed=6, steps=150)
    with torch.no_grad():
        soft = F.softmax(teacher(x) / 2, -1)
    student = two_layers(22, 12)
    opt = torch.optim.SGD(student.parameters(), 1.0)
    for _ in range(150):
        opt.zero_grad()
        F.cross_entropy(student(x) / 2, soft).backward()
        opt.step()
    found = {"teacher": teacher, "student": student}
    return {name: right(model, x_test, y_test) for name, model in found.items()}


def federated() -> Any:
    x, y, x_test, y_test = digits()
    model = two_layers(31)
    for _ in range(5):
        locals_ = [copy.deepcopy(model) for _ in range(4)]
        for local, part, labels in zip(locals_, x.chunk(4), y.chunk(4), strict=True):
            opt = torch.optim.SGD(local.parameters(), 0.5)
            for _ in range(10):
                opt.zero_grad()
                F.cross_entropy(local(part), labels).backward()
                opt.step()
        states = [local.state_dict() for local in locals_]
        model.load_state_dict({k: torch.stack([s[k] for s in states]).mean(0) for k in states[0]})
    return {"accuracy": right(model, x_test, y_test)}


def seeds() -> Any:
    x, y, x_test, y_test = digits()
    models = [trained(two_layers(seed), x, y, seed=seed) for seed in range(40, 46)]
    return spread([right(model, x_test, y_test) for model in models])


PLAIN = (
    ensemble,
    text,
    sweep,
    k_fold,
    features,
    k_means,
    directions,
    distillation,
    federated,
    seeds,
)


# --- the graphs ---------------------------------------------------------------------------------


def ran(body: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(OPS))

    def find(target: str) -> Any:
        module, _, name = target.partition(":")
        return getattr(__import__(module), name)

    job = Loaded(body, find, Accelerator("cpu")).begin({})
    ctx = Context(device=torch.device("cpu"), rank=0, world_size=1, params={})
    while ctx.result is None:
        job.step(ctx)
    return ctx.result


@pytest.mark.parametrize("plain", PLAIN, ids=lambda plain: plain.__name__)
def test_program_gives_what_plain_code_gives(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = plain.__name__.replace("_", "-")
    found, expected = ran(programs.PROGRAMS[name](), monkeypatch), plain()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        # Sums over shards are added up in another order.
        assert found[key] == pytest.approx(value, rel=1e-6), key


def test_every_program_is_checked() -> None:
    assert {plain.__name__.replace("_", "-") for plain in PLAIN} == programs.PROGRAMS.keys()


def test_the_command_prints_a_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert programs.main(["text"]) == 0
    assert json.loads(capsys.readouterr().out) == programs.request("text")
    assert programs.main([]) == 0
    assert "k-means" in capsys.readouterr().out
    assert programs.main(["nothing"]) == 2


def test_bundle_imports_nothing_of_roundhouse() -> None:
    for file in OPS.glob("*.py"):
        imported = re.findall(
            r"^import (\w+)$|^from (\w+)\S* import", file.read_text(), re.MULTILINE
        )
        names = {name for pair in imported for name in pair if name}
        assert "torch" in names <= {"torch", "os", "pathlib", "copy"}
