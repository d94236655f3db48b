"""The `roundhouse` command: a few verbs over `app.cli.client`.

The requested data goes to stdout, as a table, JSON or YAML.  Everything else (progress, errors and
what to do about them) goes to stderr.  No command ends in a traceback.  Imports that only some
verbs need are made there, so that commands start quickly.  Exit codes are stable:

    0 ok · 1 the job failed · 2 usage · 3 no access · 4 refused · 5 not found · 6 no answer
    130 interrupted
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.text import Text
from typer._click.exceptions import NoSuchOption
from typer.core import TyperCommand, TyperGroup

from app.cli import credentials, wording
from app.cli.bundling import Bundle, Unreadable, bundle_file, bundle_folder
from app.cli.client import JSON, Client, Damaged, Problem, Unreachable
from app.cli.tables import Output, err, facts, out, short, show, show_line, table

OK, JOB_FAILED, USAGE, NO_ACCESS, REFUSED, NOT_FOUND, NO_ANSWER = range(7)
INTERRUPTED = 130
HERE, WORK, DATA = "The service, and you", "Work", "Data"  # groups of verbs in `--help`
SHARES, ADMIN = "Shares and devices", "Administration"
SIMULATE = "simulate"
NOTHING = "Not found"
STARTED = "starting,running,paused,preempted"
LIVE = f"queued,{STARTED}"
SILENT_S = 5.0  # time without events after which a watcher is told why

log = logging.getLogger(__name__)


class _Verbs(TyperGroup):
    """Runs a verb, and reports its errors in words, with the matching exit code."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        return _simulate() if found is not None and cmd_name == SIMULATE else found

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Problem as problem:
            _fail(exit_code(problem), wording.problem(problem))
        except Unreachable as error:
            _fail(NO_ANSWER, wording.unreachable(error))
        except Damaged as error:
            _fail(NO_ANSWER, Text(str(error)))
        except credentials.NoLogin as error:
            _fail(NO_ACCESS, Text(str(error)))
        except (Unreadable, credentials.BadAddress) as error:
            _fail(USAGE, Text(str(error)))
        except KeyboardInterrupt:
            _fail(INTERRUPTED, Text("Interrupted. Submitted work continues."))


def _simulate() -> Any:
    """Return the real verb, which imports the scheduler; that is slow."""
    from app.cli import simulate

    real = typer.Typer()
    real.command(SIMULATE, rich_help_panel=SHARES)(simulate.simulate)
    return typer.main.get_command(real)


def exit_code(problem: Problem) -> int:
    """Choose the exit code by the remedy: correct the input, the key, the action, the id,
    or wait.
    """
    if problem.status in (401, 403):
        return NO_ACCESS
    if problem.status == 404:
        return NOT_FOUND
    if problem.status >= 500:
        return NO_ANSWER
    if problem.type in _REFUSALS or problem.status == 429:
        return REFUSED
    return USAGE


_REFUSALS = {
    "unsatisfiable",
    "payload-too-large",
    "conflict-state",
    "queue-full",
    "quota-exceeded",
    "precondition-failed",
    "gone",
}


def _fail(code: int, told: Text) -> NoReturn:
    err().print(told)
    raise typer.Exit(code)


app = typer.Typer(
    cls=_Verbs,
    help="Roundhouse: share a few accelerators between several teams.",
    epilog="Exit codes: 0 ok, 1 job failed, 2 usage, 3 no access, 4 rejected, 5 not found, 6 no "
    "answer, 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

As = Annotated[
    str | None,
    typer.Option(
        "--as", envvar="ROUNDHOUSE_AS", help="use the key of TENANT[:ROLE] that `make up` created"
    ),
]
Format = Annotated[Output, typer.Option("--output", "-o", help="output format")]
WHICH = (
    "name of a request, NAME/TASK for one of its tasks, or an id (its last 8 characters are enough)"
)
Which = Annotated[str, typer.Argument(metavar="NAME", help=WHICH)]
Several = Annotated[list[str], typer.Argument(metavar="NAME...", help=WHICH)]


@app.callback()
def _common(ctx: typer.Context, as_: As = None) -> None:
    ctx.obj = as_


def _client(ctx: typer.Context, who: credentials.Login | None = None) -> Client:
    who = who or credentials.found(ctx.obj)
    return Client(who.url, who.key)


def _once(ctx: typer.Context) -> Client:
    """Return a client without retries, for calls that create a secret: a lost answer cannot be
    repeated.
    """
    who = credentials.found(ctx.obj)
    return Client(who.url, who.key, patience_s=0.0)


# --- the service and the user --------------------------------------------------------------------


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    rich_help_panel=HERE,
)
def up(ctx: typer.Context) -> None:
    """Run the whole system on this machine, until Ctrl-C (options: those of python -m
    app.local.up)."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "app.local.up", *ctx.args])


@app.command("login", rich_help_panel=HERE)
def log_in(
    ctx: typer.Context,
    url: Annotated[str, typer.Option(help="URL of the service")] = "",
    key: Annotated[str, typer.Option(help="API key; prompted for if omitted")] = "",
) -> None:
    """Store the address of the service and your key."""
    url = url or os.environ.get("ROUNDHOUSE_URL") or typer.prompt("Address", err=True)
    url = credentials.address(url, "the address")
    key = key or typer.prompt("API key", hide_input=True, err=True)
    new = credentials.Login(url=url, key=key.strip(), source="")
    with _client(ctx, new) as client:
        me = client.get("/v1/me")
    file = credentials.store(new)
    err().print(f"Logged in as {me['user']} of {me['tenant']} ({me['role']}); saved in {file}.")


@app.command(rich_help_panel=HERE)
def whoami(ctx: typer.Context, output: Format = Output.table) -> None:
    """Show your user, tenant and role, as the service sees you."""
    who = credentials.found(ctx.obj)
    with _client(ctx, who) as client:
        me = client.get("/v1/me")
    show(me, output, lambda: facts([*wording.me(me), ("service", who.url), ("key", who.source)]))


# --- submit ---------------------------------------------------------------------------------------


class _Submit(TyperCommand):
    """The command `submit`, which explains where the options of a script belong."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except NoSuchOption as error:
            error.message += (
                ". Options of the script belong after --, as in `roundhouse submit train.py -- "
                "--epochs 2`."
            )
            raise


@app.command(cls=_Submit, rich_help_panel=WORK)
def submit(
    ctx: typer.Context,
    source: Annotated[
        Path | None,
        typer.Argument(metavar="FILE|FOLDER", help="a script, a descriptor, or a folder with code"),
    ] = None,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- WORDS", help="arguments of the script, or the command to run in the folder"
        ),
    ] = None,
    job: Annotated[str, typer.Option(help="class to run from the folder: module:Class")] = "",
    bundle: Annotated[Path | None, typer.Option(help="folder or archive with the code")] = None,
    param: Annotated[
        list[str] | None,
        typer.Option("--param", "-p", help="parameter of the job: name=value; repeatable"),
    ] = None,
    name: Annotated[str, typer.Option(help="name of the request")] = "",
    ranks: Annotated[
        int,
        typer.Option(min=1, help="number of ranks of a job or command, which share its devices"),
    ] = 1,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="print events until the request ends")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="validate only; submit nothing")] = False,
    key: Annotated[
        str, typer.Option("--idempotency-key", help="submits at most once for this key")
    ] = "",
    output: Format = Output.table,
) -> None:
    """Submit work: a script, a descriptor in YAML or JSON, or a job or command of a folder.

    \b
    roundhouse submit train.py -- --epochs 2  (a script; its folder is sent along)
    roundhouse submit folder -- python train.py --lr 0.1
    roundhouse submit folder --job train:Train -p lr=0.1
    roundhouse submit request.yaml
    roundhouse submit folder                  (with a roundhouse.yaml in it)
    """
    source, command = _script(source, command or [])
    run = _run(source, job, command, bundle)
    descriptor = _descriptor(source, run, ranks)
    if name:
        descriptor["name"] = name
    if param:
        _set_params(descriptor, param)
    code = _code(descriptor, source, bundle)
    key = key or str(uuid.uuid4())
    with _client(ctx) as client:
        if code is not None:
            _upload(client, code)
            descriptor["bundle"] = f"sha256:{code.sha256}"
        if check:
            checked = client.post("/v1/requests:validate", descriptor)
            show(checked, output, lambda: wording.validated(checked))
            return
        try:
            request = client.submit(descriptor, key=key)
        except Unreachable:
            err().print(
                "The submission may have arrived. It is safe to repeat it with --idempotency-key "
                f"{key}."
            )
            raise
        if not watch:
            show(request, output, lambda: wording.accepted(request))
            return
        err().print(wording.accepted(request))
        _watch(ctx, client, request["id"], output)


def _script(source: Path | None, words: list[str]) -> tuple[Path | None, list[str]]:
    """Return the folder and the command; a script becomes `python SCRIPT` in its own folder."""
    if misplaced := [word for word in words if word in _OWN_OPTIONS]:
        err().print(
            f"{misplaced[0]} stands after --, so it is passed to the script, not to submit."
        )
    if source is None or source.is_dir():
        return source, words
    if not source.exists():
        raise typer.BadParameter(_not_there(source, words))
    if source.suffix != ".py":
        return source, words
    return source.parent, ["python", source.name, *words]


_OWN_OPTIONS = {"--watch", "--check", "--ranks", "--idempotency-key"}


def _not_there(source: Path, words: list[str]) -> str:
    told = f"no such file or folder: {source}"
    if not words:
        return told
    return f"{told}; to run a command, name its folder first: roundhouse submit FOLDER -- COMMAND"


def _run(source: Path | None, job: str, command: list[str], bundle: Path | None) -> JSON | None:
    """Return what to run, if the options say it; None if a descriptor says it."""
    if job and command:
        raise typer.BadParameter("--job and a command exclude each other")
    if not job and not command:
        return None
    if source is not None and not source.is_dir():
        raise typer.BadParameter(
            f"{source} is neither a folder nor a Python script; with --job or a command, name the "
            "folder of the code"
        )
    if source is not None and bundle is not None:
        raise typer.BadParameter(
            f"{source} and --bundle {bundle} both name the code; give only one"
        )
    return {"job": job} if job else {"command": command}


def _descriptor(source: Path | None, run: JSON | None, ranks: int) -> JSON:
    if run is not None:
        kind = "train" if "job" in run else "command"
        return {"tasks": [{"name": kind, "type": "train", "run": run, "world_size": ranks}]}
    if source is None:
        raise typer.BadParameter(
            "name what to submit: a script, a descriptor, or a folder with code"
        )
    if ranks > 1:
        raise typer.BadParameter(
            "--ranks does not apply to a descriptor; set world_size in its tasks"
        )
    from app.cli.descriptor_file import read_descriptor

    return read_descriptor(source)


def _set_params(descriptor: JSON, params: list[str]) -> None:
    tasks = descriptor.get("tasks")
    if not isinstance(tasks, list) or len(tasks) != 1 or not isinstance(tasks[0], dict):
        raise typer.BadParameter(
            "--param needs a single task; set the parameters of several tasks in the file"
        )
    from app.cli.descriptor_file import parse_param

    try:
        given = dict(parse_param(text) for text in params)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    tasks[0]["params"] = {**(tasks[0].get("params") or {}), **given}


def _code(descriptor: JSON, source: Path | None, given: Path | None) -> Bundle | None:
    """Return the code to send; None if the descriptor names a bundle that the service
    already has.
    """
    named = descriptor.get("bundle")
    if given is not None:
        place = given
    elif isinstance(named, str) and not named.startswith("sha256:"):
        assert source is not None, "only a file can name a bundle"
        place = (source if source.is_dir() else source.parent) / named
    elif named is None and source is not None and source.is_dir():
        place = source
    else:
        return None
    return bundle_file(place) if place.is_file() else bundle_folder(place)


def _upload(client: Client, code: Bundle) -> None:
    err().print(wording.bundle(code))
    try:
        sent = client.upload(code.sha256, code.body)
    except Problem as problem:
        if problem.status == 413:
            err().print(wording.too_large(code))
        raise
    err().print("  the service already has it" if sent is None else wording.unparsed(sent))


# --- looking --------------------------------------------------------------------------------------


@app.command(rich_help_panel=WORK)
def ps(
    ctx: typer.Context,
    all_: Annotated[bool, typer.Option("--all", "-a", help="also list ended requests")] = False,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=200, help="print at most so many")
    ] = 50,
    output: Format = Output.table,
) -> None:
    """List requests, newest first."""
    phase = None if all_ else LIVE
    with _client(ctx) as client:
        page = client.get("/v1/requests", phase=phase, limit=limit)
    if page["items"] or output in (Output.json, Output.yaml):
        show(page["items"], output, lambda: table(page["items"], wording.REQUESTS))
    if not page["items"] and not all_:
        err().print(
            "Nothing is queued or running.  `roundhouse ps -a` also lists ended requests; "
            "`roundhouse submit --help` explains how to submit."
        )
    if page.get("next_cursor"):
        err().print(f"There are more than {limit}; use --limit to list more.")


@app.command("show", rich_help_panel=WORK)
def show_one(ctx: typer.Context, id: Which, output: Format = Output.table) -> None:
    """Show a request with its tasks, or one task with where it ran."""
    with _client(ctx) as client:
        kind, id = _resolve(client, id)
        value = client.get(f"/v1/{kind}/{id}")
        if kind == "requests":
            show(value, output, lambda: wording.request(value))
            return
        stays = list(client.items(f"/v1/tasks/{id}/placements"))
    show({**value, "placements": stays}, output, lambda: wording.task(value, stays))


@app.command(rich_help_panel=WORK)
def why(ctx: typer.Context, given: Which, output: Format = Output.table) -> None:
    """Explain why it waits, and what would let it start."""
    with _client(ctx) as client:
        kind, id = _resolve(client, given)
        tasks = [client.get(f"/v1/tasks/{id}")] if kind == "tasks" else _open_tasks(client, id)
        told = [_explain(client, task) for task in tasks]
    failed = [task for task in tasks if task["state"] == "failed"]
    show(told, output, lambda: wording.explained(told, failed, wording.called(given)))


def _explain(client: Client, task: JSON) -> JSON:
    return {"task": task["name"], **client.get(f"/v1/tasks/{task['id']}/explain")}


def _open_tasks(client: Client, request_id: str) -> list[JSON]:
    tasks = client.get(f"/v1/requests/{request_id}")["tasks"]
    return [task for task in tasks if task["state"] not in wording.ENDED] or tasks


@app.command(rich_help_panel=WORK)
def logs(
    ctx: typer.Context,
    id: Which,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="follow until the task ends")
    ] = False,
    grep: Annotated[
        str | None, typer.Option("--grep", "-g", help="only lines that contain this text")
    ] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", min=1, help="print only the last lines")
    ] = None,
    output: Format = Output.table,
) -> None:
    """Print what a request or task printed, on all devices and in all of its launches."""
    which = {"grep": grep, "tail": tail}
    with _client(ctx) as client:
        kind, id = _resolve(client, id)
        path = f"/v1/requests/{id}/logs"
        if kind == "tasks":
            found = client.get(f"/v1/tasks/{id}")
            path, which["task"] = f"/v1/requests/{found['request_id']}/logs", found["name"]
        printed = False
        for line in _lines(client, path, which, follow):
            show_line(line, output, partial(wording.log_line, line))
            printed = True
        if printed or grep:
            return
        value = client.get(f"/v1/{kind}/{id}")
        err().print(
            wording.silent(value) if value["state"] in wording.ENDED else wording.quiet(value)
        )


def _lines(client: Client, path: str, which: JSON, follow: bool) -> Iterator[JSON]:
    given = {name: value for name, value in which.items() if value is not None}
    if not follow:
        yield from client.items(path, **{"limit": 200, **given})
        return
    for event in client.stream(path, **given):
        if event.type != "end":
            yield event.data


class _Waits:
    """Prints why a request waits, when no event came for SILENT_S and the reason has changed.

    It uses a client of its own, in a thread, because the stream of events occupies the first.
    """

    def __init__(self, client: Callable[[], Client], request_id: str) -> None:
        self._client, self._request_id = client, request_id
        self._news, self._over, self._told = threading.Event(), False, ""
        self._thread = threading.Thread(target=self._run, name="waits", daemon=True)

    def __enter__(self) -> _Waits:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._news.set()
        self._thread.join(timeout=SILENT_S)

    def heard(self) -> None:
        self._news.set()

    def _run(self) -> None:
        with self._client() as client:
            while not self._over:
                if self._news.wait(SILENT_S):
                    self._news.clear()
                    continue
                try:
                    self._tell(client)
                except (Problem, Unreachable) as error:
                    log.debug(
                        "cannot explain why the task waits: %s", error
                    )  # the stream reports it, too

    def _tell(self, client: Client) -> None:
        states = ("blocked", "waiting")
        tasks = [task for task in _open_tasks(client, self._request_id) if task["state"] in states]
        if not tasks:
            return
        told = _explain(client, min(tasks, key=lambda task: task["state"] == "blocked"))
        line = wording.waits(told)
        if told["state"] in states and not self._over and line.plain != self._told:
            self._told = line.plain
            err().print(line)


@app.command(rich_help_panel=WORK)
def watch(ctx: typer.Context, id: Which, output: Format = Output.table) -> None:
    """Print the events of a request until it ends; exits with 1 if it does not end well."""
    with _client(ctx) as client:
        kind, id = _resolve(client, id)
        request_id = client.get(f"/v1/tasks/{id}")["request_id"] if kind == "tasks" else id
        _watch(ctx, client, request_id, output)


def _watch(ctx: typer.Context, client: Client, request_id: str, output: Output) -> None:
    """Print events until the request has ended; exits with JOB_FAILED if it did not end well."""
    with _Waits(partial(_client, ctx), request_id) as waits:
        for event in client.stream(f"/v1/requests/{request_id}/events"):
            waits.heard()
            if event.type != "end":
                show_line(event.data, output, partial(wording.event, event.data))
    request = client.get(f"/v1/requests/{request_id}")
    err().print(wording.ended(request))
    if request["state"] != "done":
        raise typer.Exit(JOB_FAILED)


# --- outputs ---


@app.command(rich_help_panel=WORK)
def outputs(
    ctx: typer.Context,
    id: Which,
    to: Annotated[
        Path | None, typer.Option("--to", help="download outputs that are files into this folder")
    ] = None,
    output: Format = Output.table,
) -> None:
    """List the outputs of its tasks, and the files in a command's folder `artifacts`."""
    with _client(ctx) as client:
        kind, id = _resolve(client, id)
        found = client.get(f"/v1/{kind}/{id}")
        given = wording.outputs(found["tasks"] if kind == "requests" else [found])
        files = [each for each in given if each["file"]]
        if to is not None and files:
            _download(client, files, to)
    if given or output in (Output.json, Output.yaml):
        show(given, output, lambda: table(given, wording.OUTPUTS))
    if not given:
        err().print(wording.no_outputs(found))
    if to is not None and not files:
        err().print(f"No output is a file: nothing was downloaded, and {to} was not created.")
        raise typer.Exit(NOT_FOUND)


def _download(client: Client, given: list[JSON], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for each in given:
            file = folder / each["file"]
            client.fetch(f"/v1/tasks/{each['task_id']}/outputs/{each['name']}", file)
            err().print(f"{file}: {each['size_bytes']} bytes")
    except OSError as error:
        raise Unreadable(f"cannot write to {folder}: {error.strerror or error}") from error


# --- checkpoints ----------------------------------------------------------------------------------


@app.command(rich_help_panel=WORK)
def checkpoints(ctx: typer.Context, id: Which, output: Format = Output.table) -> None:
    """List durable checkpoints, newest first; `from_checkpoint` in a descriptor begins from one."""
    with _client(ctx) as client:
        tasks = _tasks(client, id)
        found = [
            {"task": task["name"], **each}
            for task in tasks
            for each in client.items(f"/v1/tasks/{task['id']}/checkpoints")
        ]
    none = f"No checkpoints yet.  `roundhouse checkpoint {id}` requests one."
    show(found, output, lambda: table(found, wording.CHECKPOINTS, empty=none))


@app.command(rich_help_panel=WORK)
def export(
    ctx: typer.Context,
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="NAME|CHECKPOINT",
            help="a task (its newest checkpoint), or a checkpoint id ckp_...",
        ),
    ],
    file: Annotated[Path, typer.Argument(help="file to write, such as model.safetensors")],
    name: Annotated[
        list[str] | None, typer.Option("--name", help="only this tensor; repeatable")
    ] = None,
) -> None:
    """Write a checkpoint's tensors into a safetensors file."""
    with _client(ctx) as client:
        id = checkpoint if checkpoint.startswith("ckp_") else _newest(client, checkpoint)
        size = client.download(f"/v1/checkpoints/{id}/safetensors", file, names=name or None)
    err().print(f"{file}: {size} bytes")


def _newest(client: Client, given: str) -> str:
    """Return the newest checkpoint of the only task that has one; raises Problem."""
    newest = [
        listed[0]["id"]
        for task in _tasks(client, given)
        if (listed := client.get(f"/v1/tasks/{task['id']}/checkpoints", limit=1)["items"])
    ]
    if len(newest) > 1:
        raise typer.BadParameter(
            f"several tasks of {given} have checkpoints; name one as {given}/TASK"
        )
    if not newest:
        raise _not_found(f"{given} has no checkpoint; `roundhouse checkpoint {given}` requests one")
    return str(newest[0])


# --- datablocks -----------------------------------------------------------------------------------

BLOCK = "datablock:"


@app.command(rich_help_panel=DATA)
def cp(
    ctx: typer.Context,
    source: Annotated[str, typer.Argument(help="a file, or datablock:NAME[@VERSION]")],
    target: Annotated[str, typer.Argument(help="datablock:NAME, or a file")],
    output: Format = Output.table,
) -> None:
    """Upload a file of tensors as the newest version of a datablock, or download one.

    An interrupted transfer continues where it was, also in the next call; no bytes are sent twice.
    """
    if source.startswith(BLOCK) == target.startswith(BLOCK):
        raise typer.BadParameter(
            "one of the two arguments must be datablock:NAME, the other a file"
        )
    with _client(ctx) as client:
        if source.startswith(BLOCK):
            named = client.get_datablock(source.removeprefix(BLOCK), Path(target))
            err().print(f"{target}: {named}, {Path(target).stat().st_size} bytes")
            return
        parts: list[int] = []
        row = _put(client, target.removeprefix(BLOCK), Path(source), parts.append)
    err().print(f"{sum(parts)} of {row['size_bytes']} bytes were sent.")
    show(row, output, lambda: wording.datablock(row))


def _put(client: Client, name: str, file: Path, sent: Callable[[int], None]) -> JSON:
    try:
        return client.put_datablock(name, file, sent=sent)
    except OSError as error:
        raise Unreadable(f"cannot read {file}: {error.strerror or error}") from error


@app.command(rich_help_panel=DATA)
def datablocks(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(help="list all versions of this datablock")] = None,
    all_: Annotated[bool, typer.Option("--all", "-a", help="also list older versions")] = False,
    output: Format = Output.table,
) -> None:
    """List datablocks, newest first: the newest version of each name, or all versions of
    one name.
    """
    latest = None if all_ or name else "true"
    with _client(ctx) as client:
        found = list(client.items("/v1/datablocks", name=name, latest=latest, limit=200))
    show(found, output, lambda: table(found, wording.DATABLOCKS))


# --- changing -------------------------------------------------------------------------------------


@app.command(rich_help_panel=WORK)
def cancel(ctx: typer.Context, ids: Several, output: Format = Output.table) -> None:
    """End it at its next safe point; its progress is discarded."""
    _ask(ctx, "cancel", ids, {"requests": "cancel", "tasks": "cancel"}, output)


@app.command(rich_help_panel=WORK)
def pause(ctx: typer.Context, ids: Several, output: Format = Output.table) -> None:
    """Give its device to others; it loses no step and waits until it is resumed."""
    _ask(ctx, "pause", ids, {"requests": "hold", "tasks": "pause"}, output)


@app.command(rich_help_panel=WORK)
def resume(ctx: typer.Context, ids: Several, output: Format = Output.table) -> None:
    """Let it run again; it continues after the last step that it finished."""
    _ask(ctx, "resume", ids, {"requests": "release", "tasks": "resume"}, output)


@app.command(rich_help_panel=WORK)
def migrate(
    ctx: typer.Context,
    id: Which,
    to: Annotated[
        str | None, typer.Option("--to", help="target device; default: any free device")
    ] = None,
    output: Format = Output.table,
) -> None:
    """Move it to another device while it runs; it loses no step."""
    with _client(ctx) as client:
        asked = [
            (task, client.post(f"/v1/tasks/{task['id']}/migrate", {"to": to}))
            for task in _tasks(client, id)
        ]
        is_busy = to is not None and client.get(f"/v1/devices/{to}")["busy"]
    show_asked(
        asked, output, lambda _, now: wording.moving(wording.called(id), now, is_busy=is_busy)
    )


@app.command(rich_help_panel=WORK)
def resize(
    ctx: typer.Context,
    id: Which,
    most: Annotated[int, typer.Argument(min=1, help="the most devices that the task may hold")],
    output: Format = Output.table,
) -> None:
    """Let a task of several ranks hold fewer devices, or more; its results stay bit-identical."""
    with _client(ctx) as client:
        asked = [
            (task, client.post(f"/v1/tasks/{task['id']}/resize", {"devices_max": most}))
            for task in _tasks(client, id)
        ]
    show_asked(asked, output, partial(wording.resized, wording.called(id)))


@app.command(rich_help_panel=WORK)
def checkpoint(ctx: typer.Context, id: Which, output: Format = Output.table) -> None:
    """Write a durable checkpoint at its next safe point; it continues to run."""
    with _client(ctx) as client:
        asked = [
            (task, client.post(f"/v1/tasks/{task['id']}/checkpoint")) for task in _tasks(client, id)
        ]
    show_asked(asked, output, lambda _, now: wording.saving(wording.called(id), now))


def show_asked(
    asked: list[tuple[JSON, JSON]], output: Output, told: Callable[[JSON, JSON], Text]
) -> None:
    """Show what came of an action on each task, given as (the task before, the task now)."""
    show(
        [now for _, now in asked],
        output,
        lambda: Text("\n").join(told(before, now) for before, now in asked),
    )


def _ask(
    ctx: typer.Context, verb: str, ids: list[str], paths: dict[str, str], output: Output
) -> None:
    """Try the action on all ids; the exit code is that of the first problem."""
    done: list[tuple[str, JSON]] = []
    first = None
    with _client(ctx) as client:
        for given in ids:
            try:
                kind, id = _resolve(client, given)
                done.append((given, client.post(f"/v1/{kind}/{id}/{paths[kind]}")))
            except Problem as problem:
                first = first or problem
                err().print(Text.assemble(f"{given}: ", wording.problem(problem)))
    if done:
        lines = [wording.asked(verb, given, now) for given, now in done]
        show([now for _, now in done], output, lambda: Text("\n").join(lines))
    if first is not None:
        raise typer.Exit(exit_code(first))


# --- resolving names ------------------------------------------------------------------------------


def _resolve(client: Client, given: str) -> tuple[str, str]:
    """Return ("requests" or "tasks", id) of what was named; raises Problem if there is none.

    A name means the newest request of that name; any other text may be the end of an id.
    """
    for prefix, kind in (("req_", "requests"), ("tsk_", "tasks")):
        if given.startswith(prefix):
            return kind, given
    request, slash, task = given.partition("/")
    if slash:
        return "tasks", _task_named(client, _request(client, request), task)
    return "requests", _request(client, given)


def _request(client: Client, given: str) -> str:
    if given.startswith("req_"):
        return given
    found = client.get("/v1/requests", name=given, limit=1)["items"]
    if not found and re.fullmatch("[0-9a-f]{8,32}", given):
        found = client.get("/v1/requests", id_ends=given, limit=2)["items"]
    if len(found) > 1:
        ids = ", ".join(each["id"] for each in found)
        raise typer.BadParameter(f"several ids end in {given}, such as {ids}; give more digits")
    if not found:
        raise _not_found(f"no request has the name {given!r} or an id with this end")
    return str(found[0]["id"])


def _task_named(client: Client, request_id: str, name: str) -> str:
    tasks = client.get(f"/v1/requests/{request_id}")["tasks"]
    for task in tasks:
        if task["name"] == name:
            return str(task["id"])
    known = ", ".join(task["name"] for task in tasks)
    raise _not_found(f"the request has no task {name!r}; its tasks are {known}")


def _tasks(client: Client, given: str) -> list[JSON]:
    """Return the named task; or a request's unfinished tasks, or all if none is unfinished."""
    kind, id = _resolve(client, given)
    return [client.get(f"/v1/tasks/{id}")] if kind == "tasks" else _open_tasks(client, id)


def _not_found(told: str) -> Problem:
    return Problem(404, {"type": "not-found", "title": NOTHING, "detail": told})


# --- shares and devices ---------------------------------------------------------------------------


@app.command(rich_help_panel=SHARES)
def usage(
    ctx: typer.Context,
    by: Annotated[
        str, typer.Option(help="any of tenant, user, kind, bucket; separated by commas")
    ] = ("tenant,user"),
    days: Annotated[float, typer.Option(min=0.001, help="number of days to report")] = 1.0,
    interval: Annotated[
        str, typer.Option(help="length of a bucket: 10s, 1m, 10m, 1h or 1d")
    ] = "1h",
    output: Format = Output.table,
) -> None:
    """Show used device time; `roundhouse share` shows what you may hold now."""
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - days * 86400))
    with _client(ctx) as client:
        report = client.get("/v1/usage", group_by=by, since=since, interval=interval)
    columns = wording.usage_columns(report["group_by"])
    show(report["items"], output, lambda: table(report["items"], columns))


@app.command(rich_help_panel=SHARES)
def share(ctx: typer.Context, output: Format = Output.table) -> None:
    """Show your share now: what you may hold, what you hold and borrow, and why."""
    with _client(ctx) as client:
        fair = client.get("/v1/fair-share")
    show(fair, output, lambda: wording.shares(fair))


@app.command(rich_help_panel=SHARES)
def devices(ctx: typer.Context, output: Format = Output.table) -> None:
    """List the devices: which are up, which are free, what runs there."""
    with _client(ctx) as client:
        found = list(client.items("/v1/devices"))
        named = _on_devices(client, found)
    show(found, output, lambda: table(wording.named_devices(found, named), wording.DEVICES))


@app.command(rich_help_panel=SHARES)
def top(
    ctx: typer.Context,
    every_s: Annotated[
        float, typer.Option("--every", min=0.2, help="seconds between updates")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="print once, then exit")] = False,
    output: Annotated[
        Output, typer.Option("--output", "-o", help="output format; json and yaml print once")
    ] = Output.table,
) -> None:
    """Show shares, devices and running requests, live, until Ctrl-C."""
    screen = out()
    with _client(ctx) as client:
        if once or output != Output.table or not screen.is_terminal:
            now = _standing(client)
            named = _on_devices(client, now["devices"])
            show(now, output, lambda: wording.standing(**now, named=named))
            return
        from rich.live import Live

        with suppress(KeyboardInterrupt), Live(console=screen, screen=True) as live:
            while True:
                now = _standing(client)
                named = _on_devices(client, now["devices"])
                live.update(wording.standing(**now, named=named), refresh=True)
                time.sleep(every_s)


def _standing(client: Client) -> JSON:
    return {
        "fair": client.get("/v1/fair-share"),
        "devices": list(client.items("/v1/devices")),
        "running": client.get("/v1/requests", phase=STARTED, limit=20)["items"],
    }


def _on_devices(client: Client, devices: list[JSON]) -> dict[str, str]:
    """Return by id the names of the tasks on devices, in the form that any verb accepts."""
    ids = {device["task_id"] for device in devices} - {None}
    if not ids:
        return {}
    requests = client.get("/v1/requests", phase="starting,running", limit=200)["items"]
    names = {request["id"]: request["name"] for request in requests}
    tasks = client.get("/v1/tasks", phase="starting,running", limit=200)
    return {
        task["id"]: f"{names[task['request_id']]}/{task['name']}"
        for task in tasks["items"]
        if task["id"] in ids and task["request_id"] in names
    }


@app.command(rich_help_panel=SHARES)
def presets(ctx: typer.Context, output: Format = Output.table) -> None:
    """List the parameters configured on a device for each type of task."""
    with _client(ctx) as client:
        found = list(client.items("/v1/presets"))
    none = "No presets: every task type runs with the default settings of its device."
    show(found, output, lambda: table(found, wording.PRESETS, empty=none))


_Place = Annotated[
    str,
    typer.Argument(metavar="HOST|DEVICE", help="a host such as gpu7, or a device such as gpu7.0"),
]


@app.command(rich_help_panel=SHARES)
def drain(ctx: typer.Context, place: _Place, output: Format = Output.table) -> None:
    """Take a host or a device out of service: what runs there moves elsewhere."""
    _serve(ctx, "drain", place, output, {"hosts": "drain", "devices": "cordon"})


@app.command(rich_help_panel=SHARES)
def undrain(ctx: typer.Context, place: _Place, output: Format = Output.table) -> None:
    """Let a host or a device take work again."""
    _serve(ctx, "undrain", place, output, {"hosts": "uncordon", "devices": "uncordon"})


def _serve(
    ctx: typer.Context, verb: str, place: str, output: Output, verbs: dict[str, str]
) -> None:
    """Drain or undrain a host or a device.

    A device's id is its host's name, a dot and a number; a host's name may have dots, too.
    """
    with _client(ctx) as client:
        hosts = {host["name"] for host in client.items("/v1/hosts")}
        kind = "hosts" if place in hosts else "devices"
        client.post(f"/v1/{kind}/{place}/{verbs[kind]}")
        found = [d for d in client.items("/v1/devices") if place in (d["id"], d["host"])]
        named = _on_devices(client, found)
    show(found, output, lambda: wording.served(verb, found, named))


@app.command(rich_help_panel=HERE)
def doctor(ctx: typer.Context, output: Format = Output.table) -> None:
    """Check that the service answers, knows you, and can work.  Exits with 6 if anything is
    wrong.
    """
    who = credentials.found(ctx.obj)
    with Client(who.url, who.key, patience_s=0.0) as client:
        began_s = time.perf_counter()
        checks = client.ready()["checks"]
        took = f"{who.url} answered in {1000 * (time.perf_counter() - began_s):.0f} ms"
        found = [{"check": "service", "ok": True, "detail": took}, _known(client, who)]
    found += [{"check": name, **check} for name, check in checks.items()]
    show(found, output, lambda: table(found, wording.CHECKS))
    if not all(check["ok"] for check in found):
        raise typer.Exit(NO_ANSWER)


def _known(client: Client, who: credentials.Login) -> JSON:
    try:
        me = client.get("/v1/me")
    except Problem as problem:
        return {"check": "key", "ok": False, "detail": f"{problem} (from {who.source})"}
    told = f"{me['user']} of {me['tenant']}, {me['role']} (from {who.source})"
    return {"check": "key", "ok": True, "detail": told}


# --- what if --------------------------------------------------------------------------------------


@app.command(SIMULATE, rich_help_panel=SHARES)
def _stand_in() -> None:
    """Replay a list of jobs, or `history`, through the scheduler: waits, shares, pauses."""
    raise AssertionError("_Verbs.get_command gives the real verb")


# --- tenants and users ----------------------------------------------------------------------------

Weight = Annotated[float | None, typer.Option("--weight", "-w", help="weight among siblings")]
_Kinds = list[str] | None
_A_BOUND = "a number, or none"


@app.command(rich_help_panel=ADMIN)
def tenants(ctx: typer.Context, output: Format = Output.table) -> None:
    """List the tenants that you can see: weight, guarantee, limit, tier."""
    with _client(ctx) as client:
        found = list(client.items("/v1/tenants"))
    show(found, output, lambda: table(wording.as_tree(found), wording.TENANTS))


@app.command(rich_help_panel=ADMIN)
def tenant(
    ctx: typer.Context,
    which: Annotated[str, typer.Argument(metavar="TENANT", help="name or id of the tenant")],
    new: Annotated[bool, typer.Option("--new", help="create the tenant")] = False,
    under: Annotated[str, typer.Option(help="with --new: the parent tenant")] = "",
    weight: Weight = None,
    guarantee: Annotated[
        _Kinds,
        typer.Option(
            "--guarantee", help="guaranteed devices: KIND=DEVICES or KIND=none; repeatable"
        ),
    ] = None,
    limit: Annotated[
        _Kinds,
        typer.Option(
            "--limit",
            help="maximum of devices: KIND=DEVICES or KIND=none; * means all kinds together",
        ),
    ] = None,
    tier: Annotated[str, typer.Option(help="highest tier for its requests")] = "",
    max_running: Annotated[str, typer.Option(help=f"most running tasks: {_A_BOUND}")] = "",
    max_queued: Annotated[str, typer.Option(help=f"most queued tasks: {_A_BOUND}")] = "",
    output: Format = Output.table,
) -> None:
    """Show a tenant, and change it by the given options; or create one."""
    if under and not new:
        raise typer.BadParameter("--under needs --new: an existing tenant cannot be moved here")
    with _client(ctx) as client:
        found = {"guarantee": {}, "limit": {}} if new else _named(client, "tenant", which)
        changed: JSON = {} if weight is None else {"weight": weight}
        changed |= {"tier": tier} if tier else {}
        for name, kinds in (("guarantee", guarantee), ("limit", limit)):
            if kinds:
                changed[name] = _changed_kinds(found[name], kinds)
        for name, bound in (("max_running", max_running), ("max_queued", max_queued)):
            if bound:
                changed[name] = _number_or_none(name, bound)
        if new:
            above = {"parent_id": _named(client, "tenant", under)["id"]} if under else {}
            found = client.post("/v1/tenants", {"name": which, **above, **changed})
        else:
            found = _changed(client, "tenant", found, changed)
    show(found, output, lambda: wording.tenant(found))


@app.command(rich_help_panel=ADMIN)
def users(ctx: typer.Context, output: Format = Output.table) -> None:
    """List the users that you can see, people and service accounts."""
    with _client(ctx) as client:
        found = list(client.items("/v1/users"))
        rows = _with_tenants(client, found)
    show(found, output, lambda: table(rows, wording.USERS))


@app.command(rich_help_panel=ADMIN)
def user(
    ctx: typer.Context,
    which: Annotated[str, typer.Argument(metavar="USER", help="name or id of the user")],
    new: Annotated[bool, typer.Option("--new", help="create the user")] = False,
    tenant: Annotated[
        str, typer.Option(help="with --new: tenant of the user; default: your own")
    ] = "",
    weight: Weight = None,
    output: Format = Output.table,
) -> None:
    """Show a user of your tenant, and change it by the given options; or create one.

    `roundhouse key add USER` gives them a key.
    """
    if tenant and not new:
        raise typer.BadParameter("--tenant needs --new: an existing user cannot change tenants")
    given = {} if weight is None else {"weight": weight}
    with _client(ctx) as client:
        if new:
            found = _new_user(client, {"name": which, **given}, tenant)
        else:
            found = _changed(client, "user", _named(client, "user", which), given)
    show(found, output, lambda: wording.user(found))


def _new_user(client: Client, body: JSON, tenant: str) -> JSON:
    whose = {"tenant_id": _named(client, "tenant", tenant)["id"]} if tenant else {}
    return client.post("/v1/users", {**body, **whose})


# --- enrolment of devices -------------------------------------------------------------------------

device = typer.Typer(cls=_Verbs, help="Enrol and revoke devices.", no_args_is_help=True)
app.add_typer(device, name="device", rich_help_panel=ADMIN)

_DeviceId = Annotated[str, typer.Argument(metavar="DEVICE", help="a device such as gpu7.0")]


@device.command("key")
def show_device_key() -> None:
    """Print the public key of this host, with which an administrator enrols its devices."""
    from app.settings import settings
    from app.storage.signing import Signer

    typer.echo(Signer.at(settings().host_key_file).public)


@device.command("island-key")
def show_island_key(
    ctx: typer.Context,
    island: Annotated[str, typer.Argument(metavar="ISLAND")] = "local",
) -> None:
    """Print the public key of an island, which its devices need to start."""
    with _client(ctx) as client:
        key = client.get(f"/v1/islands/{island}")["key"]
    if key is None:
        _fail(NOT_FOUND, Text(f"Island {island} has no key yet; its scheduler creates the key."))
    typer.echo(key)


@device.command("enrol")
def enrol_devices(
    ctx: typer.Context,
    devices: Annotated[
        list[str], typer.Argument(metavar="DEVICE...", help="all devices of this host")
    ],
    key: Annotated[
        str, typer.Option(help="public key that `roundhouse device key` prints on that host")
    ],
    output: Format = Output.table,
) -> None:
    """Enrol devices of a host: messages that the host signs with its key are accepted."""
    with _client(ctx) as client:
        made = [
            client.post("/v1/enrolments", {"device_id": each, "key": key.strip()})
            for each in devices
        ]
    show(made, output, lambda: table(made, wording.ENROLMENTS))


@device.command("list")
def list_enrolments(ctx: typer.Context, output: Format = Output.table) -> None:
    """List the enrolled devices and their keys."""
    with _client(ctx) as client:
        found = list(client.items("/v1/enrolments"))
    show(found, output, lambda: table(found, wording.ENROLMENTS))


@device.command("revoke")
def revoke_device(ctx: typer.Context, id: _DeviceId, output: Format = Output.table) -> None:
    """Ignore a device from now on; no step is lost if you `drain` it first."""
    with _client(ctx) as client:
        found = client.delete(f"/v1/enrolments/{id}")
    show([found], output, lambda: table([found], wording.ENROLMENTS))


# --- webhooks -------------------------------------------------------------------------------------

webhook = typer.Typer(cls=_Verbs, help="URLs notified when a request ends.", no_args_is_help=True)
app.add_typer(webhook, name="webhook", rich_help_panel=ADMIN)

_WebhookId = Annotated[str, typer.Argument(metavar="WEBHOOK", help="id of the webhook")]


@webhook.command("list")
def list_webhooks(ctx: typer.Context, output: Format = Output.table) -> None:
    """List the webhooks of the tenants that you can see."""
    with _client(ctx) as client:
        found = list(client.items("/v1/webhooks"))
    show(found, output, lambda: table(found, wording.WEBHOOKS))


@webhook.command("add")
def add_webhook(
    ctx: typer.Context,
    url: Annotated[str, typer.Argument(metavar="URL", help="a public http or https address")],
    on: Annotated[
        list[str] | None,
        typer.Option("--on", help="outcomes: done, failed, cancelled; repeatable; default: all"),
    ] = None,
    output: Format = Output.table,
) -> None:
    """Add a webhook, called when requests end; prints its secret, once."""
    body: JSON = {"url": url} | ({"events": [f"request.{end}" for end in on]} if on else {})
    with _once(ctx) as client:
        made = client.post("/v1/webhooks", body)
    show(made, output, lambda: wording.webhook(made))


@webhook.command("rotate")
def rotate_webhook(
    ctx: typer.Context,
    id: _WebhookId,
    overlap_s: Annotated[float, typer.Option(help="seconds in which both secrets sign")] = 86_400.0,
    output: Format = Output.table,
) -> None:
    """Give a webhook a new secret, and print the secret, once."""
    with _once(ctx) as client:
        made = client.post(f"/v1/webhooks/{id}/rotate", {"overlap_s": overlap_s})
    show(made, output, lambda: wording.webhook(made))


@webhook.command("test")
def try_webhook(ctx: typer.Context, id: _WebhookId, output: Format = Output.table) -> None:
    """Send a test message to a webhook."""
    with _client(ctx) as client:
        sent = client.post(f"/v1/webhooks/{id}/test", {})
    show([sent], output, lambda: table([sent], wording.DELIVERIES))


@webhook.command("deliveries")
def list_deliveries(ctx: typer.Context, id: _WebhookId, output: Format = Output.table) -> None:
    """List the messages sent to a webhook, and what became of them."""
    with _client(ctx) as client:
        found = list(client.items(f"/v1/webhooks/{id}/deliveries"))
    show(found, output, lambda: table(found, wording.DELIVERIES))


@webhook.command("redeliver")
def redeliver(
    ctx: typer.Context,
    id: Annotated[str, typer.Argument(metavar="DELIVERY", help="id of the delivery")],
    output: Format = Output.table,
) -> None:
    """Send a message again, at once."""
    with _client(ctx) as client:
        sent = client.post(f"/v1/deliveries/{id}/redeliver", {})
    show([sent], output, lambda: table([sent], wording.DELIVERIES))


@webhook.command("delete")
def delete_webhook(ctx: typer.Context, id: _WebhookId) -> None:
    """Delete a webhook and its messages."""
    with _client(ctx) as client:
        client.delete(f"/v1/webhooks/{id}")


# --- keys and service accounts --------------------------------------------------------------------

key = typer.Typer(cls=_Verbs, help="API keys: create, rotate, revoke.", no_args_is_help=True)
account = typer.Typer(cls=_Verbs, help="Service accounts: users that are programs.")
app.add_typer(key, name="key", rich_help_panel=ADMIN)
app.add_typer(account, name="account", rich_help_panel=ADMIN)

_KeyId = Annotated[str, typer.Argument(metavar="KEY", help="public id of the key: rh_ID_...")]


@key.command("list")
def list_keys(ctx: typer.Context, output: Format = Output.table) -> None:
    """List the keys of the users that you can see; the secrets are never shown."""
    with _client(ctx) as client:
        found = list(client.items("/v1/keys"))
        users = {user["id"]: user["name"] for user in client.items("/v1/users")}
    rows = [{**key, "user": users.get(key["user_id"])} for key in found]
    show(found, output, lambda: table(rows, wording.KEYS))


@key.command("add")
def add_key(
    ctx: typer.Context,
    user: Annotated[
        str, typer.Argument(metavar="USER", help="name or id of a user or a service account")
    ],
    name: Annotated[str, typer.Option(help="purpose of the key; default: the user's name")] = "",
    role: Annotated[str, typer.Option(help="viewer, member, tenant_admin")] = "member",
    scope: Annotated[
        list[str] | None,
        typer.Option(help="restrict the key to this scope, such as work:write; repeatable"),
    ] = None,
    expires: Annotated[str, typer.Option(help="expiry, such as 2026-11-21T12:00:00Z")] = "",
    output: Format = Output.table,
) -> None:
    """Create a key; prints it, once."""
    body: JSON = {"role": role, "name": name or user, "scopes": scope or None}
    body |= {"expires_at": expires} if expires else {}
    with _once(ctx) as client:
        made = client.post("/v1/keys", body | {"user_id": _named(client, "user", user)["id"]})
    show(made, output, lambda: wording.key(made))


@key.command("rotate")
def rotate_key(
    ctx: typer.Context,
    id: _KeyId,
    overlap_s: Annotated[
        float, typer.Option(help="seconds in which the old key stays valid")
    ] = 86_400.0,
    output: Format = Output.table,
) -> None:
    """Create a key that replaces this one; prints it, once."""
    with _once(ctx) as client:
        made = client.post(f"/v1/keys/{id}/rotate", {"overlap_s": overlap_s})
    show(made, output, lambda: wording.key(made))


@key.command("revoke")
def revoke_key(ctx: typer.Context, id: _KeyId) -> None:
    """Revoke a key: it gives no access from now on."""
    with _client(ctx) as client:
        client.delete(f"/v1/keys/{id}")


@account.command("list")
def list_accounts(ctx: typer.Context, output: Format = Output.table) -> None:
    """List the service accounts of the tenants that you can see."""
    with _client(ctx) as client:
        found = list(client.items("/v1/users", service=True))
        rows = _with_tenants(client, found)
    show(found, output, lambda: table(rows, wording.ACCOUNTS))


@account.command("add")
def add_account(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    tenant: Annotated[str, typer.Option(help="name or id of the tenant; default: your own")] = "",
    output: Format = Output.table,
) -> None:
    """Create a service account; `roundhouse key add NAME` gives it a key."""
    with _client(ctx) as client:
        made = _new_user(client, {"name": name, "service": True}, tenant)
        rows = _with_tenants(client, [made])
    show([made], output, lambda: table(rows, wording.ACCOUNTS))


# --- tenants and users, by name -------------------------------------------------------------------


def _named(client: Client, kind: str, which: str) -> JSON:
    """Return the tenant or user of this id or name; if the name is ambiguous, the error lists the
    ids.
    """
    listed = list(client.items(f"/v1/{kind}s"))
    found = [item for item in listed if which in (item["id"], item["name"], short(item["id"]))]
    if len(found) > 1:
        raise typer.BadParameter(
            f"{which} is ambiguous: {', '.join(item['id'] for item in found)}; give an id"
        )
    if not found:
        told = f"no visible {kind} has the name or id {which!r}"
        raise _not_found(told)
    return found[0]


def _with_tenants(client: Client, users: list[JSON]) -> list[JSON]:
    """Add the name of its tenant to each user."""
    names = {tenant["id"]: tenant["name"] for tenant in client.items("/v1/tenants")}
    return [{**user, "tenant": names.get(user["tenant_id"])} for user in users]


def _changed(client: Client, kind: str, found: JSON, changes: JSON) -> JSON:
    if not changes:
        return found
    return client.patch(f"/v1/{kind}s/{found['id']}", changes, version=found["version"])


def _changed_kinds(now: JSON, given: list[str]) -> JSON:
    """Return `now` with each KIND=DEVICES set, and each KIND=none removed."""
    kinds = dict(now)
    for text in given:
        kind, equals, devices = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"must be KIND=DEVICES, such as cuda=4; got {text!r}")
        kinds[kind] = _number_or_none(kind, devices)
    return {kind: devices for kind, devices in kinds.items() if devices is not None}


def _number_or_none(name: str, text: str) -> int | None:
    if text != "none" and not (text.isascii() and text.isdecimal()):
        raise typer.BadParameter(f"{name} must be {_A_BOUND}; got {text!r}")
    return None if text == "none" else int(text)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
