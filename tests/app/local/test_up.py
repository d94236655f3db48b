"""What `up` is asked to start, without starting it; the acceptance tests start it."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.local import up
from app.local.up import WantedDevice, WantedSystem


def test_devices_are_named_by_kind_and_by_which_of_the_kind() -> None:
    texts = ["cpu", "cuda:0", "cuda:GPU-5b3f6c1e", "sim:1"]
    wanted = [WantedDevice.read(text) for text in texts]
    assert [(one.kind, one.which) for one in wanted] == [
        ("cpu", ""),
        ("cuda", "0"),
        ("cuda", "GPU-5b3f6c1e"),
        ("sim", "1"),
    ]
    assert [str(one) for one in wanted] == texts


@pytest.mark.parametrize(
    ("words", "devices"),
    [
        ([], ["cpu", "cpu"]),
        (["--devices", "3"], ["cpu", "cpu", "cpu"]),
        (["--device", "cpu", "--device", "sim:0"], ["cpu", "sim:0"]),
    ],
)
def test_each_named_device_replaces_the_number_of_cpu_devices(
    words: list[str], devices: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[WantedSystem] = []
    monkeypatch.setattr(up, "up", lambda wanted, say: started.append(wanted))
    assert up.main(["--home", str(tmp_path), *words]) == 0
    assert [str(device) for device in started[0].devices] == devices


def test_worker_of_a_device_is_told_its_kind_and_which_it_is(tmp_path: Path) -> None:
    devices = (WantedDevice(kind="cpu"), WantedDevice(kind="cuda", which="1"))
    wanted = WantedSystem(home=tmp_path, devices=devices)
    env = {"DATABASE_URL": "secret", "ROUNDHOUSE_DEVICE_KIND": "cpu"}
    specs = [up._device(env, wanted, n) for n in range(2)]
    assert [
        (spec.env["ROUNDHOUSE_DEVICE_KIND"], spec.env["ROUNDHOUSE_ACCELERATOR"]) for spec in specs
    ] == [("cpu", ""), ("cuda", "1")]
    assert all("DATABASE_URL" not in spec.env for spec in specs)
