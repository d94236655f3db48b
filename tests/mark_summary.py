"""Counts at the end of a run, for each mark, the tests that ran and those that were skipped.

A skip is told with its reason, so a run that is green because nothing was tried does not look like
one that tried everything.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest

MARKS = ("acceptance", "browser", "gpu", "sim", "security", "slow", "long")
_PROPERTY = "marks"  # of a report: it reaches the process that prints, also from another process
_LEFT_OUT = "left_out_by_mark"


class MarkSummary:
    """Counts the reports of a run by mark. Register it as a plugin."""

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()
        self.skipped: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.left_out: Counter[str] = Counter()  # tests that `-m` or `-k` left out

    def lines(self) -> list[str]:
        return [line for mark in MARKS if (line := self._line(mark))]

    def _line(self, mark: str) -> str:
        """Return the line of a mark; "" if no test of the run has it."""
        ran, skipped, left_out = self.ran[mark], self.skipped[mark], self.left_out[mark]
        if not (ran or skipped or left_out):
            return ""
        words = [f"{ran} ran", f"{skipped.total()} skipped"]
        if left_out:
            words.append(f"{left_out} not selected")
        reasons = [f"  {count} skipped: {reason}" for reason, count in skipped.most_common()]
        return "\n".join([f"{mark:<11}{', '.join(words)}", *reasons])

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        marks = {mark.name for mark in item.iter_markers()}
        item.user_properties.append((_PROPERTY, [mark for mark in MARKS if mark in marks]))

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.left_out.update(mark for item in items for mark in _marks(item))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[_LEFT_OUT] = dict(self.left_out)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        # each process of xdist collects, and leaves out, the same tests
        self.left_out = Counter(getattr(node, "workeroutput", {}).get(_LEFT_OUT, self.left_out))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown" or (report.when == "setup" and report.passed):
            return
        for mark in _marks(report):
            if report.skipped and not hasattr(report, "wasxfail"):
                self.skipped[mark][_reason(report)] += 1
            else:
                self.ran[mark] += 1

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if lines := self.lines():
            terminalreporter.section("tests by mark")
            terminalreporter.write_line("\n".join(lines))


def _marks(test: pytest.Item | pytest.TestReport) -> list[str]:
    return next((list(value) for name, value in test.user_properties if name == _PROPERTY), [])


def _reason(report: pytest.TestReport) -> str:
    told = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(told).removeprefix("Skipped: ")
