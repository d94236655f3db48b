"""Provides the numbers that the API and the pages show: only here rows become frozen values.

So a number on a page equals the number in the API. Nothing here writes or decides. A `tenant` of
None asks for all tenants (a platform administrator). With a tenant's id, only two facts about other
tenants are given: that a device is in use, and how much the others hold in all.

The figures of rules F1, F2 and F10 come from here; the arithmetic is in `core.fairness.usage_decay`
and `core.fairness.water_filling`.
"""

from __future__ import annotations

from app.insight.reports.budgets import (
    BudgetStanding,
    BurnDown,
    budget_standings,
    burn_downs,
)
from app.insight.reports.data import datablocks
from app.insight.reports.device_stays import device_histories, task_names
from app.insight.reports.environments import environments, newest_environments
from app.insight.reports.fleet import devices, paces, running
from app.insight.reports.health import device_failure, device_health
from app.insight.reports.history import Decided, Happened, Round, decision, decisions, events
from app.insight.reports.network import NetworkUse, network_use
from app.insight.reports.queue import Queued, median_wait_s, queue
from app.insight.reports.request_graph import request_graph
from app.insight.reports.runs import in_order, read_search, run_values
from app.insight.reports.shares import (
    KindShare,
    TenantShare,
    fair_share,
    number,
    others,
    verdict,
    verdict_of_all,
    within,
)
from app.insight.reports.usage_rows import GROUPS, INTERVALS, UsageRow, clock, to_csv, usage
from app.insight.reports.work import (
    Curve,
    ReportedStay,
    checkpoints,
    compared_runs,
    curves,
    log_head,
    log_tail,
    members,
    movement_of,
    request,
    requests,
    stays,
    tasks,
)

__all__ = [
    "GROUPS",
    "INTERVALS",
    "BudgetStanding",
    "BurnDown",
    "Curve",
    "Decided",
    "Happened",
    "KindShare",
    "NetworkUse",
    "Queued",
    "ReportedStay",
    "Round",
    "TenantShare",
    "UsageRow",
    "budget_standings",
    "burn_downs",
    "checkpoints",
    "clock",
    "compared_runs",
    "curves",
    "datablocks",
    "decision",
    "decisions",
    "device_failure",
    "device_health",
    "device_histories",
    "devices",
    "environments",
    "events",
    "fair_share",
    "in_order",
    "log_head",
    "log_tail",
    "median_wait_s",
    "members",
    "movement_of",
    "network_use",
    "newest_environments",
    "number",
    "others",
    "paces",
    "queue",
    "read_search",
    "request",
    "request_graph",
    "requests",
    "run_values",
    "running",
    "stays",
    "task_names",
    "tasks",
    "to_csv",
    "usage",
    "verdict",
    "verdict_of_all",
    "within",
]
