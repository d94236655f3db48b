"""Uses simulated accelerators from several processes: forks, kills, budgets, faults, visibility."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sim.warm import Program, Warm

pytestmark = pytest.mark.sim

MB = 2**20
Run = Callable[..., Program]


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    warm = Warm()
    yield warm
    warm.close()


@pytest.fixture
def run(warm: Warm, tmp_path: Path) -> Run:
    """Run a program; those of one test share their budgets."""

    def run(code: str, **variables: str) -> Program:
        given = {"SIM_MODE": "lazy", "SIM_HOME": str(tmp_path), **variables}
        return warm.run(code, given)

    return run


def _said(program: Program) -> object:
    with program:
        heard = program.heard()
    assert program.returncode == 0
    return heard


def test_host_that_reads_device_memory_dies_of_a_segmentation_fault(run: Run) -> None:
    code = "import ctypes\nt = take(64)\nsay(1)\nctypes.string_at(t.data_ptr(), 1)\n"
    with run(code) as program:
        assert program.heard() == 1
    assert program.returncode == -signal.SIGSEGV


def test_process_without_the_variable_has_no_accelerator() -> None:
    code = "import torch; print(hasattr(torch, 'sim'), torch.accelerator.is_available())"
    environment = {name: value for name, value in os.environ.items() if name != "SIM_DEVICES"}
    said = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert said.split() == ["False", "False"]


def test_budget_is_common_to_all_processes(run: Run) -> None:
    budget = {"SIM_MEMORY_BYTES": str(1000 * MB)}
    code = "t = take(700 * 2**20)\nsay(torch.accelerator.get_memory_info())\nhear()\n"
    tries = (
        "try:\n    take(700 * 2**20)\n    say('taken')\n"
        "except torch.OutOfMemoryError:\n    say(torch.accelerator.get_memory_info())\n"
    )
    with run(code, **budget) as holder:
        assert holder.heard() == [300 * MB, 1000 * MB]
        with run(tries, **budget) as other:
            assert other.heard() == [300 * MB, 1000 * MB]
        holder.kill()
    with run(tries, **budget) as other:
        assert other.heard() == "taken"


def test_child_that_outlives_a_killed_parent_holds_nothing(run: Run) -> None:
    code = (
        "t = take(100 * 2**20)\n"
        "child = os.fork()\n"
        "if child == 0:\n    signal.pause()\n"
        "say(child)\nhear()\n"
    )
    budget = {"SIM_MEMORY_BYTES": str(200 * MB)}
    with run(code, **budget) as parent:
        child = parent.heard()
        parent.kill()
    with run("say(torch.accelerator.get_memory_info())", **budget) as other:
        assert other.heard() == [200 * MB, 200 * MB]
    os.kill(child, signal.SIGKILL)


def test_context_counts_from_the_first_use(run: Run) -> None:
    code = "say([torch.accelerator.get_memory_info()[0], torch.sim.memory_reserved()])"
    sizes = {"SIM_MEMORY_BYTES": str(100 * MB), "SIM_CONTEXT_BYTES": str(30 * MB)}
    assert _said(run(code, **sizes)) == [70 * MB, 0]


def test_fork_before_first_use_may_use_the_device(run: Run) -> None:
    code = (
        "torch.manual_seed(3)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    say(torch.ones(3, device='sim').sum().item())\n    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
    )
    assert _said(run(code)) == 3.0


def test_fork_after_first_use_is_refused_in_cudas_words(run: Run) -> None:
    code = (
        "kept = torch.ones(3, device='sim')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    del kept\n"
        "    try:\n        torch.ones(3, device='sim')\n"
        "    except RuntimeError as error:\n        say(str(error).splitlines()[0])\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "assert kept.sum().item() == 3\n"
    )
    assert str(_said(run(code))).startswith("Cannot re-initialize sim in forked subprocess.")


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [("0", [0]), ("2,0", [2, 0]), ("1,7,2", [1]), ("", []), (None, [0, 1, 2])],
)
def test_visible_devices_are_counted_from_zero(
    run: Run, visible: str | None, numbers: list[int]
) -> None:
    code = (
        "say([torch.sim.get_device_properties(i).number for i in range(torch.sim.device_count())])"
    )
    variables = {} if visible is None else {"SIM_VISIBLE_DEVICES": visible}
    assert _said(run(code, SIM_DEVICES="3", **variables)) == numbers


def test_two_devices_copy_to_each_other_in_order(run: Run) -> None:
    code = (
        "a = torch.arange(1000., device='sim:0').add_(1)\n"
        "b = a.to('sim:1', non_blocking=True).mul_(2)\n"
        "a.fill_(0)\n"
        "try:\n    a + b\nexcept RuntimeError as error:\n    refused = str(error)\n"
        "say([b.sum().item(), a.sum().item(), str(b.device), 'sim:1' in refused])\n"
    )
    assert _said(run(code, SIM_DEVICES="2")) == [1001000.0, 0.0, "sim:1", True]


def test_checkpoint_is_mapped_to_another_device(run: Run) -> None:
    code = (
        "import io\nfile = io.BytesIO()\n"
        "torch.save(torch.arange(3, device='sim:0'), file)\nfile.seek(0)\n"
        "loaded = torch.load(file, map_location='sim:1')\n"
        "say([str(loaded.device), loaded.tolist()])\n"
    )
    assert _said(run(code, SIM_DEVICES="2")) == ["sim:1", [0, 1, 2]]
