"""Verbs for environments: the packages that requests bring."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from app.cli import root_command, wording
from app.cli.root_command import DATA, Format, Verbs, app
from app.cli.tables import Output, show, table

environment = typer.Typer(cls=Verbs, help="Packages that requests bring.", no_args_is_help=True)
app.add_typer(environment, name="environment", rich_help_panel=DATA)


_EnvironmentId = Annotated[str, typer.Argument(metavar="ENVIRONMENT", help="id of the environment")]


@environment.command("list")
def list_environments(ctx: typer.Context, output: Format = Output.table) -> None:
    """List what the files of packages were locked to, newest first."""
    with root_command.connect(ctx) as client:
        found = list(client.items("/v1/environments"))
    none = "No environments: name a file of packages in a request, as `environment`."
    show(found, output, lambda: table(found, wording.ENVIRONMENTS, empty=none))


@environment.command("show")
def show_environment(
    ctx: typer.Context,
    id: _EnvironmentId,
    output: Format = Output.table,
) -> None:
    """Show the lock: each package with its version and the hashes of its wheels."""
    with root_command.connect(ctx) as client:
        found = client.get(f"/v1/environments/{id}")
    if output in (Output.json, Output.yaml):
        show(found, output, lambda: "")
    else:  # print the lock unchanged, so that it can be kept in a file
        told = found["lock"] or found["message"] or found["state"]
        sys.stdout.write(told.rstrip("\n") + "\n")


@environment.command("refresh")
def refresh_environment(
    ctx: typer.Context,
    id: _EnvironmentId,
    output: Format = Output.table,
) -> None:
    """Have the file locked anew, to newer versions, when a request names it next."""
    with root_command.connect(ctx) as client:
        found = client.post(f"/v1/environments/{id}/refresh")
    show(found, output, lambda: f"{found['path']} is {found['state']}: {_NEXT}")


_NEXT = "the next request that names it has its versions chosen anew"
