"""The sweep of `examples/sweep`, from its folder to its winner, with kills."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.cli.bundling import bundle_folder
from app.cli.descriptor_file import read_descriptor
from app.core.model.provisions.stop_rule import rule_in
from app.core.model.rungs import RungValue, Standings
from tests.acceptance.test_lots import MOST_AT_ONCE

pytestmark = [pytest.mark.acceptance, pytest.mark.long]

ROOT = Path(__file__).parents[2]
SWEEP = ROOT / "examples/sweep"
TRIALS, STEPS, AT_ONCE = 40, 480, 4
# members without a row of metrics for each step
LACK_ROWS = """
    select t.name, t.step, count(m.step) from tasks t left join metrics m on m.task_id = t.id
    where t.lot_id = %s and t.lot_index is not null
    group by t.id having t.step <> count(m.step)
"""
LASTS_S = 900.0  # two minutes on an idle machine


def test_losers_pause_and_the_winner_has_the_bits_of_a_run_alone(system):
    client = system.client("alpha")
    found = bundle_folder(SWEEP)
    client.upload(found.sha256, found.body)
    body = read_descriptor(SWEEP / "roundhouse.yaml")
    request = client.submit({**body, "bundle": f"sha256:{found.sha256}"})
    id, lot = request["id"], request["tasks"][0]["id"]
    for results, victim in ((5, "control"), (15, "island"), (25, "control")):
        assert system.until(lambda least=results: _results(system, lot) >= least)
        system.kill(victim)
    ended = client.wait(id, timeout_s=LASTS_S)
    assert ended["state"] == "done"
    [(most,)] = system.sql(MOST_AT_ONCE, lot, lot)
    assert 0 < most <= AT_ONCE
    _must_have_decided_by_the_rows(system, lot)
    members = [client.get(f"/v1/tasks/{each['id']}") for each in client.items("/v1/tasks", lot=lot)]
    assert len(members) == TRIALS
    assert sum(member["lost_steps"] for member in members) == 0
    assert sum(member["step"] for member in members) <= 0.4 * TRIALS * STEPS
    assert not system.sql(LACK_ROWS, lot)
    done = [member for member in members if member["state"] == "done"]
    winner = min(done, key=lambda member: member["result"]["loss"])
    assert winner["result"] == _run_alone(winner["lot_values"], winner["preset"])
    # one that lost at first, and went on when worse results were in
    for member in [each for each in done if each["pauses"] and each is not winner][:1]:
        assert member["result"] == _run_alone(member["lot_values"], member["preset"])
    system.check_ledger()


def _results(system: Any, lot: str) -> int:
    [(count,)] = system.sql("select count(*) from rung_results where lot_id = %s", lot)
    return int(count)


def _must_have_decided_by_the_rows(system: Any, lot: str) -> None:
    [(descriptor,)] = system.sql("select descriptor from tasks where id = %s", lot)
    rows = system.sql(
        "select task_id, rung, value, passed from rung_results where lot_id = %s"
        " order by at, task_id, rung",
        lot,
    )
    rule = rule_in(descriptor)
    assert rule is not None
    results = [RungValue(member=task, rung=rung, value=value) for task, rung, value, _ in rows]
    passed = {(task, rung) for task, rung, _, passed in rows if passed}
    assert passed == Standings.of(rule, results).passed


def _run_alone(params: dict[str, Any], preset: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "examples.job_alone", str(SWEEP), "train:Train"]
    command += ["--params", json.dumps(params), "--preset", json.dumps(preset)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(said.stdout)["result"]
    return result
