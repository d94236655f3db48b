"""Finds the one device that a device worker serves, and what its processes need to use it.

A device worker is told its device by UUID or by index.  Two things then keep it to this device.
The visible-devices variable of the kind makes the device the only one that torch finds, with index
0.  The sandbox shows only the device nodes of the device.  A program may change the variable, but
it cannot open a node that it does not see.

CUDA has a finder of its own here.  Every other kind is found by the name of its variable,
`<KIND>_VISIBLE_DEVICES`, and has the nodes that the setting `device_nodes` names.  This module
imports no torch: `workers.hardware.device_probe` tries the device out.

A task may hold several devices of a host (`workers.process.host_allocations`).  The island only
names them, and cannot have a path of the host shown to a task.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

#: Folder for locks of devices, shared by all device workers of a host that run as root.
HOST_FOLDER = Path("/run/roundhouse-devices")
SETTING = "ROUNDHOUSE_ACCELERATOR"


class NoSuchDevice(Exception):
    """Raised when the device that a worker must serve cannot be found; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAccess:
    """Lists what a process needs to use one device, and nothing of the other devices."""

    id: str = ""  # names the device on its host; "" stands for the CPU
    is_unique: bool = False  # True: `id` is a UUID, which no other device in the world has
    # environment variables of every process that uses the device
    variables: Mapping[str, str] = field(default_factory=dict)
    nodes: tuple[Path, ...] = ()  # device nodes that the sandbox shows for writing
    folders: tuple[Path, ...] = ()  # folders that the sandbox shows for reading
    # where the device is inside its host, from wide to narrow; () if that is not known
    location: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDevice:
    """Describes a device that torch could use when its worker started, with torch's answers about
    it.
    """

    access: DeviceAccess = field(default_factory=DeviceAccess)
    model: str = ""
    memory_bytes: int = 0  # 0 for the CPU, whose memory is the host's
    compute_capability: str = ""  # of a GPU, for example "9.0"
    can_splice: bool = True  # True if ranks can take turns on the device
    can_checkpoint: bool = False  # the driver can move a process's memory off the device and back


@dataclass(frozen=True, slots=True, kw_only=True)
class MigPlace:
    """Locates a MIG instance: the minor number of its GPU, and the numbers of its two parts."""

    minor: int
    gpu_instance: int
    compute_instance: int


def driver_version(kind: str, root: Path = Path("/")) -> str:
    """Return the version of the driver of this kind of device; "" if none can be read.

    Another version may change the bits of results, and stored processes cannot be restored under
    it.
    """
    told = root / "proc/driver/nvidia/version"
    if kind != "cuda" or not told.exists():
        return ""
    found = re.search(r"\b[0-9]+\.[0-9]+(\.[0-9]+)?\b", told.read_text().partition("\n")[0])
    return found[0] if found else ""


def find_access(
    kind: str,
    asked: str,
    *,
    environ: Mapping[str, str],
    nodes: tuple[Path, ...] = (),
    root: Path = Path("/"),
    find_mig: Callable[[str], MigPlace] | None = None,
) -> DeviceAccess:
    """Return the access to the device that is `asked` for, by UUID or index.

    `nodes` replace the device nodes that the kind has by default.  Variables of `environ` that
    begin with the name of the kind are passed on, as they configure its libraries.  Files of the
    host are sought below `root`.  Raises NoSuchDevice.
    """
    if kind == "cpu":
        if asked:
            raise NoSuchDevice(f"{SETTING} is {asked!r}, but ROUNDHOUSE_DEVICE_KIND is cpu")
        return DeviceAccess()
    prefix = f"{kind.upper()}_"
    passed = {name: value for name, value in environ.items() if name.startswith(prefix)}
    asked = asked or passed.get(f"{prefix}VISIBLE_DEVICES", "")
    if "," in asked:
        raise NoSuchDevice(
            f"{asked!r} names several devices, and a worker serves one: set {SETTING}"
        )
    if kind == "cuda":
        found = _find_cuda(asked, root, find_mig or _mig_place, has_nodes=bool(nodes))
    else:
        found = _find_by_variable(kind, asked or "0")
    return replace(
        found, variables={**passed, **found.variables}, nodes=tuple(nodes) or found.nodes
    )


def all_cuda(
    *,
    environ: Mapping[str, str],
    root: Path = Path("/"),
    find_migs: Callable[[str], list[str]] | None = None,
) -> list[str]:
    """Return all GPUs of this host, as "cuda:<UUID>"; of a divided GPU its MIG instances.

    If CUDA_VISIBLE_DEVICES is set, only what it names counts.  Raises NoSuchDevice.
    """
    if named := environ.get("CUDA_VISIBLE_DEVICES", ""):
        return [f"cuda:{one.strip()}" for one in named.split(",") if one.strip()]
    found = []
    for number, gpu in enumerate(_gpus(root)):
        uuid = _asked_gpu(str(number), _gpus(root)).uuid
        is_divided = any((root / _CAPABILITIES / f"gpu{gpu.minor}/mig").glob("gi*/ci*"))
        found += (find_migs or _mig_uuids)(uuid) if is_divided else [uuid]
    return [f"cuda:{uuid}" for uuid in found]


def _find_by_variable(kind: str, asked: str) -> DeviceAccess:
    return DeviceAccess(id=asked, variables={f"{kind.upper()}_VISIBLE_DEVICES": asked})


# --- CUDA -----------------------------------------------------------------------------------------

_MIG = "MIG-"
_CAPABILITIES = "proc/driver/nvidia/capabilities"
MAX_LOCATION = 8  # most parts of a device's location


@dataclass(frozen=True, slots=True)
class _Gpu:
    """Describes a GPU as the driver lists it in /proc/driver/nvidia. GPUs are numbered in the order
    of `bus`.
    """

    bus: str
    uuid: str
    minor: int
    model: str


def _find_cuda(
    asked: str, root: Path, find_mig: Callable[[str], MigPlace], *, has_nodes: bool
) -> DeviceAccess:
    if asked.startswith(_MIG):
        if has_nodes:
            return _cuda_access(asked, (), (), root)
        instance = find_mig(asked)
        its = next((gpu.bus for gpu in _gpus(root) if gpu.minor == instance.minor), "")
        return _cuda_access(asked, _mig_nodes(instance, root), _pci_location(its, root), root)
    gpu = _asked_gpu(asked, _gpus(root))
    location = _pci_location(gpu.bus, root)
    return _cuda_access(gpu.uuid, (_node(root, f"nvidia{gpu.minor}"),), location, root)


def _pci_location(bus: str, root: Path) -> tuple[str, ...]:
    """Return where a PCI device is: its NUMA node, then the host bridge, the bridges and switches
    above it, and the device itself.

    Returns () if the host does not say it.
    """
    device = root / "sys/bus/pci/devices" / bus.lower()
    if not bus or not device.is_dir():
        return ()
    parts = device.resolve().parts
    bridge = next((n for n, part in enumerate(parts) if part.startswith("pci")), len(parts))
    node = device / "numa_node"
    number = node.read_text().strip() if node.exists() else "-1"
    numa = () if number == "-1" else (f"numa{number}",)
    return (*numa, *parts[bridge:])[:MAX_LOCATION]


def _cuda_access(
    uuid: str, nodes: tuple[Path, ...], location: tuple[str, ...], root: Path
) -> DeviceAccess:
    common = [root / "dev" / name for name in ("nvidiactl", "nvidia-uvm")]
    return DeviceAccess(
        id=uuid,
        is_unique=True,
        variables={"CUDA_VISIBLE_DEVICES": uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        nodes=(*nodes, *(node for node in common if node.exists())),
        folders=(Path("/sys"),),  # the driver's libraries read the topology there
        location=location,
    )


def _gpus(root: Path) -> list[_Gpu]:
    """Return the GPUs that the driver lists, in the order in which nvidia-smi counts them."""
    listed = (root / "proc/driver/nvidia/gpus").glob("*/information")
    return sorted(map(_read_gpu, listed), key=lambda gpu: gpu.bus)


def _read_gpu(file: Path) -> _Gpu:
    pairs = (line.partition(":")[::2] for line in file.read_text().splitlines())
    told = {name.strip(): value.strip() for name, value in pairs}
    try:
        minor = int(told["Device Minor"])
    except (KeyError, ValueError) as error:
        raise NoSuchDevice(f"{file} names no minor number of the GPU") from error
    return _Gpu(file.parent.name, told.get("GPU UUID", ""), minor, told.get("Model", ""))


def _asked_gpu(asked: str, gpus: list[_Gpu]) -> _Gpu:
    there = "; ".join(f"{n}: {gpu.uuid} ({gpu.model})" for n, gpu in enumerate(gpus))
    if not gpus:
        raise NoSuchDevice("the NVIDIA driver lists no GPU on this host (/proc/driver/nvidia/gpus)")
    if not asked and len(gpus) > 1:
        raise NoSuchDevice(f"this host has several GPUs, so {SETTING} must name one: {there}")
    wanted = asked or "0"
    found = [
        gpu
        for number, gpu in enumerate(gpus)
        if wanted == str(number) or (wanted.startswith("GPU-") and gpu.uuid.startswith(wanted))
    ]
    if len(found) != 1:
        raise NoSuchDevice(f"{SETTING} is {asked!r}, but this host has {there}")
    if not re.fullmatch(r"GPU-[0-9a-f-]+", found[0].uuid):
        raise NoSuchDevice(
            f"the driver has no UUID yet for GPU {wanted}: start nvidia-persistenced, or run "
            "nvidia-smi once"
        )
    return found[0]


def _mig_nodes(place: MigPlace, root: Path) -> tuple[Path, ...]:
    """Return the device nodes of a MIG instance: of its GPU, and one for each of its two
    capabilities.
    """
    parts = root / _CAPABILITIES / f"gpu{place.minor}/mig/gi{place.gpu_instance}"
    caps = (parts / "access", parts / f"ci{place.compute_instance}" / "access")
    numbers = map(_capability_minor, caps)
    named = [f"nvidia-caps/nvidia-cap{number}" for number in numbers]
    return tuple(_node(root, name) for name in (f"nvidia{place.minor}", *named))


def _capability_minor(file: Path) -> int:
    try:
        found = re.search(r"^DeviceFileMinor:\s*(\d+)", file.read_text(), re.MULTILINE)
    except OSError as error:
        raise NoSuchDevice(f"the driver lists no such MIG instance: {error}") from error
    if found is None:
        raise NoSuchDevice(f"{file} names no DeviceFileMinor")
    return int(found[1])


def _node(root: Path, name: str) -> Path:
    node = root / "dev" / name
    if not node.exists():
        raise NoSuchDevice(f"the device node {node} is missing on this host, or in this container")
    return node


def _mig_place(uuid: str) -> MigPlace:
    """Ask NVML for the place of a MIG instance."""
    with _nvml(f"the nodes of {uuid}") as nvml:
        instance = nvml.nvmlDeviceGetHandleByUUID(uuid)
        gpu = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance)
        return MigPlace(
            minor=nvml.nvmlDeviceGetMinorNumber(gpu),
            gpu_instance=nvml.nvmlDeviceGetGpuInstanceId(instance),
            compute_instance=nvml.nvmlDeviceGetComputeInstanceId(instance),
        )


def _mig_uuids(gpu_uuid: str) -> list[str]:
    """Ask NVML for the MIG instances of a GPU."""
    with _nvml(f"the MIG instances of {gpu_uuid}") as nvml:
        gpu = nvml.nvmlDeviceGetHandleByUUID(gpu_uuid)
        found = []
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
            with suppress(nvml.NVMLError_NotFound):  # numbers between instances may be free
                instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)
                found.append(str(nvml.nvmlDeviceGetUUID(instance)))
        return found


@contextmanager
def _nvml(sought: str) -> Iterator[Any]:
    """Yield NVML, which finds what is sought.  Raises NoSuchDevice."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError as error:
        raise NoSuchDevice(
            f"{sought} are found by the package nvidia-ml-py, which is not installed; install it,"
            " or name the device and its nodes (ROUNDHOUSE_DEVICE_NODES)"
        ) from error
    try:
        nvml.nvmlInit()
        try:
            yield nvml
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise NoSuchDevice(f"NVML does not find {sought}: {error}") from error
