"""A tree of processes, each of which counts: some in sessions of their own, some orphaned."""

import os
import signal
import sys
import time

PATHS = ["child", "grandchild", "session", "orphan", "deaf"]


def count(name):
    done = 0
    while not os.path.exists("enough"):
        done += sum(1 for _ in range(20_000))
        with open(f"count-{name}", "w") as file:
            file.write(str(done))
    os._exit(0)


def grow(name):
    if pid := os.fork():
        if name == "orphan":
            os.waitpid(pid, 0)  # its parent is gone when all are there
        return
    if name in ("session", "orphan"):
        os.setsid()
    if name == "orphan" and os.fork():
        os._exit(0)
    if name == "deaf":
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
            signal.signal(number, signal.SIG_IGN)
    if name == "child" and not os.fork():
        count("grandchild")
    count(name)


for name in ("child", "session", "orphan", "deaf"):
    grow(name)
while len([name for name in os.listdir() if name.startswith("count-")]) < len(PATHS):
    time.sleep(0.01)
print("grown", flush=True)
if "stay" not in sys.argv:
    open("enough", "w").close()
while "stay" in sys.argv:
    sum(range(20_000))
