"""The verb for budgets: shows what is spent and left, sets a budget, or adds to it."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cli import root_command, wording
from app.cli.client import JSON, Client
from app.cli.names import find_named
from app.cli.root_command import ADMIN, Format, app
from app.cli.tables import Output, show
from app.core.units import parse_seconds

_HOURS = "KIND=DEVICE-HOURS, such as cuda=1000; * means all kinds together; repeatable"


@app.command(rich_help_panel=ADMIN)
def budget(
    ctx: typer.Context,
    which: Annotated[
        str, typer.Argument(metavar="[TENANT]", help="name or id; default: your own tenant")
    ] = "",
    user: Annotated[str, typer.Option(help="the budget of this user instead")] = "",
    each_user: Annotated[
        bool,
        typer.Option("--each-user", help="the budget of each user of the TENANT that has none"),
    ] = False,
    grant: Annotated[
        list[str] | None, typer.Option("--grant", help=f"set the budget: {_HOURS}")
    ] = None,
    period: Annotated[str, typer.Option(help="with --grant: month, week, or days: 14d")] = "",
    timezone: Annotated[
        str, typer.Option(help="with --grant: zone in which periods begin, as Europe/Berlin")
    ] = "",
    at: Annotated[
        list[str] | None,
        typer.Option(
            "--at",
            help="with --grant: PERCENT=notify, demote, hold or pause; repeatable; default: "
            "100=pause",
        ),
    ] = None,
    carry: Annotated[
        float | None, typer.Option(help="with --grant: part of what is left for the next period")
    ] = None,
    to: Annotated[
        list[str] | None,
        typer.Option("--to", help="with --grant: a channel that is told; repeatable"),
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="remove the budget")] = False,
    add: Annotated[
        str, typer.Option(help="add to this period: KIND=DEVICE-HOURS, such as cuda=40 or cuda=-5")
    ] = "",
    why: Annotated[str, typer.Option(help="with --add: the reason, for the audit log")] = "",
    output: Format = Output.table,
) -> None:
    """Show the budget of a tenant or user: what is spent, left, and when it runs out."""
    terms = {"period": period, "timezone": timezone, "at": at, "carry": carry, "to": to}
    given: JSON = {name: value for name, value in terms.items() if value not in ("", None)}
    if given and not grant:
        raise typer.BadParameter(f"--{next(iter(given))} needs --grant")
    if bool(add) != bool(why):
        raise typer.BadParameter("--add and --why belong together")
    if sum((bool(grant), remove, bool(add))) > 1:
        raise typer.BadParameter("give one of --grant, --add and --remove")
    if each_user and (user or add):
        raise typer.BadParameter("--each-user goes with a TENANT, and neither --user nor --add")
    with root_command.connect(ctx) as client:
        path, owner = _owner(client, which, user)
        if each_user:
            new = _budget(grant, given) if grant else None
            default = _each_user(client, path, owner, new, remove)
            show({"budget": default}, output, lambda: wording.budget_of_each_user(default))
            return
        if grant or remove:
            body = None if remove else _budget(grant or [], given)
            client.patch(path, {"budget": body}, version=owner["version"])
        if add:
            kind, hours = _hours(add)
            more = {"kind": kind, "device_hours": hours, "why": why}
            client.post(f"{path}/budget/adjustments", more)
        if remove:
            return
        found = client.get(f"{path}/budget")
    show(found, output, lambda: wording.budget(found))


def _each_user(
    client: Client, path: str, tenant: JSON, new: JSON | None, remove: bool
) -> JSON | None:
    """Return the budget of each user of a tenant, after it was set or removed."""
    if new is not None or remove:
        limits = {**tenant["user_defaults"], "budget": new}
        tenant = client.patch(path, {"user_defaults": limits}, version=tenant["version"])
    default: JSON | None = tenant["user_defaults"]["budget"]
    return default


def _owner(client: Client, which: str, user: str) -> tuple[str, JSON]:
    """Return the address and the answer of the tenant or user that is meant."""
    if user and which:
        raise typer.BadParameter("give a TENANT or --user, not both")
    if user:
        found = find_named(client, "user", user)
        return f"/v1/users/{found['id']}", found
    if not which:
        which = client.get("/v1/me")["tenant_id"]
    found = find_named(client, "tenant", which)
    return f"/v1/tenants/{found['id']}", found


def _budget(grant: list[str], given: JSON) -> JSON:
    body: JSON = {"device_hours": dict(_hours(text) for text in grant)}
    for name in ("timezone", "carry", "to"):
        if name in given:
            body[name] = given[name]
    if "at" in given:
        body["at"] = dict(_action(text) for text in given["at"])
    if "period" in given:
        body["period"] = _period(given["period"])
    return body


def _hours(text: str) -> tuple[str, float]:
    kind, _, hours = text.partition("=")
    try:
        return kind, float(hours.removesuffix("h"))
    except ValueError:
        told = f"must be KIND=DEVICE-HOURS, such as cuda=1000; got {text!r}"
        raise typer.BadParameter(told) from None


def _action(text: str) -> tuple[str, str]:
    percent, _, action = text.partition("=")
    if not (percent.isascii() and percent.isdecimal() and action):
        raise typer.BadParameter(f"must be PERCENT=ACTION, such as 80=notify; got {text!r}")
    return percent, action


def _period(text: str) -> str | JSON:
    if text in ("month", "week"):
        return text
    try:
        days = parse_seconds(text) / 86400
    except ValueError:
        days = 0.5
    if days != int(days):
        raise typer.BadParameter(f"must be month, week, or days such as 14d; got {text!r}")
    return {"days": int(days)}
