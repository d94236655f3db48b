"""Models of islands, hosts, devices and presets."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import Field

from app.api.schemas.base import EXAMPLE_AT, EXAMPLE_TASK, In, Out, Weight, example


class IslandOut(Out):
    model_config = example(name="local", leader="9b2f", led=True, term=4, devices=2, key="5e" * 32)
    name: str
    leader: str | None
    led: bool = Field(description="Whether the island's scheduler holds a current lease.")
    term: int
    devices: int
    key: str | None = Field(
        description="The public key that verifies the island's messages to devices."
    )


class HostOut(Out):
    model_config = example(name="host-a", island="local", cordoned=False, devices=2, up=2)
    name: str
    island: str
    cordoned: bool
    devices: int
    up: int


class EnrolmentIn(In):
    model_config = example(device_id="host-a", key="3d" * 32)
    device_id: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,130}$")] = Field(
        description="A host, with all its devices, or a single device: the host's name, a dot and "
        "a number. A host whose name ends with a dot and a number is enrolled device by device."
    )
    key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] = Field(
        description="The host's public key, as `roundhouse device key` prints it on that host."
    )


class EnrolmentOut(Out):
    model_config = example(
        device_id="host-a",
        key="3d" * 32,
        enrolled_by="platform_admin",
        enrolled_at=EXAMPLE_AT,
        revoked_at=None,
    )
    device_id: str
    key: str = Field(description="The host's public key; reports signed with it are accepted.")
    enrolled_by: str
    enrolled_at: datetime
    revoked_at: datetime | None = Field(description="Reports are rejected from this time on.")


class DevicePatch(In):
    model_config = example(cost=1.5)
    cost: Weight


class SandboxOut(Out):
    model_config = example(mode="required", layers=["files", "network"], missing=[], refuses="")
    mode: str = Field(
        description="`required`: the device takes work only with all sandbox layers; `preferred`: "
        "with the available layers; `off`: without a sandbox."
    )
    layers: list[str] = Field(description="The active sandbox layers.")
    missing: list[str] = Field(description="The configured sandbox layers that are not active.")
    refuses: str = Field(description="Why the device takes no work; empty if it does.")


class HeldBytes(Out):
    device: int = Field(description="In device memory.")
    host: int = Field(description="In host memory.")


class DeviceFacts(Out):
    """The facts of a device that are shown; other facts that it reports are not."""

    model: str | None = Field(
        None, description="An accelerator, as its driver names it; a MIG instance with its profile."
    )
    compute_capability: str | None = Field(None, description="A GPU's, such as `9.0`.")
    uuid: str | None = Field(
        None, description="The UUID or the index by which its worker found the accelerator."
    )
    rack: str | None = Field(None, description="The rack of its host, if it is known.")
    location: list[str] = Field(
        [], description="Its location inside its host, from wide to narrow; gangs are placed near."
    )
    labels: list[str] = Field([], description="Its labels, which tasks can ask for or avoid.")
    offers: list[str] = Field(
        [], description="What its host can do and tasks may need, such as `mount:imagenet`."
    )
    gives: dict[str, int] = Field(
        {},
        description="The most that it gives one task of each resource that it can limit: `cpus` in "
        "thousandths, `memory` and `disk` in bytes, `processes`.",
    )
    sandbox: list[str] | str | None = Field(
        None, description="The sandbox layers around the processes of a task."
    )
    torch: str | None = None
    protocol: int | None = Field(
        None, description="The version of the messages of the device's worker."
    )
    capabilities: list[str] = []
    splice: bool = Field(False, description="Whether ranks can take turns on the device.")
    host_memory_bytes: int | None = None
    held_bytes: HeldBytes | None = Field(
        None, description="Memory held by the tasks of all tenants together."
    )


class HealthNoteOut(Out):
    at: datetime
    told: str


class HealthOut(Out):
    """Shows the health of a device that has a monitor."""

    model_config = example(
        is_watched=True,
        is_checking=False,
        cordon_rule="xid",
        cordon_reason="Xid 48 (double-bit ECC error).",
        cordoned_at=EXAMPLE_AT,
        warnings=[],
        reading={"temperature_c": 61, "power_w": 312.0},
        notes=[{"at": EXAMPLE_AT, "told": "Cordoned: Xid 48 (double-bit ECC error)."}],
    )
    is_watched: bool = Field(description="Whether a monitor watches the device.")
    is_checking: bool = Field(description="The device is being checked before it takes work again.")
    cordon_rule: str | None = Field(description="The health rule that cordoned the device.")
    cordon_reason: str | None
    cordoned_at: datetime | None
    warnings: list[str] = Field(description="Findings because of which it is not cordoned.")
    reading: dict[str, float] = Field(
        description="The figures that the monitor read when they last changed enough."
    )
    notes: list[HealthNoteOut] = Field(description="What a rule decided, the newest first.")


_WELL: dict[str, Any] = {
    "is_watched": True,
    "is_checking": False,
    "cordon_rule": None,
    "cordon_reason": None,
    "cordoned_at": None,
    "warnings": [],
    "reading": {"temperature_c": 61, "power_w": 312.0},
    "notes": [],
}


class DeviceOut(Out):
    model_config = example(
        id="host-a.0",
        host="host-a",
        island="local",
        kind="cpu",
        up=True,
        cordoned=False,
        stopping=False,
        failure="",
        busy=True,
        task_id=EXAMPLE_TASK,
        tasks=[EXAMPLE_TASK],
        threads=1,
        memory_bytes=4 * 2**30,
        cost=1.0,
        seen_at=EXAMPLE_AT,
        version=1,
        sandbox={"mode": "required", "layers": ["files", "network"], "missing": [], "refuses": ""},
        facts={"sandbox": ["files", "network"], "torch": "2.13.0", "splice": True},
        health=_WELL,
    )
    id: str
    host: str
    island: str
    kind: str
    up: bool
    cordoned: bool = Field(description="The device or its host takes no new work.")
    stopping: bool = Field(description="Its worker stops, so that it takes no new work either.")
    failure: str = Field(
        description="Why its worker cannot serve it, while it is not up; empty if there is no such "
        "reason."
    )
    busy: bool = Field(description="A task holds the device.")
    task_id: str | None = Field(description="The task on the device, if you may see it.")
    tasks: list[str] = Field(
        description="The tasks on the device that you may see: graphs that share it in turns, or "
        "tasks with fractions of it."
    )
    threads: int
    memory_bytes: int
    cost: float
    seen_at: datetime | None
    version: int
    sandbox: SandboxOut
    facts: DeviceFacts
    health: HealthOut


class PresetIn(In):
    model_config = example(params={"deterministic": True, "threads": 1})
    params: dict[str, Any]


class PresetOut(Out):
    model_config = example(
        task_type="train",
        kind="cpu",
        params={"deterministic": True},
        version=1,
        updated_at=EXAMPLE_AT,
    )
    task_type: str
    kind: str
    params: dict[str, Any]
    version: int
    updated_at: datetime
