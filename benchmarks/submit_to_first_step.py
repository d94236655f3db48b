"""Measure the time from a submit to the job's first step, on an idle system.

    python -m benchmarks.submit_to_first_step [--quick]

The peer works without Roundhouse: `python` in a new process imports torch, loads the same class and
runs its first step.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from app.cli.bundling import bundle_folder
from app.cli.client import Client
from app.local.embedded_servers import temporary_home
from app.local.up import Handle, running
from benchmarks import Target, quick, report

BOUND_S = 1.0
TIMEOUT_S = 60.0

JOB = """
import time

import torch


class Job:
    def __init__(self, ctx):
        self.net = torch.nn.Linear(8, 8)

    def step(self, ctx):
        self.net(torch.ones(8)).sum().backward()
        ctx.finish({"first_step_s": time.time()})
"""

ALONE = """
import time
from job import Job
class Ctx:
    def finish(self, result):
        print(result["first_step_s"])
Job(Ctx()).step(Ctx())
"""


def main() -> int:
    times = 5 if quick() else 40
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.py").write_text(JOB)
        alone = [alone_s(folder) for _ in range(3)]
        with temporary_home() as home, running(home) as system:
            ours = submit_all(system, folder, times)
    targets = [
        Target(
            name="submit to first step, p50",
            value=round(statistics.median(ours), 3),
            unit="s",
            op="<=",
            bound=BOUND_S,
        )
    ]
    peers = {
        "a new python that imports torch, p50, s": round(statistics.median(alone), 3),
        "ours, slowest, s": round(max(ours), 3),
        "ours, times": times,
    }
    return report("submit_to_first_step", targets, peers)


def submit_all(system: Handle, folder: str, times: int) -> list[float]:
    with Client(system.url, system.keys["alpha"]["member"]) as client:
        bundle = bundle_folder(Path(folder))
        client.upload(bundle.sha256, bundle.body)
        took_s = [submit_s(client, bundle.sha256) for _ in range(times + 1)]
    return took_s[1:]  # the first call is a warm-up


def submit_s(client: Client, bundle: str) -> float:
    descriptor = {
        "name": "first-step",
        "bundle": f"sha256:{bundle}",
        "tasks": [{"name": "job", "type": "train", "run": {"job": "job:Job"}}],
    }
    began_s = time.time()
    request = client.submit(descriptor)
    while request["state"] in ("queued", "running"):
        if time.time() > began_s + TIMEOUT_S:
            raise TimeoutError(f"request {request['id']} is still {request['state']}")
        request = client.get(f"/v1/requests/{request['id']}", wait="10s")
    if request["state"] != "done":
        raise RuntimeError(f"request {request['id']} {request['state']}: {request['tasks']}")
    first_step_s: float = request["tasks"][0]["result"]["first_step_s"]
    return first_step_s - began_s


def alone_s(folder: str) -> float:
    began_s = time.time()
    command = [sys.executable, "-c", ALONE]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return float(done.stdout) - began_s


if __name__ == "__main__":
    sys.exit(main())
