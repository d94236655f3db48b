"""Functions that tell in which process they run, and disturb it."""

import os
import pathlib
import secrets
import threading
import time

PROCESS = secrets.token_hex(8)  # drawn once, when a process imports this module
left = []


def look(ctx, nap_s=0.0):
    """Tell what functions before this one left."""
    time.sleep(nap_s)
    print("looks")
    found = {"process": PROCESS, "left": len(left), "variable": os.environ.get("LEFT")}
    return {**found, "files": [*os.listdir()]}


def spoil(ctx):
    """Leave what a hostile or careless function leaves."""
    left.append(ctx)
    os.environ["LEFT"] = "1"
    pathlib.Path("left").touch()
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return {"process": PROCESS}


def die(ctx):
    os._exit(3)
