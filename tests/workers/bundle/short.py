"""Functions that tell in which process they run, and what a function before them left there."""

import io
import os
import random
import resource
import secrets
import signal
import subprocess
import sys
import threading
import time

import torch

PROCESS = secrets.token_hex(8)  # drawn once, when the process imports this module
calls = 0


def look(ctx, nap_s=0.0):
    global calls
    calls += 1
    time.sleep(nap_s)
    print("looks")
    return {
        "process": PROCESS,
        "calls": calls,
        "state": {
            "random": random.random(),
            "torch": torch.rand(1).item(),
            "threads": torch.get_num_threads(),
            "dtype": str(torch.get_default_dtype()),
            "gradients": torch.is_grad_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "folder": os.getcwd(),
            "files": sorted(name for name in os.listdir() if not name.startswith(".")),
            "variables": sorted(os.environ.items()),
            "handler": str(signal.getsignal(signal.SIGUSR1)),
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            "files_most": resource.getrlimit(resource.RLIMIT_NOFILE),
            "cpu_s": resource.getrlimit(resource.RLIMIT_CPU),
            "processors": sorted(os.sched_getaffinity(0)),
        },
    }


def change(ctx):
    """Change all that the next function must not see."""
    os.environ["LEFT"] = "1"
    os.environ.pop("HOME")
    os.mkdir("folder")
    for name in ("file", "folder/file"):
        with open(name, "w") as file:
            file.write("left")
    os.chdir("/")
    random.seed(7)
    torch.manual_seed(7)
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(False)
    sys.stdout = io.StringIO()
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    for limit, most in ((resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CPU, 3600)):
        resource.setrlimit(limit, (most, resource.getrlimit(limit)[1]))
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return {"process": PROCESS}


def fail(ctx):
    raise ValueError(PROCESS)


def die(ctx):
    os._exit(3)


def leave_thread(ctx):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return {"process": PROCESS}


def leave_child(ctx):
    subprocess.Popen(["sleep", "600"])
    return {"process": PROCESS}


def close_output(ctx):
    os.close(1)
    return {"process": PROCESS}


def lower_priority(ctx):
    os.nice(1)
    return {"process": PROCESS}


def lower_limit(ctx):
    resource.setrlimit(resource.RLIMIT_CPU, (3600, 3600))
    return {"process": PROCESS}


def wait(ctx):
    while not os.path.exists("end"):
        time.sleep(0.01)
    return {"process": PROCESS}


def spoil_torch(ctx):
    """Change what other functions of the process compute."""
    torch.ones = torch.zeros
    return {}


def ones(ctx):
    return {"sum": float(torch.ones(3).sum())}
