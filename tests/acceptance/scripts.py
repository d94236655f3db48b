"""Scripts as users bring them, slowed from outside until a test opens a gate."""

from __future__ import annotations

from pathlib import Path

from app.cli.bundling import bundle_folder
from tests.acceptance.conftest import Gate, TenantClient

#: It runs a script, which naps whenever it makes a line of progress until the gate opens.
SLOWED = """
import json, os, runpy, sys, time

_, gate, nap_s, *sys.argv = sys.argv
dumps = json.dumps


def dumped(*given, **more):
    until_s = time.monotonic() + float(nap_s)
    is_script = sys._getframe(1).f_globals["__name__"] == "__main__"  # the platform calls it too
    while is_script and not os.path.exists(gate) and time.monotonic() < until_s:
        time.sleep(0.02)
    return dumps(*given, **more)


json.dumps = dumped
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def upload(client: TenantClient, script: Path, folder: Path) -> str:
    """Upload a script with what slows it, by way of a new folder; return its bundle."""
    folder.mkdir()
    (folder / script.name).write_text(script.read_text())
    (folder / "slowed.py").write_text(SLOWED)
    found = bundle_folder(folder)
    client.upload(found.sha256, found.body)
    return f"sha256:{found.sha256}"


def slowed(gate: Gate, nap_s: float, *words: str) -> dict[str, object]:
    """Return the fields of a task that runs a script with these words, slowed by the gate."""
    command = ["python", "slowed.py", gate.file, str(nap_s), *words]
    return {"run": {"command": command}, "mounts": gate.mounts}
