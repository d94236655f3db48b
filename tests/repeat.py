"""Runs tests several times beside busy processes: `python -m tests.repeat 5 tests/workers/ranks`.

A test that fails only now and then is broken. On a quiet machine it may pass a hundred times. `make
test REPEAT=5 ONLY=path` calls this program.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

BUSY = 6
#: It ends with the process that started it, however that one ends.
_LOOP = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    sum(range(100_000))"
_USAGE = "Usage: make test REPEAT=5 ONLY=path, with the path of a file or folder of tests."


def main(words: list[str]) -> int:
    if len(words) != 2 or not words[0].isdecimal() or not Path(words[1].split("::")[0]).exists():
        print(_USAGE, file=sys.stderr)  # noqa: T201
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    times, failed = int(words[0]), list[int]()
    with busy(BUSY):
        for n in range(1, times + 1):
            print(f"--- run {n} of {times} beside {BUSY} busy processes", flush=True)  # noqa: T201
            if subprocess.run(_command(words[1])).returncode:
                failed.append(n)
    told = f"failed: {', '.join(map(str, failed))}" if failed else "none failed"
    print(f"--- {times} runs, {told}")  # noqa: T201
    return 1 if failed or not times else 0


@contextlib.contextmanager
def busy(count: int) -> Iterator[list[int]]:
    """Keep `count` processes busy; yield their ids."""
    command = [sys.executable, "-I", "-S", "-c", _LOOP, str(os.getpid())]
    loops = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield [loop.pid for loop in loops]
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


def _command(path: str) -> list[str]:
    spread = ["-n", "auto", "--dist", "loadfile"] if Path(path).is_dir() else []
    options = ["-q", "-p", "no:cacheprovider", "-m", "not gpu and not long"]
    return [sys.executable, "-m", "pytest", *options, *spread, path]


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
