"""Two device workers in a process of its own, which kills itself at a stage of a move.

    python -m tests.workers.criu.killed_device HOME CRIU SOURCE STAGE
    python -m tests.workers.criu.killed_device HOME CRIU SOURCE after TOLD

The first says in a line of JSON which image there is when it dies.  The second, after it, gets
that line; it launches the task again on the second device, as an island does, and says how it went.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.core.model.protocol.messages import Finished, Paused, Saved, Started
from app.core.model.provisions.process_images import OFFER
from tests.launches import image_of
from tests.workers.conftest import DeviceRig
from tests.workers.criu.criu_processes import STAGES, criu_at, folders_in_memory
from tests.workers.criu.moving import END_S
from workers.criu import dump_and_restore

DEVICES = ("killed0.0", "killed1.0")


def main() -> None:
    home, criu, source, stage, *told = sys.argv[1:]
    here, there = (_rig(Path(home), name, criu) for name in DEVICES)
    command = ["python", "-c", source]
    if told:
        _go_on(there, command, json.loads(told[0]))
        here.close()
        there.close()
        return
    _die_at(stage)
    if stage in ("dump", "upload"):
        _say(images=[])
    here.launch("t1", command, 1)
    here.until(lambda: here.printed("t1"), timeout_s=END_S)
    here.pause("t1", 1)
    paused = here.event(Paused, "t1", 1, timeout_s=END_S)
    saved = here.until(
        lambda: next((s for s in here.all(Saved, "t1", 1) if s.step == paused.step), None),
        timeout_s=END_S,
    )
    image = here.image(saved)
    _say(images=[[image.sha256, image.step, image.key]], has_processes=saved.has_processes)
    there.launch("t1", command, 2, images=[image])
    there.event(Finished, "t1", 2, timeout_s=END_S)


def _rig(home: Path, device: str, criu: str) -> DeviceRig:
    own = home / device
    own.mkdir(mode=0o755, exist_ok=True)
    if not (own / "store").is_symlink():
        (own / "store").symlink_to(home / "store")
    rig = DeviceRig(own, lease_s=30.0, device=device, criu=criu)
    rig.open()
    rig.until(lambda: OFFER in rig.reports[-1].facts["offers"], timeout_s=END_S)
    return rig


def _die_at(stage: str) -> None:
    """Have this process killed as the stage begins; while CRIU runs, if that is the stage."""
    owner, name = STAGES[stage]
    real: Callable[..., Any] = getattr(owner, name)

    def die() -> None:
        if owner is dump_and_restore:
            criu_at(stage, END_S)
        os.kill(os.getpid(), signal.SIGKILL)

    def dies(*args: Any, **more: Any) -> Any:
        if owner is not dump_and_restore:
            die()
        threading.Thread(target=die).start()
        return real(*args, **more)

    setattr(owner, name, dies)


def _say(**said: Any) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


def _go_on(rig: DeviceRig, command: list[str], said: dict[str, Any]) -> None:
    images = [image_of(*image) for image in said["images"]]
    rig.launch("t1", command, 3, images=images)
    started = rig.event(Started, "t1", 3, timeout_s=END_S)
    rig.let_end("t1", 3)
    rig.event(Finished, "t1", 3, timeout_s=END_S)
    rig.until(lambda: rig.view("t1", 3) is None, timeout_s=END_S)
    _say(resumed=started.resumed, printed=rig.printed("t1", 3), left=folders_in_memory())


if __name__ == "__main__":
    main()
