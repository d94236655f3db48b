"""A gang that is too wide for any island takes its tickets on two; its bits never depend on it.

So do partitions of a graph that need two devices each.  Through HTTP alone; each island has a
scheduler of its own and two devices.
"""

from __future__ import annotations

import pytest

from app.cli.client import ApiProblem
from tests.acceptance.conftest import ENDED
from tests.acceptance.test_hosts import events, is_right
from tests.acceptance.test_islands import broad, crossed, ended, is_up, submit_graph, two_islands
from tests.acceptance.test_splicing import train

pytestmark = pytest.mark.acceptance


@pytest.fixture(scope="module")
def islands():
    # Another scheduler leads within a lease also on a busy machine.
    more = {"ROUNDHOUSE_SLICE_MAX_S": "4", "ROUNDHOUSE_LEASE_S": "30"}
    with two_islands(devices=2, **more) as (system, east):
        yield system, east


@pytest.fixture(scope="module")
def undisturbed(islands):
    client = islands[0].client("alpha")
    return client.wait(train(client, "alone", step_s=0.0))["tasks"][0]


VICTIMS = ("home", "island")  # `test_hosts` and `test_islands` kill such, too


def wide(client, name, **task):
    devices = {"min": 3, "max": 3, "across_hosts": True}
    return train(client, name, devices=devices, islands=2, **task)


def gang(request):
    return request["tasks"][0]


def tickets(request):
    return request["tasks"][1:]


def runs(request):
    return gang(request)["state"] == "running"


def all_run(request):
    return all(task["state"] == "running" for task in request["tasks"])


def test_gang_over_two_islands_gives_the_bits_of_one_device(islands, undisturbed):
    system, _ = islands
    client = system.client("alpha")
    with system.gate() as gate:
        id = wide(client, "wide", gate=gate)
        request = client.wait_until(id, all_run)
        (ticket,) = tickets(request)
        assert ticket["name"].endswith("@east")
        assert {ticket["seat"], *ticket["lent"]} == {"east.0", "east.1"}
        assert gang(request)["seat"] in ("local.0", "local.1")
    task = is_right(system, client, id, undisturbed)
    assert (task["pauses"], task["epoch"], task["lost_steps"]) == (0, 1, 0), events(client, id)
    assert client.request(id)["state"] == "done"


def kinds(client, id):
    return [event["type"] for event in client.items(f"/v1/requests/{id}/events", limit=200)]


def test_gang_is_paused_with_its_tickets_and_resumes_without_losing_a_step(islands, undisturbed):
    system, _ = islands
    client = system.client("alpha")
    with system.gate() as gate:
        id = wide(client, "held", gate=gate)
        for _ in range(2):
            system.wait_running(client, id)
            client.post(f"/v1/requests/{id}/hold")
            client.wait_until(id, nobody_sits)
            client.post(f"/v1/requests/{id}/release")
        client.wait_until(id, runs)
        (ticket,) = tickets(client.request(id))
        # only one ticket is paused, but its whole gang gives way
        client.post(f"/v1/tasks/{ticket['id']}/pause")
        request = client.wait_until(id, nobody_sits)
        told = client.get(f"/v1/tasks/{gang(request)['id']}/explain")["reasons"]
        assert (told[0]["code"], told[0]["change"]["value"]) == ("TICKETS", ["east"])
        client.post(f"/v1/tasks/{ticket['id']}/resume")
    task = is_right(system, client, id, undisturbed)
    assert task["lost_steps"] == 0, events(client, id)


def nobody_sits(request):
    return not any(task["seat"] for task in request["tasks"])


def test_two_such_gangs_and_other_jobs_take_turns(islands, undisturbed):
    """Let each island follow its own fair share: all tasks end, and no task loses a step."""
    system, _ = islands
    alpha, beta = system.client("alpha"), system.client("beta")
    wides = {wide(client, "turns", step_s=0.12): client for client in (alpha, beta)}
    gamma = system.client("gamma")
    small = [gamma.submit_job("train:Train", name="small", params={"steps": 60}) for _ in range(4)]
    for id, client in wides.items():
        task = is_right(system, client, id, undisturbed)
        assert task["lost_steps"] == 0, events(client, id)
    assert all(gamma.wait(id)["state"] == "done" for id in small)
    assert any(gang(client.request(id))["pauses"] for id, client in wides.items())


@pytest.mark.parametrize(
    "victim",
    ["ticket", "scheduler", *(pytest.param(each, marks=pytest.mark.long) for each in VICTIMS)],
)
def test_gang_gives_the_same_bits_whichever_process_is_killed(islands, undisturbed, victim):
    system, east = islands
    client = system.client("alpha")
    if victim == "scheduler":
        east.start("standby")  # before the job: a scheduler takes long to start on a busy machine
    with system.gate() as gate:
        id = wide(client, f"killed-{victim}", gate=gate, retry={"max": 1})
        system.wait_running(client, id)
        saved = f"/v1/tasks/{gang(client.request(id))['id']}/checkpoints"
        assert system.until(lambda: list(client.items(saved)))
        if victim == "home":
            system.kill(f"device.{gang(client.request(id))['seat'].rpartition('.')[2]}")
        elif victim == "ticket":
            east.kill("device.0")
            east.start("device.0")
        elif victim == "scheduler":
            east.kill("leader")
        else:
            east.kill()
            client.wait_until(id, lambda request: not gang(request)["seat"])
            east.start("leader", "device.0", "device.1")
    task = is_right(system, client, id, undisturbed)
    assert task["attempts"] == 0, events(client, id)
    assert (task["epoch"] == 1) == (victim == "scheduler"), events(client, id)
    assert all(system.until(lambda n=n: is_up(client, f"east.{n}")) for n in range(2))


def test_running_gang_is_cancelled_with_its_tickets(islands):
    system, _ = islands
    client = system.client("alpha")
    with system.gate() as gate:
        id = wide(client, "cancelled", gate=gate)
        system.wait_running(client, id)
        client.post(f"/v1/requests/{id}/cancel")
    assert client.wait(id)["state"] == "cancelled"
    client.wait_until(id, nobody_sits)
    assert system.until(lambda: {task["state"] for task in client.request(id)["tasks"]} <= {*ENDED})
    system.check_ledger()


def test_gang_too_wide_for_all_islands_is_refused_with_a_pointer(islands):
    client = islands[0].client("alpha")
    with pytest.raises(ApiProblem, match="devices/min"):
        train(client, "too-wide", devices={"min": 3, "max": 3, "across_hosts": True})
    with pytest.raises(ApiProblem, match="tasks/0/islands"):
        train(client, "one-host", islands=2)


@pytest.mark.parametrize("graph", [pytest.param(broad, marks=pytest.mark.long), crossed])
def test_partitions_of_a_graph_that_needs_two_devices_begin_on_two_each(islands, graph):
    """Check on both islands that partitions with two executors give the bits of one executor."""
    system, _ = islands
    client = system.client("alpha")
    alone = ended(client, submit_graph(client, "narrow", islands=1, nap_s=0.01, graph=graph))
    id = submit_graph(client, "wide-graph", graph=graph, devices={"min": 2, "max": 2})
    assert ended(client, id) == alone
    places = client.get(f"/v1/requests/{id}/plan")
    assert {place["island"] for place in places["tasks"]} == {"local", "east"}
    assert {plan["executors"] for plan in places["graphs"]} == {2}
    for task in client.request(id)["tasks"]:
        stays = [*client.items(f"/v1/tasks/{task['id']}/placements")]
        held = {stay["device_id"] for stay in stays if stay["epoch"] == 1}
        assert len(held) == 2, stays
        assert len({device.partition(".")[0] for device in held}) == 1, stays
    system.check_ledger()
