"""Forks programs from a process that has imported torch and used no device: some ms each, not 2 s.

The process that forks is `python -m tests.sim.warm FD`; `Warm` starts it and asks it for programs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parent.parent.parent
_LARGEST = 65536  # bytes of a request

# --- in the test's process ------------------------------------------------------------------------


class Program:
    """A running program; leaving the block closes its input, and waits for its end."""

    def __init__(self, warm: Warm, pid: int, wrote: int, reads: int) -> None:
        self.warm, self.pid = warm, pid
        self.input, self.output = os.fdopen(wrote, "wb"), os.fdopen(reads)
        self.returncode: int | None = None

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def heard(self) -> Any:
        """Return what the program says next."""
        return json.loads(self.output.readline())

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        self.input.close()
        self.returncode = self.warm.ask({"wait": self.pid})["status"]
        self.output.close()


class Warm:
    """The process that forks programs."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.sim.warm", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "SIM_DEVICES": "1"},
            cwd=ROOT,
        )
        theirs.close()

    def close(self) -> None:
        self.socket.close()
        self.process.wait()

    def run(self, code: str, variables: dict[str, str]) -> Program:
        """Run Python code, with torch imported, in a process with these variables."""
        (reads_input, writes_input), (reads_output, writes_output) = os.pipe(), os.pipe()
        request = {"code": code, "variables": variables}
        pid = self.ask(request, [reads_input, writes_output])["pid"]
        os.close(reads_input)
        os.close(writes_output)
        return Program(self, pid, writes_input, reads_output)

    def ask(self, request: dict[str, Any], fds: list[int] | None = None) -> dict[str, Any]:
        socket.send_fds(self.socket, [json.dumps(request).encode()], fds or [])
        answer: dict[str, Any] = json.loads(self.socket.recv(_LARGEST))
        return answer


# --- in the process that forks, and its children --------------------------------------------------

_WORDS = """
import json, os, signal, sys, torch
def say(what): print(json.dumps(what), flush=True)
def hear(): return sys.stdin.readline()
def take(size): return torch.empty(size, dtype=torch.uint8, device='sim')
"""


def serve(fd: int) -> None:
    import torch  # noqa: F401

    requests = socket.socket(fileno=fd)
    while True:
        message, fds, _, _ = socket.recv_fds(requests, _LARGEST, 2)
        if not message:
            return
        request = json.loads(message)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer = {"status": os.waitstatus_to_exitcode(status)}
        else:
            pid = os.fork()
            if not pid:
                requests.close()
                _become(request, fds)
            for fd in fds:
                os.close(fd)
            answer = {"pid": pid}
        requests.send(json.dumps(answer).encode())


def _become(request: dict[str, Any], fds: list[int]) -> NoReturn:
    status = 1
    try:
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        sys.stdin = os.fdopen(0)
        os.environ.update(request["variables"])
        exec(_WORDS + request["code"], {"__name__": "program"})
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
