"""Runs processes that are started together and end together.

A `Spec` says how to run a program. A `Child` runs it, again after each death. A `ProcessSupervisor`
starts stages of children in order, restarts dead ones, and stops all in reverse order.

A child always ends when the thread that started it ends, even after `kill -9`
(`app.local.exec_leash`). So start children from a thread that lives as long as they should. This
module does not know the programs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

LEASH = Path(__file__).with_name("exec_leash.py")

LOOK_S = 0.1  # interval at which processes are checked
AGAIN_S = 0.2  # wait before the first restart; doubled after every further death
AGAIN_MAX_S = 10.0
HEALTHY_S = 10.0  # lifetime after which the count of deaths starts again
DEATHS_WHILE_STARTING = 5  # deaths after which a start has failed
LOG_TAIL = 15  # lines
CHECK_S = 10.0  # interval of looks whether a program answers
HUNG_S = 60.0  # in seconds: how long a program may not answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Describes a program to run. `command[0]` is an absolute path; `user` is (user id, group id)
    if not our own.

    `stop` is the signal that asks it to end; SIGKILL follows after `grace_s`. `death` is the signal
    that it gets when its supervisor dies. `ready` says whether it works already. A program that
    `answers` has not found to answer for HUNG_S is killed, and so starts again.
    """

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    folder: Path = Path("/")
    user: tuple[int, int] | None = None
    stop: signal.Signals = signal.SIGTERM
    death: signal.Signals = signal.SIGKILL
    grace_s: float = 8.0
    ready: Callable[[], bool] = lambda: True
    answers: Callable[[], bool] | None = None


class NotReady(Exception):
    """Raised if a program did not start; says which one, with the last lines of its log."""


class StopAsked(Exception):
    """The supervisor was asked to stop while it was still starting."""


def leashed(spec: Spec) -> list[str]:
    """Return the command line that runs `spec` so that it dies with the calling thread."""
    user, group = spec.user or (-1, -1)
    words = (os.getpid(), int(spec.death), user, group)
    return [sys.executable, "-I", "-S", str(LEASH), *map(str, words), *spec.command]


def start_leashed(spec: Spec, output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start `spec` so that it dies with the calling thread."""
    return subprocess.Popen(
        leashed(spec),
        env=dict(spec.env),
        cwd=spec.folder,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,  # Ctrl-C must reach only the supervisor
    )


@dataclass
class Child:
    """Runs a program, and runs it again after it has died.

    `deaths` counts deaths in a row; `again_s` is when it may restart.
    """

    spec: Spec
    log: Path
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    deaths: int = 0
    again_s: float | None = None
    checked_s: float = 0.0  # when it was last asked whether it answers
    answered_s: float = 0.0

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self, now_s: float) -> None:
        with self.log.open("ab") as log:
            self.process = start_leashed(self.spec, log)
        self.started_s, self.again_s = now_s, None

    def look(self, now_s: float) -> str:
        """Notice if the program has died, or restart it if that is due; return in words what
        happened.
        """
        if self.alive:
            return self._mind_hanging(now_s)
        if self.again_s is None:
            return self._died(now_s)
        if now_s < self.again_s:
            return ""
        self.start(now_s)
        return "starts again"

    def _mind_hanging(self, now_s: float) -> str:
        if self.spec.answers is None or now_s < self.checked_s + CHECK_S:
            return ""
        self.checked_s = now_s
        if self.spec.answers():
            self.answered_s = now_s
        elif now_s > max(self.answered_s, self.started_s) + HUNG_S:
            self.kill()
            return f"has not answered for {HUNG_S:g} s, and was killed"
        return ""

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(number)  # no effect if it has ended

    def kill(self) -> None:
        """Kill the program, and all processes of its group."""
        if self.process is not None and self.alive:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _died(self, now_s: float) -> str:
        lived_s = now_s - self.started_s
        self.deaths = 1 if lived_s > HEALTHY_S else self.deaths + 1
        self.again_s = now_s + min(AGAIN_MAX_S, AGAIN_S * 2 ** (self.deaths - 1))
        code = self.process.returncode if self.process else 0
        return f"ended with {_how(code)} after {lived_s:.1f} s"


@dataclass
class ProcessSupervisor:
    """Starts, restarts and stops programs.

    `changed` is called whenever a process id has changed; `say` gets sentences for a person.
    """

    logs: Path
    changed: Callable[[], None] = lambda: None
    say: Callable[[str], None] = lambda _: None
    stages: list[list[Child]] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _hurry: threading.Event = field(default_factory=threading.Event)

    def ask_to_stop(self) -> None:
        """Ask to stop; a second call asks to stop at once. It is safe to call this from a signal
        handler.
        """
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def pids(self) -> dict[str, int]:
        return {child.spec.name: child.pid for child in self._children() if child.pid is not None}

    def start(self, *specs: Spec, timeout_s: float = 60.0) -> None:
        """Start programs together and wait until each is ready; raises NotReady, StopAsked."""
        stage = [Child(spec, _fresh_log(self.logs, spec.name)) for spec in specs]
        self.stages.append(stage)
        for child in stage:
            child.start(time.monotonic())
        self.changed()
        for child in stage:
            self._wait_for(child, timeout_s)

    def wait_until(
        self, ready: Callable[[], bool], why_not: Callable[[], str], *, timeout_s: float
    ) -> None:
        """Watch until `ready` returns true; raises NotReady(why_not()), StopAsked."""
        until_s = time.monotonic() + timeout_s
        while not ready():
            if self._stop.wait(LOOK_S / 4):
                raise StopAsked
            self._look()
            for child in self._children():
                if child.deaths >= DEATHS_WHILE_STARTING:
                    raise NotReady(_why(child, f"ended {child.deaths} times"))
            if time.monotonic() > until_s:
                raise NotReady(why_not())

    def watch(self) -> None:
        """Restart whatever dies, until a stop is asked for."""
        while not self._stop.wait(LOOK_S):
            self._look()

    def stop(self) -> None:
        """Stop the stages in reverse order; afterwards none of their processes runs."""
        self._stop.set()
        for stage in reversed(self.stages):
            _stop_stage(stage, self._hurry)
        self.stages.clear()

    def _wait_for(self, child: Child, timeout_s: float) -> None:
        self.wait_until(
            lambda: child.alive and child.spec.ready(),
            lambda: _why(child, f"is not ready after {timeout_s:g} s"),
            timeout_s=timeout_s,
        )

    def _look(self) -> None:
        now_s = time.monotonic()
        for child in self._children():
            if what := child.look(now_s):
                self.say(f"{child.spec.name} {what}")
                self.changed()

    def _children(self) -> list[Child]:
        return [child for stage in self.stages for child in stage]


def _stop_stage(stage: Sequence[Child], hurry: threading.Event) -> None:
    asked_s = time.monotonic()
    for child in stage:
        child.signal(child.spec.stop)
    for child in stage:
        while child.alive and not hurry.is_set():
            if time.monotonic() > asked_s + child.spec.grace_s:
                break
            time.sleep(LOOK_S / 5)
        child.kill()


def _fresh_log(folder: Path, name: str) -> Path:
    """Create an empty log; the log of the last run is kept beside it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = folder / f"{name}.log"
    if log.exists():
        log.replace(folder / f"{name}.log.1")
    log.touch(mode=0o600)
    return log


def _why(child: Child, what: str) -> str:
    lines = child.log.read_text(errors="replace").splitlines()[-LOG_TAIL:]
    tail = "".join(f"\n  | {line}" for line in lines) or " nothing"
    return f"{child.spec.name} {what}; {child.log} ends with:{tail}"


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
