"""Builds Launch orders: the task's descriptor, and all that it refers to, looked up.

Task descriptors (US20170329632A1): the preset parameters of the task's type are looked up here, at
the moment of the launch. They are configured on the device that will run the task.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import and_, func, or_, select
from sqlalchemy.orm import Session

from app.core.model import codec, preset
from app.core.model.checkpoints.migration import Moving
from app.core.model.descriptor import TaskDescriptor
from app.core.model.device_choice import WHOLE_MILLI
from app.core.model.protocol.messages import JSON, CheckpointRef, ExpectedTask, Launch
from app.core.model.provisions.network_policy import NetworkWish, withdrawn
from app.data import datablocks, mounts
from app.db import tenant_tree
from app.db.models import (
    Checkpoint,
    Datablock,
    DatablockUse,
    Device,
    Need,
    Placement,
    Preset,
    Request,
    Task,
)
from app.scheduling.launch_image_key import expected_with_image_key
from app.settings import settings
from app.storage.signing import block_key

IMAGES_OFFERED = 3
RESENDS_SURE = 10  # resends during which no Launch counts as lost (`journal.LAUNCHES_UNSEEN`)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFacts:
    """Holds everything to which the launches of one plan refer, by task; presets by kind of
    device.
    """

    bundles: Mapping[str, str] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, JSON]] = field(default_factory=dict)
    inputs: Mapping[str, JSON] = field(default_factory=dict)
    images: Mapping[str, list[CheckpointRef]] = field(default_factory=dict)
    mounts: Mapping[str, JSON] = field(default_factory=dict)
    roots: Mapping[str, str] = field(default_factory=dict)
    withdrawn: Mapping[str, list[str]] = field(default_factory=dict)

    def launch(self, task: Task, device: Device) -> Launch:
        """Return the launch of the task on the device, on one slot and with the last order's
        number.
        """
        spec = task.spec
        max_us = int(spec.max_duration_s * 1e6)
        return Launch(
            task=task.id,
            epoch=task.epoch,
            seq=task.order_seq,
            tenant=task.tenant_id,
            user=task.user_id if device.facts.get("user") else "",
            request=task.request_id if device.facts.get("request") else "",
            spec=spec,
            bundle=self.bundles[task.id],  # "" for a command without a bundle
            inputs=self.inputs.get(task.id, {}),
            preset=self._preset(spec, task.type, device),
            images=self.images.get(task.id, []),
            mounts=self.mounts.get(task.id, {}),
            root=self.roots.get(task.id, ""),
            withdrawn=self.withdrawn.get(task.id, []),
            budget_us=max(0, max_us - task.total_held_us + task.unheard_us),
            incarnation=device.incarnation,
            surely_until_us=device.heard_us + int(_sure_s() * 1e6),
        )

    def _preset(self, spec: TaskDescriptor, type_: str, device: Device) -> JSON:
        """Return the preset for this type of task on this kind of device, or else that for "*".

        A task with a fraction of a device gets no settings of the device's driver, as other tasks
        use the device too.
        """
        by_type = self.presets.get(device.kind, {})
        chosen = by_type.get(type_, by_type.get("*", {}))
        params = {**preset.defaults(device.kind, threads=device.threads), **chosen}
        is_whole = spec.devices.choice.fraction_milli == WHOLE_MILLI
        return params if is_whole else preset.of_process(params)


def look_up(session: Session, launches: Sequence[tuple[Task, Device]]) -> LaunchFacts:
    """Read what the launches of these tasks, each on its device, refer to."""
    if not launches:
        return LaunchFacts()
    ids = [task.id for task, _ in launches]
    kinds = sorted({device.kind for _, device in launches})
    return LaunchFacts(
        bundles=_bundles(session, ids),
        presets=_presets(session, kinds),
        inputs=inputs(session, [task for task, _ in launches]),
        images=_images(session, [task.id for task, _ in launches if _may_have_images(task)]),
        mounts=mounts.of_tasks(session, [task for task, _ in launches]),
        roots=mounts.roots_of_tasks(session, [task for task, _ in launches]),
        withdrawn=_withdrawn(session, [task for task, _ in launches]),
    )


def _withdrawn(session: Session, tasks: Iterable[Task]) -> dict[str, list[str]]:
    """Return the destinations that each task asked for and that the policies no longer allow."""
    wishing = [(task, wish) for task in tasks if (wish := task.descriptor.get("network"))]
    may_reach = {
        tenant: tenant_tree.network_of(tenant_tree.path(session, tenant))
        for tenant in {task.tenant_id for task, _ in wishing}
    }
    return {
        task.id: withdrawn(NetworkWish(allow=tuple(wish["allow"])), may_reach[task.tenant_id])
        for task, wish in wishing
    }


def ahead(session: Session, device: Device, tasks: Sequence[Task]) -> list[ExpectedTask]:
    """Return what a device can prefetch for tasks before their launch: the inputs that exist so
    far, and the newest image.
    """
    if not tasks:
        return []
    bundles = _bundles(session, [task.id for task in tasks])
    taken = inputs(session, tasks)
    expected = (
        ExpectedTask(
            task=task.id,
            epoch=task.epoch,
            tenant=task.tenant_id,
            bundle=bundles[task.id],
            inputs=list(taken.get(task.id, {}).values()),
            image=_newest(codec.from_json(Moving, task.moving)) if task.moving else None,
            environment=(task.descriptor.get("environment") or {}).get("lock", ""),
        )
        for task in tasks
    )
    return [
        expected_with_image_key(session, task, device, each)
        for task, each in zip(tasks, expected, strict=True)
    ]


def _newest(moving: Moving) -> CheckpointRef | None:
    if not moving.rounds:
        return None
    newest = moving.rounds[-1]
    return CheckpointRef(sha256=newest.sha256, step=newest.step, key=newest.key)


def _sure_s() -> float:
    """Return for how many seconds after a device's last heartbeat its launches cannot move to
    another device.

    By the device's own clock, its lease does not end earlier, and no Launch is counted as lost
    earlier.
    """
    lease_s = settings().lease_s - settings().lease_margin_s
    return min(lease_s, RESENDS_SURE * settings().order_resend_s)


def _bundles(session: Session, ids: Sequence[str]) -> dict[str, str]:
    digest = Request.descriptor["bundle"].astext
    query = select(Task.id, digest).join(Request, Request.id == Task.request_id)
    found = session.execute(query.where(Task.id.in_(ids)))
    return {id: (named or "").removeprefix("sha256:") for id, named in found}


def _presets(session: Session, kinds: Sequence[str]) -> dict[str, dict[str, JSON]]:
    found: dict[str, dict[str, JSON]] = defaultdict(dict)
    for row in session.scalars(select(Preset).where(Preset.kind.in_(kinds))):
        found[row.kind][row.task_type] = row.params
    return found


def inputs(session: Session, tasks: Sequence[Task]) -> dict[str, JSON]:
    """Return the inputs that exist so far, by task and port, in the form that a Launch has."""
    found: dict[str, JSON] = defaultdict(dict)
    if not (takers := [task.id for task in tasks if task.descriptor.get("inputs")]):
        return found
    query = (
        select(Need.task_id, Need.port, Need.output, Task.outputs, datablocks.reach(Device))
        .join(Task, Task.id == Need.needs_id)
        .outerjoin(Placement, and_(*_MADE_THERE))
        .outerjoin(Device, and_(Device.id == Placement.device_id, _IS_UP))
        .where(Need.task_id.in_(takers), Need.port != "")
    )
    for id, port, output, outputs, maker in session.execute(query):
        if output not in outputs:
            continue  # its maker has not run yet, or the input comes late
        found[id][port] = source(outputs[output], maker)
    if takers := [task.id for task in tasks if datablocks.are_taken_by(task)]:
        uses = (
            select(DatablockUse.task_id, DatablockUse.port, Datablock)
            .join(Datablock, Datablock.id == DatablockUse.datablock_id)
            .where(DatablockUse.task_id.in_(takers))
        )
        rows = session.execute(uses).all()
        near = datablocks.places(session, {row.id for _, _, row in rows})
        for id, port, row in rows:
            copies = [copy for how in near[row.id] for copy in _copies(how, row.sha256)]
            found[id][port] = {**datablocks.as_input(row), "copies": copies}
    return found


_MADE_THERE = (
    Placement.task_id == Task.id,
    Placement.epoch == Task.epoch,
    ~Placement.guest,
)
_IS_UP = Device.lease_until > func.now()


def source(kept: JSON, maker: JSON) -> JSON:
    """Return an output in the form of an input; `maker` is how to reach the device worker that made
    it.
    """
    said = {name: kept[name] for name in _OF_AN_OUTPUT & kept.keys()}
    return {**said, "copies": _copies(maker, kept["sha256"])}


def _copies(maker: JSON, sha256: str) -> list[JSON]:
    """Return where a copy may still lie: at the device worker that made or fetched the bytes.

    The worker's secret is known to its island only; the task gets no more than the key of this
    block.
    """
    if not (maker["links"] and maker["secret"]):
        return []  # the worker is down, or of an older version
    return [{"place": maker["links"], "key": block_key(maker["secret"], sha256)}]


# What an input takes over from an output. The name of the datablock as which the output was
# published is left out, so that the input stays an edge. Images may refer to datablocks that a task
# declares: a task that starts from the image elsewhere has those, but it has none of the first
# task's edges.
_OF_AN_OUTPUT = {"sha256", "size_bytes", "format"}


def _may_have_images(task: Task) -> bool:
    """True if the task was launched before, or starts from a checkpoint of another task."""
    return task.epoch > 0 or task.descriptor.get("from_checkpoint") is not None


def _images(session: Session, ids: Sequence[str]) -> dict[str, list[CheckpointRef]]:
    """Return the newest checkpoints of each task."""
    if not ids:
        return {}
    query = (
        select(Checkpoint.task_id, Checkpoint.sha256, Checkpoint.step, Checkpoint.key)
        .where(
            Checkpoint.task_id.in_(ids),
            # The checkpoint that a task began from is offered even if it is damaged: the task must
            # not start from the beginning instead.
            or_(Checkpoint.damaged_at.is_(None), Checkpoint.epoch == 0),
            Checkpoint.deleted_at.is_(None),
        )
        .order_by(Checkpoint.step.desc(), Checkpoint.created_at.desc())
    )
    found: dict[str, list[CheckpointRef]] = defaultdict(list)
    for id, sha256, step, key in session.execute(query):
        found[id].append(CheckpointRef(sha256=sha256, step=step, key=key))
    return {id: images[:IMAGES_OFFERED] for id, images in found.items()}
