"""Three tenants share the two devices of a host: real training, one `kill -9` of its worker, and a
judgment at the end.

When all jobs are done, a job of four ranks gets both devices, until another job comes.

    make demo        (or: python -m examples.demo)

The demo ends by itself in a few minutes, with status 0 only if every promise held. The data goes to
a temporary folder, or to ROUNDHOUSE_HOME if that is set.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rich.console import Console

from app.local.up import Handle
from examples import judge
from examples.judge import Kill, Life, Sample
from examples.session import (
    WEIGHTS,
    Job,
    Session,
    alone,
    folder_of,
    on_devices_enough,
    run_demo,
    run_python,
    why,
)
from examples.view import ENDED, View, summary, verdicts

JSON = dict[str, Any]

DEVICES = 2
JOB_S = 6.0  # of device time per job, roughly
BURST = 3  # jobs of each tenant at first; more are submitted whenever fewer are unfinished
SUBMIT_S = 65.0  # time during which more jobs are submitted
KILL_AFTER_S = 25.0
LEAST_WINDOW_S = 45.0  # in a shorter window the shares would prove little
GIVE_UP_S = 270.0  # five minutes are promised
LOOK_S = 1.0
KILLED = "device.1"  # stands for the worker of its host
RANKS = 4  # of the last job
# steps of the last job per step of a digits job: on one device it takes 15 to 40 s
RANKS_STEPS = 2.3

ENV = {
    "ROUNDHOUSE_DEVICE_THREADS": "1",
    "ROUNDHOUSE_GROW_AFTER_S": "2",
    "ROUNDHOUSE_SLICE_MAX_S": "2",  # many turns in a short time, so that there is something to see
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The kind of job that a tenant submits: the class in examples/FOLDER; seeds vary."""

    folder: str
    params: Mapping[str, Any]


DIGITS = Wish(folder="digits", params={"width": 16, "work": 4})
CHARS = Wish(folder="chars", params={"width": 48, "work": 1})
WISHES = {"alpha": DIGITS, "beta": DIGITS, "gamma": CHARS}
DDP = Wish(folder="ddp", params={})
FOLDERS = {wish.folder for wish in WISHES.values()}


def main() -> int:
    title = "Roundhouse: three tenants share two devices, by weight 1 : 1 : 2"
    return run_demo(title, DEVICES, ENV, lambda *system: Demo(*system).run())


class Demo(Session):
    """A run of the demo."""

    def __init__(self, console: Console, system: Handle, began_s: float) -> None:
        super().__init__(console, system, began_s, sorted({*FOLDERS, DDP.folder}))
        self.samples: list[Sample] = []
        self.kill: Kill | None = None

    def run(self) -> list[judge.Verdict]:
        # 1. Measure a step here, so that the demo takes equally long on any machine.
        self.console.print("measuring how long a step takes on this machine")
        steps = {folder: round(1e3 * JOB_S / ms) for folder, ms in step_times_ms().items()}
        told = ", ".join(f"{folder} {count}" for folder, count in steps.items())
        self.console.print(f"steps of each job: {told}")
        # 2. Submit a burst of jobs for each tenant.
        for tenant in WISHES:
            for _ in range(BURST):
                self._submit(tenant, steps)
        # 3. Watch, submit more so that there is always work waiting, and kill a device worker.
        with View(self.console, WEIGHTS, self.system.facts["devices"]) as view:
            self._watch(view, steps)
            # 4. Four ranks take all devices, give one back to a new job, and take it again.
            self._splice(view, steps)
        # 5. Judge.
        return self._judge(self.lives())

    # --- submit ---

    def _submit(self, tenant: str, steps: Mapping[str, int]) -> str:
        """Submit a job of the tenant; returns the task's id."""
        wish = WISHES[tenant]
        n = sum(job.tenant == tenant for job in self.jobs.values()) + 1
        params = {**wish.params, "steps": steps[wish.folder], "seed": n}
        name = f"{wish.folder}-{n}"
        return self.accepted(Job(tenant=tenant, name=name, folder=wish.folder, params=params))

    # --- watch ---

    def _watch(self, view: View, steps: Mapping[str, int]) -> None:
        first_s = time.monotonic() - self.began_s
        while True:
            at_s = time.monotonic() - self.began_s
            unfinished = self._look(view, at_s).unfinished
            if not any(unfinished.values()):
                return
            if at_s < first_s + SUBMIT_S:
                for tenant in [tenant for tenant in WISHES if unfinished[tenant] < BURST]:
                    self._submit(tenant, steps)
            if self.kill is None and at_s > first_s + KILL_AFTER_S:
                self._kill(view, at_s)
            if at_s > GIVE_UP_S:
                view.note(at_s, "this takes too long: giving up")
                return
            time.sleep(LOOK_S)

    def _splice(self, view: View, steps: Mapping[str, int]) -> None:
        params = {**DDP.params, "steps": round(RANKS_STEPS * steps[DIGITS.folder])}
        id = self.accepted(
            Job(tenant="alpha", name="ddp-1", folder=DDP.folder, params=params, ranks=RANKS)
        )
        if self._until(view, id, lent=True, told=f"its {RANKS} ranks have both devices"):
            self._submit("beta", steps)
            self._until(view, id, lent=False, told="it gave one back to a new job, and goes on")
            self._until(view, id, lent=True, told="it has both again")
        while self.at_s() < GIVE_UP_S and any(self._look(view, self.at_s()).unfinished.values()):
            time.sleep(LOOK_S)

    def _until(self, view: View, id: str, *, lent: bool, told: str) -> bool:
        """Watch until the task holds lent devices, or none any more; False if it ended before."""
        while self.at_s() < GIVE_UP_S:
            self._look(view, self.at_s())
            task = self.admin.get(f"/v1/tasks/{id}")
            if task["state"] in ENDED:
                return False
            if task["state"] == "running" and bool(task["lent"]) == lent:
                view.note(self.at_s(), f"{self.jobs[id].name}: {told}")
                return True
            time.sleep(LOOK_S / 4)
        return False

    def _look(self, view: View, at_s: float) -> Sample:
        """Take a sample and show it."""
        shares = self.admin.get("/v1/fair-share")["tenants"]
        total_us = {share["tenant"]: share["total_us"] for share in shares}
        tasks: dict[str, list[JSON]] = {tenant: [] for tenant in WISHES}
        for task in self.admin.items("/v1/tasks", limit=100):
            if task["id"] in self.jobs:
                tasks[self.jobs[task["id"]].tenant].append(task)
        sample = Sample(
            at_s=at_s,
            used_us={tenant: total_us[tenant] for tenant in WISHES},
            unfinished={
                tenant: sum(task["state"] not in ENDED for task in own)
                for tenant, own in tasks.items()
            },
        )
        self.samples.append(sample)
        view.show(at_s, tasks, sample.used_us)
        return sample

    def _kill(self, view: View, at_s: float) -> None:
        devices = self.system.facts["devices"]
        pid = self.system.kill(KILLED)
        self.kill = Kill(devices=devices, at=datetime.now(UTC))
        told = " and ".join(devices)
        view.note(at_s, f"kill -9 {pid}: that was the worker of {told}, and all it held")
        again = self.system.wait_restarted(KILLED, pid)
        view.note(at_s, f"it was started again, as process {again}")

    # --- judge ---

    def _judge(self, lives: Sequence[Life]) -> list[judge.Verdict]:
        window = judge.saturated(self.samples)
        self.console.print(summary(window, WEIGHTS, lives))
        for life in lives:
            if life.task["state"] != "done":
                self.console.print(why(life), markup=False, soft_wrap=True)
        kill = self.kill or Kill(devices=["nothing"], at=datetime.now(UTC))
        spliced = next(life for life in lives if life.task["name"] == "ddp-1")
        chosen = judge.most_disturbed([life for life in lives if life is not spliced])
        self.console.print(f"now {chosen.name} once more, alone, to compare the bits")
        job = self.jobs[chosen.task["id"]]
        found = [
            judge.all_done(lives),
            judge.shares_follow_weights(window, WEIGHTS, least_s=LEAST_WINDOW_S),
            judge.ledger_adds_up(lives, self.booked_us()),
            judge.pauses_lose_nothing(lives, kill),
            judge.kill_costs_little(lives, kill),
            judge.same_bits(chosen, alone(job, chosen.task["preset"], ENV)),
            judge.spliced(spliced, on_devices_enough(self.jobs[spliced.task["id"]], ENV)),
        ]
        self.console.print(verdicts(found))
        return found


def step_times_ms() -> dict[str, float]:
    """Return the milliseconds of a step of each kind of job, with DEVICES jobs at once."""
    kinds = {wish.folder: wish for wish in WISHES.values()}
    with ThreadPoolExecutor(DEVICES) as pool:
        return dict(zip(kinds, pool.map(step_ms, kinds.values()), strict=True))


def step_ms(wish: Wish) -> float:
    words = ("-m", "examples.pace", str(folder_of(wish.folder)), json.dumps(dict(wish.params)))
    return float(run_python(ENV, *words).splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
