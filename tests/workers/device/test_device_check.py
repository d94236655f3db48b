"""A worker begins with its device, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.settings import Settings
from workers.device import device_check
from workers.process.isolation.device_access import DeviceAccess, FoundDevice
from workers.transfer import host_context
from workers.transfer.host_context import CPU_BYTES, CannotServe, House, lock_device


def _settings(tmp_path: Path, **more: object) -> Settings:
    return Settings(home=tmp_path, device="h.0", redis_url="redis://127.0.0.1:1/0", **more)


def test_cpu_worker_needs_no_trial(tmp_path):
    settings = _settings(tmp_path)
    found = device_check.find_device(settings)
    house = House.of(settings, found)
    assert (found, house.memory_bytes, house.access) == (FoundDevice(), CPU_BYTES, DeviceAccess())


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("h100", "torch knows no kind of device that is called 'h100'"),
        ("H100", "torch knows no kind of device that is called 'H100'"),
        ("xpu", r"torch .* finds no accelerator here, and no xpu device \(with XPU_VISIBLE_DEV"),
        ("meta", "and no meta device"),
    ],
)
def test_worker_of_a_kind_that_torch_cannot_use_ends_with_the_reason(tmp_path, kind, told):
    with pytest.raises(CannotServe, match=told):
        device_check.find_device(_settings(tmp_path, device_kind=kind))


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="there may be a GPU here")
def test_worker_of_kind_cuda_without_a_gpu_ends_with_the_reason(tmp_path):
    with pytest.raises(CannotServe, match=r"cannot serve a device of kind cuda: the NVIDIA"):
        device_check.find_device(_settings(tmp_path, device_kind="cuda"))


def test_worker_with_a_missing_node_ends_with_the_reason(tmp_path):
    with pytest.raises(CannotServe, match="ROUNDHOUSE_DEVICE_NODES names /dev/none"):
        device_check.find_device(
            _settings(tmp_path, device_kind="xpu", device_nodes="/dev/null,/dev/none")
        )


@pytest.mark.parametrize(
    ("set_bytes", "found_bytes", "bytes_"),
    [(0, 80, 80), (64, 80, 64), (100, 80, 80), (64, 0, 64), (0, 0, CPU_BYTES)],
)
def test_memory_of_a_device_is_what_it_has_and_at_most_what_is_set(
    tmp_path, set_bytes, found_bytes, bytes_
):
    found = FoundDevice(memory_bytes=found_bytes)
    assert House.of(_settings(tmp_path, device_memory_bytes=set_bytes), found).memory_bytes == (
        bytes_
    )


def test_memory_of_an_accelerator_is_not_charged_to_the_host(tmp_path):
    found = FoundDevice(memory_bytes=80)
    cpu, sim = (
        House.of(_settings(tmp_path, device_kind=kind, host_memory_bytes=7), found).bounds
        for kind in ("cpu", "sim")
    )
    assert cpu.resident_memory_bytes - sim.resident_memory_bytes == 80


def test_second_worker_of_an_accelerator_cannot_serve(tmp_path):
    def house(device: str, id: str) -> House:
        (tmp_path / "run").mkdir(exist_ok=True)
        settings = _settings(tmp_path).model_copy(update={"device": device, "device_kind": "sim"})
        return House.of(settings, FoundDevice(access=DeviceAccess(id=id), memory_bytes=1))

    first = lock_device(house("h.0", "0"), 0.0)
    assert first is not None
    with pytest.raises(CannotServe, match=r"sim-0\.lock is locked by process"):
        lock_device(house("h.1", "0"), 0.0)
    other = lock_device(house("h.1", "1"), 0.0)
    assert other is not None
    os.close(first)
    again = lock_device(house("h.1", "0"), 0.0)
    for fd in (other, again):
        assert fd is not None
        os.close(fd)


def test_uuid_is_locked_on_the_whole_host(tmp_path, monkeypatch):
    monkeypatch.setattr(host_context, "HOST_FOLDER", tmp_path / "locks")
    access = DeviceAccess(id="GPU-1", is_unique=True)
    houses = []
    for name in ("one", "two"):
        (tmp_path / name / "run").mkdir(parents=True)
        found = FoundDevice(access=access, memory_bytes=1)
        houses.append(House.of(_settings(tmp_path / name, device_kind="cuda"), found))
    fds = [lock_device(houses[0], 0.0)]
    if os.geteuid() == 0:
        with pytest.raises(CannotServe, match=r"locks/cuda-GPU-1\.lock is locked by process"):
            lock_device(houses[1], 0.0)
    else:  # nothing is common to two homes but what all users may write to
        fds.append(lock_device(houses[1], 0.0))
    for fd in fds:
        assert fd is not None
        os.close(fd)


def test_the_zygote_looks_at_no_device():
    """A process that has used a device must not fork: torch then refuses the child's use."""
    program = (
        "import torch\n"
        "def looked(*args): raise SystemExit('the zygote looked at a device')\n"
        "for name in ('is_available', 'device_count', 'init', '_lazy_init'):\n"
        "    setattr(torch.cuda, name, looked)\n"
        "torch.accelerator.is_available = torch.accelerator.current_accelerator = looked\n"
        "from workers import zygote\n"
        "zygote.import_what_jobs_need()\n"
        "print('ready')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["ready"], done.stderr
