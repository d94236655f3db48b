"""POST /v1/simulations: replays work with other weights, quotas, devices or rules.

Only platform admins may call it, because the answer names all tenants.  It changes nothing.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from app.api.access.auth import PlatformAdmin
from app.api.middleware import v1_router
from app.api.problems import declared
from app.api.schemas.base import KIND, DeviceLimit, Guarantee, In, Name, Out, Tier, Weight, example
from app.api.times import Time
from app.core.fairness.usage_decay import half_life
from app.core.simulation.simulator import Costs
from app.core.simulation.what_if import POLICIES
from app.db.transactions import Db
from app.errors import BadInput
from app.insight import simulations
from app.settings import settings

YEAR_S = 366 * 86400.0

router = v1_router("simulations", 403)


Seconds = Annotated[float, Field(ge=0, le=YEAR_S, allow_inf_nan=False)]
HalfLife = Annotated[Seconds, AfterValidator(half_life)]
Named = Annotated[Name, Field(description="a tenant")]
Count = Annotated[int, Field(ge=1, le=simulations.MOST_DEVICES)]


def _policy(name: str) -> str:
    if name not in POLICIES:
        raise ValueError(f"must be one of {', '.join(POLICIES)}; got {name!r}")
    return name


class ArrivalIn(In):
    """A made-up task: it arrives at `at_s` and needs `devices` for `work_s`.

    With `devices_min` it is elastic: it starts with that many, and grows up to `devices` while no
    other task wants them.  On k of n devices it runs at k/n of the speed.
    """

    model_config = example(at_s=0.0, tenant="vision", work_s=3600.0, devices=4, kind="cuda")
    at_s: Seconds = 0.0
    tenant: Name = Field(description="Changes by tenant name; a new name is a tenant of weight 1.")
    user: Name = "all"
    work_s: float = Field(gt=0, le=YEAR_S, allow_inf_nan=False)
    devices: Count = 1
    devices_min: Count | None = Field(None, description="Default: all of `devices`.")
    kind: str = Field("cpu", pattern=f"^{KIND}$")
    memory_bytes: int = Field(0, ge=0, le=1 << 60)
    priority: int = Field(0, ge=-100, le=100)
    tier: Tier = "standard"


class SimulationIn(In):
    """A simulation; settings that are left out are as in the present deployment."""

    model_config = example(
        source="history", since="2026-11-20T00:00:00Z", weights={"vision": 2.0}, devices={"cuda": 8}
    )
    source: Literal["history", "arrivals"] = "history"
    arrivals: list[ArrivalIn] | None = Field(
        None, min_length=1, max_length=simulations.MOST_ARRIVALS
    )
    island: str | None = Field(
        None, description="Default: the scheduling settings of this service."
    )
    since: Time = Field(
        None, description="history: replay tasks that ended after this time; default: a week ago."
    )
    until: Time = Field(None, description="history: and before this time; default: now.")
    policy: Annotated[str, AfterValidator(_policy)] = Field(
        "fair", description="one of " + ", ".join(POLICIES)
    )
    devices: Annotated[dict[str, Count], Field(min_length=1, max_length=32)] | None = Field(
        None, description="Number of devices by kind; replaces the existing devices."
    )
    weights: dict[Named, Weight] = Field({}, max_length=10_000)
    guarantees: dict[Named, Guarantee] = Field({}, max_length=10_000)
    limits: dict[Named, DeviceLimit] = Field({}, max_length=10_000)
    half_life_s: HalfLife | None = Field(None, description="0: usage never decays.")
    slice_min_s: Annotated[Seconds, Field(ge=0.1)] | None = None
    slice_max_s: Annotated[Seconds, Field(ge=0.1)] | None = None
    pause_s: Seconds = Field(
        0.0, description="How long a pause keeps devices occupied, in both runs."
    )
    resume_s: Seconds | None = Field(
        None,
        description="How long a resume keeps devices occupied before work continues; default: "
        "the measured median",
    )
    resize_s: Seconds | None = Field(
        None,
        description="How long a resize keeps devices occupied; default: half of a pause and a "
        "resume.",
    )
    grow_after_s: Seconds | None = Field(
        None, description="Minimum time on devices after a start or a resize."
    )
    durations_known: bool = Field(
        False, description="Whether the scheduler knows durations in advance."
    )


class WaitSpread(Out):
    """Statistics of waits, in seconds; null if no task ended."""

    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None


class Slowdown(Out):
    """Quantiles of (lost + work) / work, where work counts as ten minutes at least."""

    p50: float | None
    p95: float | None


class Figures(Out):
    """`wait_s` until the first start; `lost_s` is end minus arrival minus work, pauses included."""

    jobs: int
    finished: int
    pauses: int
    resizes: int
    wait_s: WaitSpread
    lost_s: WaitSpread
    slowdown: Slowdown


class SimulatedTenant(Figures):
    """`share` of all device time, `fair_share` the part owed, `share_error` the difference."""

    tenant: str
    weight: float
    device_h: float
    share: float
    fair_share: float
    share_error: float


class SimulatedWidth(Figures):
    devices: str = Field(description="Devices of a job: 1, 2-7, 8-15 or 16+.")


class HeldOverTime(Out):
    """Mean devices wanted by all and held by each tenant, in intervals of `every_s`."""

    every_s: float
    wanted: list[float]
    held: dict[str, list[float]]


class SimulatedRun(Figures):
    run: Literal["as is", "what if"]
    policy: str
    devices: dict[str, int]
    left_out: int = Field(description="Jobs that ask for more devices than exist.")
    lasted_s: float
    device_h: float
    utilisation: float
    fairness_error: float = Field(
        description="Mean fraction of the devices that one tenant was entitled to while they were "
        "held by another or idle."
    )
    tenants: list[SimulatedTenant]
    widths: list[SimulatedWidth]
    lost_curve_s: list[float] = Field(description="101 quantiles of lost_s, in ascending order.")
    over_time: HeldOverTime


_SPREAD = {"mean": 40.0, "p50": 30.0, "p95": 120.0, "p99": 180.0, "max": 200.0}
_FIGURES = {
    "jobs": 3,
    "finished": 3,
    "pauses": 1,
    "resizes": 0,
    "wait_s": _SPREAD,
    "lost_s": _SPREAD,
    "slowdown": {"p50": 1.1, "p95": 1.4},
}
_RUN = {
    **_FIGURES,
    "policy": "fair",
    "devices": {"cuda": 8},
    "left_out": 0,
    "lasted_s": 3600.0,
    "device_h": 6.5,
    "utilisation": 0.81,
    "fairness_error": 0.02,
    "tenants": [
        {
            **_FIGURES,
            "tenant": "vision",
            "weight": 2.0,
            "device_h": 4.4,
            "share": 0.68,
            "fair_share": 0.66,
            "share_error": 0.02,
        }
    ],
    "widths": [{**_FIGURES, "devices": "1"}],
    "lost_curve_s": [0.0, 40.0, 200.0],
    "over_time": {"every_s": 1800.0, "wanted": [8.0, 5.0], "held": {"vision": [5.0, 4.0]}},
}


class SimulationOut(Out):
    """Both replays; `left_out` counts tasks of the history that ended without holding a device."""

    model_config = example(
        jobs=3,
        left_out=0,
        since="2026-11-20T00:00:00Z",
        until="2026-11-21T12:00:00Z",
        runs=[{**_RUN, "run": "as is"}, {**_RUN, "run": "what if"}],
    )
    jobs: int
    left_out: int
    since: datetime | None
    until: datetime | None
    runs: list[SimulatedRun]


@router.post(
    "/simulations",
    summary="Replay history with other weights, quotas or devices",
    response_model=SimulationOut,
    responses=declared(403, 409),
)
def simulate(body: SimulationIn, session: Db, _: PlatformAdmin) -> dict[str, Any]:
    """Replays the work twice with the scheduler's own code: as it is, and with the changes.

    `history` is every task that ended in the period: it arrives when it was submitted and needs its
    devices as long as it held them.  `arrivals` are made up.  Nothing is changed.
    """
    scene, since, until = _scene(body, session)
    what_if = simulations.WhatIf(
        policy=body.policy,
        devices=body.devices,
        weights=body.weights,
        guarantees=body.guarantees,
        limits=body.limits,
        half_life_s=body.half_life_s,
        slice_min_s=body.slice_min_s,
        slice_max_s=body.slice_max_s,
        grow_after_s=body.grow_after_s,
    )
    resume_s = scene.resume_s if body.resume_s is None else body.resume_s
    costs = Costs(image_s=body.pause_s, resume_s=resume_s, resize_s=body.resize_s)
    runs = simulations.compare(scene, what_if, costs)
    return {
        "jobs": len(scene.arrivals),
        "left_out": scene.left_out,
        "since": since,
        "until": until,
        "runs": runs,
    }


def _scene(
    body: SimulationIn, session: Db
) -> tuple[simulations.ReplayInput, datetime | None, datetime | None]:
    island = settings().island if body.island is None else body.island
    if body.source == "history":
        if body.arrivals is not None:
            told = 'must be absent unless `source` is "arrivals"'
            raise BadInput.at("/arrivals", told, "unexpected")
        return simulations.of_history(
            session,
            island,
            since=body.since,
            until=body.until,
            durations_known=body.durations_known,
        )
    if body.arrivals is None:
        raise BadInput.at("/arrivals", 'must be present if `source` is "arrivals"', "missing")
    made = [_made(n, one) for n, one in enumerate(body.arrivals)]
    scene = simulations.of_made(session, island, made, durations_known=body.durations_known)
    return scene, None, None


def _made(n: int, one: ArrivalIn) -> simulations.Made:
    least = one.devices if one.devices_min is None else one.devices_min
    if least > one.devices:
        told = f"must be at most `devices`, which is {one.devices}"
        raise BadInput.at(f"/arrivals/{n}/devices_min", told, "order")
    given = one.model_dump(exclude={"devices", "devices_min"})
    return simulations.Made(**given, width=least, width_max=one.devices)
