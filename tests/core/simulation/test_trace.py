"""Lists of jobs are read line by line; what is wrong is told with its line."""

from __future__ import annotations

import pytest

from app.core.simulation.simulator import Arrival
from app.core.simulation.trace import BadTrace, read

PHILLY = """timestamp,duration,num_gpus,gpu_time,cluster
2017-10-03 00:00:10,30.5,4,122.0,vc2
2017-10-03 00:00:00,100.0,1,100.0,vc1

"""

SACCT = """JobID|Account|User|Submit|ElapsedRaw|AllocTRES|State
7|lab|ada|2026-01-02T00:00:00|60|billing=8,cpu=8,gres/gpu=2,mem=64G,node=1|COMPLETED
7.batch|lab||2026-01-02T00:00:00|60|cpu=8,gres/gpu=2,mem=64G|COMPLETED
8|lab|bob|2026-01-02T00:01:00|5|billing=1,cpu=1,mem=1G|COMPLETED
9|lab|bob|2026-01-02T00:02:00|0|billing=1,gres/gpu:h100=4,gres/gpu=4|CANCELLED
10|ops||2026-01-02T01:00:00|7|gres/gpu:h100=4,gres/gpu=4|TIMEOUT
"""


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def test_jobs_arrive_in_order_of_time_from_0_s() -> None:
    trace = read(lines(PHILLY))
    assert trace.arrivals == (
        Arrival(
            at_s=0.0, task="j1", tenant="vc1", user="vc1/all", work_s=100.0, width=1,
            kind="cuda", tier="basic", expected_s=100.0,
        ),
        Arrival(
            at_s=10.0, task="j2", tenant="vc2", user="vc2/all", work_s=30.5, width=4,
            kind="cuda", tier="basic", expected_s=30.5,
        ),
    )  # fmt: skip
    assert trace.began_s == 1506988800.0  # date -u -d 2017-10-03 +%s
    assert trace.left_out == 0


def test_additional_columns_are_read() -> None:
    text = "timestamp,duration,num_gpus,cluster,user,kind,tier,priority\n5,1,1,a,eve,cpu,premium,-3"
    [arrival] = read(lines(text)).arrivals
    assert (arrival.user, arrival.kind, arrival.tier) == ("a/eve", "cpu", "premium")
    assert arrival.priority == -3


def test_simulated_scheduler_may_be_given_no_durations() -> None:
    assert {a.expected_s for a in read(lines(PHILLY), expected=False).arrivals} == {None}


def test_sacct_output_is_read_without_steps_and_jobs_without_devices() -> None:
    trace = read(lines(SACCT))
    assert [(a.at_s, a.tenant, a.user, a.width, a.work_s) for a in trace.arrivals] == [
        (0.0, "lab", "lab/ada", 2, 60.0),
        (3600.0, "ops", "ops/all", 4, 7.0),
    ]
    assert trace.left_out == 3


def test_a_list_without_jobs_is_no_error() -> None:
    assert read(["timestamp,duration,num_gpus,cluster\n"]).arrivals == ()


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("2017-10-03 00:00:00,1,1", "must have 4 values, one for each column; got 3"),
        ("yesterday,1,1,a", "timestamp must be YYYY-MM-DD HH:MM:SS; got 'yesterday'"),
        ("1,0,1,a", "duration must be seconds above 0; got '0'"),
        ("1,nan,1,a", "duration must be seconds above 0; got 'nan'"),
        ("1,inf,1,a", "duration must be seconds above 0; got 'inf'"),
        ("1,1,0,a", "num_gpus must be 1 to 1000000; got '0'"),
        ("1,1,1.5,a", "num_gpus must be 1 to 1000000; got '1.5'"),
        ("9" * 400 + ",1,1,a", f"timestamp must be YYYY-MM-DD HH:MM:SS; got '{'9' * 400}'"),
        ("1,1," + "9" * 5000 + ",a", f"num_gpus must be 1 to 1000000; got '{'9' * 5000}'"),
        ("1,1,1,", "cluster must not be empty"),
    ],
)
def test_fault_is_reported_with_its_line(row: str, what: str) -> None:
    with pytest.raises(BadTrace, match=r"line 3: ") as told:
        read(["timestamp,duration,num_gpus,cluster\n", "1,1,1,a\n", row])
    assert told.value.what == what


def test_header_without_a_required_column_is_refused() -> None:
    with pytest.raises(BadTrace, match="line 1: missing column 'num_gpus'"):
        read(["timestamp,duration,cluster\n"])


def test_job_that_can_run_on_fewer_devices_is_elastic() -> None:
    text = "timestamp,duration,num_gpus,cluster,min_gpus\n5,60,4,a,1\n6,60,4,a,\n7,60,4,a,4"
    assert [(a.width, a.width_max, a.work_s) for a in read(lines(text)).arrivals] == [
        (1, 4, 60.0),
        (4, 0, 60.0),
        (4, 0, 60.0),
    ]
    with pytest.raises(BadTrace, match=r"line 2: min_gpus must be 1 to 4; got '5'"):
        read(lines("timestamp,duration,num_gpus,cluster,min_gpus\n5,60,4,a,5"))
