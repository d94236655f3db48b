"""Programs of all sorts that are paused, stored, killed and restored elsewhere at random moments.

The result is that of a run that nothing disturbs, and no line of output is there twice or lost.  A
program that cannot be stored begins again in its folder, its log says why, and its result is right
too.  `make test` moves a few of them once or twice, `make bench` each of them MOMENTS times.
"""

from __future__ import annotations

import os
import random
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from app.core.model.protocol.messages import Finished
from app.intake.environments import ClaimedEnvironment
from tests.package_index import why_unreachable
from tests.workers.criu.moving import SEED, alone, moved
from tests.workers.criu.programs import PROGRAMS, MatrixProgram
from workers.control.package_locker import locked
from workers.transfer.installs.environments import PLATFORM_PYTHON

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may store processes")

MOMENTS = int(os.environ.get("MOVES_MOMENTS", "20"))
IN_ONE_RUN = 4  # a program of a second does not live to see more
IN_TEST = {"half lines": 1, "sockets": 1}
LOCKED_S, BUILT_S = 120.0, 300.0  # time limits for an environment, with its downloads


@pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if p.name in IN_TEST], ids=lambda p: p.name
)
def test_program_moves_with_its_processes(pair, program: MatrixProgram):
    _move(pair, program, IN_TEST[program.name], alone(program.source))


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_program_moves_at_many_moments(pair, program: MatrixProgram, tmp_path: Path):
    if not program.needs:
        _move(pair, program, MOMENTS, alone(program.source))
        return
    if why := why_unreachable(tmp_path):
        pytest.skip(f"the index of packages of this machine cannot be reached: {why}")
    more = {"environment": _environment(pair, program.needs)}
    undisturbed = moved(pair, "alone", program.source, random.Random(), 0, **more)
    _move(pair, program, MOMENTS, undisturbed.printed, **more)


def _environment(pair, names: tuple[str, ...]) -> dict[str, Any]:
    """Have both hosts build an environment of these packages; return it as a launch has it."""
    text = "\n".join(names).encode()
    wanted = ClaimedEnvironment(
        id="",
        path="requirements.txt",
        sort="requirements",
        python=PLATFORM_PYTHON,
        alone=False,
        body=text,
    )
    lock, _ = pair[0].store.put([locked(wanted, LOCKED_S).text.encode()])
    environment = {"python": PLATFORM_PYTHON, "lock": lock, "own_python": False}
    for rig in pair:
        rig.launch(f"build-{lock[:8]}", ["true"], environment=environment)
        rig.event(Finished, f"build-{lock[:8]}", timeout_s=BUILT_S)
    return environment


def _move(pair, program: MatrixProgram, moments: int, expected: list[str], **more: Any) -> None:
    chance, left, runs, begun_again = random.Random(f"{SEED} {program.name}"), moments, 0, 0
    while left > 0:
        runs += 1
        task = f"p{PROGRAMS.index(program)}-{moments}-{runs}"
        most, is_imported = min(left, IN_ONE_RUN), bool(program.needs) and runs % 3 > 0
        when = {"is_imported": is_imported, "within_s": program.within_s}
        run = moved(pair, task, program.source, chance, most, **when, **more)
        print(program.name, run.begun, sorted({*run.told}))  # noqa: T201
        left -= max(1, run.moves)
        begun_again += run.times_begun_again
        lines = enumerate(zip_longest(run.printed, expected))
        differ = [(n, found, good) for n, (found, good) in lines if found != good]
        assert (run.end, differ[:3]) == ("Finished", [])
        if run.times_begun_again:
            assert program.begins_again, run.told
            assert any(program.begins_again in line for line in run.told), run.told
    assert begun_again or not program.begins_again
