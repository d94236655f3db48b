"""Each list of words has one home; every table that must know its words knows all of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from app.api.schemas.base import PhaseWord, RequestState, TaskState
from app.api.schemas.tasks import ReasonOut, TimeSpentOut, UnknownOut
from app.cli import wording
from app.core.explanation import waiting_reasons
from app.core.model import failure_causes
from app.core.model.failure_causes import CAUSES
from app.core.model.lifecycle import State
from app.core.model.phase import Phase
from app.db.models.work import REQUEST_STATES
from app.pages import charts

ROOT = Path(__file__).parents[3]
CODES = set(waiting_reasons.CODES)

#: Reasons that end by themselves or when others release devices, so that a start can be estimated.
OPEN = {
    # a time that is known
    "NOT_BEFORE", "RETRY_BACKOFF", "STORE_REFUSES",
    # devices that become free
    "FROZEN_ON_DEVICE", "IMAGE_BEING_SAVED", "MOVING", "GANG_NEEDS_MORE_DEVICES",
    "DEVICES_KEPT_FOR_A_GANG", "WAITING_FOR_DEVICE", "DEVICE_STOPPING", "SOME_DEVICES_DRAINED",
    "AVOIDS_DEVICE", "DEVICE_FREE", "DEVICE_LACKS_ROOM",
    # others that go first, or may not be paused now
    "TENANT_OVER_FAIR_SHARE", "USER_OVER_FAIR_SHARE", "HIGHER_PRIORITY_AHEAD",
    "EARLIER_TASK_AHEAD", "GUARANTEED_TO_OTHERS", "HOLDERS_PROTECTED", "TIER_SHED",
    "BUDGET_DEMOTED",
}  # fmt: skip
#: Reasons that a user ends by changing the request, and those that only an administrator ends. All
#: others end without either.
OF_USER = {
    "HELD_BY_USER",
    "HELD_BY_RULE",
    "IDLE_SESSION",
    "LOT_HELD",
    "LOT_FAILURES",
    "REQUEST_MISSED",
    "RESERVATION_OVER",
    "RANK_BEHIND",
}
OF_ADMIN = {
    "HELD_BY_ADMIN", "STORE_REFUSES", "NO_SCHEDULER", "NO_DEVICE_UP", "DEVICE_DRAINED",
    "TOO_FEW_DEVICES", "USER_LIMIT", "USER_RUNNING_LIMIT", "TENANT_LIMIT", "TENANT_RUNNING_LIMIT",
    "TIER_SHED", "SOME_DEVICES_DRAINED",
}  # fmt: skip
#: Names in capitals in the command that are no codes.
NO_CODES = {"HF_TOKEN", "JUPYTER_TOKEN", "NO_PROXY", "SSL_CERT_DIR", "SSL_CERT_FILE"}


def words_in_capitals(path: Path) -> set[str]:
    """Return the string constants of a module that look like codes."""
    found = {
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return {word for word in found if re.fullmatch(r"[A-Z]+(_[A-Z]+)+", word)}


def test_each_reason_either_closes_the_estimate_or_ends_without_a_person():
    assert waiting_reasons.CLOSED | OPEN == CODES
    assert not waiting_reasons.CLOSED & OPEN


def test_each_reason_names_the_one_who_can_end_it():
    wanted = {
        code: "change_request" if code in OF_USER else "ask_admin" if code in OF_ADMIN else "wait"
        for code in CODES
    }
    assert wanted == waiting_reasons.CODES
    assert CODES >= OF_USER | OF_ADMIN


def test_reasons_that_start_conditions_give_are_named_as_such():
    """The functions `of_start` give these, and no others do."""
    source = ast.parse(Path(waiting_reasons.__file__).read_text())
    of_start = {"_unmet_conditions", "_by_hold", "_by_terms", "backoff"}
    of_start |= {"after_request", "request_missed", "_by_reservation"}
    given = {
        node.value
        for function in source.body
        if isinstance(function, ast.FunctionDef) and function.name in of_start
        for node in ast.walk(function)
        if isinstance(node, ast.Constant) and node.value in CODES
    }
    assert given == waiting_reasons.START


def test_every_code_is_given_by_some_function_and_none_is_unknown():
    source = Path(waiting_reasons.__file__).read_text()
    assert words_in_capitals(Path(waiting_reasons.__file__)) - CODES <= {"CPU"}
    for code in CODES:
        places = source.count(f'"{code}"')
        tables = sum(code in table for table in (waiting_reasons.CODES, waiting_reasons.START))
        tables += code in waiting_reasons.CLOSED - waiting_reasons.START
        tables += code in waiting_reasons.START - waiting_reasons.CLOSED
        assert places > tables, code


def test_codes_that_the_command_and_the_answers_name_exist():
    for folder in ("app/cli", "app/insight", "app/intake", "app/core/scheduling"):
        for path in (ROOT / folder).rglob("*.py"):
            named = {
                word
                for word in words_in_capitals(path)
                if not word.startswith(("ROUNDHOUSE_", "XDG_"))
            }
            assert named - NO_CODES <= CODES, path


def test_next_actions_have_words_in_api_command_and_pages():
    actions = set(waiting_reasons.CODES.values())
    assert wording._WHAT_TO_DO.keys() == actions
    told = ReasonOut.model_fields["next_action"].description or ""
    assert set(re.findall(r"`(\w+)`", told)) == actions
    parts = (ROOT / "app/pages/templates/_parts.html").read_text()
    shown = set(re.findall(r'next_action == "(\w+)"', parts))
    assert shown == actions - {"wait"}  # waiting needs no advice


def test_codes_of_unknown_starts_are_those_of_the_estimator():
    source = (ROOT / "app/core/explanation/estimator.py").read_text()
    given = set(re.findall(r'code="(\w+)"', source)) | {"BLOCKED"}
    told = UnknownOut.model_fields["code"].description or ""
    assert set(re.findall(r"`(\w+)`", told)) == given
    page = (ROOT / "docs/reference/waiting.md").read_text()
    assert all(f"`{code}`" in page for code in given)


def test_states_and_phases_of_the_api_are_those_of_the_model():
    assert set(PhaseWord.__args__) == set(Phase)
    assert set(TaskState.__args__) == set(State)
    assert set(RequestState.__args__) == set(REQUEST_STATES)


def test_every_phase_has_a_mark_of_its_own_on_pages():
    style = (ROOT / "app/pages/static/roundhouse.css").read_text()
    marked = set(re.findall(r"\.chip\.(\w+)::before", style))
    assert set(Phase) - marked == {"queued"}  # the plain mark


def test_times_of_an_explanation_have_words_in_command_and_pages():
    assert wording._SPENT.keys() == TimeSpentOut.model_fields.keys()
    assert charts.TIMES.keys() == TimeSpentOut.model_fields.keys()


def test_causes_that_workers_report_are_those_of_the_protocol():
    known = CAUSES.keys()
    assert known >= failure_causes.SUSPECT | failure_causes.AVOIDED_AFTER | failure_causes.EXCUSED
    named: set[str] = set()
    for path in (*(ROOT / "workers").rglob("*.py"), *(ROOT / "app/scheduling").rglob("*.py")):
        named |= set(re.findall(r'\bcause="(\w+)"', path.read_text()))
    assert named
    assert named <= known
