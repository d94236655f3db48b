"""What the command says of an answer of the API."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from app.cli import wording
from app.cli.tables import Screen, table

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


def test_when_it_starts_is_told_with_its_interval_or_why_it_is_not_known():
    known = {"p10_s": 20.0, "p50_s": 90.0, "p90_s": 4000.0}
    assert starts(estimate=known) == (
        "Expected to start in 1m 30s (80 % of such tasks: 20.0 s to 1h 06m)."
    )
    assert starts() == "Start time unknown. No task has ended here yet."


def test_where_its_time_went_is_told_the_longest_first():
    spent = "running 1m 38s, queued 1m 11s, starting 400 ms"
    assert said().endswith(f"Time so far: {spent}.")


def test_what_to_end_first_is_told_where_there_is_a_choice():
    nearest = {"code": "HELD_BY_USER", "message": "it is resumed."}
    assert "Most likely next" not in said(nearest=nearest)
    assert "Most likely next: it is resumed." in said(nearest=nearest, reasons=[REASON, REASON])


# --- tables ---------------------------------------------------------------------------------------

SCHEMAS = json.loads(
    (Path(__file__).parents[3] / "docs" / "openapi.json").read_text(encoding="utf-8")
)["components"]["schemas"]
LONG = "a-name-of-forty-characters-in-one-word-x"  # longer than most names
ID = "req_0192f0c1b7e97d3e9a4c5b6d7e8f9a0b"


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
    "CHECKPOINTS": row_of("CheckpointOut", task=LONG, id=ID),
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
def test_a_table_fits_80_columns_and_breaks_no_id(name: str) -> None:
    columns, row = getattr(wording, name), TABLES[name]
    lines = printed(columns, row)
    assert max(map(len, lines)) <= 80
    wide = printed(columns, row, wide=True)
    for column in columns:
        if column.whole or column.right:
            value = wording.cell(column.of(row)).plain
            shown = wide if column.wide else lines
            assert any(value in line for line in shown), (column.heading, value)
