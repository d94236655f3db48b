"""Hold what the demos share: tenants' clients, the jobs they submit, and their whole stories."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from app.cli.bundling import bundle_folder
from app.cli.client import Client
from app.local.embedded_servers import CannotStart, temporary_home
from app.local.up import ROOT, Handle, WantedDevice, running
from examples.judge import Life, Verdict

JSON = dict[str, Any]

CHECKPOINT_EVERY_S = 2.0
PLAIN_WIDTH = 120  # number of columns, if the terminal does not say how many it has
WEIGHTS = {"alpha": 1.0, "beta": 1.0, "gamma": 2.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """An accepted task: what runs, from which folder of examples/, and what it asked for."""

    tenant: str
    name: str
    folder: str
    params: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    devices: Mapping[str, Any] = field(default_factory=dict)
    command: Sequence[str] = ()  # instead of the class `train:Train`


class Session:
    """A running system and what was submitted to it; `jobs` are the accepted ones, by task id."""

    def __init__(
        self, console: Console, system: Handle, began_s: float, folders: Sequence[str]
    ) -> None:
        self.console, self.system, self.began_s = console, system, began_s
        self.admin = Client(system.url, system.keys["platform"]["platform_admin"], patience_s=30)
        self.members = {
            tenant: Client(system.url, system.keys[tenant]["member"], patience_s=30)
            for tenant in WEIGHTS
        }
        self.bundles = {folder: self._upload(folder) for folder in folders}
        self.jobs: dict[str, Job] = {}

    def _upload(self, folder: str) -> str:
        bundle = bundle_folder(folder_of(folder))
        for member in self.members.values():
            member.upload(bundle.sha256, bundle.body)
        return bundle.sha256

    def accepted(self, job: Job) -> str:
        """Submit a job; returns its task's id."""
        asked = descriptor(job, self.bundles[job.folder])
        id: str = self.members[job.tenant].submit(asked)["tasks"][0]["id"]
        self.jobs[id] = job
        return id

    def at_s(self) -> float:
        return time.monotonic() - self.began_s

    def lives(self) -> list[Life]:
        """Return the story of every accepted job."""
        return [self._life(id, job) for id, job in self.jobs.items()]

    def _life(self, id: str, job: Job) -> Life:
        def oldest_first(what: str) -> list[JSON]:
            return list(self.admin.items(f"/v1/tasks/{id}/{what}", limit=100))[::-1]

        return Life(
            tenant=job.tenant,
            name=f"{job.tenant}/{job.name}",
            task=self.admin.get(f"/v1/tasks/{id}"),
            placements=oldest_first("placements"),
            checkpoints=oldest_first("checkpoints"),
        )

    def booked_us(self) -> dict[str, int]:
        rows = self.admin.get("/v1/usage", group_by="tenant")["items"]
        booked = {row["tenant"]: row["held_us"] for row in rows}
        return {tenant: booked.get(tenant, 0) for tenant in WEIGHTS}


def run_demo(
    title: str,
    devices: int | Sequence[WantedDevice],
    env: Mapping[str, str],
    play: Callable[[Console, Handle, float], list[Verdict]],
) -> int:
    """Start a system, play a demo on it and stop it; returns 0 if every promise held."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # end as tidily as on Ctrl-C
        signal.signal(number, signal.default_int_handler)
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    console, began_s = Console(highlight=False, width=width), time.monotonic()
    console.print(title)
    try:
        with home() as folder, running(folder, devices=devices, env=env) as system:
            console.print(f"up after {time.monotonic() - began_s:.1f} s; while this runs:")
            console.print(places(system), markup=False, soft_wrap=True)
            found = play(console, system, began_s)
    except CannotStart as error:
        console.print(str(error), style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; everything is stopped")
        return 130
    broken = [verdict for verdict in found if not verdict.held]
    took_s = time.monotonic() - began_s
    console.print(f"{len(found) - len(broken)} of {len(found)} promises held, in {took_s:.0f} s")
    console.print("`make up` keeps such a system running and prints its addresses and keys")
    return 1 if broken else 0


def why(life: Life) -> str:
    """Describe why a job did not get done."""
    said = life.task["message"] or "it gave no reason"
    return f"{life.name} is {life.task['state']}: {said}\n{life.task['detail'] or ''}"


# --- requests -------------------------------------------------------------------------------------


def descriptor(job: Job, bundle: str) -> JSON:
    run = {"command": list(job.command)} if job.command else {"job": "train:Train"}
    task = {
        "name": job.name,
        "type": "train",
        "run": run,
        "world_size": job.ranks,
        "devices": dict(job.devices),
    }
    if not job.command:
        task |= {"params": dict(job.params), "checkpoint": {"every_s": CHECKPOINT_EVERY_S}}
    return {"name": job.name, "bundle": f"sha256:{bundle}", "tasks": [task]}


# --- the same jobs without Roundhouse -------------------------------------------------------------


def alone(job: Job, preset: JSON, env: Mapping[str, str], *, kind: str = "cpu") -> JSON:
    """Return the result of a job that runs undisturbed in a process of its own."""
    words = (str(folder_of(job.folder)), "train:Train", "--params", json.dumps(dict(job.params)))
    options = ("--preset", json.dumps(preset), "--kind", kind)
    said = run_python(env, "-m", "examples.job_alone", *words, *options)
    result: JSON = json.loads(said.splitlines()[-1])["result"]
    return result


def on_devices_enough(job: Job, env: Mapping[str, str], *, kind: str = "cpu") -> JSON:
    """Return the result of a job of several ranks, run by hand with a slot for each rank."""
    counts = ("--ranks", str(job.ranks), "--seats", str(job.ranks), "--kind", kind)
    params = ("--params", json.dumps(dict(job.params)), "--steps", str(job.params["steps"]))
    entry = f"examples.{job.folder}.train:Train"
    said = run_python(env, "-m", "examples.gang_alone", entry, *counts, *params)
    result: JSON = json.loads(said.splitlines()[-job.ranks])["result"]
    return result


def by_torchrun(job: Job, env: Mapping[str, str]) -> str:
    """Return the last line that a command of several ranks prints under torchrun, on the CPU."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.ranks))
    script = str(folder_of(job.folder) / job.command[1])
    return run_python(env, *torchrun, script, *job.command[2:]).splitlines()[-1]


def run_python(env: Mapping[str, str], *words: str) -> str:
    """Run a Python command and return its output; its errors go to our standard error."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def folder_of(name: str) -> Path:
    return Path(__file__).parent / name


@contextmanager
def home() -> Iterator[Path]:
    """Yield ROUNDHOUSE_HOME, which is kept, or a temporary folder."""
    if named := os.environ.get("ROUNDHOUSE_HOME"):
        yield Path(named).absolute()
        return
    with temporary_home() as folder:
        yield folder


def places(system: Handle) -> str:
    keys = [f"    sign in as {tenant}: {system.keys[tenant]['tenant_admin']}" for tenant in WEIGHTS]
    return "\n".join([f"  pages {system.url}/ui/", *keys, f"  API   {system.url}/docs"])
