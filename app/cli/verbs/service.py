"""Verbs about the service and its user: up, login, whoami, doctor."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from app.cli import credentials, root_command, wording
from app.cli.client import JSON, ApiProblem, Client
from app.cli.root_command import HERE, NO_ANSWER, Format, app
from app.cli.tables import Output, err, facts, show, table


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
    words = [f"--{name}={value}" for name, value in given.items() if value is not None]
    words += [f"--device={one}" for one in device or ()]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "app.local.up", *words])


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
def doctor(ctx: typer.Context, output: Format = Output.table) -> None:
    """Check that the service answers, knows you, and can work; exit with 6 if not."""
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
    except ApiProblem as problem:
        return {"check": "key", "ok": False, "detail": f"{problem} (from {who.source})"}
    told = f"{me['user']} of {me['tenant']}, {me['role']} (from {who.source})"
    return {"check": "key", "ok": True, "detail": told}
