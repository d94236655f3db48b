"""What the command says of an answer of the API."""

from __future__ import annotations

from app import telling

TOLD = {
    "task": "train",
    "state": "waiting",
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
    return telling._explained({**TOLD, "reasons": [REASON], **more}).plain


def starts(**more):
    return said(**more).splitlines()[-2].strip()


def test_when_it_starts_is_told_with_its_interval_or_why_it_is_not_known():
    known = {"p10_s": 20.0, "p50_s": 90.0, "p90_s": 4000.0}
    assert starts(estimate=known) == (
        "It is expected to start in 1 m 30 s; 80 % of such tasks start in 20.0 s to 1 h 06 m."
    )
    assert starts() == "When it starts is not known. No task has ended here yet."


def test_where_its_time_went_is_told_the_longest_first():
    spent = "computed 1 m 38 s, waited 1 m 11 s, switched 0.4 s, staged 0.0 s, moved 0.0 s"
    assert said().endswith(f"So far: {spent}.")


def test_what_to_end_first_is_told_where_there_is_a_choice():
    nearest = {"code": "HELD_BY_USER", "message": "Release."}
    assert "To end first" not in said(nearest=nearest)
    assert "To end first: Release." in said(nearest=nearest, reasons=[REASON, REASON])
