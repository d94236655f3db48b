"""What `up` is asked to start, without starting it; the acceptance tests start it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from app.local import up
from app.local.up import WantedDevice, WantedSystem, stop_on_signals


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


@pytest.mark.parametrize("is_ignored", [True, False])
def test_end_of_the_terminal_stops_unless_it_was_to_be_ignored(is_ignored: bool) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    asked: list[None] = []
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
        stop_on_signals(lambda: asked.append(None))
        os.kill(os.getpid(), signal.SIGHUP)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert len(asked) == (0 if is_ignored else 1)


def test_home_that_cannot_be_written_is_named(capsys):
    assert up.main(["--home", "/sys/roundhouse"]) == 1
    assert "/sys/roundhouse cannot be written: " in capsys.readouterr().err
