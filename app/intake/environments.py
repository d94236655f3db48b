"""Handles the environments of requests: checks them when they are submitted; control locks them.

The file that a request names was kept when its bundle was uploaded. Faults of the file are faults
of the request. If the tenant has a lock of the same file, the tasks get it at once. Otherwise they
wait, `blocked` and without an island, until control has one (`workers.control.package_locker`).

The same file keeps its lock, so that the same request runs with the same packages tomorrow. It is
locked again if that failed before, if the platform has other versions now, or if a user asks for a
refresh.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, func, select, text, update
from sqlalchemy.orm import Session

from app.core.model.descriptor import Descriptor, in_environment
from app.core.model.device_choice import with_packages
from app.core.model.fields import Fault
from app.core.model.lifecycle import ENDED
from app.core.model.provisions import requirements
from app.core.model.provisions.environment import EnvironmentFile, TaskEnvironment
from app.core.model.provisions.package_lock import PackageLock
from app.core.model.provisions.requirements import BadFile
from app.data import bundles
from app.data.upload_kinds import keep_package_files
from app.db.ids import new_id
from app.db.models import Bundle, Environment, PackageFile, Request, Task
from app.db.transactions import after_commit
from app.errors import Gone
from app.messaging import outbox
from app.scheduling import journal
from app.settings import settings
from app.storage.store import Damaged, Store

CAUSE = "environment"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"  # Python of the platform
GIST_CHARACTERS = 300  # of uv's words in the message of a task
_DRAWN = " ×╰├│─▶"  # noqa: RUF001  # what uv draws before its lines
LOCKING = 0x656E7673  # key of the advisory lock under which control claims an environment

#: True for a task whose environment is not locked yet.
IS_PENDING: ColumnElement[bool] = Task.descriptor["environment"]["lock"].astext == ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedEnvironment:
    """Describes the environment of a request; `alone` if it may bring its own torch and
    interpreter.

    Only commands of one rank can: several ranks share the platform's torch.
    """

    file: EnvironmentFile
    sha256: str
    alone: bool

    @property
    def python(self) -> str:
        return self.file.python or PYTHON

    def of_task(self, lock: str = "") -> TaskEnvironment:
        return TaskEnvironment(python=self.python, lock=lock, own_python=self.python != PYTHON)


# --- at the submission ----------------------------------------------------------------------------


def wanted(
    session: Session, tenant_id: str, descriptor: Descriptor
) -> tuple[WantedEnvironment | None, list[Fault]]:
    """Return the environment of a request, None if it has none or a faulty one; and the faults."""
    if (file := descriptor.environment) is None or descriptor.bundle is None:
        return None, []
    tasks = descriptor.tasks
    alone = all(task.run.kind == "command" and task.world_size == 1 for task in tasks)
    faults = list(_python_faults(file, alone))
    known = _package_files(session, tenant_id, descriptor.bundle.removeprefix("sha256:"))
    if known is None:
        return None, faults  # reported as an unknown bundle
    where = f"/environment/{file.sort}"
    if file.path not in known:
        near = requirements.near_file(file.path, sorted(known))
        told = f"the bundle has no file {file.path!r} that names packages; {near}"
        return None, [*faults, Fault(where, told, "unknown-file")]
    body = session.get_one(PackageFile, (tenant_id, known[file.path])).body
    try:
        requirements.check(file.sort, file.path, body)
    except BadFile as bad:
        faults += [Fault(where, _sentence(file.path, one), "packages") for one in bad.faults]
    return WantedEnvironment(file=file, sha256=known[file.path], alone=alone), faults


def _python_faults(file: EnvironmentFile, alone: bool) -> Iterator[Fault]:
    if file.python not in ("", PYTHON) and not alone:
        told = (
            f"jobs, functions, graphs and gangs run in the platform's Python {PYTHON}; only a "
            f"request whose tasks are all commands of one rank can have Python {file.python}"
        )
        yield Fault("/environment/python", told, "python")


def _sentence(path: str, fault: requirements.FileFault) -> str:
    where = f"{path}, line {fault.line}" if fault.line else path
    return f"{where}: {fault.detail}"


def _package_files(session: Session, tenant_id: str, sha256: str) -> Mapping[str, str] | None:
    """Return the files of a bundle that may be an environment, with their hashes; None without the
    bundle.

    A bundle that is older than environments is inspected now.
    """
    row = session.get(Bundle, (tenant_id, sha256))
    if row is None:
        return None
    if row.package_files is None:
        try:
            with Store.at(settings().store_address).open(sha256) as stored:
                found = bundles.inspect_stored(stored)
        except Damaged as error:
            raise Gone(f"{error}; tell an administrator") from error
        row.package_files = keep_package_files(session, tenant_id, found.package_files)
    return row.package_files


def entered(descriptor: Descriptor, environment: WantedEnvironment | None) -> Descriptor:
    """Return the request with its environment, not locked yet, in each task."""
    return descriptor if environment is None else in_environment(descriptor, environment.of_task())


def take(
    session: Session, tenant_id: str, user_id: str, environment: WantedEnvironment
) -> tuple[str, str]:
    """Return the id of the tenant's row of the environment, and its lock; "" if control must lock
    it.

    The row is locked until the commit, if it has no lock yet: so control sees either no task of
    this request, or all.
    """
    key = {
        "tenant_id": tenant_id,
        "source_sha256": environment.sha256,
        "sort": environment.file.sort,
        "python": environment.python,
        "alone": environment.alone,
    }
    row = session.scalars(select(Environment).filter_by(**key)).one_or_none()
    if row is not None and row.state == "locked":
        return row.id, row.lock_sha256 or ""
    given = {**key, "id": new_id("env"), "user_id": user_id, "path": environment.file.path}
    id, state, lock = session.execute(_TAKE, given).one()
    return id, lock if state == "locked" else ""


_TAKE = text(
    """
    insert into environments
        (id, tenant_id, user_id, path, sort, source_sha256, python, alone)
    values (:id, :tenant_id, :user_id, :path, :sort, :source_sha256, :python, :alone)
    on conflict (tenant_id, source_sha256, sort, python, alone) do update set
        claimed_until = case when environments.state = 'locking'
            then environments.claimed_until end,
        state = case when environments.state = 'locked' then 'locked' else 'locking' end
    returning id, state, lock_sha256
    """
)


# --- for control --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedEnvironment:
    """An environment that this process locks now."""

    id: str
    path: str
    sort: str
    python: str
    alone: bool
    body: bytes

    @property
    def own_python(self) -> bool:
        return self.python != PYTHON


def claim(session: Session, *, for_s: float) -> ClaimedEnvironment | None:
    """Claim the next environment to lock.

    It is one of the tenant that was served longest ago, and never a second one of the same tenant.
    """
    session.execute(select(func.pg_advisory_xact_lock(LOCKING)))
    row = session.execute(_CLAIM, {"for_s": for_s}).one_or_none()
    if row is None:
        return None
    body = session.get_one(PackageFile, (row.tenant_id, row.source_sha256)).body
    return ClaimedEnvironment(
        id=row.id, path=row.path, sort=row.sort, python=row.python, alone=row.alone, body=body
    )


_CLAIM = text(
    """
    update environments
    set tried_at = now(), claimed_until = now() + :for_s * interval '1 second'
    where id = (
        select one.id from environments one
        where one.state = 'locking' and coalesce(one.claimed_until, now()) <= now()
            and not exists (
                select from environments busy where busy.tenant_id = one.tenant_id
                    and busy.state = 'locking' and busy.claimed_until > now()
            )
        order by (
                select max(before.tried_at) from environments before
                where before.tenant_id = one.tenant_id
            ) nulls first, one.id
        limit 1 for update skip locked
    )
    returning id, tenant_id, path, sort, python, alone, source_sha256
    """
)


def keep_lock(session: Session, id: str, lock: PackageLock, took_us: int) -> None:
    """Write the lock of an environment, and give it to the tasks that wait for it."""
    row = session.get_one(Environment, id, with_for_update=True, populate_existing=True)
    row.state, row.message, row.claimed_until = "locked", "", None
    row.lock_sha256, row.platform = lock.sha256, dict(lock.over)
    row.packages = sorted([one.name, one.version] for one in lock.packages)
    row.locked_at, row.took_us = func.now(), took_us
    session.flush()
    for choice in session.scalars(_CHOICES, {"id": id}).all():
        needs = with_packages(choice, lock.sha256)
        session.execute(_GIVE, {"id": id, "lock": lock.sha256, "choice": choice, "needs": needs})
    after_commit(session, outbox.nudge_control)


_WAITS_FOR_IT = """
    requests.id = tasks.request_id and requests.environment_id = :id
    and tasks.state = 'blocked' and tasks.descriptor #>> '{environment,lock}' = ''
"""
_CHOICES = text(f"select distinct device_choice from tasks, requests where {_WAITS_FOR_IT}")
_GIVE = text(
    f"""
    update tasks
    set device_choice = :needs, descriptor =
        jsonb_set(tasks.descriptor, '{{environment,lock}}', to_jsonb(cast(:lock as text)))
    from requests
    where {_WAITS_FOR_IT} and tasks.device_choice = :choice
    """
)


def keep_failure(session: Session, id: str, message: str, took_us: int) -> None:
    """Write why an environment cannot be locked; the tasks that wait for it fail."""
    row = session.get_one(Environment, id, with_for_update=True, populate_existing=True)
    row.state, row.message, row.claimed_until = "failed", message, None
    row.took_us = took_us
    session.flush()
    told = f"Its environment could not be locked: {_gist(message)}"
    journal.give_up(
        session, _waiting(session, Task.cancel_asked_at.is_(None), id), CAUSE, told, message
    )
    journal.settle(session)


def _gist(said: str) -> str:
    """Return the beginning of uv's words in one line, without the marks that it draws."""
    words = " ".join(line.strip(_DRAWN) for line in said.splitlines()).removeprefix("error: ")
    return words if len(words) <= GIST_CHARACTERS else f"{words[: GIST_CHARACTERS - 1]}…"


def cancel_waiting(session: Session) -> None:
    """End cancelled tasks that still wait for a lock, since no island has them yet."""
    if ids := _waiting(session, Task.cancel_asked_at.is_not(None)):
        journal.cancel(session, ids, "Cancelled before its environment was locked.")
        journal.settle(session)


def _waiting(session: Session, which: ColumnElement[bool], id: str | None = None) -> Sequence[str]:
    """Return the tasks that wait for the lock of this environment or, without `id`, of any."""
    query = select(Task.id).where(Task.island.is_(None), Task.state.not_in(ENDED), IS_PENDING)
    if id is not None:
        query = query.join(Request, Request.id == Task.request_id)
        query = query.where(Request.environment_id == id)
    return session.scalars(query.where(which).order_by(Task.id)).all()


def refresh(session: Session, installed: Mapping[str, str]) -> None:
    """Mark as stale the locks that were made for other versions of the platform's packages than it
    has now.
    """
    is_over = Environment.platform != {}
    old = update(Environment).where(
        Environment.state == "locked", is_over, Environment.platform != dict(installed)
    )
    session.execute(old.values(state="stale").execution_options(synchronize_session=False))
