"""An array and a matrix through HTTP, with kills: each index once, and never too many at once."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.acceptance

COUNT, AT_ONCE = 120, 6

# the most placements of a lot that were open at the same instant
MOST_AT_ONCE = """
    select max(open) from (
        select sum(step) over (order by at, step) as open from (
            select p.launched_at as at, 1 as step from placements p join tasks t on t.id = p.task_id
            where t.lot_id = %s
            union all
            select p.ended_at, -1 from placements p join tasks t on t.id = p.task_id
            where t.lot_id = %s and p.ended_at is not null
        ) moves
    ) counted
"""


def _lot(client, run, **more):
    task = {"name": "lot", "run": run, **more}
    request = client.submit({"name": "many", "bundle": client.bundle, "tasks": [task]})
    return request["id"], request["tasks"][0]["id"]


def test_each_member_of_an_array_is_done_once_when_processes_are_killed(system):
    client = system.client("alpha")
    id, lot = _lot(
        client,
        {"function": "short:look"},
        params={"nap_s": 0.05},
        array={"count": COUNT, "at_once": AT_ONCE},
        retry={"max": 3},
    )
    for victim in ("island", "control", "api", "island", "device.0"):
        system.until(lambda: system.sql("select 1 from lots where id = %s and live > 0", lot))
        system.kill(victim)
    assert client.wait(id)["state"] == "done"
    members = system.sql(
        "select lot_index, state from tasks where lot_id = %s and lot_index is not null", lot
    )
    assert sorted(members) == [(n, "done") for n in range(COUNT)]
    ends = """select count(*) from placements p join tasks t on t.id = p.task_id
        where t.lot_id = %s and p."end" = 'finished'"""
    assert system.sql(ends, lot) == [(COUNT,)]
    [(most,)] = system.sql(MOST_AT_ONCE, lot, lot)
    assert 0 < most <= AT_ONCE
    system.check_ledger()


def test_members_of_a_matrix_that_failed_start_again(system):
    client = system.client("beta")
    script = 'echo $0-$SEED; test "$SEED" != 1'
    id, lot = _lot(
        client,
        {"command": ["sh", "-c", script, "${matrix.way}"]},
        env={"SEED": "${matrix.seed}"},
        matrix={"way": ["a", "b"], "seed": "0-2", "exclude": [{"way": "b", "seed": 1}]},
    )
    ended = client.wait(id)
    assert (ended["state"], ended["task_states"]) == ("failed", {"done": 4, "failed": 1})
    members = sorted(client.items("/v1/tasks", lot=lot), key=lambda each: each["lot_index"])
    values = [(member["lot_values"]["seed"], member["lot_values"]["way"]) for member in members]
    assert values == [(0, "a"), (0, "b"), (1, "a"), (2, "a"), (2, "b")]
    said = [client.log_text(member["id"]) for member in members]
    assert said == [["a-0"], ["b-0"], ["a-1"], ["a-2"], ["b-2"]]
    client.post(f"/v1/requests/{id}/retry")
    system.until(lambda: client.get(f"/v1/tasks/{members[2]['id']}")["epoch"] == 2)
    assert client.wait(id)["task_states"] == {"done": 4, "failed": 1}
    assert client.log_text(members[2]["id"]) == ["a-1", "a-1"]
