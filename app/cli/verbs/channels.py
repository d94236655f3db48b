"""Verbs for channels: names for addresses in chats and elsewhere that requests tell of events."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cli import root_command, wording
from app.cli.client import JSON, Client
from app.cli.names import find_named
from app.cli.root_command import WORK, Format, Verbs, app
from app.cli.tables import Output, err, show, table
from app.cli.verbs.secrets import hidden_value
from app.cli.verbs.submit import channel_wish

channel = typer.Typer(cls=Verbs, help="Who is told of your requests.", no_args_is_help=True)
app.add_typer(channel, name="channel", rich_help_panel=WORK)

_Name = Annotated[str, typer.Argument(metavar="CHANNEL", help="name or id of a channel")]


@channel.command("list")
def list_channels(ctx: typer.Context, output: Format = Output.table) -> None:
    """List the channels that your requests can name: names and kinds, never addresses."""
    with root_command.connect(ctx) as client:
        found = list(client.items("/v1/channels"))
    show(found, output, lambda: table(found, wording.CHANNELS))


@channel.command("add")
def add_channel(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="what requests call it")],
    kind: Annotated[str, typer.Option(help="slack, teams, mail, or webhook")] = "webhook",
    tenant: Annotated[str, typer.Option(help="name or id of the tenant; default: your own")] = "",
    output: Format = Output.table,
) -> None:
    """Add a channel; its address comes from standard input or a prompt that shows nothing."""
    with root_command.connect_once(ctx) as client:
        body: JSON = {"name": name, "kind": kind, "address": hidden_value(f"Address of {name}")}
        if tenant:
            body["tenant_id"] = find_named(client, "tenant", tenant)["id"]
        made = client.post("/v1/channels", body)
    show(made, output, lambda: wording.channel(made))


@channel.command("test")
def try_channel(ctx: typer.Context, name: _Name, output: Format = Output.table) -> None:
    """Send a test message to a channel."""
    with root_command.connect(ctx) as client:
        sent = client.post(f"/v1/channels/{_id(client, name)}/test", {})
    show([sent], output, lambda: table([sent], wording.DELIVERIES))


@channel.command("deliveries")
def list_channel_deliveries(ctx: typer.Context, name: _Name, output: Format = Output.table) -> None:
    """List the messages sent to a channel, and what became of them."""
    with root_command.connect(ctx) as client:
        found = list(client.items(f"/v1/channels/{_id(client, name)}/deliveries"))
    show(found, output, lambda: table(found, wording.DELIVERIES))


@channel.command("remove")
def remove_channel(ctx: typer.Context, name: _Name) -> None:
    """Remove a channel with its messages; requests that name it go on."""
    with root_command.connect(ctx) as client:
        client.delete(f"/v1/channels/{_id(client, name)}")
    err().print(f"{name} is removed.")


@channel.command("usual")
def set_usual_channels(
    ctx: typer.Context,
    wishes: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME[:EVENT,...]", help="such as ml-alerts:failed,preempted"),
    ] = None,
    none: Annotated[bool, typer.Option("--none", help="tell nobody")] = False,
    output: Format = Output.table,
) -> None:
    """Show or set who is told of your requests without --notify."""
    if wishes and none:
        raise typer.BadParameter("--none goes without names")
    with root_command.connect(ctx) as client:
        if wishes or none:
            body = {"notify": [channel_wish(each) for each in wishes or ()]}
            found = client.put("/v1/me/notifications", body)
        else:
            found = client.get("/v1/me/notifications")
    show(found, output, lambda: table(found["notify"], wording.USUAL_CHANNELS))


def _id(client: Client, name: str) -> str:
    if name.startswith("chn_"):
        return name
    found = [each for each in client.items("/v1/channels") if each["name"] == name]
    if not found:
        raise typer.BadParameter(f"there is no channel {name}; see `roundhouse channel list`")
    if len(found) > 1:
        ids = ", ".join(each["id"] for each in found)
        raise typer.BadParameter(f"several tenants have a channel {name}; name its id: {ids}")
    return str(found[0]["id"])
