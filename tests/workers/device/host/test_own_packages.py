"""Tasks whose request brings packages, with real processes on a real device."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch

from app.core.model.protocol.messages import ExpectedTask, Failed, Finished, Started
from tests.wheels import add_wheel
from tests.workers.device.conftest import PackagedRig
from workers.transfer.installs.environments import PLATFORM_PYTHON, interpreters


def test_job_imports_the_package_beside_the_platforms_torch(packaged: PackagedRig) -> None:
    rig = packaged.rig
    rig.launch("t1", "packaged:Tower", environment=packaged.environment())
    found = rig.event(Finished, "t1").result
    assert found["height"] == 5
    assert found["file"].startswith("/environment/")
    assert (found["torch"], found["numpy"]) == (torch.__version__, numpy.__version__)


def test_job_without_an_environment_does_not_see_that_of_another(packaged: PackagedRig) -> None:
    rig = packaged.rig
    rig.launch("t1", "packaged:Tower", environment=packaged.environment())
    rig.event(Finished, "t1")
    rig.launch("t2", "packaged:Tower")
    assert "No module named 'towers'" in rig.event(Failed, "t2").message


def test_paused_job_goes_on_with_objects_of_the_package(packaged: PackagedRig) -> None:
    rig = packaged.rig
    environment = packaged.environment()
    params = {"steps": 100, "nap_s": 0.01, "waits": True}
    given = {"params": params, "environment": environment}
    rig.launch("t1", "packaged:Tower", **given)
    rig.steps("t1", 20)
    images = rig.paused_and_saved("t1", 1)
    rig.launch("t1", "packaged:Tower", 2, images=images, **given)
    rig.event(Started, "t1", 2)
    rig.let_end("t1", 2)
    assert rig.event(Finished, "t1", 2).result["height"] == 100


def test_function_and_graph_import_the_package(packaged: PackagedRig) -> None:
    rig = packaged.rig
    more = {"environment": packaged.environment(), "outputs": ["y"]}
    rig.launch("t1", "packaged:grow", **more)
    assert "y" in rig.event(Finished, "t1").outputs
    graph = {
        "nodes": [{"name": "a", "function": "packaged:grow", "outputs": ["y"]}],
        "outputs": {"y": "a.y"},
    }
    sha256, _ = rig.store.put([json.dumps(graph).encode()])
    rig.launch("t2", {"graph": f"sha256:{sha256}"}, **more)
    assert "y" in rig.event(Finished, "t2").outputs


SEES = (
    "import sys, towers, numpy, torch; "
    "print(sys.prefix, towers.__file__, numpy.__version__, torch.__version__)"
)


def test_command_has_the_environments_python_and_programs(packaged: PackagedRig) -> None:
    rig = packaged.rig
    more = {"environment": packaged.environment()}
    rig.launch("t1", ["python", "-c", SEES], **more)
    rig.event(Finished, "t1")
    said = " ".join(rig.printed("t1"))
    assert said.startswith("/environment /environment/lib/")
    assert said.endswith(f"{numpy.__version__} {torch.__version__}")
    rig.launch("t2", ["build-tower"], **more)
    rig.event(Finished, "t2")
    assert rig.printed("t2") == ["1"]


def test_command_alone_sees_no_package_of_the_platform(packaged: PackagedRig) -> None:
    rig = packaged.rig
    code = "import importlib.util as u, towers; print(u.find_spec('torch'), u.find_spec('app'))"
    rig.launch("t1", ["python", "-c", code], environment=packaged.environment(over={}))
    rig.event(Finished, "t1")
    assert rig.printed("t1") == ["None None"]


def test_command_has_an_interpreter_of_its_own(packaged: PackagedRig) -> None:
    rig = packaged.rig
    others = sorted({*interpreters()} - {PLATFORM_PYTHON})
    if not others:
        pytest.skip("uv finds no further interpreter in the PATH of this machine")
    python = others[-1]
    rig.until(lambda: f"python:{python}" in rig.reports[-1].facts["offers"])
    environment = packaged.environment(python=python, over={})
    code = "import sys, towers, importlib.util as u; print(*sys.version_info[:2], sep='.'); "
    code += "print(towers.ONE, u.find_spec('torch'))"
    rig.launch("t1", ["python", "-c", code], environment={**environment, "python": python})
    rig.event(Finished, "t1")
    assert rig.printed("t1") == [python, "1 None"]


def test_ranks_of_a_command_have_the_package(packaged: PackagedRig) -> None:
    rig = packaged.rig
    code = (
        "import towers, torch, torch.distributed as d; d.init_process_group('gloo'); "
        "x = torch.ones(1) * towers.ONE; d.all_reduce(x); "
        "print(f'{int(x)}\\n', end='')"  # in one write: the ranks share a stream
    )
    rig.launch("t1", ["python", "-c", code], world_size=2, environment=packaged.environment())
    rig.event(Finished, "t1", timeout_s=90)  # two imports of torch on a busy machine
    assert rig.printed("t1") == ["2", "2"]


def test_tenants_process_cannot_write_to_the_environment(packaged: PackagedRig) -> None:
    rig = packaged.rig
    code = (
        "import os, pathlib\n"
        "for path in ('/environment/mine', '/environment/lib/mine', '/environment/about.json',\n"
        "             os.path.realpath('/environment/bin/python')):\n"
        "    try:\n"
        "        open(path, 'a')\n"
        "    except OSError as error:\n"
        "        print(type(error).__name__, error.errno)\n"
    )
    rig.launch("t1", ["python", "-c", code], environment=packaged.environment())
    rig.event(Finished, "t1")
    told = rig.printed("t1")
    assert len(told) == 4
    assert all(line.split()[0] in ("OSError", "PermissionError") for line in told)


def test_second_launch_is_hardly_later_than_without(packaged: PackagedRig) -> None:
    rig = packaged.rig
    environment = packaged.environment()

    def launched_s(task: str, **more: Any) -> float:
        began_s = time.monotonic()
        rig.launch(task, "jobs:Count", params={"steps": 1}, **more)
        rig.event(Started, task)
        took_s = time.monotonic() - began_s
        rig.event(Finished, task)
        return took_s

    first_s = launched_s("t0", environment=environment)
    without_s = with_s = math.inf
    for n in range(20):  # the shortest of a few on a machine that has other work
        without_s = min(without_s, launched_s(f"without{n}"))
        with_s = min(with_s, launched_s(f"with{n}", environment=environment))
        if n >= 2 and with_s - without_s < 0.3:
            break
    assert with_s - without_s < 0.3, f"first {first_s} s, then {with_s} s; without {without_s} s"


def test_failed_build_shows_uvs_own_words(packaged: PackagedRig) -> None:
    rig = packaged.rig
    wrong = replace(packaged.pin, hashes=("sha256:" + "5" * 64,))
    rig.launch("t1", "packaged:Tower", environment=packaged.environment(packages=(wrong,)))
    failed = rig.event(Failed, "t1")
    assert failed.cause == "environment"
    assert "Hash mismatch" in failed.message + failed.detail


def test_environment_in_use_outlives_the_limit(packaged: PackagedRig) -> None:
    rig = packaged.rig
    environment = packaged.environment()
    rig.launch(
        "t1", "packaged:Tower", params={"steps": 10_000, "nap_s": 0.01}, environment=environment
    )
    rig.steps("t1", 2)
    kept = replace(rig.house.environments, limit_bytes=0)
    other = packaged.environment(packages=())
    kept.opened(other["lock"], rig.store).close()
    assert environment["lock"] in kept.shown()
    rig.cancel("t1")
    rig.until(lambda: not rig.supervisor.stays.residents)
    kept.opened(packaged.environment(packages=(), over={})["lock"], rig.store).close()
    rig.until(lambda: environment["lock"] not in kept.shown() or _again(kept, packaged))
    assert environment["lock"] not in kept.shown()


def _again(kept: Any, packaged: PackagedRig) -> bool:
    """The supervisor lets go of it in another thread: build once more, which makes room."""
    add_wheel(packaged.wheels, "more")
    kept.make_room(())
    return False


def test_environment_of_an_expected_task_is_built_before_its_launch(packaged: PackagedRig) -> None:
    rig, lock = packaged.rig, packaged.environment()["lock"]
    about = {"task": "t1", "epoch": 1, "tenant": "ten", "bundle": rig.bundle, "inputs": []}
    entry = ExpectedTask(**about, image=None, environment=lock)
    rig.supervisor.receive(lambda: rig.supervisor.lookout.expect([entry], here=[]))
    rig.until(lambda: lock in rig.reports[-1].facts.get("environments", {}))


def test_device_tells_what_it_offers_and_has(packaged: PackagedRig) -> None:
    rig = packaged.rig
    offers = {f"environment:{PLATFORM_PYTHON}", f"python:{PLATFORM_PYTHON}"}
    rig.until(lambda: offers <= {*rig.reports[-1].facts["offers"]})
    environment = packaged.environment()
    rig.launch("t1", "packaged:Tower", environment=environment)
    rig.event(Finished, "t1")
    rig.until(lambda: rig.reports[-1].facts.get("environments"))
    size_bytes, took_us = rig.reports[-1].facts["environments"][environment["lock"]]
    assert size_bytes > 0
    assert took_us > 0
