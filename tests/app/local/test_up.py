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


def test_worker_of_each_host_is_told_its_devices_and_no_password(tmp_path: Path) -> None:
    kinds = [WantedDevice(kind="cpu"), WantedDevice(kind="cuda", which="1")]
    wanted = WantedSystem(home=tmp_path, devices=(*kinds, *kinds), hosts=2)
    assert wanted.host_workers == ["host.local", "host.local-2"]
    specs = [up._host({"DATABASE_URL": "secret"}, wanted, name) for name in wanted.host_workers]
    assert [spec.env["ROUNDHOUSE_DEVICES"] for spec in specs] == [
        "local.0=cpu,local.1=cuda:1",
        "local-2.2=cpu,local-2.3=cuda:1",
    ]
    queues = [spec.command[spec.command.index("-Q") + 1] for spec in specs]
    assert queues == [
        "device.local,device.local.0,device.local.1",
        "device.local-2,device.local-2.2,device.local-2.3",
    ]
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
