"""Forks without end, up to so many at once, each child as short-lived as can be."""

import os
import sys
import threading

MOST = 100
print("forks", flush=True)


def spin():
    while True:
        sum(range(1000))


threading.Thread(target=spin, daemon=True).start()
alive = 0
while True:
    pid = os.fork()
    if not pid:
        if alive % 7 == 0 and not os.fork():
            os._exit(0)
        os._exit(0)
    alive += 1
    while alive >= MOST or (alive and os.waitpid(-1, os.WNOHANG)[0]):
        alive -= 1
        if alive >= MOST - 1:
            os.waitpid(-1, 0)
    if "stop" in os.listdir():
        sys.exit()
