"""A worker finds its device among those of the host, and its processes reach no other."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from app.core.model.protocol.messages import Finished
from workers.process.isolation.device_access import (
    DeviceAccess,
    MigPlace,
    NoSuchDevice,
    all_cuda,
    driver_version,
    find_access,
)

UUIDS = ("GPU-aaaa0000-1111", "GPU-aaaa2222-3333", "GPU-bbbb4444-5555")
MIG = "MIG-cccc6666-7777"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """Three GPUs as the driver shows them; minor numbers are not in the order of the buses."""
    for bus, (uuid, minor) in enumerate(zip(UUIDS, (2, 0, 1), strict=True)):
        folder = tmp_path / f"proc/driver/nvidia/gpus/0000:0{bus}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(
            f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 1{bus}\nGPU UUID: \t {uuid}\n"
            f"Bus Location: \t 0000:0{bus}:00.0\nDevice Minor: \t {minor}\n"
        )
    parts = tmp_path / "proc/driver/nvidia/capabilities/gpu0/mig/gi3"
    (parts / "ci1").mkdir(parents=True)
    (parts / "access").write_text("DeviceFileMinor: 30\nDeviceFileMode: 292\n")
    (parts / "ci1" / "access").write_text("DeviceFileMinor: 31\nDeviceFileMode: 292\n")
    nodes = tmp_path / "dev"
    (nodes / "nvidia-caps").mkdir(parents=True)
    names = ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "nvidia-modeset")
    for name in (*names, "nvidia-caps/nvidia-cap30", "nvidia-caps/nvidia-cap31"):
        (nodes / name).touch()
    return tmp_path


def _cuda(host: Path, asked: str, environ: dict[str, str] | None = None) -> DeviceAccess:
    def find_mig(uuid: str) -> MigPlace:
        assert uuid == MIG
        return MigPlace(minor=0, gpu_instance=3, compute_instance=1)

    return find_access("cuda", asked, environ=environ or {}, root=host, find_mig=find_mig)


def _names(access: DeviceAccess, host: Path) -> set[str]:
    return {str(node.relative_to(host / "dev")) for node in access.nodes}


@pytest.mark.parametrize(
    ("asked", "uuid", "minor"),
    [
        ("0", UUIDS[0], 2),
        ("2", UUIDS[2], 1),
        (UUIDS[1], UUIDS[1], 0),
        ("GPU-bbbb", UUIDS[2], 1),  # as CUDA takes it
    ],
)
def test_gpu_by_index_or_uuid_has_its_own_node_only(host, asked, uuid, minor):
    found = _cuda(host, asked)
    assert (found.id, found.is_unique) == (uuid, True)
    assert found.variables == {"CUDA_VISIBLE_DEVICES": uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert _names(found, host) == {f"nvidia{minor}", "nvidiactl", "nvidia-uvm"}


def test_mig_instance_has_its_capabilities_only(host):
    found = _cuda(host, MIG)
    caps = {"nvidia-caps/nvidia-cap30", "nvidia-caps/nvidia-cap31"}
    assert _names(found, host) == {"nvidia0", "nvidiactl", "nvidia-uvm", *caps}
    assert found.variables["CUDA_VISIBLE_DEVICES"] == MIG


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("", "several GPUs, so ROUNDHOUSE_ACCELERATOR must name one: 0: GPU-aaaa0000-1111"),
        ("3", "ROUNDHOUSE_ACCELERATOR is '3', but this host has 0: GPU-aaaa0000-1111"),
        ("GPU-aaaa", "ROUNDHOUSE_ACCELERATOR is 'GPU-aaaa', but this host has"),  # of two
        ("GPU-dddd", "ROUNDHOUSE_ACCELERATOR is 'GPU-dddd', but this host has"),
        ("0,1", "names several devices"),
        ("-1", "but this host has"),
    ],
)
def test_gpu_that_is_not_one_of_the_host_is_refused(host, asked, told):
    with pytest.raises(NoSuchDevice, match=told):
        _cuda(host, asked)


def test_driver_tells_its_version(host):
    told = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build"
    (host / "proc/driver/nvidia/version").write_text(f"{told}\nGCC version: 14.2.0\n")
    assert driver_version("cuda", host) == "580.159.04"
    assert driver_version("xpu", host) == driver_version("cuda", host / "none") == ""


def test_gpu_without_its_node_or_uuid_is_refused(host):
    (host / "dev" / "nvidia2").unlink()
    with pytest.raises(NoSuchDevice, match=r"dev/nvidia2 is missing"):
        _cuda(host, "0")
    file = host / "proc/driver/nvidia/gpus/0000:01:00.0/information"
    file.write_text(file.read_text().replace(UUIDS[1], "GPU-????????-????"))
    with pytest.raises(NoSuchDevice, match="nvidia-persistenced"):
        _cuda(host, "1")


def test_mig_instance_without_the_library_of_nvml_is_refused(host):
    with pytest.raises(NoSuchDevice, match=r"nvidia-ml-py|NVML does not find"):
        find_access("cuda", MIG, environ={}, root=host)
    nodes = (host / "dev" / "nvidia0",)
    assert find_access("cuda", MIG, environ={}, nodes=nodes, root=host).nodes == nodes


def test_host_without_gpus_is_told(tmp_path):
    with pytest.raises(NoSuchDevice, match="lists no GPU"):
        _cuda(tmp_path, "")


def test_variable_that_names_one_device_stands_for_the_setting(host):
    inherited = {"CUDA_VISIBLE_DEVICES": UUIDS[2], "CUDA_HOME": "/opt/cuda", "HOME": "/root"}
    found = _cuda(host, "", inherited)
    assert found.id == UUIDS[2]
    assert found.variables["CUDA_HOME"] == "/opt/cuda"
    assert "HOME" not in found.variables
    with pytest.raises(NoSuchDevice, match="names several devices"):
        _cuda(host, "", {"CUDA_VISIBLE_DEVICES": "0,1"})


def test_kind_without_a_finder_has_the_variable_of_its_name(tmp_path):
    node = tmp_path / "node"
    environ = {"SIM_HOME": "/there", "SIM_VISIBLE_DEVICES": "5"}
    found = find_access("sim", "3", environ=environ, nodes=(node,))
    assert found.variables == {"SIM_HOME": "/there", "SIM_VISIBLE_DEVICES": "3"}
    assert (found.id, found.is_unique, found.nodes) == ("3", False, (node,))


def test_cpu_has_no_access_and_takes_no_device():
    assert find_access("cpu", "", environ={"CUDA_VISIBLE_DEVICES": "0"}) == DeviceAccess()
    with pytest.raises(NoSuchDevice, match="ROUNDHOUSE_DEVICE_KIND is cpu"):
        find_access("cpu", "0", environ={})


# --- from inside ----------------------------------------------------------------------------------

_PROGRAM = """
import os, sys
def opens(path):
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError:
        return False
    return True
print(os.environ["SIM_VISIBLE_DEVICES"], [opens(path) for path in sys.argv[1:]])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make device nodes")
def test_residents_of_two_workers_on_a_host_reach_their_own_device_only(rigs, tmp_path):
    """The nodes are copies of /dev/null: one of each device, and one that both devices share."""
    nodes = tmp_path / "nodes"
    nodes.mkdir()
    number = os.stat("/dev/null").st_rdev
    for name in ("device0", "device1", "control"):
        os.mknod(nodes / name, stat.S_IFCHR | 0o666, number)
        (nodes / name).chmod(0o666)
    paths = [str(nodes / name) for name in ("device0", "device1", "control")]
    for own in (0, 1):
        access = DeviceAccess(
            variables={"SIM_VISIBLE_DEVICES": str(own)},
            nodes=(nodes / f"device{own}", nodes / "control"),
        )
        rig = rigs(home=tmp_path / f"home{own}", access=access)
        if "files" not in rig.reports[-1].facts["sandbox"]:
            pytest.skip("this machine gives no mount namespaces")
        params = {"paths": [*paths, str(nodes)], "number": number}
        rig.launch("t1", "devices:reach", params=params)
        seen = rig.event(Finished, "t1").result
        reached = [seen[path] for path in paths]
        assert reached == [own == 0, own == 1, True]
        assert not seen["mknod"]
        assert seen["visible"] == str(own)
        rig.launch("t2", [sys.executable, "-c", _PROGRAM, *paths])
        rig.event(Finished, "t2")
        assert rig.printed("t2") == [f"{own} {[own == 0, own == 1, True]}"]


def _on_pci(host: Path, bus: str, above: str, numa: str) -> None:
    """Let sysfs show a device below host bridge and switch, as Linux does."""
    device = host / "sys/devices" / above / bus
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{numa}\n")
    links = host / "sys/bus/pci/devices"
    links.mkdir(parents=True, exist_ok=True)
    (links / bus).symlink_to(device)


def test_location_of_a_gpu_is_its_numa_node_and_its_pci_path(host: Path) -> None:
    _on_pci(host, "0000:00:00.0", "pci0000:3a/0000:3a:00.0", "1")
    _on_pci(host, "0000:01:00.0", "pci0000:4b/0000:4b:00.0", "-1")
    assert _cuda(host, "0").location == ("numa1", "pci0000:3a", "0000:3a:00.0", "0000:00:00.0")
    assert _cuda(host, "1").location == ("pci0000:4b", "0000:4b:00.0", "0000:01:00.0")
    assert _cuda(host, "2").location == (), "the host does not tell it"
    assert _cuda(host, MIG).location == _cuda(host, "1").location, "its GPU has the minor number 0"


def _all(host: Path, environ: dict[str, str] | None = None) -> list[str]:
    def find_migs(uuid: str) -> list[str]:
        assert uuid == UUIDS[1]
        return [MIG, "MIG-dddd8888"]

    return all_cuda(environ=environ or {}, root=host, find_migs=find_migs)


def test_all_gpus_of_a_host_are_found_in_the_order_of_their_buses_and_divided_ones_by_parts(host):
    assert _all(host) == [
        f"cuda:{UUIDS[0]}",
        f"cuda:{MIG}",
        "cuda:MIG-dddd8888",
        f"cuda:{UUIDS[2]}",
    ]


def test_variable_says_which_gpus_of_a_host_count(host):
    assert _all(host, {"CUDA_VISIBLE_DEVICES": f"{UUIDS[2]}, 0"}) == [f"cuda:{UUIDS[2]}", "cuda:0"]


def test_host_without_a_driver_has_no_gpu(tmp_path):
    assert _all(tmp_path) == []


def test_divided_gpu_needs_the_library_of_nvml(host):
    with pytest.raises(NoSuchDevice, match=r"MIG instances of GPU-aaaa2222-3333"):
        all_cuda(environ={}, root=host)
