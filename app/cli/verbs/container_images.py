"""Verbs for container images, in which commands run: mounts of the sort "image"."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cli import root_command
from app.cli.root_command import DATA, Format, Verbs, app
from app.cli.tables import Output
from app.cli.verbs import mounts
from app.cli.verbs.mounts import Tenants

image = typer.Typer(
    cls=Verbs, help="Container images in which commands can run.", no_args_is_help=True
)
app.add_typer(image, name="image", rich_help_panel=DATA)

_Name = Annotated[str, typer.Argument(metavar="IMAGE", help="name of the container image")]


@image.command("list")
def list_images(ctx: typer.Context, output: Format = Output.table) -> None:
    """List the container images that you may use; an administrator of the platform sees all."""
    none = "No container images: an administrator adds them with `roundhouse image add`."
    mounts.list_sort(ctx, "image", output, none)


@image.command("add")
def add_image(
    ctx: typer.Context,
    name: _Name,
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="OCI layout or root file system on the hosts: a folder or a tar"
        ),
    ],
    tenants: Tenants = "*",
    output: Format = Output.table,
) -> None:
    """Name a container image, in which commands then run with `image: IMAGE`."""
    mounts.add_sort(ctx, {"name": name, "path": path, "sort": "image"}, tenants, output)


@image.command("grant")
def grant_image(
    ctx: typer.Context, name: _Name, tenants: Tenants, output: Format = Output.table
) -> None:
    """Say anew who may use a container image; tasks that run keep it."""
    mounts.grant(ctx, name, tenants, output)


@image.command("remove")
def remove_image(ctx: typer.Context, name: _Name) -> None:
    """Delete the name of a container image; its files stay, and tasks that run keep it."""
    with root_command.connect(ctx) as client:
        client.delete(f"/v1/mounts/{name}")
