"""Verbs for secrets: values that tasks get as environment variables, never shown again."""

from __future__ import annotations

import sys
from typing import Annotated
from urllib.parse import quote, urlencode

import typer
from rich.text import Text

from app.cli import root_command, wording
from app.cli.client import JSON, Client
from app.cli.names import find_named
from app.cli.root_command import WORK, Format, Verbs, app
from app.cli.tables import Output, err, show, table

secret = typer.Typer(cls=Verbs, help="Tokens and passwords for tasks.", no_args_is_help=True)
app.add_typer(secret, name="secret", rich_help_panel=WORK)

_Name = Annotated[
    str, typer.Argument(metavar="NAME", help="environment variable, such as HF_TOKEN")
]
_Wide = Annotated[
    bool, typer.Option("--tenant-wide", help="for all users of your tenant; administrators only")
]
_Tenant = Annotated[
    str, typer.Option("--tenant", help="with --tenant-wide: name or id of a tenant")
]


@secret.command("list")
def list_secrets(ctx: typer.Context, output: Format = Output.table) -> None:
    """List your secrets and those of your tenant: names and times, never values."""
    with root_command.connect(ctx) as client:
        found = list(client.items("/v1/secrets"))
    show(found, output, lambda: table(found, wording.SECRETS))


@secret.command("set")
def set_secret(
    ctx: typer.Context,
    name: _Name,
    tenant_wide: _Wide = False,
    tenant: _Tenant = "",
    output: Format = Output.table,
) -> None:
    """Set a secret, from standard input or a prompt that shows nothing.

    The line end behind the value is not part of it.
    """
    with root_command.connect(ctx) as client:
        path = _path(client, name, tenant_wide, tenant)
        made = client.put(path, {"value": hidden_value(f"Value of {name}")})
    show(made, output, lambda: _set_sentence(made))


@secret.command("remove")
def remove_secret(
    ctx: typer.Context, name: _Name, tenant_wide: _Wide = False, tenant: _Tenant = ""
) -> None:
    """Remove a secret: tasks that name it fail at their next launch."""
    with root_command.connect(ctx) as client:
        client.delete(_path(client, name, tenant_wide, tenant))
    err().print(f"{name} is removed.")


def hidden_value(what: str) -> str:
    """Return a line of standard input, or what a person types without seeing it."""
    if sys.stdin.isatty():
        return str(typer.prompt(what, hide_input=True, err=True))
    return sys.stdin.read().removesuffix("\n").removesuffix("\r")


def _path(client: Client, name: str, tenant_wide: bool, tenant: str) -> str:
    if tenant and not tenant_wide:
        raise typer.BadParameter("--tenant needs --tenant-wide")
    query: JSON = {"tenant_wide": "true"} if tenant_wide else {}
    if tenant:
        query["tenant_id"] = find_named(client, "tenant", tenant)["id"]
    return f"/v1/secrets/{quote(name, safe='')}" + (f"?{urlencode(query)}" if query else "")


def _set_sentence(made: JSON) -> Text:
    whose = "your tenant" if made["user_id"] is None else "you"
    return Text(f"{made['name']} is set for {whose} (version {made['version']}).")
