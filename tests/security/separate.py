"""Run a device in a process of its own, with a job that asks to outlive it.

python -m tests.security.separate HOME [--sandbox off]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.security.devices import attack
from tests.workers.conftest import DeviceRig


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("home", type=Path)
    parser.add_argument("--sandbox", default="preferred")
    options = parser.parse_args()
    rig = DeviceRig(options.home, sandbox=options.sandbox)
    rig.open()
    attack(rig, "bad", "outlive_the_device")
    rig.until(lambda: rig.printed("bad"))
    sys.stdout.write(rig.printed("bad")[0] + "\n")
    sys.stdout.flush()
    time.sleep(60)


if __name__ == "__main__":
    main()
