"""Check that shares follow the weights within seconds, on one device, in the whole system.

    python -m benchmarks.shares [--quick] [--graphs [--devices 2]]

Four tenants of weights 1:2:4:8 want one CPU device at once. Their jobs differ eightfold, in the
time of a step and in the time of a job, and not in the order of the weights. The device measures
what each tenant held, turn by turn. A tenant's share of a window is compared with its weight.

With `--graphs` the tenants want the device for graphs. A node maps over a list, first for a
millisecond of each item for all four tenants, then skewed eightfold like the steps of jobs. Graphs
share the device: they take turns of some milliseconds on it, which have no rows of their own. So
the time that each tenant has held is read whenever the device reports it, by the device's clock.
With `--devices 2` the tenants share two devices: times and shares are summed over both.

The peer is round robin: the same system and the same jobs, with equal weights for all tenants.
"""

from __future__ import annotations

import bisect
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psycopg

from app.cli.bundling import bundle_folder
from app.cli.client import Client
from app.local.embedded_servers import temporary_home
from app.local.up import Handle, running
from benchmarks import Target, quick, report

JSON = dict[str, Any]

WINDOW_S = 5.0
SHORT_S = 1.0
SLIDE_S = 1.0
LOOK_S = 0.02
WINDOW_BOUND_PERCENT = 2.0
MINUTE_BOUND_PERCENT = 0.5
GRAPH_BOUNDS_PERCENT = {SHORT_S: 2.0, WINDOW_S: 0.5}  # over all windows of this length
SKEWED_BOUND_PERCENT = 3.0
SEVERAL_BOUNDS_PERCENT = {WINDOW_S: 2.0}  # of several devices together
SETTLE_S = 10.0  # until all have started once, and the first has waited for the others
# Room for four tasks and their standbys: the next task of each user is kept ready.
ENV = {
    "ROUNDHOUSE_SLICE_MIN_S": "0.005",
    "ROUNDHOUSE_RESIDENTS_MAX": "8",
    "ROUNDHOUSE_SHARERS_MAX": "8",
}

JOB = """
import torch


class Job:
    # A step is so many small steps of training at once, each of about a millisecond.

    def __init__(self, ctx, *, parts, steps):
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)
        )
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.parts, self.steps = parts, steps

    def step(self, ctx):
        for _ in range(self.parts):
            loss = self.net(torch.randn(128, 64)).square().mean()
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
        if ctx.step == self.steps:
            ctx.finish()
        return {"loss": loss.item()}


def items(ctx, *, count):
    return {"n": list(range(count)), "w": torch.randn(256, 256) / 16}


def work(ctx, n, w, *, parts):
    x = torch.full((256, 256), float(n))
    for _ in range(parts):
        x = torch.relu(x @ w)
    return {"y": x.mean().item()}


def total(ctx, y):
    return {"y": sum(y)}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanting:
    """Describes a tenant and its jobs: `parts` milliseconds a step, about `job_s` seconds of the
    device.
    """

    weight: int
    parts: int
    job_s: int

    @property
    def steps(self) -> int:
        return 1000 * self.job_s // self.parts

    def job(self) -> JSON:
        params = {"parts": self.parts, "steps": self.steps}
        return {"type": "train", "run": {"job": "job:Job"}, "params": params}

    def graph(self) -> JSON:
        """Return a graph with a step of the job for each item."""
        items = {"name": "items", "function": "job:items", "outputs": ["n", "w"]}
        work = {"name": "work", "function": "job:work", "outputs": ["y"], "map": ["n"]}
        nodes = [
            {**items, "params": {"count": self.steps}},
            {**work, "inputs": {"n": "items.n", "w": "items.w"}, "params": {"parts": self.parts}},
            {"name": "total", "function": "job:total", "inputs": {"y": "work.y"}, "outputs": ["y"]},
        ]
        graph = {"nodes": nodes, "outputs": {"y": "total.y"}}
        return {"type": "preprocess", "run": {"graph": graph}}


TENANTS = (
    Wanting(weight=1, parts=4, job_s=4),
    Wanting(weight=2, parts=16, job_s=2),
    Wanting(weight=4, parts=8, job_s=16),
    Wanting(weight=8, parts=2, job_s=8),
)
ALIKE = tuple(replace(one, parts=1) for one in TENANTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Describes a turn on the slot, in seconds of the database's clock."""

    tenant: str
    from_s: float
    to_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Holds the seconds that each tenant had held of a device, as reported at `at_s`."""

    at_s: float
    held_s: tuple[float, ...]


def main() -> int:
    watch_s = 20.0 if quick() else 60.0
    with tempfile.TemporaryDirectory() as folder, temporary_home() as home:
        (Path(folder) / "job.py").write_text(JOB)
        with running(home, devices=_devices(), env=ENV) as system:
            weights = [one.weight for one in TENANTS]
            if "--graphs" in sys.argv:
                alike = shares(system, folder, "alike", weights, watch_s, _graphs(ALIKE))
                skewed = shares(system, folder, "skewed", weights, watch_s, _graphs(TENANTS))
                facts = {**_told_facts(alike, "alike"), **_told_facts(skewed, "skewed")}
                several = f"_{_devices()}_devices" if _devices() > 1 else ""
                return report(f"shares_graphs{several}", _graph_targets(alike, skewed), facts)
            jobs = [one.job() for one in TENANTS]
            ours = shares(system, folder, "weighed", weights, watch_s, jobs)
            even = shares(system, folder, "even", [1] * len(TENANTS), watch_s, jobs)
    return report("shares", _targets(ours), {**_facts(ours), **_peer(even)})


def _devices() -> int:
    words = sys.argv
    return int(words[words.index("--devices") + 1]) if "--devices" in words else 1


def _graphs(tenants: Sequence[Wanting]) -> list[JSON]:
    return [one.graph() for one in tenants]


# --- running --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Holds the turns of `tenants`, in the order of `TENANTS`, that overlap the watched time.

    `told` are the reports of each device.
    """

    tenants: list[str]
    turns: list[Turn]
    told: list[list[Told]]
    switches_us: list[int]
    from_s: float
    to_s: float


def shares(
    system: Handle, folder: str, name: str, weights: list[int], watch_s: float, tasks: list[JSON]
) -> Watched:
    """Fill the device with tasks of new tenants of these weights, and watch them for a while.

    `tasks` and `weights` are in the order of `TENANTS`.
    """
    with Client(system.url, system.keys["platform"]["platform_admin"]) as admin:
        tenants = [_tenant(admin, f"{name}-{n}", weight) for n, weight in enumerate(weights)]
        members = [Client(system.url, _key(admin, tenant)) for tenant in tenants]
    bundle = bundle_folder(Path(folder))
    for member in members:
        member.upload(bundle.sha256, bundle.body)
    # The heaviest first: the others soon make up for its earlier start.
    by_weight = sorted(zip(members, TENANTS, tasks, strict=True), key=lambda one: -one[1].weight)
    requests = [
        (member, member.submit(_descriptor(task, bundle.sha256))["id"])
        for n in range(_jobs(min(one.job_s for one in TENANTS), watch_s))
        for member, wanting, task in by_weight
        if n < _jobs(wanting.job_s, watch_s)
    ]
    time.sleep(SETTLE_S)
    from_s = _now_s(system)
    told = _listen(system, tenants, watch_s)
    to_s = _now_s(system)
    for member, id in requests:
        member.post(f"/v1/requests/{id}/cancel")
    for member, id in requests:
        _wait_for_end(member, id)
    for member in members:
        member.close()
    return Watched(
        tenants=tenants,
        turns=_turns(system, tenants),
        told=told,
        switches_us=_switches(system, tenants),
        from_s=from_s,
        to_s=to_s,
    )


def _jobs(job_s: int, watch_s: float) -> int:
    """Return more jobs of this length than devices three times as quick could finish."""
    return 2 + int(3 * _devices() * (SETTLE_S + watch_s) / job_s)


def _tenant(admin: Client, name: str, weight: int) -> str:
    return str(admin.post("/v1/tenants", {"name": name, "weight": weight})["id"])


def _key(admin: Client, tenant: str) -> str:
    user = admin.post("/v1/users", {"tenant_id": tenant, "name": "member"})["id"]
    made = admin.post("/v1/keys", {"user_id": user, "role": "member", "name": "benchmark"})
    return str(made["key"])


def _descriptor(task: JSON, bundle: str) -> JSON:
    tasks = [{"name": "job", **task}]
    return {"name": "shares", "bundle": f"sha256:{bundle}", "tasks": tasks}


def _wait_for_end(member: Client, id: str) -> None:
    while (found := member.get(f"/v1/requests/{id}", wait="10s"))["state"] in ("queued", "running"):
        pass
    if found["state"] == "failed":
        raise RuntimeError(f"request {id} failed: {found['tasks']}")


# --- what the device measured ---------------------------------------------------------------------


def _rows(system: Handle, query: str, *values: Any) -> list[tuple[Any, ...]]:
    with _connected(system) as connection:
        return connection.execute(query, values).fetchall()


def _connected(system: Handle) -> psycopg.Connection[tuple[Any, ...]]:
    url = system.facts["database_url"].replace("postgresql+psycopg", "postgresql", 1)
    return psycopg.connect(url, autocommit=True)


def _listen(system: Handle, tenants: list[str], watch_s: float) -> list[list[Told]]:
    """Return all reports of each device in this time; reads much more often than devices report."""
    query = """
        select device.id, device.heard_us, tenant.id, coalesce(sum(placement.held_us), 0)
        from devices device cross join unnest(%s::text[]) with ordinality as tenant (id, place)
        left join placements placement
            on placement.tenant_id = tenant.id and placement.device_id = device.id
        group by device.id, device.heard_us, tenant.id, tenant.place order by tenant.place
    """
    found: dict[str, dict[int, Told]] = {}
    until_s = time.monotonic() + watch_s
    with _connected(system) as connection:
        while time.monotonic() < until_s:
            rows = connection.execute(query, (tenants,)).fetchall()
            for device, heard_us in {(row[0], row[1]) for row in rows}:
                held_s = tuple(float(held) / 1e6 for id, _, _, held in rows if id == device)
                told = Told(at_s=heard_us / 1e6, held_s=held_s)
                found.setdefault(device, {}).setdefault(heard_us, told)
            time.sleep(LOOK_S)
    return [list(told.values()) for told in found.values()]


def _now_s(system: Handle) -> float:
    return float(_rows(system, "select extract(epoch from clock_timestamp())")[0][0])


def _turns(system: Handle, tenants: list[str]) -> list[Turn]:
    """Return all turns.

    A turn's end is the time when it was written, a moment after the real end.
    """
    query = """
        select tenant_id, extract(epoch from ended_at)::float, held_us from placements
        where tenant_id = any(%s) and held_us > 0 order by ended_at
    """
    return [
        Turn(tenant=tenant, from_s=to_s - held_us / 1e6, to_s=to_s)
        for tenant, to_s, held_us in _rows(system, query, tenants)
    ]


def _switches(system: Handle, tenants: list[str]) -> list[int]:
    """Return how long the slot was empty at each resume, in microseconds."""
    query = """
        select (data->>'switch_us')::int from events
        where tenant_id = any(%s) and type = 'task.started' and data->>'step' <> '0'
    """
    return [switch_us for (switch_us,) in _rows(system, query, tenants)]


def _held_by_turns(watched: Watched, from_s: float, to_s: float) -> list[float]:
    """Return the seconds that each tenant held in this time."""
    return [
        sum(
            max(0.0, min(turn.to_s, to_s) - max(turn.from_s, from_s))
            for turn in watched.turns
            if turn.tenant == tenant
        )
        for tenant in watched.tenants
    ]


def _held_as_told(watched: Watched, from_s: float, to_s: float) -> list[float]:
    """Return the seconds that each tenant held, by the devices' reports, interpolated linearly."""

    def by(told: list[Told], at_s: float, place: int) -> float:
        later = bisect.bisect_left(told, at_s, key=lambda one: one.at_s)
        later = min(max(later, 1), len(told) - 1)
        before, after = told[later - 1], told[later]
        part = (at_s - before.at_s) / (after.at_s - before.at_s)
        return before.held_s[place] + part * (after.held_s[place] - before.held_s[place])

    return [
        sum(by(told, to_s, place) - by(told, from_s, place) for told in watched.told)
        for place in range(len(watched.tenants))
    ]


def _errors(held: Sequence[float]) -> list[float]:
    """Return the error of each tenant's share, in percent of the device."""
    weight = sum(one.weight for one in TENANTS)
    return [
        abs(100 * mine / sum(held) - 100 * one.weight / weight)
        for mine, one in zip(held, TENANTS, strict=True)
    ]


def _windows(watched: Watched, window_s: float = WINDOW_S) -> Iterator[float]:
    """Yield the worst tenant's error in each window."""
    at_s = watched.from_s
    while at_s + window_s <= watched.to_s:
        yield max(_errors(_held_by_turns(watched, at_s, at_s + window_s)))
        at_s += SLIDE_S


def _told_windows(watched: Watched, window_s: float) -> Iterator[float]:
    """Yield the worst tenant's error in each window, for tenants that share devices.

    Each window begins at a report.
    """
    begins_s, ends_s = _told_between(watched)
    for told in (one for of_device in watched.told for one in of_device):
        if told.at_s >= begins_s and told.at_s + window_s <= ends_s:
            yield max(_errors(_held_as_told(watched, told.at_s, told.at_s + window_s)))


def _told_between(watched: Watched) -> tuple[float, float]:
    """Return the time for which all devices have reports."""
    begins_s = max(told[0].at_s for told in watched.told)
    return begins_s, min(told[-1].at_s for told in watched.told)


def _whole(watched: Watched) -> float:
    return max(_errors(_held_by_turns(watched, watched.from_s, watched.to_s)))


# --- reporting ------------------------------------------------------------------------------------


def _targets(ours: Watched) -> list[Target]:
    figures = (
        ("in the worst window of 5 s", max(_windows(ours)), WINDOW_BOUND_PERCENT),
        ("over the whole time", _whole(ours), MINUTE_BOUND_PERCENT),
    )
    return [
        Target(
            name=f"worst tenant's error of share, {when}",
            value=round(value, 3),
            unit="% of the device",
            op="<=",
            bound=bound,
        )
        for when, value, bound in figures
    ]


def _graph_targets(alike: Watched, skewed: Watched) -> list[Target]:
    """Return the targets for the worst tenant in the worst window."""
    bounds = SEVERAL_BOUNDS_PERCENT if _devices() > 1 else GRAPH_BOUNDS_PERCENT
    figures = [(alike, "", window_s, bound) for window_s, bound in bounds.items()]
    figures.append((skewed, ", nodes skewed eightfold", WINDOW_S, SKEWED_BOUND_PERCENT))
    return [
        Target(
            name=f"worst tenant's error of share, worst window of {window_s:.0f} s{what}",
            value=round(max(_told_windows(watched, window_s)), 3),
            unit="% of the device" if _devices() == 1 else f"% of {_devices()} devices",
            op="<=",
            bound=bound,
        )
        for watched, what, window_s, bound in figures
    ]


def _facts(ours: Watched, name: str = "ours") -> JSON:
    inside = [turn for turn in ours.turns if ours.from_s < turn.to_s < ours.to_s]
    lasts_s = ours.to_s - ours.from_s
    held_s = sum(turn.to_s - turn.from_s for turn in inside)
    turns = {
        f"{name}, turn of weight {one.weight}, p50, ms": _median(
            [round(1000 * (t.to_s - t.from_s), 1) for t in inside if t.tenant == tenant]
        )
        for tenant, one in zip(ours.tenants, TENANTS, strict=True)
    }
    windows = {
        f"{name}, {which} window of {window_s:.0f} s, %": round(find(_windows(ours, window_s)), 3)
        for window_s in (SHORT_S, WINDOW_S)
        for which, find in (("median", statistics.median), ("worst", max))
    }
    return {
        **windows,
        f"{name}, whole time, %": round(_whole(ours), 3),
        f"{name}, turns a second": round(len(inside) / lasts_s, 2),
        **turns,
        f"{name}, seat empty at a switch, p50, us": _median(ours.switches_us),
        f"{name}, device held, %": round(100 * held_s / lasts_s, 1),
        "seconds watched": round(lasts_s, 1),
    }


def _told_facts(watched: Watched, name: str) -> JSON:
    from_s, to_s = _told_between(watched)
    lasts_s, held = to_s - from_s, _held_as_told(watched, from_s, to_s)
    windows = {
        f"{name}, {which} window of {window_s:.0f} s, %": round(
            find(_told_windows(watched, window_s)), 3
        )
        for window_s in (SHORT_S, WINDOW_S)
        for which, find in (("mean", statistics.mean), ("worst", max))
    }
    inside = [turn for turn in watched.turns if watched.from_s < turn.to_s < watched.to_s]
    return {
        **windows,
        f"{name}, whole time, %": round(max(_errors(held)), 3),
        f"{name}, stays that ended": len(inside),
        f"{name}, told a second": round(len(watched.told[0]) / lasts_s, 1),
        f"{name}, devices held, %": round(100 * sum(held) / lasts_s / len(watched.told), 1),
        "seconds watched": round(lasts_s, 1),
    }


def _median(values: list[Any]) -> float | None:
    return statistics.median(values) if values else None


def _peer(even: Watched) -> JSON:
    return {
        "round robin, worst window of 5 s, %": round(max(_windows(even)), 3),
        "round robin, whole time, %": round(_whole(even), 3),
    }


if __name__ == "__main__":
    sys.exit(main())
