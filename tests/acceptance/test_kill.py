"""Kill any one process while three tenants' work runs: nothing is lost, nothing runs twice.

After each kill every accepted request must reach its right end with exactly the parameters of an
undisturbed run, no two processes may have run one task at once, and the ledger must add up to the
microsecond.
"""

from __future__ import annotations

import pytest

from tests.acceptance.history import overlaps, runs

pytestmark = pytest.mark.acceptance

STEPS = 120
PER_TENANT = 2
VICTIMS = ["api", "control", "island", "device.0", "resident", "redis", "postgres"]


@pytest.fixture(scope="module")
def undisturbed(system):
    """The parameters that this job ends with when nothing happens to it."""
    client = system.client("alpha")
    done = client.wait(submit(client, "undisturbed"), timeout_s=60)
    return done["tasks"][0]["result"]["parameters"]


def submit(client, name):
    # A killed resident counts as a crash of the job, which its owner must allow for.
    return client.submit_job(
        "train:Train",
        name=name,
        params={"steps": STEPS, "seed": 3},
        retry={"max": 2},
        checkpoint={"every_s": 1.0, "keep": 2},
    )


@pytest.mark.parametrize("victim", VICTIMS)
def test_everything_accepted_ends_right_when_one_process_is_killed(system, undisturbed, victim):
    clients = [system.client(tenant) for tenant in ("alpha", "beta", "gamma")]
    ids = [
        (client, submit(client, f"{victim}-{n}")) for n in range(PER_TENANT) for client in clients
    ]
    system.wait_running(*ids[0])

    system.kill(victim)

    for client, id in ids:
        request = client.wait(id, timeout_s=120)
        assert request["state"] == "done", request
        task = request["tasks"][0]
        assert task["result"] == {"done": STEPS, "parameters": undisturbed}
        assert overlaps(runs(client.log_text(task["id"]))) == []
    system.check_ledger()
