"""A copy of a task goes on from its processes only if it would be started in the same way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.core.model.provisions.environment import TaskEnvironment
from tests.launches import launch_of
from workers.device.stays.command_images import _started_as

LAUNCH = launch_of("t1", run={"command": ["x"]}, inputs={"data": {"sha256": "aa", "size_bytes": 1}})


@pytest.mark.parametrize(
    "more",
    [
        {"type": "other"},
        {"params": {"lr": 2}},
        {"env": {"A": "b"}},
        {"world_size": 2},
        {"image": "debian"},
        {"mounts": {"/data": "imagenet"}},
        {"environment": TaskEnvironment(python="3.11", lock="ab")},
    ],
    ids=str,
)
def test_each_part_of_the_descriptor_counts(more):
    assert _started_as(replace(LAUNCH, spec=replace(LAUNCH.spec, **more))) != _started_as(LAUNCH)


@pytest.mark.parametrize(
    "more",
    [
        {"bundle": "ab"},
        {"inputs": {}},
        {"inputs": {"data": {"sha256": "bb", "size_bytes": 1}}},
        {"inputs": {"other": {"sha256": "aa", "size_bytes": 1}}},
    ],
    ids=str,
)
def test_each_file_counts(more):
    assert _started_as(replace(LAUNCH, **more)) != _started_as(LAUNCH)


def test_what_belongs_to_one_launch_does_not_count():
    copies = {"data": {**LAUNCH.inputs["data"], "copies": [{"place": ["h", 1], "key": "k"}]}}
    other = replace(LAUNCH, task="t2", epoch=7, budget_us=5, inputs=copies)
    assert _started_as(other) == _started_as(LAUNCH)
