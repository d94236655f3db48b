"""What the command says of an answer of the API."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from app.cli import wording
from app.cli.tables import Column, Screen, table
from app.cli.watching import WaitReasons

TOLD = {
    "task": "train",
    "phase": "queued",
    "place": 3,
    "message": "-",
    "reasons": [],
    "nearest": None,
    "estimate": None,
    "no_estimate": {"code": "NO_HISTORY", "message": "No task has ended here yet."},
    "time": {
        "waited_s": 71.5, "switched_s": 0.4, "moved_s": 0.0, "computed_s": 98.1, "staged_s": 0.01,
    },
}  # fmt: skip
REASON = {"code": "DEVICE_FREE", "message": "-", "next_action": "wait", "unblocked_by": "x"}


def said(**more):
    return wording._explained({**TOLD, "reasons": [REASON], **more}, "digits").plain


def starts(**more):
    return said(**more).splitlines()[-2].strip()


def test_start_is_given_as_an_interval_or_with_why_it_is_unknown():
    known = {"p10_s": 20.0, "p50_s": 90.0, "p90_s": 4000.0}
    assert starts(estimate=known) == (
        "Expected to start in 1m 30s (80 % of such tasks: 20.0 s to 1h 06m)."
    )
    assert starts() == "Start time unknown. No task has ended here yet."


def test_time_spent_is_listed_longest_first():
    spent = "running 1m 38s, queued 1m 11s, starting 400 ms"
    assert said().endswith(f"Time so far: {spent}.")


def test_most_likely_next_is_named_where_there_are_several_reasons():
    nearest = {"code": "HELD_BY_USER", "message": "it is resumed."}
    assert "Most likely next" not in said(nearest=nearest)
    assert "Most likely next: it is resumed." in said(nearest=nearest, reasons=[REASON, REASON])


@pytest.mark.parametrize(
    ("last", "hint"),
    [
        ("ModuleNotFoundError: No module named 'pandas'", "the packages that the service"),
        ("<urlopen error [Errno -3] Temporary failure in name resolution>", "network.allow"),
        ("OSError: [Errno 101] Network is unreachable", "network.allow"),
        ("KeyError: 'x'", ""),
    ],
)
def test_failure_for_lack_of_packages_or_network_has_a_hint(last, hint):
    task = {"name": "train", "cause": "exit", "message": "exit status 1", "detail": f"...\n{last}"}
    told = wording.failure(task).plain.splitlines()
    assert hint in told[-1] if hint else told[-1].strip() == last


# --- tables ---------------------------------------------------------------------------------------

SCHEMAS = json.loads(
    (Path(__file__).parents[3] / "docs" / "openapi.json").read_text(encoding="utf-8")
)["components"]["schemas"]
LONG = "a-name-of-forty-characters-in-one-word-x"  # longer than most names
ID = "req_0192f0c1b7e97d3e9a4c5b6d7e8f9a0b"


def test_failed_lot_has_counts_and_no_cause():
    lot = {"name": "train", "cause": None, "message": "2 members done, 1 failed.", "detail": None}
    assert wording.failure(lot).plain.strip() == "train: 2 members done, 1 failed."


def row_of(schema: str, **more):
    """What the API's document gives as an example, with every field and long names."""
    [example] = SCHEMAS[schema]["examples"]
    fields = dict.fromkeys(SCHEMAS[schema]["properties"])
    defaults = {
        name: told["default"]
        for name, told in SCHEMAS[schema]["properties"].items()
        if "default" in told
    }
    return {**fields, **defaults, **example, **more}


TABLES = {
    "REQUESTS": row_of(
        "RequestSummary",
        name=LONG,
        user=LONG,
        phase="preempted",
        task_phases={"preempted": 12, "running": 120},
    ),
    "TASKS": row_of(
        "TaskOut",
        name=LONG,
        step=12_345_678,
        lent=["gpu-host-7.1"],
        seat="gpu-host-7.0",
        metrics={"loss": 5.271e-06, "accuracy": 0.98765},
        held_us=86_400_000_000,
    ),
    "CHECKPOINTS": row_of("CheckpointOut", task=LONG, id=ID, best_of_lot=True),
    "DATABLOCKS": row_of("DatablockOut", name=LONG),
    "DEVICES": row_of("DeviceOut", id="gpu-host-7.10", task=f"{LONG}/{LONG}", threads=128),
    "_SHARES": {
        "tenant": LONG,
        "depth": 1,
        "weight": 1.5,
        "share": 0.25,
        "guarantee": 100,
        "fair": 1000.25,
        "held": 100,
        "borrowed": 7,
        "waiting": 1000,
        "usage_us": 8.64e13,
    },
    "KEYS": row_of("KeyOut", user=LONG, name=LONG),
    "USERS": row_of("UserOut", name=LONG, tenant=LONG),
    "ACCOUNTS": row_of("UserOut", name=LONG, tenant=LONG),
    "TENANTS": row_of("TenantOut", name=LONG, depth=1, limit={"cpu": 16, "cuda": 512}),
    "WEBHOOKS": row_of("WebhookOut", url=f"https://hooks.example.org/{LONG}"),
    "DELIVERIES": row_of("DeliveryOut"),
    "PLACEMENTS": row_of("PlacementOut", device_id="gpu-host-7.10"),
    "PRESETS": row_of("PresetOut"),
}


def printed(columns, row, *, wide: bool = False) -> list[str]:
    screen = Screen(file=io.StringIO(), width=250 if wide else 80, color_system=None)
    screen.shows_all = wide
    with screen.capture() as shown:
        screen.print(table([row], columns))
    return shown.get().splitlines()


@pytest.mark.parametrize("name", TABLES)
def test_table_fits_80_columns_and_breaks_no_id(name: str) -> None:
    columns, row = getattr(wording, name), TABLES[name]
    lines = printed(columns, row)
    assert max(map(len, lines)) <= 80
    wide = printed(columns, row, wide=True)
    for column in columns:
        if column.whole or column.right:
            value = wording.cell(column.of(row)).plain
            shown = wide if column.wide else lines
            assert any(value in line for line in shown), (column.heading, value)


HEALTH = {
    "is_watched": True,
    "is_checking": False,
    "cordon_rule": None,
    "cordon_reason": None,
    "cordoned_at": None,
    "warnings": [],
    "reading": {"temperature_c": 61, "power_w": 312.4, "memory_used_bytes": 2**30},
    "notes": [],
}
XID = "Xid 48 (double-bit ECC error)."


@pytest.mark.parametrize(
    ("health", "told"),
    [
        (None, ""),
        ({"is_watched": False}, ""),
        ({}, "61 °C, 312 W"),
        ({"warnings": [XID]}, XID),
        ({"cordon_reason": XID}, XID),
        ({"cordon_reason": XID, "is_watched": False}, XID),
        ({"cordon_reason": XID, "is_checking": True}, "is being checked"),
    ],
)
def test_the_health_of_a_device_is_told_in_a_few_words(health, told):
    device = {} if health is None else {"health": {**HEALTH, **health}}
    assert wording.device_health(device) == told


@pytest.mark.parametrize(
    ("tasks", "told"), [([], "a/t"), (["t1"], "a/t"), (["t1", "t2", "t3"], "a/t and 2 more")]
)
def test_a_device_with_several_tasks_names_one_and_counts_the_others(tasks, told):
    column = next(column for column in wording.DEVICES if column.heading == "TASK")
    assert column.of({"task": "a/t", "tasks": tasks}) == told


def test_a_device_is_shown_with_its_figures_and_what_was_decided():
    now = "2026-11-21T12:00:00Z"
    notes = [{"at": now, "told": f"Cordoned: {XID}"}]
    health = {**HEALTH, "cordon_reason": XID, "cordoned_at": now, "notes": notes}
    device = {"id": "h.0", "up": True, "cordoned": True, "task_id": None, "health": health}
    out = io.StringIO()
    Screen(file=out, width=100).print(wording.one_device(device, {}))
    for told in (XID, f"Cordoned: {XID}", "memory_used_bytes", "1.0 GiB", "312.4"):
        assert told in out.getvalue()


def test_table_that_does_not_fit_shortens_long_names_in_their_middle() -> None:
    named = [
        {"name": f"a-long-name-of-a-run-{n:050}", "id": "0" * 8, "why": "two words"} for n in (1, 2)
    ]
    columns = [
        Column("NAME", lambda r: r["name"]),
        Column("ID", lambda r: r["id"], whole=True),
        Column("WHY", lambda r: r["why"]),
    ]
    console = Console(width=40, file=io.StringIO())
    console.print(table(named, columns))
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 3
    assert all(len(line) <= 40 for line in lines)
    assert "a-long-n…00000001 " in lines[1]


def test_watched_wait_is_told_again_only_when_something_else_than_a_figure_changed() -> None:
    waits = WaitReasons(lambda: None, "req")  # type: ignore[arg-type, return-value]
    told = {"task": "train", "phase": "queued", "place": 3, "reasons": [{"code": "A"}]}
    soon, late = {"p50_s": 100.0}, {"p50_s": 400.0}
    assert waits._is_news({**told, "estimate": soon}, 0.0)
    assert not waits._is_news({**told, "estimate": soon}, 5.0)
    assert not waits._is_news({**told, "estimate": {"p50_s": 60.0}}, 20.0), "within its interval"
    assert waits._is_news({**told, "estimate": late}, 25.0)
    assert waits._is_news({**told, "place": 2, "estimate": late}, 30.0)
    assert waits._is_news({**told, "place": 2, "estimate": None}, 35.0)
    built = {**told, "reasons": [{"code": "PACKAGES_INSTALLING"}], "estimate": None}
    news = [at_s for at_s in range(40, 130) if waits._is_news(built, float(at_s))]
    assert news == [40, 61, 82, 103, 124]
