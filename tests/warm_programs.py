"""One warm process of this test process forks the programs of all its systems.

A system starts six programs of ours.  Each imports for two to four seconds, and does so again after
each kill.  The warm process imports once what they import, but no program itself: a program reads
its settings when it is imported.  `tests/acceptance/test_up.py` starts a system without it.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO
from unittest import mock

from app.local import process_supervisor
from app.local.exec_leash import die_with
from app.local.process_supervisor import Spec
from tests.warm_processes import Forked, Forks, Warm, fork_of, run_program
from tests.workers import warm_zygotes
from workers.device.processes import zygote_handle

Start = Callable[[Spec, IO[bytes]], "Forked | subprocess.Popen[bytes]"]

_PROGRAMS = (
    "app.local.seed",
    "app.local.up",
    "app.main",
    "workers.control.controller",
    "workers.control.scheduler",
    "workers.device.worker",
)
_RUNNERS = ("celery", "uvicorn")
# What the runners import when they start.
_LATER = (
    *("celery.app.amqp", "celery.apps.worker", "celery.bin.celery", "celery.bin.worker"),
    *("celery.concurrency.thread", "celery.worker.consumer", "kombu.transport.redis"),
    *("psycopg", "sqlalchemy.dialects.postgresql.psycopg", "uvicorn.main"),
    *("uvicorn.lifespan.on", "uvicorn.loops.auto", "uvicorn.protocols.websockets.auto"),
)
_start_fresh = process_supervisor.start_leashed

_warm = Warm(
    "tests.warm_programs",
    {**os.environ, "PYTHONUNBUFFERED": "1"},
    own_ask=True,
    asks=tuple(warm_zygotes.WARM.values()),
)


@contextlib.contextmanager
def forked_from_a_warm_process() -> Iterator[None]:
    """Programs that are started meanwhile, and all that these start, are forks."""
    with mock.patch.object(process_supervisor, "start_leashed", _forked(_ask)):
        yield


def _ask(spec: Spec) -> socket.socket:
    """Return the socket to ask at; what zygotes its devices need begins too."""
    warm_zygotes.WARM["cpu"].ask()
    if "SIM_DEVICES" in spec.env:
        warm_zygotes.WARM["sim"].ask()
    return _warm.ask()


def _forked(
    ask: Callable[[Spec], socket.socket],
) -> Callable[..., Forked | subprocess.Popen[bytes]]:
    def start(spec: Spec, output: IO[bytes]) -> Forked | subprocess.Popen[bytes]:
        program, *words = spec.command
        ours = program == sys.executable and {*words[:2]} & {*_PROGRAMS, *_RUNNERS}
        if not ours or spec.user or "--workers" in words:
            return _start_fresh(spec, output)
        body = {"words": words, "env": dict(spec.env), "folder": str(spec.folder)}
        return fork_of(ask(spec), {**body, "death": int(spec.death)}, [output.fileno()])

    return start


# --- the warm process -----------------------------------------------------------------------------


def main(asks: int, ask: int, *zygotes: int) -> None:
    """Fork programs on request until the test process is gone."""
    die_with(os.getppid(), signal.SIGKILL)
    _import_what_programs_need()
    ours, *of_kinds = (socket.socket(fileno=fd) for fd in (ask, *zygotes))
    process_supervisor.start_leashed = _forked(lambda _: ours)
    of_kind = dict(zip(warm_zygotes.WARM, of_kinds, strict=True))
    zygote_handle.start_zygote = warm_zygotes.forked(of_kind.__getitem__)
    gc.collect()
    gc.freeze()
    body, [output] = Forks(asks).serve()
    run_program(body, (output, output), {ask, *zygotes})


def _import_what_programs_need() -> None:
    for program in _PROGRAMS:
        found = importlib.util.find_spec(program)
        assert found
        assert found.origin
        for node in ast.parse(Path(found.origin).read_text()).body:
            if isinstance(node, ast.Import):
                _import(*(each.name for each in node.names))
            elif isinstance(node, ast.ImportFrom) and node.module:
                _import(node.module, *(f"{node.module}.{each.name}" for each in node.names))
    _import(*_LATER)
    from app.settings import settings

    assert settings.cache_info().currsize == 0, "settings were read before a program began"


def _import(*names: str) -> None:
    for name in names:
        if name not in _PROGRAMS:
            with contextlib.suppress(ModuleNotFoundError):  # a name in a module
                importlib.import_module(name)
