"""Writes the same number into two files, one after the other, without a pause."""

import mmap
import os
import sys
from pathlib import Path

if os.path.exists("first"):
    first, second = (int(Path(name).read_text()) for name in ("first", "second"))
    print("found", first, second, flush=True)
    raise SystemExit
files = [os.open(name, os.O_RDWR | os.O_CREAT) for name in ("first", "second")]
for file in files:
    os.pwrite(file, b"%09d" % 0, 0)
mapped = mmap.mmap(files[0], 9) if sys.argv[1] == "mapped" else None
number = 0
while True:
    number += 1
    if mapped is None:
        os.pwrite(files[0], b"%09d" % number, 0)
    else:
        mapped[:] = b"%09d" % number
    os.pwrite(files[1], b"%09d" % number, 0)
    if number == 1:
        print("writes", flush=True)
