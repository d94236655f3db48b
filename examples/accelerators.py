"""Three tenants share a CPU device and two simulated accelerators: what accelerators add.

    make demo SIM=1        (or: python -m examples.accelerators)

The accelerators are the simulated ones of the tests (docs/internals/simulated_accelerator.md).
Their memory is not the host's, and their work runs late.  Each has so little memory that the states
of waiting jobs must leave it.  Nothing here has run on a GPU.  The demo ends by itself in a few
minutes, with status 0 only if every promise held.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from app.local.up import Handle, WantedDevice
from examples import judge
from examples.demo import DIGITS, RANKS_STEPS, Wish, step_ms
from examples.judge import Life, Verdict, Window
from examples.session import (
    WEIGHTS,
    Job,
    Session,
    alone,
    by_torchrun,
    on_devices_enough,
    run_demo,
    why,
)
from examples.view import ENDED, summary, verdicts

JSON = dict[str, Any]

SIM = "sim"
DEVICES = (WantedDevice(kind="cpu"), *(WantedDevice(kind=SIM, which=n) for n in "01"))
MEMORY_BYTES = 64 * 2**20  # of each accelerator: about two jobs fit
HOST_MEMORY_BYTES = 6 * 2**20  # for what left it: about three jobs' states fit
TRAIN = Wish(folder="digits", params={"width": 64, "work": 1})
JOB_S = 6.0  # of device time per job, roughly
JOBS = 3  # unfinished jobs that each tenant keeps on each kind of device
WINDOW_S = 60.0
GIVE_UP_S = 400.0
LOOK_S = 1.0
RANKS = 2


def main() -> int:
    if importlib.util.find_spec("torch_sim") is None:
        sys.stderr.write(
            "The simulated accelerator is not built. Install a C++ compiler"
            " (Debian: apt-get install g++), then run make setup.\n"
        )
        return 1
    with tempfile.TemporaryDirectory(prefix="roundhouse-accelerators-") as folder:
        env = environment(Path(folder))
        title = "Roundhouse: three tenants share a CPU device and two simulated accelerators"
        return run_demo(title, DEVICES, env, lambda *system: Accelerators(*system, env).run())


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a system with two accelerators whose budgets are in `folder`."""
    folder.chmod(0o755)
    node = folder / "budget"  # in the place of a device node: tasks must open it
    node.touch()
    node.chmod(0o666)
    return {
        "SIM_DEVICES": "2",
        "SIM_HOME": str(folder),
        "SIM_MEMORY_BYTES": str(MEMORY_BYTES),
        "SIM_MODE": "lazy",
        "ROUNDHOUSE_HOST_MEMORY_BYTES": str(HOST_MEMORY_BYTES),
        "ROUNDHOUSE_DEVICE_NODES": str(node),
        "ROUNDHOUSE_RESIDENTS_MAX": str(len(WEIGHTS) * JOBS),  # so that only memory is short
        "ROUNDHOUSE_DEVICE_THREADS": "1",
        "ROUNDHOUSE_GROW_AFTER_S": "2",
        "ROUNDHOUSE_SLICE_MAX_S": "2",
        "OMP_NUM_THREADS": "1",
    }


class Accelerators(Session):
    """A run of the demo."""

    def __init__(
        self, console: Console, system: Handle, began_s: float, env: Mapping[str, str]
    ) -> None:
        super().__init__(console, system, began_s, ("digits", "ddp", "torchrun"))
        self.env = env
        self.steps = round(1e3 * JOB_S / step_ms(TRAIN))
        self.ranks_steps = round(RANKS_STEPS * 1e3 * JOB_S / step_ms(DIGITS))
        self.numbers: Counter[str] = Counter()

    def run(self) -> list[Verdict]:
        # 1. Keep every tenant busy on both kinds of device.
        used = self._share()
        self._until(self._all_ended, "the jobs of all tenants have ended")
        # 2. Move a job while it runs.
        self._move()
        # 3. Two ranks on both accelerators; another job takes one of them, and gives it back.
        ranks = self._ranks()
        self._until(self._all_ended, "both jobs have ended")
        # 4. A command with a rank on each accelerator, frozen for a while.
        command = self._command()
        self._until(self._all_ended, "the command has ended")
        # 5. Judge.
        return self._judge(used, ranks, command)

    def _share(self) -> dict[tuple[str, str], int]:
        """Return the device-microseconds that each tenant used of each kind in the window."""
        self._submit_missing()
        self._until(self._runs_everywhere, "every device is held")
        began, until_s = self._used_us(), self.at_s() + WINDOW_S
        while self.at_s() < until_s:
            self._submit_missing()
            time.sleep(LOOK_S)
        return {key: us - began.get(key, 0) for key, us in self._used_us().items()}

    def _submit_missing(self) -> None:
        unfinished = self._unfinished()
        for tenant in WEIGHTS:
            for kind in ("cpu", SIM):
                for _ in range(JOBS - unfinished[tenant, kind]):
                    self._submit(tenant, kind)

    def _submit(self, tenant: str, kind: str) -> str:
        self.numbers[tenant] += 1
        seed = self.numbers[tenant]
        return self.accepted(
            Job(
                tenant=tenant,
                name=f"{kind}-{seed}",
                folder="digits",
                params={**TRAIN.params, "steps": self.steps, "seed": seed},
                devices={"kind": kind},
            )
        )

    def _move(self) -> None:
        """Move a job from one accelerator to the other while it runs."""
        id = self._submit("gamma", SIM)
        task = f"/v1/tasks/{id}"
        self._until(lambda: self.admin.get(task)["step"] > 0, "a job computes on an accelerator")
        here = self.admin.get(task)["seat"]
        other = next(device for device in self._accelerators() if device != here)
        self.members["gamma"].post(f"{task}/migrate", {"to": other})
        self._until(
            lambda: self.admin.get(task)["seat"] in (other, None),
            f"it moved from {here} to {other}",
        )

    def _ranks(self) -> str:
        """Run ranks on both accelerators, and let another job take one of them for a while."""
        self._until(self._all_ended, "the moved job has ended")
        id = self.accepted(
            Job(
                tenant="alpha",
                name="ddp-1",
                folder="ddp",
                params={"steps": self.ranks_steps},
                ranks=RANKS,
                devices={"kind": SIM, "min": 1, "max": RANKS},
            )
        )
        if self._until_lent(id, True, f"ddp-1: its {RANKS} ranks have both accelerators"):
            self._submit("beta", SIM)
            self._until_lent(id, False, "ddp-1: it gave one back to a new job, and goes on")
            self._until_lent(id, True, "ddp-1: it has both again")
        return id

    def _command(self) -> str:
        """Run a script for torchrun on both accelerators, and freeze it where it stands."""
        job = Job(
            tenant="gamma",
            name="torchrun-1",
            folder="torchrun",
            command=("python", "train.py", "--steps", str(self.ranks_steps)),
            ranks=RANKS,
            devices={"kind": SIM, "min": RANKS},
        )
        id, member = self.accepted(job), self.members["gamma"]
        task = f"/v1/tasks/{id}"
        self._until(lambda: self.admin.get(task)["metrics"].get("step", 0) > 0, "a command runs")
        member.post(f"{task}/pause")
        self._until(lambda: self.admin.get(task)["state"] == "blocked", "the command is frozen")
        member.post(f"{task}/resume")
        return id

    # --- look ---

    def _tasks(self) -> list[JSON]:
        return [
            task for task in self.admin.items("/v1/tasks", limit=100) if task["id"] in self.jobs
        ]

    def _unfinished(self) -> Counter[tuple[str, str]]:
        mine = (self.jobs[task["id"]] for task in self._tasks() if task["state"] not in ENDED)
        return Counter((job.tenant, str(job.devices["kind"])) for job in mine)

    def _all_ended(self) -> bool:
        return not self._unfinished()

    def _accelerators(self) -> list[str]:
        devices = self.system.facts["devices"]
        return [id for id, device in zip(devices, DEVICES, strict=True) if device.kind == SIM]

    def _runs_everywhere(self) -> bool:
        seats = {task["seat"] for task in self._tasks() if task["state"] == "running"}
        return seats.issuperset(self.system.facts["devices"])

    def _used_us(self) -> dict[tuple[str, str], int]:
        rows = self.admin.get("/v1/usage", group_by="tenant,kind")["items"]
        return {(row["tenant"], row["kind"]): row["held_us"] for row in rows}

    def _until(self, is_so: Callable[[], bool], told: str) -> bool:
        while self.at_s() < GIVE_UP_S:
            if is_so():
                self._note(told)
                return True
            time.sleep(LOOK_S / 2)
        self._note(f"this takes too long: {told} has not come true")
        return False

    def _until_lent(self, id: str, lent: bool, told: str) -> bool:
        """Wait until the task holds lent devices, or none any more; False if it ended before."""

        def has_come() -> bool:
            task = self.admin.get(f"/v1/tasks/{id}")
            return task["state"] in ENDED or (
                task["state"] == "running" and bool(task["lent"]) == lent
            )

        return (
            self._until(has_come, told) and self.admin.get(f"/v1/tasks/{id}")["state"] not in ENDED
        )

    def _note(self, told: str) -> None:
        self.console.print(f"[{self.at_s():5.1f} s] {told}", markup=False, soft_wrap=True)

    # --- judge ---

    def _judge(
        self, used: Mapping[tuple[str, str], int], ranks: str, command: str
    ) -> list[Verdict]:
        lives = self.lives()
        by_tenant = {t: sum(us for (who, _), us in used.items() if who == t) for t in WEIGHTS}
        window = Window(seconds=WINDOW_S, used_us=by_tenant)
        self.console.print(summary(window, WEIGHTS, lives))
        for life in lives:
            if life.task["state"] != "done":
                self.console.print(why(life), markup=False, soft_wrap=True)
        gang, frozen = (next(x for x in lives if x.task["id"] == id) for id in (ranks, command))
        single = [x for x in lives if x not in (gang, frozen) and x.task["kind"] == SIM]
        told = {life.name: self._events(life) for life in single}
        evicted = [life for life in single if any(_RETURNED in said for said in told[life.name])]
        moved = [life for life in single if any(_MOVED in said for said in told[life.name])]
        found = [
            judge.all_done(lives),
            judge.shares_follow_weights(window, WEIGHTS, least_s=WINDOW_S),
            by_kind(used),
            judge.ledger_adds_up(lives, self.booked_us()),
            judge.pauses_lose_nothing(lives, None),
            evictions(evicted),
            moves(moved),
            *(self._same_bits(life) for life in (*evicted[:1], *moved[:1])),
            judge.spliced(gang, on_devices_enough(self.jobs[ranks], self.env, kind=SIM)),
            self._same_words(frozen),
        ]
        self.console.print(verdicts(found))
        return found

    def _events(self, life: Life) -> list[str]:
        request = life.task["request_id"]
        return [event["message"] for event in self.admin.items(f"/v1/requests/{request}/events")]

    def _same_bits(self, life: Life) -> Verdict:
        job = self.jobs[life.task["id"]]
        return judge.same_bits(life, alone(job, life.task["preset"], self.env, kind=SIM))

    def _same_words(self, life: Life) -> Verdict:
        job, request = self.jobs[life.task["id"]], life.task["request_id"]
        lines = self.admin.items(f"/v1/requests/{request}/logs", task=life.task["id"], limit=200)
        here, there = (
            [line["text"] for line in lines][-1:],
            by_torchrun(job, {**self.env, "SIM_DEVICES": ""}),
        )
        return Verdict(
            promise=f"{life.name}, a script for torchrun with a rank on each accelerator, is frozen"
            " and ends with the bits of torchrun on the CPU",
            held=here == [there] and life.task["pauses"] > 0,
            numbers=f"paused {life.task['pauses']} times; {here[-1] if here else 'no line'}",
        )


_RETURNED = "from its saved state"  # in the event of a job whose process had to end
_MOVED = "Moved"


def by_kind(used: Mapping[tuple[str, str], int]) -> Verdict:
    """Show what each tenant used of each kind; every tenant must have used both."""
    told = [
        f"{kind}: " + ", ".join(f"{who} {used.get((who, kind), 0) / 1e6:.0f} s" for who in WEIGHTS)
        for kind in ("cpu", SIM)
    ]
    both = all(used.get((who, kind), 0) for who in WEIGHTS for kind in ("cpu", SIM))
    return Verdict(
        promise="every tenant computes on both kinds of device",
        held=both,
        numbers="; ".join(told),
    )


def evictions(evicted: Sequence[Life]) -> Verdict:
    return Verdict(
        promise=f"the states of waiting jobs leave an accelerator of {MEMORY_BYTES >> 20} MiB, and"
        " come back",
        held=bool(evicted),
        numbers=f"{len(evicted)} jobs went on from their saved state",
    )


def moves(moved: Sequence[Life]) -> Verdict:
    return Verdict(
        promise="a running job moves from one accelerator to the other",
        held=bool(moved),
        numbers=", ".join(life.name for life in moved) or "no job was moved",
    )


if __name__ == "__main__":
    sys.exit(main())
