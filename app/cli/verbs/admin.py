"""Verbs for administrators: tenants, users, enrolment, webhooks, keys, service accounts."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from rich.text import Text

from app.cli import root_command, wording
from app.cli.client import JSON, Client
from app.cli.names import find_named
from app.cli.root_command import ADMIN, NOT_FOUND, Format, Verbs, app
from app.cli.tables import Output, show, table
from app.core.units import parse_seconds

Weight = Annotated[
    float | None,
    typer.Option("--weight", "-w", help="weight among siblings; counts for usage from now on"),
]
ForPast = Annotated[
    bool, typer.Option("--for-past-usage", help="the weight counts for usage of the past, too")
]


class WorkAction(StrEnum):
    cancel = "cancel"
    pause = "pause"
    resume = "resume"


_ACTIONS = {
    WorkAction.cancel: "cancel",
    WorkAction.pause: "hold",
    WorkAction.resume: "release",
}
_Kinds = list[str] | None
_A_BOUND = "a number, or none"
_LIMIT = "maximum of devices: KIND=DEVICES or KIND=none; * means all kinds together"
_Limit = Annotated[_Kinds, typer.Option("--limit", help=_LIMIT)]
_MaxRunning = Annotated[str, typer.Option(help=f"most running tasks: {_A_BOUND}")]
_MaxQueued = Annotated[str, typer.Option(help=f"most queued tasks: {_A_BOUND}")]
_MaxSessions = Annotated[str, typer.Option(help=f"most sessions that have not ended: {_A_BOUND}")]
_MaxDuration = Annotated[str, typer.Option(help="longest time on devices, such as 4h; or none")]


@app.command(rich_help_panel=ADMIN)
def tenants(ctx: typer.Context, output: Format = Output.table) -> None:
    """List the tenants that you can see: weight, guarantee, limit, tier."""
    with root_command.connect(ctx) as client:
        found = list(client.items("/v1/tenants"))
    show(found, output, lambda: table(wording.as_tree(found), wording.TENANTS))


@app.command(rich_help_panel=ADMIN)
def tenant(
    ctx: typer.Context,
    which: Annotated[str, typer.Argument(metavar="TENANT", help="name or id of the tenant")],
    new: Annotated[bool, typer.Option("--new", help="create the tenant")] = False,
    under: Annotated[str, typer.Option(help="with --new: the parent tenant")] = "",
    weight: Weight = None,
    for_past_usage: ForPast = False,
    guarantee: Annotated[
        _Kinds,
        typer.Option(
            "--guarantee", help="guaranteed devices: KIND=DEVICES or KIND=none; repeatable"
        ),
    ] = None,
    limit: _Limit = None,
    tier: Annotated[str, typer.Option(help="highest tier for its requests")] = "",
    max_running: _MaxRunning = "",
    max_queued: _MaxQueued = "",
    each_user: Annotated[
        _Kinds,
        typer.Option(
            "--each-user",
            help="a limit of each user without an own one, such as max_running=8, limit.cuda=2 or "
            "max_queued=none; repeatable",
        ),
    ] = None,
    idle_pause: Annotated[
        str, typer.Option(help="seconds after which a task that computes nothing is paused; none")
    ] = "",
    session_end: Annotated[
        str, typer.Option(help="seconds without input after which a session ends; none")
    ] = "",
    network: Annotated[
        _Kinds,
        typer.Option(
            "--network",
            help="what its tasks may reach: HOST:PORT, such as huggingface.co:443; repeatable, and "
            "replaces the list; none: nothing; inherit: as the tenant above",
        ),
    ] = None,
    work: Annotated[
        WorkAction | None,
        typer.Option("--work", help="what to do with all its requests and those below it"),
    ] = None,
    output: Format = Output.table,
) -> None:
    """Show a tenant, and change it by the given options; or create one.

    `--work pause` pauses all of its requests.
    """
    if under and not new:
        raise typer.BadParameter("--under needs --new: an existing tenant cannot be moved here")
    with root_command.connect(ctx) as client:
        found = {"guarantee": {}, "limit": {}} if new else find_named(client, "tenant", which)
        changed: JSON = {} if weight is None else {"weight": weight}
        changed |= {"for_past_usage": True} if for_past_usage and not new else {}
        changed |= {"tier": tier} if tier else {}
        for name, kinds in (("guarantee", guarantee), ("limit", limit)):
            if kinds:
                changed[name] = _changed_kinds(found[name], kinds)
        bounds = {"max_running": max_running, "max_queued": max_queued, "idle_pause_s": idle_pause}
        bounds["session_end_s"] = session_end
        for name, bound in bounds.items():
            if bound:
                changed[name] = _number_or_none(name, bound)
        if network:
            changed["network"] = _network_policy(network)
        if each_user:
            changed["user_defaults"] = _user_defaults(found.get("user_defaults") or {}, each_user)
        if new:
            above = {"parent_id": find_named(client, "tenant", under)["id"]} if under else {}
            found = client.post("/v1/tenants", {"name": which, **above, **changed})
        else:
            found = _changed(client, "tenant", found, changed)
        if work is not None:
            done = _change_work(client, found, _ACTIONS[work])
            show(done, output, lambda: wording.work_taken(which, done, work.value))
            return
    show(found, output, lambda: wording.tenant(found))


def _change_work(client: Client, tenant: JSON, action: str) -> JSON:
    """Cancel, hold or release the work of a tenant, call by call; return how many requests."""
    requests, more = 0, True
    while more:
        done = client.post(f"/v1/tenants/{tenant['id']}/{action}")
        requests, more = requests + done["requests"], done["more"]
    return {"requests": requests}


@app.command(rich_help_panel=ADMIN)
def users(ctx: typer.Context, output: Format = Output.table) -> None:
    """List the users that you can see, people and service accounts."""
    with root_command.connect(ctx) as client:
        found = list(client.items("/v1/users"))
        rows = _with_tenants(client, found)
    show(found, output, lambda: table(rows, wording.USERS))


@app.command(rich_help_panel=ADMIN)
def user(
    ctx: typer.Context,
    which: Annotated[str, typer.Argument(metavar="USER", help="name or id of the user")],
    new: Annotated[bool, typer.Option("--new", help="create the user")] = False,
    tenant: Annotated[
        str, typer.Option(help="with --new: tenant of the user; default: your own")
    ] = "",
    weight: Weight = None,
    for_past_usage: ForPast = False,
    limit: _Limit = None,
    max_running: _MaxRunning = "",
    max_queued: _MaxQueued = "",
    max_sessions: _MaxSessions = "",
    max_duration: _MaxDuration = "",
    delete: Annotated[
        bool, typer.Option("--delete", help="delete the user with all keys; the history stays")
    ] = False,
    output: Format = Output.table,
) -> None:
    """Show a user of your tenant, and change it by the given options; or create or delete one.

    `roundhouse key add USER` gives them a key.
    """
    if tenant and not new:
        raise typer.BadParameter("--tenant needs --new: an existing user cannot change tenants")
    given: JSON = {} if weight is None else {"weight": weight}
    bounds = {"max_running": max_running, "max_queued": max_queued, "max_sessions": max_sessions}
    given |= {name: _number_or_none(name, bound) for name, bound in bounds.items() if bound}
    if max_duration:
        given["max_duration_s"] = _seconds_or_none("--max-duration", max_duration)
    if delete and (new or limit or given or for_past_usage):
        raise typer.BadParameter("--delete needs no other options")
    with root_command.connect(ctx) as client:
        found = {} if new else find_named(client, "user", which)
        if delete:
            client.delete(f"/v1/users/{found['id']}")
            return
        if limit:
            given["limit"] = _changed_kinds(found.get("limit") or {}, limit) or None
        if new:
            found = _new_user(client, {"name": which, **given}, tenant)
        else:
            given |= {"for_past_usage": True} if for_past_usage else {}
            found = _changed(client, "user", found, given)
    show(found, output, lambda: wording.user(found))


def _new_user(client: Client, body: JSON, tenant: str) -> JSON:
    whose = {"tenant_id": find_named(client, "tenant", tenant)["id"]} if tenant else {}
    return client.post("/v1/users", {**body, **whose})


device = typer.Typer(cls=Verbs, help="Enrol and revoke devices.", no_args_is_help=True)
app.add_typer(device, name="device", rich_help_panel=ADMIN)

_DeviceId = Annotated[str, typer.Argument(metavar="DEVICE", help="a device such as gpu7.0")]


@device.command("key")
def show_device_key() -> None:
    """Print the public key of this host, with which an administrator enrols its devices."""
    root_command.require_service()
    from app.settings import settings
    from app.storage.signing import Signer

    typer.echo(Signer.at(settings().host_key_file).public)


@device.command("island-key")
def show_island_key(
    ctx: typer.Context,
    island: Annotated[str, typer.Argument(metavar="ISLAND")] = "local",
) -> None:
    """Print the public key of an island, which its devices need to start."""
    with root_command.connect(ctx) as client:
        key = client.get(f"/v1/islands/{island}")["key"]
    if key is None:
        root_command.fail(
            NOT_FOUND, Text(f"Island {island} has no key yet; its scheduler creates the key.")
        )
    typer.echo(key)


@device.command("enrol")
def enrol_devices(
    ctx: typer.Context,
    devices: Annotated[
        list[str],
        typer.Argument(metavar="NAME...", help="the host, or single devices of it"),
    ],
    key: Annotated[
        str, typer.Option(help="public key that `roundhouse device key` prints on that host")
    ],
    output: Format = Output.table,
) -> None:
    """Enrol a host: messages about its devices that it signs with its key are accepted."""
    with root_command.connect(ctx) as client:
        made = [
            client.post("/v1/enrolments", {"device_id": each, "key": key.strip()})
            for each in devices
        ]
    show(made, output, lambda: table(made, wording.ENROLMENTS))


@device.command("list")
def list_enrolments(ctx: typer.Context, output: Format = Output.table) -> None:
    """List the enrolled hosts and devices, and their keys."""
    with root_command.connect(ctx) as client:
        found = list(client.items("/v1/enrolments"))
    show(found, output, lambda: table(found, wording.ENROLMENTS))


@device.command("revoke")
def revoke_device(ctx: typer.Context, id: _DeviceId, output: Format = Output.table) -> None:
    """Ignore a host or a device from now on; no step is lost if you `drain` it first."""
    with root_command.connect(ctx) as client:
        found = client.delete(f"/v1/enrolments/{id}")
    show([found], output, lambda: table([found], wording.ENROLMENTS))


webhook = typer.Typer(cls=Verbs, help="URLs notified when a request ends.", no_args_is_help=True)
app.add_typer(webhook, name="webhook", rich_help_panel=ADMIN)

_WebhookId = Annotated[str, typer.Argument(metavar="WEBHOOK", help="id of the webhook")]


@webhook.command("list")
def list_webhooks(ctx: typer.Context, output: Format = Output.table) -> None:
    """List the webhooks of the tenants that you can see."""
    with root_command.connect(ctx) as client:
        found = list(client.items("/v1/webhooks"))
    show(found, output, lambda: table(found, wording.WEBHOOKS))


@webhook.command("add")
def add_webhook(
    ctx: typer.Context,
    url: Annotated[str, typer.Argument(metavar="URL", help="a public http or https address")],
    on: Annotated[
        list[str] | None,
        typer.Option(
            "--on", help="done, failed, cancelled, or held for a lot; repeatable; default: all"
        ),
    ] = None,
    output: Format = Output.table,
) -> None:
    """Add a webhook, called when requests end or lots are held; prints its secret, once."""
    body: JSON = {"url": url} | ({"events": [f"request.{end}" for end in on]} if on else {})
    with root_command.connect_once(ctx) as client:
        made = client.post("/v1/webhooks", body)
    show(made, output, lambda: wording.webhook(made))


@webhook.command("rotate")
def rotate_webhook(
    ctx: typer.Context,
    id: _WebhookId,
    overlap_s: Annotated[float, typer.Option(help="seconds in which both secrets sign")] = 86_400.0,
    output: Format = Output.table,
) -> None:
    """Give a webhook a new secret, and print the secret, once."""
    with root_command.connect_once(ctx) as client:
        made = client.post(f"/v1/webhooks/{id}/rotate", {"overlap_s": overlap_s})
    show(made, output, lambda: wording.webhook(made))


@webhook.command("test")
def try_webhook(ctx: typer.Context, id: _WebhookId, output: Format = Output.table) -> None:
    """Send a test message to a webhook."""
    with root_command.connect(ctx) as client:
        sent = client.post(f"/v1/webhooks/{id}/test", {})
    show([sent], output, lambda: table([sent], wording.DELIVERIES))


@webhook.command("deliveries")
def list_deliveries(ctx: typer.Context, id: _WebhookId, output: Format = Output.table) -> None:
    """List the messages sent to a webhook, and what became of them."""
    with root_command.connect(ctx) as client:
        found = list(client.items(f"/v1/webhooks/{id}/deliveries"))
    show(found, output, lambda: table(found, wording.DELIVERIES))


@webhook.command("redeliver")
def redeliver(
    ctx: typer.Context,
    id: Annotated[str, typer.Argument(metavar="DELIVERY", help="id of the delivery")],
    output: Format = Output.table,
) -> None:
    """Send a message again, at once."""
    with root_command.connect(ctx) as client:
        sent = client.post(f"/v1/deliveries/{id}/redeliver", {})
    show([sent], output, lambda: table([sent], wording.DELIVERIES))


@webhook.command("delete")
def delete_webhook(ctx: typer.Context, id: _WebhookId) -> None:
    """Delete a webhook and its messages."""
    with root_command.connect(ctx) as client:
        client.delete(f"/v1/webhooks/{id}")


key = typer.Typer(cls=Verbs, help="API keys: create, rotate, revoke.", no_args_is_help=True)
account = typer.Typer(cls=Verbs, help="Service accounts: users that are programs.")
app.add_typer(key, name="key", rich_help_panel=ADMIN)
app.add_typer(account, name="account", rich_help_panel=ADMIN)

_KeyId = Annotated[str, typer.Argument(metavar="KEY", help="public id of the key: rh_ID_...")]


@key.command("list")
def list_keys(ctx: typer.Context, output: Format = Output.table) -> None:
    """List the keys of the users that you can see; the secrets are never shown."""
    with root_command.connect(ctx) as client:
        found = list(client.items("/v1/keys"))
        users = {user["id"]: user["name"] for user in client.items("/v1/users")}
    rows = [{**key, "user": users.get(key["user_id"])} for key in found]
    show(found, output, lambda: table(rows, wording.KEYS))


@key.command("add")
def add_key(
    ctx: typer.Context,
    user: Annotated[
        str, typer.Argument(metavar="USER", help="name or id of a user or a service account")
    ],
    name: Annotated[str, typer.Option(help="purpose of the key; default: the user's name")] = "",
    role: Annotated[str, typer.Option(help="viewer, member, tenant_admin")] = "member",
    scope: Annotated[
        list[str] | None,
        typer.Option(help="restrict the key to this scope, such as work:write; repeatable"),
    ] = None,
    expires: Annotated[str, typer.Option(help="expiry, such as 2026-11-21T12:00:00Z")] = "",
    output: Format = Output.table,
) -> None:
    """Create a key; prints it, once."""
    body: JSON = {"role": role, "name": name or user, "scopes": scope or None}
    body |= {"expires_at": expires} if expires else {}
    with root_command.connect_once(ctx) as client:
        made = client.post("/v1/keys", body | {"user_id": find_named(client, "user", user)["id"]})
    show(made, output, lambda: wording.key(made))


@key.command("rotate")
def rotate_key(
    ctx: typer.Context,
    id: _KeyId,
    overlap_s: Annotated[
        float, typer.Option(help="seconds in which the old key stays valid")
    ] = 86_400.0,
    output: Format = Output.table,
) -> None:
    """Create a key that replaces this one; prints it, once."""
    with root_command.connect_once(ctx) as client:
        made = client.post(f"/v1/keys/{id}/rotate", {"overlap_s": overlap_s})
    show(made, output, lambda: wording.key(made))


@key.command("revoke")
def revoke_key(ctx: typer.Context, id: _KeyId) -> None:
    """Revoke a key: it gives no access from now on."""
    with root_command.connect(ctx) as client:
        client.delete(f"/v1/keys/{id}")


@key.command("revoke-all")
def revoke_user_keys(
    ctx: typer.Context,
    user: Annotated[str, typer.Argument(metavar="USER", help="name or id of the user")],
    output: Format = Output.table,
) -> None:
    """Revoke all keys of a user, and sign out the browsers: for a stolen laptop."""
    with root_command.connect(ctx) as client:
        done = client.delete(f"/v1/users/{find_named(client, 'user', user)['id']}/keys")
    show(done, output, lambda: wording.keys_revoked(user, done))


@account.command("list")
def list_accounts(ctx: typer.Context, output: Format = Output.table) -> None:
    """List the service accounts of the tenants that you can see."""
    with root_command.connect(ctx) as client:
        found = list(client.items("/v1/users", service=True))
        rows = _with_tenants(client, found)
    show(found, output, lambda: table(rows, wording.ACCOUNTS))


@account.command("add")
def add_account(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    tenant: Annotated[str, typer.Option(help="name or id of the tenant; default: your own")] = "",
    output: Format = Output.table,
) -> None:
    """Create a service account; `roundhouse key add NAME` gives it a key."""
    with root_command.connect(ctx) as client:
        made = _new_user(client, {"name": name, "service": True}, tenant)
        rows = _with_tenants(client, [made])
    show([made], output, lambda: table(rows, wording.ACCOUNTS))


def _with_tenants(client: Client, users: list[JSON]) -> list[JSON]:
    """Add the name of its tenant to each user."""
    names = {tenant["id"]: tenant["name"] for tenant in client.items("/v1/tenants")}
    return [{**user, "tenant": names.get(user["tenant_id"])} for user in users]


def _changed(client: Client, kind: str, found: JSON, changes: JSON) -> JSON:
    if not changes:
        return found
    return client.patch(f"/v1/{kind}s/{found['id']}", changes, version=found["version"])


def _network_policy(given: list[str]) -> list[str] | None:
    """Return the policy of a tenant; None if it has none of its own."""
    if given == ["inherit"]:
        return None
    return [] if given == ["none"] else given


def _changed_kinds(now: JSON, given: list[str]) -> JSON:
    """Return `now` with each KIND=DEVICES set, and each KIND=none removed."""
    kinds = dict(now)
    for text in given:
        kind, equals, devices = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"must be KIND=DEVICES, such as cuda=4; got {text!r}")
        kinds[kind] = _number_or_none(kind, devices)
    return {kind: devices for kind, devices in kinds.items() if devices is not None}


def _user_defaults(now: JSON, given: list[str]) -> JSON:
    """Return limits of each user with each NAME=VALUE set; a VALUE `none` removes one."""
    limits = {name: value for name, value in now.items() if value is not None}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"must be NAME=VALUE, such as max_running=8; got {text!r}")
        if name.startswith("limit."):
            kind = name.removeprefix("limit.")
            limits["limit"] = _changed_kinds(limits.get("limit", {}), [f"{kind}={value}"]) or None
        elif name == "max_duration_s":
            limits[name] = _seconds_or_none(name, value)
        else:
            limits[name] = _number_or_none(name, value)
    return {name: value for name, value in limits.items() if value is not None}


def _seconds_or_none(name: str, text: str) -> float | None:
    if text == "none":
        return None
    try:
        return float(text) if text.replace(".", "", 1).isdecimal() else parse_seconds(text)
    except ValueError as error:
        raise typer.BadParameter(f"{name} must be {error}, or none; got {text!r}") from error


def _number_or_none(name: str, text: str) -> int | None:
    if text != "none" and not (text.isascii() and text.isdecimal()):
        raise typer.BadParameter(f"{name} must be {_A_BOUND}; got {text!r}")
    return None if text == "none" else int(text)
