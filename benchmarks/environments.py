"""Measure what a task pays for packages of its own, at its first launch and at each later one.

    python -m benchmarks.environments [--quick]

The packages are those of a Hugging Face script. They come from this machine's index, or from the
folder that ROUNDHOUSE_WHEELS names; torch is the platform's. The peer is a task that installs the
packages itself into a new environment, with a cache of `uv` that already has every package.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from app.cli.bundling import bundle_folder
from app.cli.client import Client
from app.local.embedded_servers import temporary_home
from app.local.up import Handle, running
from app.settings import settings
from benchmarks import Target, quick, report
from workers.process import uv

BEYOND_S = 0.3
TIMEOUT_S = 300.0
PACKAGES = "accelerate>=1.10\ndatasets>=4.0\ntransformers>=4.56\n"
SCRIPT = "import time\nprint(time.time())\n"
FOUND = """
from importlib.util import find_spec
print(all(find_spec(name) for name in ("accelerate", "datasets", "transformers")))
"""


def main() -> int:
    times = 5 if quick() else 30
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(SCRIPT)
        (Path(folder) / "found.py").write_text(FOUND)
        (Path(folder) / "requirements.txt").write_text(PACKAGES)
        with temporary_home() as home, running(home) as system:
            first_s, packages, ours = launched(system, Path(folder), times)
        installing = installed_s(Path(folder), 3)
    without_s, with_s = (statistics.median(took) for took in ours)
    targets = [
        Target(
            name="later launches with packages beyond those without, s",
            value=round(with_s - without_s, 3),
            unit="s",
            op="<=",
            bound=BEYOND_S,
        )
    ]
    peers = {
        "a task that installs them itself, warm cache, s": round(statistics.median(installing), 3),
        "ours, first launch, s": round(first_s, 3),
        "ours, later launches, p50, s": round(with_s, 3),
        "ours without packages, p50, s": round(without_s, 3),
        "packages": len(packages["packages"]),
        "launches of each kind": times,
    }
    return report("environments", targets, peers)


def launched(
    system: Handle, folder: Path, times: int
) -> tuple[float, dict[str, Any], tuple[list[float], list[float]]]:
    """Return the seconds of the first launch with packages, the environment, and the seconds of
    later launches.

    The later launches are without and with the packages, in turn.
    """
    with Client(system.url, system.keys["alpha"]["member"]) as client:
        bundle = bundle_folder(folder)
        client.upload(bundle.sha256, bundle.body)
        launch_s(client, bundle.sha256, packages=False)  # a warm-up
        first_s = launch_s(client, bundle.sha256, packages=True)
        if printed(client, bundle.sha256, "found.py", packages=True) != "True":
            raise RuntimeError("the task does not find its packages")
        without_s, with_s = [], []
        for _ in range(times):
            without_s.append(launch_s(client, bundle.sha256, packages=False))
            with_s.append(launch_s(client, bundle.sha256, packages=True))
        (environment,) = client.get("/v1/environments")["items"]
    return first_s, environment, (without_s, with_s)


def launch_s(client: Client, bundle: str, *, packages: bool) -> float:
    """Return the seconds from a submit to the first line of the script."""
    began_s = time.time()
    return float(printed(client, bundle, "train.py", packages=packages)) - began_s


def printed(client: Client, bundle: str, script: str, *, packages: bool) -> str:
    """Run a script as a task; return the one line that it prints."""
    environment = {"environment": {"requirements": "requirements.txt"}} if packages else {}
    request = client.submit(
        {
            "name": "packages",
            "bundle": f"sha256:{bundle}",
            **environment,
            "tasks": [{"name": "task", "type": "train", "run": {"command": ["python", script]}}],
        }
    )
    until_s = time.monotonic() + TIMEOUT_S
    while request["state"] in ("queued", "running"):
        if time.monotonic() > until_s:
            raise TimeoutError(f"request {request['id']} is still {request['state']}")
        request = client.get(f"/v1/requests/{request['id']}", wait="10s")
    if request["state"] != "done":
        raise RuntimeError(f"request {request['id']} {request['state']}: {request['tasks']}")
    (line,) = client.items(f"/v1/requests/{request['id']}/logs")
    return str(line["text"])


def installed_s(folder: Path, times: int) -> list[float]:
    """Return the seconds in which the packages are installed into a new environment and found
    there.
    """
    variables = uv.variables(folder / "cache")
    index, wanted = uv.index_options(settings()), ["--requirement", "requirements.txt"]
    took_s = []
    for number in range(times + 1):
        began_s = time.monotonic()
        made = folder / f"environment-{number}"
        for words in (
            ["venv", "--quiet", "--system-site-packages", "--python", sys.executable, str(made)],
            ["pip", "install", "--quiet", "--python", str(made), *index, *uv.ONLY_WHEELS, *wanted],
        ):
            done = uv.run(words, folder=folder, environment=variables, limit_s=TIMEOUT_S)
            if done.status:
                raise RuntimeError(done.said)
        subprocess.run(
            [made / "bin" / "python", "found.py"], cwd=folder, check=True, stdout=subprocess.DEVNULL
        )
        took_s.append(time.monotonic() - began_s)
    return took_s[1:]  # the first fills the cache


if __name__ == "__main__":
    sys.exit(main())
