"""Verbs for reservations: devices that a tenant is guaranteed in windows, and maintenance."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import typer

from app.cli import root_command, wording
from app.cli.client import JSON
from app.cli.names import find_named
from app.cli.root_command import ADMIN, Format, Verbs, app
from app.cli.tables import Output, err, show, table
from app.core.units import parse_seconds

reservation = typer.Typer(
    cls=Verbs, help="Devices for a time, and maintenance.", no_args_is_help=True
)
app.add_typer(reservation, name="reservation", rich_help_panel=ADMIN)

_Name = Annotated[str, typer.Argument(metavar="RESERVATION", help="name or id of a reservation")]
_Devices = Annotated[
    list[str] | None, typer.Option("--devices", help="KIND=NUMBER, such as cuda=8; repeatable")
]
_Ids = Annotated[
    list[str] | None,
    typer.Option("--device-id", metavar="DEVICE", help="this very device; repeatable"),
]
_Labels = Annotated[
    list[str] | None,
    typer.Option("--label", help="a label that the devices have; repeatable"),
]
_Maintenance = Annotated[
    list[str] | None,
    typer.Option("--maintenance", metavar="DEVICE", help="take a device out; repeatable"),
]
_FROM = "when the first window begins, such as 2026-12-07T09:00, in --timezone"
_REPEAT = "how it repeats, as in RFC 5545: FREQ=WEEKLY;BYDAY=MO;COUNT=10"


@reservation.command("list")
def list_reservations(ctx: typer.Context, output: Format = Output.table) -> None:
    """List what is reserved for you, and all planned maintenance."""
    with root_command.connect(ctx) as client:
        found = list(client.items("/v1/reservations"))
    show(found, output, lambda: table(found, wording.RESERVATIONS))


@reservation.command("show")
def show_reservation(ctx: typer.Context, name: _Name, output: Format = Output.table) -> None:
    """Show a reservation and its windows that have not ended."""
    with root_command.connect(ctx) as client:
        found = find_named(client, "reservation", name)
    show(found, output, lambda: wording.reservation(found))


@reservation.command("add")
def add_reservation(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="what it is called")],
    begins: Annotated[str, typer.Option("--from", help=_FROM)],
    ends: Annotated[str, typer.Option("--to", help="when the first window ends")],
    devices: _Devices = None,
    label: _Labels = None,
    device_id: _Ids = None,
    tenant: Annotated[str, typer.Option("--for", help="name or id of the tenant")] = "",
    user: Annotated[str, typer.Option(help="the only user of the tenant that it is for")] = "",
    maintenance: _Maintenance = None,
    repeat: Annotated[str, typer.Option(help=_REPEAT)] = "",
    timezone: Annotated[str, typer.Option(help="zone of the times, as Europe/Berlin")] = "UTC",
    island: Annotated[str, typer.Option(help="if there are several")] = "",
    note: Annotated[str, typer.Option(help="what it is for")] = "",
    output: Format = Output.table,
) -> None:
    """Guarantee devices to a tenant in windows, or take devices out of service for a time."""
    body: JSON = {"name": name, "timezone": timezone, "rule": repeat}
    body["begins_at"], body["ends_at"] = _time(begins, timezone), _time(ends, timezone)
    for key, value in (("island", island), ("note", note)):
        if value:
            body[key] = value
    body |= _wanted(devices, label, device_id)
    if maintenance:
        body |= {"maintenance": True, "device_ids": maintenance}
    with root_command.connect(ctx) as client:
        if tenant:
            body["tenant_id"] = find_named(client, "tenant", tenant)["id"]
        if user:
            body["user_id"] = find_named(client, "user", user)["id"]
        made = client.post("/v1/reservations", body)
    show(made, output, lambda: wording.reservation(made))


@reservation.command("change")
def change_reservation(
    ctx: typer.Context,
    name: _Name,
    begins: Annotated[str, typer.Option("--from", help="begin of the next window")] = "",
    ends: Annotated[str, typer.Option("--to", help="its end; alone: of the present one")] = "",
    devices: _Devices = None,
    label: _Labels = None,
    device_id: _Ids = None,
    maintenance: _Maintenance = None,
    repeat: Annotated[str, typer.Option(help=_REPEAT + "; or none")] = "",
    timezone: Annotated[str, typer.Option(help="another zone; default: that it has")] = "",
    note: Annotated[str, typer.Option(help="what it is for; or none")] = "",
    output: Format = Output.table,
) -> None:
    """Change a reservation, which keeps its place; windows that have begun stay.

    `--to` alone, inside a window, moves the end of that window.
    """
    body = _wanted(devices, label, device_id)
    if repeat:
        body["rule"] = "" if repeat == "none" else repeat
    if note:
        body["note"] = None if note == "none" else note
    if maintenance:
        body["device_ids"] = maintenance
    with root_command.connect(ctx) as client:
        found = find_named(client, "reservation", name)
        if timezone:
            body["timezone"] = timezone
        for key, value in (("begins_at", begins), ("ends_at", ends)):
            if value:
                body[key] = _time(value, timezone or found["timezone"])
        if not body:
            raise typer.BadParameter("say what to change, such as --to")
        made = client.patch(f"/v1/reservations/{found['id']}", body)
    show(made, output, lambda: wording.reservation(made))


@reservation.command("free")
def list_free_times(
    ctx: typer.Context,
    devices: Annotated[str, typer.Argument(metavar="KIND=NUMBER", help="such as cuda=8")] = "",
    label: _Labels = None,
    device_id: _Ids = None,
    lasting: Annotated[str, typer.Option("--for", help="how long: 90m, 8h, 2d")] = "1h",
    island: Annotated[str, typer.Option(help="if there are several")] = "",
    output: Format = Output.table,
) -> None:
    """List when so many devices can be reserved, in the next 60 days."""
    if not (devices or device_id):
        raise typer.BadParameter("say how many, such as cuda=8, or which with --device-id")
    wanted: JSON = {"label": label or [], "device_id": device_id or []}
    if devices:
        wanted["kind"], wanted["devices"] = _number(devices)
    try:
        wanted["for_s"] = round(parse_seconds(lasting))
    except ValueError as error:
        raise typer.BadParameter(f"--for: {error}") from None
    if island:
        wanted["island"] = island
    with root_command.connect(ctx) as client:
        found = client.get("/v1/reservations:free", **wanted)
    show(found, output, lambda: table(found["windows"], wording.FREE_TIMES))


@reservation.command("remove")
def remove_reservation(ctx: typer.Context, name: _Name) -> None:
    """Cancel a reservation with all its windows; tasks that name it run no more."""
    with root_command.connect(ctx) as client:
        client.delete(f"/v1/reservations/{find_named(client, 'reservation', name)['id']}")
    err().print(f"{name} is removed.")


def _wanted(
    devices: list[str] | None, labels: list[str] | None, device_ids: list[str] | None
) -> JSON:
    """Return the devices that a call asks for; "none" takes the labels away."""
    body: JSON = {}
    if devices:
        body["devices"] = dict(_number(text) for text in devices)
    if labels:
        body["labels"] = [] if labels == ["none"] else labels
    if device_ids:
        body["device_ids"] = device_ids
    return body


def _number(text: str) -> tuple[str, int]:
    kind, _, number = text.partition("=")
    if not (kind and number.isascii() and number.isdecimal()):
        raise typer.BadParameter(f"must be KIND=NUMBER, such as cuda=8; got {text!r}")
    return kind, int(number)


def _time(text: str, zone: str) -> str:
    """Return a time with its offset; one that is given without is in the zone."""
    try:
        at = datetime.fromisoformat(text)
        at = at if at.tzinfo else at.replace(tzinfo=ZoneInfo(zone))
    except (ValueError, ZoneInfoNotFoundError) as error:
        told = f"must be a time such as 2026-12-07T09:00 in a time zone that exists: {error}"
        raise typer.BadParameter(told) from None
    return at.isoformat()
