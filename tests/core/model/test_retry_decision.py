"""The first rule of `retry` that fits a failure decides; a task avoids where it failed."""

from __future__ import annotations

from itertools import product

import pytest

from app.core.model.failure_causes import CAUSES, OF_RULES
from app.core.model.provisions.retry import (
    DOES,
    ELSEWHERE,
    FAIL,
    HOLD,
    NEVER_MAX,
    RETRY,
    RetryBackoff,
    RetryPolicy,
    RetryRule,
)
from app.core.model.retry_decision import (
    AVOIDED_MOST,
    AVOIDED_S,
    AttemptFailure,
    AvoidedDevice,
    avoided_now,
    decide,
    with_avoided,
)

PATTERN = "NCCL.*timeout"
#: Conditions of a rule -> which of the failures below it fits.
CONDITIONS = {
    "none": ({}, lambda cause, exit_status, line: True),
    "exit": ({"exits": (75, 137)}, lambda cause, exit_status, line: exit_status in (75, 137)),
    "cause": ({"cause": "memory"}, lambda cause, exit_status, line: cause == "memory"),
    "log": ({"log": PATTERN}, lambda cause, exit_status, line: bool(line)),
    "all": (
        {"exits": (137,), "cause": "memory", "log": PATTERN},
        lambda cause, exit_status, line: exit_status == 137 and cause == "memory" and bool(line),
    ),
}
FAILURES = [*product(CAUSES, (None, 1, 75, 137), ("", "NCCL: timeout"))]


@pytest.mark.parametrize("name", CONDITIONS)
@pytest.mark.parametrize("do", DOES)
def test_rule_decides_exactly_the_failures_that_it_fits(name, do):
    """The table of causes and rules: what fits is done, all else goes as without rules."""
    conditions, fits = CONDITIONS[name]
    ruled = RetryPolicy(max=3, rules=(RetryRule(**conditions, do=do),))
    for cause, exit_status, line in FAILURES:
        lines = {PATTERN: line} if line else {}
        failure = AttemptFailure(cause=cause, exit_status=exit_status, lines=lines, attempts=1)
        found, without = decide(ruled, failure), decide(RetryPolicy(max=3), failure)
        if not fits(cause, exit_status, line):
            assert found == without, failure
            continue
        attempts = 2 if do in (RETRY, ELSEWHERE) else 1
        assert (found.do, found.number, found.attempts) == (do, 1, attempts), failure
        assert found.line == (line if "log" in conditions else "")
        assert "rule 1" in found.told


@pytest.mark.parametrize("cause", CAUSES)
def test_cause_without_a_rule_is_retried_where_another_attempt_may_help(cause):
    found = decide(RetryPolicy(max=1), AttemptFailure(cause=cause))
    assert found.do == (RETRY if CAUSES[cause] else FAIL)
    assert decide(RetryPolicy(max=1), AttemptFailure(cause=cause, attempts=1)).gives_up


def test_first_rule_that_fits_wins():
    rules = (
        RetryRule(exits=(1,), do=FAIL),
        RetryRule(exits=(1, 2), do=HOLD),
        RetryRule(do=ELSEWHERE),
    )
    policy = RetryPolicy(max=3, rules=rules)
    found = [decide(policy, AttemptFailure(cause="exit", exit_status=n)) for n in (1, 2, 3)]
    assert [(each.do, each.number) for each in found] == [(FAIL, 1), (HOLD, 2), (ELSEWHERE, 3)]


@pytest.mark.parametrize("cause", OF_RULES)
def test_rule_may_retry_what_is_usually_not_retried_but_not_beyond_max(cause):
    policy = RetryPolicy(max=2, rules=(RetryRule(cause=cause, do=RETRY),))
    left = [decide(policy, AttemptFailure(cause=cause, attempts=n)) for n in range(3)]
    assert [each.do for each in left] == [RETRY, RETRY, FAIL]
    assert left[2].told == "No attempt is left (2 of 2)."


@pytest.mark.parametrize("is_excused", [False, True])
@pytest.mark.parametrize("cause", CAUSES)
def test_never_lets_no_attempt_follow(cause, is_excused):
    policy = RetryPolicy(max=NEVER_MAX)
    assert decide(policy, AttemptFailure(cause=cause, is_excused=is_excused)).gives_up


@pytest.mark.parametrize("do", DOES)
def test_fault_of_the_platform_uses_up_no_attempt_whatever_the_rules_say(do):
    policy = RetryPolicy(max=0, rules=(RetryRule(do=do),))
    found = decide(policy, AttemptFailure(cause="device", attempts=7, is_excused=True))
    assert (found.do, found.attempts, found.wait_s, found.number) == (RETRY, 7, 0.0, 0)


def test_waits_double_up_to_the_longest():
    policy = RetryPolicy(max=100, backoff=RetryBackoff(first_s=0.5, most_s=3.0))
    found = [decide(policy, AttemptFailure(cause="exit", attempts=n)).wait_s for n in range(5)]
    assert found == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert decide(policy, AttemptFailure(cause="exit", attempts=99)).wait_s == 3.0


class TestAvoidedDevices:
    def test_ninth_device_lets_the_oldest_in_again(self):
        avoided: tuple[AvoidedDevice, ...] = ()
        for n in range(AVOIDED_MOST + 1):
            avoided = with_avoided(avoided, [f"h.{n}"], is_strict=False, now_s=100.0 + n)
        assert [each.device for each in avoided] == [f"h.{n}" for n in range(1, AVOIDED_MOST + 1)]

    def test_device_is_let_in_again_after_ten_minutes(self):
        avoided = with_avoided((), ["h.0"], is_strict=True, now_s=100.0)
        assert avoided_now(avoided, now_s=100.0 + AVOIDED_S - 1) == avoided
        assert avoided_now(avoided, now_s=100.0 + AVOIDED_S) == ()

    def test_second_failure_on_a_device_counts_from_then(self):
        avoided = with_avoided((), ["h.0", "h.1"], is_strict=True, now_s=100.0)
        again = with_avoided(avoided, ["h.0"], is_strict=False, now_s=200.0)
        assert again == (
            AvoidedDevice("h.1", 100.0 + AVOIDED_S, True),
            AvoidedDevice("h.0", 200.0 + AVOIDED_S, False),
        )
