"""Native collectives are asked for by a command with a device for each rank; all else is told what
to do.
"""

from __future__ import annotations

from typing import Any

import pytest

from app.core.model.descriptor import BadDescriptor, parse


def request(**task: Any) -> dict[str, Any]:
    usual = {"name": "t", "run": {"command": ["python", "train.py"]}, "collectives": "native"}
    return {"tasks": [{**usual, **task}]}


def test_each_rank_has_a_device_without_saying_so() -> None:
    [task] = parse(request(world_size=4)).tasks
    assert (task.collectives, task.devices.min, task.devices.max) == ("native", 4, 4)
    assert "native" in task.devices.choice.needs


def test_a_job_needs_a_host_that_runs_jobs_so() -> None:
    """A host of an older version would run them by the exact engine."""
    job = request(world_size=4, run={"job": "m:J"})
    [task] = parse({**job, "bundle": f"sha256:{'0' * 64}"}).tasks
    assert (task.collectives, task.devices.min, task.devices.max) == ("native", 4, 4)
    assert task.devices.choice.needs == ("native-job",)


def test_exact_is_the_default_and_needs_nothing() -> None:
    [task] = parse(request(world_size=4, collectives=None)).tasks
    assert (task.collectives, task.devices.min) == ("exact", 1)
    assert "native" not in task.devices.choice.needs


@pytest.mark.parametrize(
    ("task", "where", "told"),
    [
        ({"world_size": 1}, "collectives", "is for several ranks; world_size is 1"),
        ({"world_size": 2, "collectives": "nccl"}, "collectives", "native"),
        ({"world_size": 2, "run": {"function": "m:f"}}, "collectives", "exact for a function"),
        (
            {"world_size": 2, "run": {"job": "m:J"}, "devices": {"across_hosts": True}},
            "devices/across_hosts",
            "must be false",
        ),
        ({"world_size": 4, "devices": {"min": 2, "max": 4}}, "devices/min", "must be 4"),
        ({"world_size": 2, "devices": {"kind": "sim"}}, "devices/kind", "one of cpu, cuda"),
    ],
)
def test_what_cannot_be_is_refused_with_both_ways_out(
    task: dict[str, Any], where: str, told: str
) -> None:
    with pytest.raises(BadDescriptor) as refused:
        parse(request(**task))
    fault = refused.value.faults[0]
    assert fault.pointer == f"/tasks/0/{where}"
    assert told in fault.detail
