"""Verbs for shares and devices: usage, share, devices, top, presets, drain, undrain, simulate."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Annotated

import typer

from app.cli import root_command, wording
from app.cli.client import JSON, Client
from app.cli.root_command import SHARES, SIMULATE, STARTED, Format, app
from app.cli.tables import Output, out, show, table


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
    with root_command.connect(ctx) as client:
        report = client.get("/v1/usage", group_by=by, since=since, interval=interval)
    columns = wording.usage_columns(report["group_by"])
    show(report["items"], output, lambda: table(report["items"], columns))


@app.command(rich_help_panel=SHARES)
def share(ctx: typer.Context, output: Format = Output.table) -> None:
    """Show your share now: what you may hold, what you hold and borrow, and why."""
    with root_command.connect(ctx) as client:
        fair = client.get("/v1/fair-share")
    show(fair, output, lambda: wording.shares(fair))


@app.command(rich_help_panel=SHARES)
def devices(
    ctx: typer.Context,
    device: Annotated[
        str, typer.Argument(metavar="[DEVICE]", help="show this device only, with its health")
    ] = "",
    output: Format = Output.table,
) -> None:
    """List the devices: which are up, which are free, what runs there, how they are."""
    with root_command.connect(ctx) as client:
        if device:
            one = client.get(f"/v1/devices/{device}")
            named = _on_devices(client, [one])
            show(one, output, lambda: wording.one_device(one, named))
            return
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
    with root_command.connect(ctx) as client:
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
    """Return the names of the tasks on devices, by id, in a form that any verb accepts."""
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
    with root_command.connect(ctx) as client:
        found = list(client.items("/v1/presets"))
    none = "No presets: every task type runs with the default settings of its device."
    show(found, output, lambda: table(found, wording.PRESETS, empty=none))


_Place = Annotated[
    str,
    typer.Argument(metavar="HOST|DEVICE", help="a host such as gpu7, or a device such as gpu7.0"),
]


@app.command(rich_help_panel=SHARES)
def drain(ctx: typer.Context, place: _Place, output: Format = Output.table) -> None:
    """Take a host or a device out of service: tasks there move elsewhere, none starts there."""
    _serve(ctx, "drain", place, output, {"hosts": "drain", "devices": "cordon"})


@app.command(rich_help_panel=SHARES)
def undrain(ctx: typer.Context, place: _Place, output: Format = Output.table) -> None:
    """Let a host or a device take work again."""
    _serve(ctx, "undrain", place, output, {"hosts": "uncordon", "devices": "uncordon"})


def _serve(
    ctx: typer.Context, verb: str, place: str, output: Output, paths: dict[str, str]
) -> None:
    """Drain or undrain a host or a device.

    A device's id is its host's name, a dot and a number; a host's name may have dots, too.
    """
    with root_command.connect(ctx) as client:
        hosts = {host["name"] for host in client.items("/v1/hosts")}
        kind = "hosts" if place in hosts else "devices"
        client.post(f"/v1/{kind}/{place}/{paths[kind]}")
        found = [d for d in client.items("/v1/devices") if place in (d["id"], d["host"])]
        named = _on_devices(client, found)
    show(found, output, lambda: wording.served(verb, found, named))


# The list of verbs shows this docstring. The verb itself is slow to import, so `Verbs.get_command`
# imports it only when it is called.
@app.command(SIMULATE, rich_help_panel=SHARES)
def _stand_in() -> None:
    """Replay a list of jobs, or `history`, through the scheduler: waits, shares, pauses."""
    raise AssertionError("Verbs.get_command gives the real verb")
