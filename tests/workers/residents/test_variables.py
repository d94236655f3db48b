"""Environment variables of a task reach every process that runs its code, and nothing else."""

from __future__ import annotations

import sys

from app.core.model.protocol.messages import Finished
from tests.workers.conftest import DeviceRig

ENV = {"HF_HOME": "/scratch/hf", "TZ": "Asia/Tokyo"}


def printed(rig: DeviceRig, task: str) -> list[str]:
    rig.event(Finished, task)
    rig.until(lambda: rig.view(task, 1) is None)
    return rig.printed(task, 1)


def test_function_its_module_and_a_child_see_the_variables(rig):
    rig.launch("t1", "variables:seen", params={"names": [*ENV, "NOT_SET"]}, env=ENV)
    assert rig.event(Finished, "t1").result == {
        **{name: [value] * 3 for name, value in ENV.items()},
        "NOT_SET": [None] * 3,
    }
    rig.launch("t2", "variables:seen", params={"names": [*ENV]})  # forked from the same zygote
    assert rig.event(Finished, "t2").result == {"HF_HOME": [None] * 3, "TZ": ["UTC"] * 3}


def test_each_rank_of_a_job_sees_the_variables(rig):
    rig.launch("t1", "variables:Say", params={"name": "HF_HOME"}, env=ENV, world_size=2)
    lines = printed(rig, "t1")
    assert sorted(lines) == [f"rank {rank} sees /scratch/hf" for rank in range(2)]


def test_command_sees_the_variables_and_those_of_the_platform(rig):
    said = "echo $HF_HOME $TZ $PYTHONUNBUFFERED $ROUNDHOUSE_TASK $OMP_NUM_THREADS"
    env = {**ENV, "PYTHONUNBUFFERED": ""}
    rig.launch("t1", ["bash", "-c", said], env=env)
    assert printed(rig, "t1") == ["/scratch/hf Asia/Tokyo t1 1"]


def test_ranks_of_a_command_import_from_their_python_path_and_ours(rig):
    script = (
        "import os, sys; sys.path.remove(''); import variables, sitecustomize;"
        "seen = [os.environ['RANK'], os.environ['HF_HOME'], sitecustomize.__name__];"
        "print(' '.join(seen) + '\\n', end='')"  # in one write: the ranks share a stream
    )
    command = [sys.executable, "-c", script]
    rig.launch("t1", command, env={**ENV, "PYTHONPATH": "."}, world_size=2)
    assert sorted(printed(rig, "t1")) == [f"{rank} /scratch/hf sitecustomize" for rank in range(2)]
