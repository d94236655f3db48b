"""Says at what time it runs, all the time, some hundred times a second."""

import sys
import time

until_s = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until_s:
    print("tick", time.monotonic_ns() // 1000)
    sum(range(100_000))
