"""The verdicts of the demo on simulated accelerators, on made-up stories."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import accelerators
from examples.accelerators import by_kind, environment, evictions, moves
from examples.judge import Life, pauses_lose_nothing
from examples.session import Job, descriptor

ALL = {
    (tenant, kind): 1_000_000 for tenant in ("alpha", "beta", "gamma") for kind in ("cpu", "sim")
}


def life(**task: object) -> Life:
    stays = [
        {"device_id": "local.1", "first_step": 0, "last_step": 10, "end": "paused"},
        {
            "device_id": "local.2",
            "first_step": task.pop("resumed", 10),
            "last_step": 20,
            "end": None,
        },
    ]
    return Life(tenant="alpha", name="alpha/sim-1", task=task, placements=stays, checkpoints=())


def test_every_tenant_must_have_used_every_kind() -> None:
    assert by_kind(ALL).held
    assert not by_kind({**ALL, ("beta", "sim"): 0}).held
    assert "cpu: alpha 1 s" in by_kind(ALL).numbers


def test_without_evictions_or_moves_their_promises_are_broken() -> None:
    assert evictions([life()]).held
    assert moves([life()]).held
    assert not evictions([]).held
    assert not moves([]).held


def test_without_a_kill_every_lost_step_counts() -> None:
    assert pauses_lose_nothing([life()], None).held
    assert not pauses_lose_nothing([life(resumed=8)], None).held


def test_command_is_submitted_without_parameters_and_a_job_with_them() -> None:
    devices = {"kind": "sim", "min": 2}
    script = Job(
        tenant="beta",
        name="s-1",
        folder="torchrun",
        command=("python", "train.py"),
        ranks=2,
        devices=devices,
    )
    (task,) = descriptor(script, "0" * 64)["tasks"]
    assert (task["run"], task["devices"]) == ({"command": ["python", "train.py"]}, devices)
    assert "params" not in task
    (task,) = descriptor(Job(tenant="beta", name="d-1", folder="digits"), "0" * 64)["tasks"]
    assert (task["run"], task["params"]) == ({"job": "train:Train"}, {})


def test_without_the_simulated_accelerator_the_demo_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(accelerators.importlib.util, "find_spec", lambda name: None)
    assert accelerators.main() == 1
    assert "apt-get install g++" in capsys.readouterr().err


def test_every_process_of_a_task_may_open_the_budget(tmp_path: Path) -> None:
    node = Path(environment(tmp_path)["ROUNDHOUSE_DEVICE_NODES"])
    assert (node.parent.stat().st_mode & 0o777, node.stat().st_mode & 0o777) == (0o755, 0o666)
