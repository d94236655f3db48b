"""Patterns of rules of retry are found in the end of a log, in bounded time."""

from __future__ import annotations

import pytest

from app.core.model.provisions.retry import RetryPolicy, RetryRule
from app.log_patterns import (
    LINE_MOST,
    MOST_CHARACTERS,
    BadPattern,
    compiled,
    matched_lines,
)
from tests.app.conftest import problem


def policy(*patterns):
    return RetryPolicy(max=1, rules=tuple(RetryRule(log=each) for each in patterns))


def test_newest_line_that_matches_is_found_for_each_pattern():
    log = ["step 1", "NCCL: old timeout", "NCCL: a\ttimeout", "end"]
    found = matched_lines(policy("NCCL.*timeout", "step [0-9]", "absent"), log)
    assert found == {"NCCL.*timeout": "NCCL: a timeout", "step [0-9]": "step 1"}
    assert matched_lines(RetryPolicy(), log) == {}


def test_only_the_end_of_a_log_is_searched():
    log = ["needle", *["x" * 1023] * (MOST_CHARACTERS // 1024)]
    assert matched_lines(policy("needle"), log) == {}
    assert matched_lines(policy("needle"), log[:-1]) == {"needle": "needle"}
    [line] = matched_lines(policy("y"), ["y" * 9999]).values()
    assert len(line) == LINE_MOST


@pytest.mark.parametrize("pattern", ["a(", "(?=x)", r"(a)\1", r"\pL{50}z", "((a{30}){30}){30}"])
def test_pattern_that_re2_does_not_run_or_that_is_too_large_is_refused(pattern):
    with pytest.raises(BadPattern, match=r"\w"):
        compiled(pattern)
    assert matched_lines(policy(pattern), ["aaa"]) == {}


def test_pattern_that_explodes_elsewhere_is_linear_here():
    assert matched_lines(policy("(x+x+)+y"), ["x" * MOST_CHARACTERS]) == {}


def test_request_with_a_bad_pattern_is_refused_with_its_place(as_):
    rules = [{"do": "fail", "exit": [1]}, {"do": "fail", "log": "a("}]
    task = {"name": "t", "run": {"command": ["true"]}, "retry": {"rules": rules}}
    answer = as_("red.member").post("/v1/requests:validate", json={"tasks": [task]})
    found = problem(answer, 422, "validation-error", "/tasks/0/retry/rules/1/log")
    assert "RE2: missing ): a(" in found["detail"]
