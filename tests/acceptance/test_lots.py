"""An array, a matrix and chains of requests through HTTP, with kills: each index once, never too
many at once, and each link of a chain once and after the one before.
"""

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


# of the only task of each request: its state, how often it finished, its first launch, its end
LINKS = """
    select t.request_id, t.state, count(*) filter (where p."end" = 'finished'),
        min(p.launched_at), t.ended_at
    from tasks t join placements p on p.task_id = t.id where t.request_id = any(%s)
    group by t.id
"""


IS_DONE = "select 1 from tasks where request_id = %s and state = 'done'"


def _chain(client, name):
    """Submit three requests, each after the one before; return their ids."""
    task = {"name": "link", "run": {"function": "short:look"}, "retry": {"max": 3}}
    ids = []
    for n, on in enumerate(("", "done", "ended")):
        needs = [{"request": ids[-1], "on": on}] if ids else []
        linked = {**task, "start": {"after_requests": needs}} if needs else task
        body = {"name": f"{name}-{n}", "bundle": client.bundle, "tasks": [linked]}
        ids.append(client.submit(body)["id"])
    return ids


def _lot(client, run, **more):
    task = {"name": "lot", "run": run, **more}
    request = client.submit({"name": "many", "bundle": client.bundle, "tasks": [task]})
    return request["id"], request["tasks"][0]["id"]


def test_members_of_an_array_and_links_of_chains_are_done_once_when_processes_are_killed(system):
    """Each kill comes as the first link of a chain ends: often before control looks at its end."""
    client, other, chains = system.client("alpha"), system.client("beta"), []
    id, lot = _lot(
        client,
        {"function": "short:look"},
        params={"nap_s": 0.05},
        array={"count": COUNT, "at_once": AT_ONCE},
        retry={"max": 3},
    )
    for n, victim in enumerate(("island", "control", "api", "control", "device.0")):
        system.until(lambda: system.sql("select 1 from lots where id = %s and live > 0", lot))
        chains.append(chain := _chain(other, f"{victim}-{n}".replace(".", "-")))
        assert system.until(lambda first=chain[0]: system.sql(IS_DONE, first))
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
    for chain in chains:
        assert [other.wait(each)["state"] for each in chain] == ["done"] * 3
        links = {row[0]: row[1:] for row in system.sql(LINKS, chain)}
        assert [links[each][:2] for each in chain] == [("done", 1)] * 3
        first, second, third = (links[each] for each in chain)
        assert first[3] <= second[2] <= second[3] <= third[2], "each begins after the one before"
    decided = "select outcome from request_needs where needs_request_id = any(%s)"
    awaited = [each for chain in chains for each in chain[:2]]
    assert system.sql(decided, awaited) == [("met",)] * len(awaited)
    told = "select count(*) from events where type = 'task.after_request' and request_id = any(%s)"
    assert system.sql(told, [each for chain in chains for each in chain]) == [(len(awaited),)]
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
