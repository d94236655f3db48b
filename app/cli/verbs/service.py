"""Verbs about the service and its user: up, login, whoami, doctor."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from app.cli import credentials, root_command, watching, wording
from app.cli.client import JSON, ApiProblem, Client, ClientError
from app.cli.root_command import HERE, NO_ANSWER, Format, app
from app.cli.tables import Output, clock, err, facts, show, table

TASK_S = 30.0  # time for a task that does nothing
ANSWER_S = 10.0  # time for one answer: the checks of the service take at most half of it
_NO_OP = {"name": "doctor", "run": {"command": ["true"]}, "max_duration_s": TASK_S}
_HEARS = ("postgres", "redis", "islands")  # without these no heartbeat is heard
#: Reasons of a wait that are no queue.
_BROKEN = {"NO_SCHEDULER", "NO_DEVICE_UP", "NOT_LOOKED_AT"}


@app.command(rich_help_panel=HERE)
def up(
    home: Annotated[Path | None, typer.Option(help="folder for all data")] = None,
    devices: Annotated[int | None, typer.Option(help="number of CPU devices; default 2")] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND[:WHICH]",
            help="a device, instead of --devices: cpu, or as torch names its kind, with its UUID or"
            " index (cuda:0); may be repeated",
        ),
    ] = None,
    hosts: Annotated[int | None, typer.Option(help="number of simulated hosts; default 1")] = None,
    host: Annotated[str | None, typer.Option(help="address to listen on")] = None,
    port: Annotated[int | None, typer.Option(help="port of the API; default: a free one")] = None,
) -> None:
    """Run the whole system on this machine, until Ctrl-C."""
    given = {"home": home, "devices": devices, "hosts": hosts, "host": host, "port": port}
    _become("app.local.up", given, device)


@app.command(rich_help_panel=HERE)
def mcp(
    ctx: typer.Context,
    write: Annotated[
        bool, typer.Option("--write", help="also submit, pause, resume and cancel")
    ] = False,
) -> None:
    """Serve the API to a language model, over stdin and stdout (Model Context Protocol)."""
    credentials.found(ctx.obj)  # raises an error in words before the protocol begins
    try:
        from app.cli import agents
    except ImportError as error:
        told = (
            "this needs the package mcp: pip install 'roundhouse-client[mcp]', or "
            "'roundhouse[mcp]' where the service is installed"
        )
        raise typer.BadParameter(told) from error
    agents.server(lambda: root_command.connect(ctx), write=write).run()


@app.command(rich_help_panel=HERE)
def worker(
    host: Annotated[str | None, typer.Option(help="name of this host; default: its own")] = None,
    cpus: Annotated[int | None, typer.Option(help="so many CPU devices")] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND[:WHICH]",
            help="a device by its UUID or index (cuda:0); may be repeated; default: all GPUs",
        ),
    ] = None,
) -> None:
    """Serve the devices of this host, until Ctrl-C."""
    _become("workers.device.host_worker", {"host": host, "cpus": cpus}, device)


def _become(module: str, given: Mapping[str, object], devices: Sequence[str] | None) -> NoReturn:
    """Run a module of this installation in place of this process, with the options that are set."""
    root_command.require_service()
    words = [f"--{name}={value}" for name, value in given.items() if value is not None]
    words += [f"--device={one}" for one in devices or ()]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *words])


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
    with root_command.connect(ctx, new) as client:
        me = client.get("/v1/me")
    file = credentials.store(new)
    err().print(f"Logged in as {me['user']} of {me['tenant']} ({me['role']}); saved in {file}.")


@app.command(rich_help_panel=HERE)
def whoami(ctx: typer.Context, output: Format = Output.table) -> None:
    """Show your user, tenant and role, as the service sees you."""
    who = credentials.found(ctx.obj)
    with root_command.connect(ctx, who) as client:
        me = client.get("/v1/me")
    show(me, output, lambda: facts([*wording.me(me), ("service", who.url), ("key", who.source)]))


@app.command(rich_help_panel=HERE)
def doctor(
    ctx: typer.Context,
    task: Annotated[
        bool, typer.Option("--task", help="also run a task that does nothing, for half a minute")
    ] = False,
    output: Format = Output.table,
) -> None:
    """Check that the service answers, knows you, and can work; exit with 6 if not."""
    who = credentials.found(ctx.obj)
    with Client(who.url, who.key, patience_s=0.0, timeout_s=ANSWER_S) as client:
        began_s = time.perf_counter()
        checks = client.ready()["checks"]
        took = f"{who.url} answered in {1000 * (time.perf_counter() - began_s):.0f} ms"
        found = [{"check": "service", "ok": True, "detail": took}, _known(client, who)]
        found += [{"check": name, **check} for name, check in checks.items()]
        if found[1]["ok"] and all(checks.get(name, {}).get("ok") for name in _HEARS):
            found += _silent(client)
        if task:
            found.append({"check": "task", **_ran(client)})
    show(found, output, lambda: table(found, wording.CHECKS))
    if not all(check["ok"] for check in found):
        raise typer.Exit(NO_ANSWER)


def _silent(client: Client) -> Iterator[JSON]:
    """Yield a failed check for each device that failed, or stopped to report without having said
    so.
    """
    try:
        devices = list(client.items("/v1/devices"))
    except ClientError as error:
        yield {"check": "device list", "ok": False, "detail": str(error)}
        return
    for device in devices:
        if device["up"] or device["cordoned"] or device["stopping"]:
            continue
        since = f"since {clock(device['seen_at'])}" if device["seen_at"] else "yet"
        told = f"{device['id']} sends no heartbeat {since}: it hangs, or its host is gone"
        if failure := device.get("failure"):
            told = f"{device['id']}: {failure}"
        yield {"check": "device", "ok": False, "detail": told}


def _ran(client: Client) -> JSON:
    """Run a task that does nothing; a task that waits behind others is no fault."""
    try:
        request = client.submit({"name": "doctor", "tasks": [_NO_OP]})
        until_s = time.monotonic() + TASK_S
        while request["state"] not in wording.ENDED and time.monotonic() < until_s:
            request = client.get(f"/v1/requests/{request['id']}", wait="5s")
        if request["state"] in wording.ENDED:
            return {"ok": request["state"] == "done", "detail": f"a task is {request['state']}"}
        (one,) = client.get(f"/v1/requests/{request['id']}")["tasks"]
        told = watching.explain(client, client.get(f"/v1/tasks/{one['id']}"))
        client.post(f"/v1/requests/{request['id']}/cancel")
    except ClientError as error:
        return {"ok": False, "detail": str(error)}
    codes = {reason["code"] for reason in told.get("reasons", ())}
    is_queued = bool(codes) and not codes & _BROKEN
    return {"ok": is_queued, "detail": f"after {TASK_S:g} s: {wording.waits(told).plain}"}


def _known(client: Client, who: credentials.Login) -> JSON:
    try:
        me = client.get("/v1/me")
    except ApiProblem as problem:
        return {"check": "key", "ok": False, "detail": f"{problem} (from {who.source})"}
    told = f"{me['user']} of {me['tenant']}, {me['role']} (from {who.source})"
    return {"check": "key", "ok": True, "detail": told}
