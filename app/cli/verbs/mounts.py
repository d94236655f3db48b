"""Verbs for mounts: folders of the hosts that tasks can see, read-only."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cli import root_command, wording
from app.cli.client import JSON, Client
from app.cli.names import find_named
from app.cli.root_command import DATA, Format, Verbs, app
from app.cli.tables import Output, err, show, table

mount = typer.Typer(
    cls=Verbs, help="Folders of the hosts that tasks can see.", no_args_is_help=True
)
app.add_typer(mount, name="mount", rich_help_panel=DATA)

_Name = Annotated[str, typer.Argument(metavar="MOUNT", help="name of the mount")]
Tenants = Annotated[
    str,
    typer.Option(
        help="who may use it, with all tenants below: names or ids separated by commas, or *"
    ),
]
_ALL = "*"


@mount.command("list")
def list_mounts(ctx: typer.Context, output: Format = Output.table) -> None:
    """List the mounts that you may use; an administrator of the platform sees all of them."""
    none = "No mounts: an administrator of the platform adds them with `roundhouse mount add`."
    list_sort(ctx, "folder", output, none)


@mount.command("add")
def add_mount(
    ctx: typer.Context,
    name: _Name,
    path: Annotated[str, typer.Argument(metavar="PATH", help="the folder on the hosts")],
    tenants: Tenants,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="always so: tasks cannot write to a mount")
    ] = True,
    output: Format = Output.table,
) -> None:
    """Name a folder, which tasks then see with `mounts: {/data: MOUNT}`."""
    add_sort(ctx, {"name": name, "path": path, "read_only": read_only}, tenants, output)


@mount.command("grant")
def grant_mount(
    ctx: typer.Context, name: _Name, tenants: Tenants, output: Format = Output.table
) -> None:
    """Say anew who may use a mount; tasks that run keep what they see."""
    grant(ctx, name, tenants, output)


@mount.command("remove")
def remove_mount(ctx: typer.Context, name: _Name) -> None:
    """Delete the name of a mount; the folder stays, and tasks that run keep what they see."""
    with root_command.connect(ctx) as client:
        client.delete(f"/v1/mounts/{name}")


# --- of all sorts ---------------------------------------------------------------------------------


def list_sort(ctx: typer.Context, sort: str, output: Output, empty: str) -> None:
    """List the mounts of one sort."""
    with root_command.connect(ctx) as client:
        found = list(client.items("/v1/mounts", sort=sort))
        rows = _with_tenant_names(client, found)
    columns = wording.IMAGES if sort == "image" else wording.MOUNTS
    show(found, output, lambda: table(rows, columns, empty=empty))


def add_sort(ctx: typer.Context, body: JSON, tenants: str, output: Output) -> None:
    """Register a mount for these tenants."""
    with root_command.connect(ctx) as client:
        made = client.post("/v1/mounts", {**body, "tenants": _ids(client, tenants)})
        rows = _with_tenant_names(client, [made])
    show([made], output, lambda: table(rows, wording.MOUNTS))
    verb = "image" if made["sort"] == "image" else "mount"
    err().print(
        "Hosts look for it within half a minute, where their ROUNDHOUSE_MOUNT_ROOTS"
        f" allow.  `roundhouse {verb} list` counts those that show it.",
        soft_wrap=True,
    )


def grant(ctx: typer.Context, name: str, tenants: str, output: Output) -> None:
    """Say anew which tenants may use a mount."""
    with root_command.connect(ctx) as client:
        found = client.get(f"/v1/mounts/{name}")
        changes = {"tenants": _ids(client, tenants)}
        made = client.patch(f"/v1/mounts/{name}", changes, version=found["version"])
        rows = _with_tenant_names(client, [made])
    show([made], output, lambda: table(rows, wording.MOUNTS))


def _ids(client: Client, tenants: str) -> list[str] | None:
    if tenants == _ALL:
        return None
    return [find_named(client, "tenant", which)["id"] for which in tenants.split(",")]


def _with_tenant_names(client: Client, mounts: list[JSON]) -> list[JSON]:
    if all(mount["tenants"] is None for mount in mounts):
        return mounts
    known = {tenant["id"]: tenant["name"] for tenant in client.items("/v1/tenants")}
    return [
        {**mount, "tenants": mount["tenants"] and [known.get(id, id) for id in mount["tenants"]]}
        for mount in mounts
    ]
