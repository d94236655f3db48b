from __future__ import annotations

import re

import pytest

from workers.criu.confinement import oddities

CONFINED = """Name:\tpython
Uid:\t200001\t200001\t200001\t200001
Gid:\t200001\t200001\t200001\t200001
Groups:\t
NoNewPrivs:\t1
Seccomp:\t2
CapInh:\t0000000000000000
CapPrm:\t0000000000000000
CapEff:\t0000000000000000
CapBnd:\t0000000000000000
CapAmb:\t0000000000000000
"""


def test_confined_process_has_no_oddity():
    assert oddities(CONFINED, 200_001) == []


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("Uid:\t200001\t0\t200001\t200001", "Uid is 200001 0 200001 200001"),
        ("Uid:\t0\t0\t0\t0", "Uid is 0 0 0 0"),
        ("Gid:\t200001\t200001\t200001\t0", "Gid is 200001 200001 200001 0"),
        ("Groups:\t0 27", "Groups is 0 27"),
        ("NoNewPrivs:\t0", "it could gain privileges"),
        ("Seccomp:\t0", "it has no system call filter"),
        ("Seccomp:\t1", "it has no system call filter"),
        ("CapEff:\t0000000000200000", "CapEff is 0000000000200000"),
        ("CapBnd:\t000001ffffffffff", "CapBnd is 000001ffffffffff"),
        ("CapAmb:\t0000000000000001", "CapAmb is 0000000000000001"),
    ],
)
def test_each_right_beyond_a_command_is_told(line, told):
    name = line.partition(":")[0]
    status = re.sub(rf"^{name}:.*$", line.replace("\\", ""), CONFINED, flags=re.MULTILINE)
    assert oddities(status, 200_001) == [told]


def test_user_of_another_task_is_told():
    assert oddities(CONFINED, 200_002) == [
        "Uid is 200001 200001 200001 200001",
        "Gid is 200001 200001 200001 200001",
    ]


def test_status_without_the_fields_is_not_confined():
    assert len(oddities("Name:\tx\n", 1)) == 9
