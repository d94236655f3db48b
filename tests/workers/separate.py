"""A device in a process of its own, so that it can be stopped and killed.

    python -m tests.workers.separate HOME [--nap S] [--sandbox off] [--command WORDS --every-s S]
        [--monitor file:FOLDER --preset JSON]

Says "running" once its job steps; without walls the job writes to HOME/steps when each began.  Or
it runs a command, and then says, each in a line of JSON, which checkpoints there are.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from app.core.model import codec
from app.core.model.protocol.messages import Saved
from tests.workers.conftest import PRESET, DeviceRig


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("home", type=Path)
    parser.add_argument("--nap", type=float, default=0.01)
    parser.add_argument("--sandbox", default="off")
    parser.add_argument("--command", default="")
    parser.add_argument("--monitor", default="none")
    parser.add_argument("--preset", type=json.loads, default={}, help="in addition to the usual")
    parser.add_argument("--every-s", type=float, default=60.0)
    options = parser.parse_args()
    rig = DeviceRig(
        options.home,
        # It trusts itself for a second.  What does not stop within half of the margin, or all of
        # it, is ended, and a busy machine is slow.
        lease_s=11.0,
        lease_margin_s=10.0,
        beat_s=0.2,
        sandbox=options.sandbox,
        monitor=options.monitor,
    )
    rig.open()
    if options.command:
        _run_command(rig, options)
    path = str(options.home / "steps") if options.sandbox == "off" else None
    params = {"nap_s": options.nap, "path": path}
    rig.launch("t1", "jobs:Stamp", params=params, preset={**PRESET, **options.preset})
    rig.steps("t1", 3)
    sys.stdout.write("running\n")
    sys.stdout.flush()
    time.sleep(60)


def _run_command(rig: DeviceRig, options: Any) -> None:
    rig.launch("t1", options.command.split(), checkpoint_every_s=options.every_s)
    rig.until(lambda: rig.printed("t1"))
    sys.stdout.write("running\n")
    sys.stdout.flush()
    for told in range(1000):
        there = rig.until(lambda n=told: rig.all(Saved, "t1")[n : n + 1], timeout_s=60.0)
        sys.stdout.write(json.dumps(codec.to_json(rig.image(there[0]))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
