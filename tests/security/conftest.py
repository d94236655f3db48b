"""The fixtures of the API's tests, for attacks on it, and the workers' warm zygotes.

A test of this folder that is skipped fails, since an attack that was not tried is not held off.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests import missing_layers
from tests.app.conftest import app, as_, red, submitted, world
from tests.workers.conftest import warm_zygotes

__all__ = ["app", "as_", "red", "submitted", "warm_zygotes", "world"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        failure = missing_layers.failure_of_skip(
            str(report.longrepr[2]), os.environ.get(missing_layers.SETTING, "")
        )
        if failure:
            report.outcome, report.longrepr = "failed", f"{item.nodeid}: {failure}"
    return report
