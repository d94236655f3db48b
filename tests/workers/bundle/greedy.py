"""What a tenant would write who takes all that there is; each is run by a real resident."""

import mmap
import os
import threading
import time

import torch


def eat_memory(ctx):
    held = []
    while True:
        held.append(torch.ones(16 * 2**20, dtype=torch.uint8))


def hold_memory(ctx, *, megabytes):
    """Take no more than this, and keep it until the device ends the process."""
    held = torch.ones(megabytes << 20, dtype=torch.uint8)
    time.sleep(600)
    return {"bytes": held.nbytes}


def hide_memory(ctx, *, megabytes, threads, where):
    """Take no more than this, where a count of the heap does not see it, beside idle threads."""
    for _ in range(threads):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    if where == "heap":
        return hold_memory(ctx, megabytes=megabytes)
    fd = os.memfd_create("hidden") if where == "memfd" else os.open(f"{where}/hidden", 66, 0o600)
    os.ftruncate(fd, megabytes << 20)
    held = mmap.mmap(fd, megabytes << 20)
    for at in range(0, len(held), 4096):
        held[at] = 1
    time.sleep(600)
    return {}


def eat_memory_in_child(ctx):
    """The kernel may end the child, and leave its parent."""
    child = os.fork()
    if not child:
        eat_memory(ctx)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    raise RuntimeError(f"a loader ended with {status}")


def fork_all(ctx):
    while True:  # small ones, so that it takes a second
        os.posix_spawn("/bin/sleep", ["sleep", "60"], {})


def fill(ctx, *, path):
    """How much a folder takes before there is no space."""
    block, written = b"\1" * 2**20, 0
    with open(f"{path}/full", "wb", buffering=0) as file:
        try:
            while True:
                written += file.write(block)
        except OSError as error:
            told = error.strerror
    os.unlink(f"{path}/full")
    return {"bytes": written, "told": told}
