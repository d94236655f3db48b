"""Kill, stop and empty the parts of a whole system at random while three tenants train on it.

    python -m benchmarks.chaos [--quick]

The system is that of `make up`, with two CPU devices. Jobs are submitted one after another.
Meanwhile parts get `kill -9`, Redis loses all its data, and a device worker or the island is
stopped for longer than its lease and then continued. A fixed seed draws the order and the times.

Afterwards every job must have ended with the parameters and the losses of the same job run alone
(`examples.job_alone`), no two processes may have run one task at once, the ledger must be
equal in all its tables, and nothing of the system may be left on the host.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import redis

from app.local.embedded_servers import socket_folder, temporary_home
from app.local.up import running
from benchmarks import Target, quick, report
from examples.session import run_python
from tests.acceptance.conftest import JOBS, SUMS, System
from tests.acceptance.history import overlaps, runs
from tests.acceptance.test_up import family
from workers.process.isolation.cgroups import group_name

JSON = dict[str, Any]

SEED = 22
TENANTS = ("alpha", "beta", "gamma")
ENTRY = "train:TrainAloud"
DEVICES = 2
#: The ledger's sums, in the order of `SUMS`.
SUMMED = ("placements", "usage", "charged placements", "charged usage", "accounts")
STOPPED_S = {"stop device": 15.0, "stop island": 20.0}
PATIENCE_S = 60.0
# what a device worker has in its folder of scratch folders for itself; all else is of a resident
OWN = ("template", "probe")
GONE_S = 20.0  # the kernel removes mounts and groups some time after their last process
ENV = {"ROUNDHOUSE_DEVICE_THREADS": "1", "ROUNDHOUSE_SLICE_MAX_S": "5"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sets the size of a run; `disturbances` has the number of each kind within `length_s`."""

    jobs: int
    steps: int
    length_s: float
    ends_within_s: float
    disturbances: dict[str, int]


LONG = Plan(
    jobs=30,
    steps=900,
    length_s=400.0,
    ends_within_s=600.0,
    disturbances={
        "device": 18,
        "zygote": 10,
        "postgres": 8,
        "island": 7,
        "control": 7,
        "resident": 7,
        "api": 6,
        "redis": 5,
        "flush": 20,
        "stop device": 4,
        "stop island": 2,
    },
)
QUICK = Plan(
    jobs=9,
    steps=300,
    length_s=60.0,
    ends_within_s=240.0,
    disturbances={
        "device": 2,
        "zygote": 2,
        "postgres": 1,
        "island": 1,
        "control": 1,
        "resident": 2,
        "api": 1,
        "redis": 1,
        "flush": 3,
        "stop device": 1,
        "stop island": 1,
    },
)


def main() -> int:
    plan, began_s = QUICK if quick() else LONG, time.monotonic()
    with temporary_home() as home:
        with (
            running(home, devices=DEVICES, env=ENV) as handle,
            contextlib.closing(System(handle)) as system,
        ):
            traces = Traces(home, handle.facts["devices"])
            chaos, tasks = _disturbed(system, plan, traces)
            _say("the same jobs run alone")
            found = [_judged(system, task) for task in tasks]
            [sums] = system.sql(SUMS)
        left = traces.after_stop()
    return _report(plan, chaos, found, dict(zip(SUMMED, sums, strict=True)), left, began_s)


def _disturbed(system: System, plan: Plan, traces: Traces) -> tuple[Chaos, list[JSON]]:
    """Submit all jobs while the system is disturbed; returns the tasks once all have ended."""
    draw = random.Random(SEED)
    chaos = Chaos(system, draw, traces)
    kinds = [kind for kind, count in plan.disturbances.items() for _ in range(count)]
    draw.shuffle(kinds)
    at_s = sorted(draw.uniform(0.0, plan.length_s) for _ in kinds)
    with ThreadPoolExecutor(1) as pool:
        began_s = time.monotonic()
        accepted: Future[list[tuple[str, str]]] = pool.submit(_submit, system, plan)
        for due_s, kind in zip(at_s, kinds, strict=True):
            time.sleep(max(0.0, began_s + due_s - time.monotonic()))
            chaos.disturb(kind)
        chaos.seen = {kind: len(names) for kind, names in traces.now().items()}
        chaos.calm()
        ids = accepted.result()
    until_s = time.monotonic() + plan.ends_within_s
    return chaos, [_ended(system, tenant, id, plan.steps, until_s) for tenant, id in ids]


def _submit(system: System, plan: Plan) -> list[tuple[str, str]]:
    """Submit all jobs, the first six at once; returns (tenant, request) of each."""
    at_once, accepted = 2 * len(TENANTS), []
    between_s = 0.7 * plan.length_s / (plan.jobs - at_once)
    for n in range(plan.jobs):
        tenant = TENANTS[n % len(TENANTS)]
        id = system.client(tenant).submit_job(
            ENTRY,
            name=f"chaos-{n}",
            params=_params(tenant, plan.steps),
            retry={"max": 100},  # a killed resident counts as a crash of its job
            checkpoint={"every_s": 1.0, "keep": 2},
        )
        accepted.append((tenant, id))
        if n + 1 >= at_once:
            time.sleep(between_s)
    return accepted


def _params(tenant: str, steps: int) -> JSON:
    return {"steps": steps, "seed": TENANTS.index(tenant)}


def _ended(system: System, tenant: str, id: str, steps: int, until_s: float) -> JSON:
    """Wait for the request to end and return its task.

    If the request does not end in time, the task has its current state.
    """
    client = system.client(tenant)
    with contextlib.suppress(TimeoutError):
        client.wait(id, timeout_s=max(1.0, until_s - time.monotonic()))
    _say(f"{tenant} {id} has ended")
    task_id = client.request(id)["tasks"][0]["id"]
    task = client.get(f"/v1/tasks/{task_id}")
    return {**task, "tenant": tenant, "params": _params(tenant, steps)}


# --- disturb --------------------------------------------------------------------------------------


class Chaos:
    """Makes disturbances one after another; `made` counts them by kind.

    `seen` is the number of traces of each kind while jobs ran.
    """

    def __init__(self, system: System, draw: random.Random, traces: Traces) -> None:
        self.system, self.draw, self.traces = system, draw, traces
        self.made: Counter[str] = Counter()
        self.seen: dict[str, int] = {}
        self.stopped: list[threading.Timer] = []

    def disturb(self, kind: str) -> None:
        """Make one disturbance; it counts if there was something to disturb."""
        self.traces.look(self.system.handle.process.pid)
        match kind:
            case "flush":
                made = self.system.until(self._flush)
            case "stop device" | "stop island":
                made = self.system.until(lambda: self._stop(kind))
            case "zygote" | "resident":
                made = self.system.until(lambda: self._kill_one(kind))
            case _:
                made = self._kill(self._device() if kind == "device" else kind)
        self.made[kind] += made
        _say(kind if made else f"{kind}: there was none")

    def calm(self) -> None:
        """Wait until all stopped processes have been continued."""
        for timer in self.stopped:
            timer.join()

    def _device(self) -> str:
        return f"device.{self.draw.randrange(DEVICES)}"

    def _kill(self, name: str) -> bool:
        pid = self.system.handle.kill(name)
        self.system.handle.wait_restarted(name, pid, PATIENCE_S)
        return True

    def _kill_one(self, kind: str) -> bool:
        """Kill one process; False if there is no such process now, or it ended by itself."""
        with contextlib.suppress(psutil.NoSuchProcess):
            system = self.system
            processes = system.zygotes() if kind == "zygote" else system.residents()
            if processes:
                self.draw.choice(processes).kill()
                return True
        return False

    def _stop(self, kind: str) -> bool:
        name = self._device() if kind == "stop device" else "island"
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.system.handle.pids()[self.system.handle.process_of(name)])
            process.suspend()
            self.stopped.append(threading.Timer(STOPPED_S[kind], _go_on, [process]))
            self.stopped[-1].start()
            return True
        return False

    def _flush(self) -> bool:
        with redis.Redis.from_url(self.system.handle.facts["redis_url"]) as client:
            try:
                return bool(client.flushall())
            except redis.RedisError:  # Redis is just starting
                return False


def _go_on(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # killed meanwhile
        process.resume()


# --- judge ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgment:
    """Holds the verdict on one job; `wrong_metrics` are rows that the job does not have when it
    runs alone.
    """

    task: JSON
    has_right_bits: bool
    metrics: int
    wrong_metrics: int
    has_last_metric: bool
    overlaps: int


_alone: dict[str, tuple[JSON, dict[int, float]]] = {}


def _judged(system: System, task: JSON) -> Judgment:
    result, losses = _undisturbed(task)
    client = system.client(task["tenant"])
    rows = list(client.items(f"/v1/tasks/{task['id']}/metrics", limit=200))
    steps = Counter(row["step"] for row in rows)
    wrong = [row for row in rows if row["values"] != {"loss": losses.get(row["step"])}]
    return Judgment(
        task=task,
        has_right_bits=task["state"] == "done" and task["result"] == result,
        metrics=len(rows),
        wrong_metrics=len(wrong) + len(rows) - len(steps),
        has_last_metric=max(losses) in steps,
        overlaps=len(overlaps(runs(client.log_text(task["id"])))),
    )


def _undisturbed(task: JSON) -> tuple[JSON, dict[int, float]]:
    """Return the result of this job, and the loss of each step, when it runs undisturbed."""
    params, preset = json.dumps({**task["params"], "step_s": 0.0}), json.dumps(task["preset"])
    if params + preset not in _alone:
        words = (str(JOBS), ENTRY, "--params", params, "--preset", preset)
        lines = run_python({}, "-m", "examples.job_alone", *words).splitlines()
        said = [line.split() for line in lines if line.startswith("loss ")]
        losses = {int(step): float(loss) for _, step, loss in said}
        _alone[params + preset] = json.loads(lines[-1])["result"], losses
    return _alone[params + preset]


# --- what is left ---------------------------------------------------------------------------------


@dataclass
class Traces:
    """Finds traces of the system on this host; `shared` are the names that it used in /dev/shm."""

    home: Path
    devices: list[str]
    shared: set[str] = field(default_factory=set)

    def look(self, supervisor: int) -> None:
        """Record the names in /dev/shm that processes below this one use now."""
        for process in psutil.Process(supervisor).children(recursive=True):
            with contextlib.suppress(OSError):  # the process ended meanwhile
                maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
                names = (line.partition("/dev/shm/")[2] for line in maps)
                self.shared |= {name.removesuffix(" (deleted)") for name in names if name}

    def after_stop(self) -> dict[str, list[str]]:
        """Return the traces that are left, by kind: at once if there are none, otherwise after
        `GONE_S`.
        """
        until_s = time.monotonic() + GONE_S
        while any((left := self.now()).values()) and time.monotonic() < until_s:
            time.sleep(0.2)
        return left

    def now(self) -> dict[str, list[str]]:
        home, groups = str(self.home), {group_name(d, self.home / "run") for d in self.devices}
        scratch = self.home.glob("run/*/scratch/*")
        backing = Path("/sys/block").glob("loop*/loop/backing_file")
        sockets = socket_folder(self.home)
        return {
            "processes": family(self.home),
            "shared memory": sorted(n for n in self.shared if Path("/dev/shm", n).exists()),
            "scratch folders": [str(path) for path in scratch if path.name not in OWN],
            "control groups": [
                at for at, _, _ in os.walk("/sys/fs/cgroup") if groups & {*Path(at).parts}
            ],
            "loop devices": [file.parts[3] for file in backing if home in _text(file)],
            "socket folders": [str(sockets)] if sockets.exists() else [],
        }


def _text(file: Path) -> str:
    """Return the file's text; empty for a loop device that has just been released."""
    try:
        return file.read_text()
    except OSError:
        return ""


# --- report ---------------------------------------------------------------------------------------


def _report(
    plan: Plan,
    chaos: Chaos,
    found: list[Judgment],
    sums: dict[str, int],
    left: dict[str, list[str]],
    began_s: float,
) -> int:
    def no(name: str, value: int, unit: str) -> Target:
        return Target(name=name, value=value, unit=unit, op="<=", bound=0)

    right = sum(one.has_right_bits for one in found)
    wanted = sum(plan.disturbances.values())
    targets = [
        Target(name="jobs done, right bits", value=right, unit="jobs", op=">=", bound=plan.jobs),
        Target(
            name="disturbances made",
            value=chaos.made.total(),
            unit="disturbances",
            op=">=",
            bound=wanted,
        ),
        no(
            "metrics of a step that are doubled or wrong",
            sum(j.wrong_metrics for j in found),
            "rows",
        ),
        no(
            "jobs without the metrics of their last step",
            sum(not j.has_last_metric for j in found),
            "jobs",
        ),
        no("steps that two processes ran at once", sum(j.overlaps for j in found), "pairs"),
        no("difference in the ledger", max(sums.values()) - min(sums.values()), "us"),
        no("left behind", sum(map(len, left.values())), "things"),
    ]
    tasks = [one.task for one in found]
    peers = {
        "disturbances": dict(chaos.made),
        "jobs": f"{right} of {plan.jobs}",
        "not right": [_why(one.task) for one in found if not one.has_right_bits],
        "metrics, rows": sum(one.metrics for one in found),
        "attempts, pauses, lost steps": [
            sum(task[name] for task in tasks) for name in ("attempts", "pauses", "lost_steps")
        ],
        "ledger, us": sums,
        "on the host after the last disturbance": chaos.seen,
        "left behind": {kind: names[:5] for kind, names in left.items()},
        "seconds": round(time.monotonic() - began_s),
        "load (1 min)": round(os.getloadavg()[0], 1),
    }
    return report("chaos", targets, peers)


def _say(what: str) -> None:
    sys.stderr.write(f"{time.strftime('%T')} {what}\n")


def _why(task: JSON) -> str:
    return f"{task['id']} {task['state']} at step {task['step']}: {task['cause']} {task['message']}"


if __name__ == "__main__":
    sys.exit(main())
