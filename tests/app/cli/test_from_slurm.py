"""Each command of docs/howto/from_slurm.md runs, against the API, in the order of the page.

One service and one folder serve all of them.  Nothing runs here: tasks stay queued, and a thread
ends the request of a command that waits for its end.
"""

from __future__ import annotations

import re
import shlex
import threading
from pathlib import Path

import pytest
from sqlalchemy import func, text, update

from app.core.model.provisions import notice
from app.db.models import Device, Host, Request, Task, Webhook
from app.db.transactions import transaction
from app.messaging.live_updates import changes
from tests import command_line
from tests.serving import server  # noqa: F401

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "howto" / "from_slurm.md").read_text()
COMMANDS = re.findall(r"`roundhouse ([^`]+)`", PAGE)
DESCRIPTOR = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1]

#: What needs a running process, and a test that has one.
ELSEWHERE = {
    "shell train": "tests/acceptance/test_tunnel_kills.py",
    "run --interactive": "tests/acceptance/test_sessions.py",
}
#: What the platform of this test cannot give; the error says so, and names no option.
REFUSED = {
    "submit train.py --tier premium": "tier",
    "submit train.py --image torch": "image",
}
#: What has to be ended for the command to end.
WAITING = {"submit train.py --watch", "logs train --follow"}


JOB = "class Train:\n    def step(self, ctx):\n        ctx.finish()\n"
FACTS = {
    "sandbox": "off",
    "model": "NVIDIA H100 80GB HBM3",
    "offers": ["env", notice.NEED, "limit:cpus", "limit:memory"],
    "gives": {"cpus": 64_000, "memory": 2**40},
}
#: What a command needs to be there, as an island would make it.
BEFORE = {
    "cancel lot/command.7": "insert into tasks (id, request_id, tenant_id, user_id, lot_id,"
    " lot_index, ordinal, name, type, kind, descriptor, state) select id || '7', request_id,"
    " tenant_id, user_id, id, 7, 0, name || '.7', type, kind, descriptor, 'waiting'"
    " from tasks where id in (select id from lots)",
    "retry train": "update tasks set state = 'failed' where name = 'command' and state = 'done'",
}


@pytest.fixture
def folder(server, tmp_path, monkeypatch):  # noqa: F811
    """A folder with what the page submits, as a member of red; there are four cuda devices on
    each of two hosts.
    """
    here = tmp_path / "here"
    (here / "code").mkdir(parents=True)
    for path in ("train.py", "work.py", "eval.py", "job.sh", "code/train.py"):
        (here / path).write_text(JOB if path == "code/train.py" else "")
    (here / "request.yaml").write_text(DESCRIPTOR)
    monkeypatch.chdir(here)
    monkeypatch.setenv("ROUNDHOUSE_URL", server.url)
    monkeypatch.setenv("ROUNDHOUSE_KEY", server.world.keys["red.member"])
    with transaction() as session:
        session.execute(update(Device).values(facts=FACTS))
        hook = {"tenant_id": "ten_red", "url": "channel:team-mail", "secret": ""}
        sealed = {"kind": "mail", "key_id": "k", "encrypted": b""}
        session.add(Webhook(id="chn_1", name="team-mail", **hook, **sealed))
        old = session.get_one(Device, "h.0")
        session.add(Host(name="g", island="isle"))
        session.flush()
        for number in range(8):
            about = {
                "host": "hg"[number // 4],
                "island": "isle",
                "kind": "cuda",
                "memory_bytes": 80 * 10**9,
            }
            id = f"h.{number + 2}"
            session.add(Device(id=id, lease_until=old.lease_until, facts=FACTS, **about))
    return here


def run(command):
    """Run a command of the page; return its result."""
    if command in BEFORE:
        with transaction() as session:
            session.execute(text(BEFORE[command]))
    done = threading.Event()
    if command in WAITING:
        ender = threading.Thread(target=end_what_waits, args=[done])
        ender.start()
    try:
        return command_line.invoke(shlex.split(command))
    finally:
        done.set()
        if command in WAITING:
            ender.join()


def end_what_waits(done):
    while not done.wait(0.2):
        with transaction() as session:
            session.execute(
                update(Request)
                .where(Request.name == "train")
                .values(state="done", ended_at=func.now())
            )
            ended = {"state": "done", "seat": None}
            session.execute(update(Task).where(Task.name == "command").values(ended))
        changes.tell_all()


@pytest.mark.slow
def test_each_command_of_the_page_runs(folder):
    faults = []
    for command in COMMANDS:
        if command in ELSEWHERE:
            continue
        result = run(command)
        if command in REFUSED:
            assert result.exit_code != 0, command
            assert REFUSED[command] in result.output, command
        elif result.exit_code not in ({0, 1} if command in WAITING else {0}):
            faults.append(f"{command}: {result.exit_code}\n{result.output}")
    assert not faults, "\n".join(faults)
    with transaction() as session:
        told = "select descriptor from tasks where descriptor->'run'->>'command' like '%job.sh%'"
        [descriptor] = session.scalars(text(told))
    assert descriptor["run"] == {"command": ["bash", "job.sh"]}


def test_page_has_the_twenty_most_used_options_and_what_runs_elsewhere():
    named = {*ELSEWHERE, *REFUSED, *WAITING, *BEFORE}
    assert named <= {*COMMANDS}
    for command, file in ELSEWHERE.items():
        assert f'system, "{command.split()[0]}", ' in (ROOT / file).read_text()
    sbatch, squeue = PAGE.split("## sbatch")[1].split("## squeue")
    assert sum(line.startswith(("| `--", "| `sbatch")) for line in sbatch.splitlines()) >= 20
    assert sum(line.startswith("| `squeue") for line in squeue.splitlines()) >= 8
