"""The words of the `roundhouse` command: which facts of an answer a person sees, and how.

One function or list of columns for each kind of answer.  Nothing is asked or printed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from operator import itemgetter

from rich.console import Group, RenderableType
from rich.text import Text

from app.bundling import IGNORE_FILE, Bundle
from app.client import JSON, Problem, Unreachable
from app.core.messages import ARTIFACTS
from app.terminal import Column, ago, cell, clock, facts, seconds, size, state, table, words

ENDED = frozenset({"done", "failed", "cancelled"})

# --- requests -------------------------------------------------------------------------------------

REQUESTS = [
    Column("ID", lambda r: r["id"]),
    Column("NAME", lambda r: r["name"]),
    Column("STATE", lambda r: _request_state(r)),
    Column("TENANT", lambda r: r["tenant"]),
    Column("USER", lambda r: r["user"]),
    Column("TASKS", lambda r: _counted(r["task_states"])),
    Column("SUBMITTED", lambda r: ago(r["submitted_at"])),
]

VALIDATED = [
    Column("TASK", lambda t: t["name"]),
    Column("TYPE", lambda t: t["type"]),
    Column("DEVICE", lambda t: t["kind"]),
    Column("NEEDS", lambda t: ", ".join(need["task"] for need in t["needs"])),
]

#: A request or a task that was asked to change.
WISHED = [
    Column("ID", lambda x: x["id"]),
    Column("NAME", lambda x: x["name"]),
    Column("STATE", lambda x: state(x["state"])),
    Column("ASKED", lambda x: _asked(x) or _too_late(x)),
]

WISHED_TASKS = [*WISHED, Column("DEVICES", lambda t: _width(t))]


def accepted(request: JSON) -> Text:
    text = words(f"Accepted as {request['id']}: {request['name']}, {request['state']}.")
    return text.append(f"\n  roundhouse why {request['id']}\n  roundhouse logs -f {request['id']}")


def ended(request: JSON) -> RenderableType:
    held = sum(map(_device_us, request["tasks"]))
    pauses = sum(task["pauses"] for task in request["tasks"])
    lost = sum(task["lost_steps"] for task in request["tasks"])
    counts = f"{_times(pauses, 'pause')}, {_times(lost, 'lost step')}"
    told = Text.assemble(
        words(f"{request['name']} is "),
        state(request["state"]),
        f": {seconds(held)} of device time, {counts}.",
    )
    failed = [task for task in request["tasks"] if task["state"] == "failed"]
    return Group(told, *_results(request["tasks"]), *map(failure, failed))


def _device_us(task: JSON) -> int:
    """Of its seat and of what was lent to it besides."""
    return int(task["held_us"] + task["guest_held_us"])


def request(value: JSON) -> RenderableType:
    head = facts(
        [
            ("request", value["id"]),
            ("name", value["name"]),
            ("state", _request_state(value)),
            ("owner", f"{value['user']} of {value['tenant']}"),
            ("tier", value["tier"]),
            ("priority", value["priority"] or None),
            ("labels", value["labels"]),
            ("bundle", value["bundle"]),
            ("submitted", ago(value["submitted_at"])),
            ("ended", ago(value["ended_at"])),
        ]
    )
    tasks = value["tasks"]
    failures = [failure(task) for task in tasks if task["state"] == "failed"]
    return Group(head, Text(), table(tasks, TASKS), *_results(tasks), *failures)


def _results(tasks: Iterable[JSON]) -> list[Text]:
    """A line each, since a result may be far wider than a column."""
    return [
        Text.assemble("\n", words(f"{task['name']} gave ", "dim"), cell(task["result"]))
        for task in tasks
        if task["result"]
    ]


def _request_state(value: JSON) -> Text:
    """A started request of which nothing is on a device is paused if it is held, else it waits."""
    live = value["task_states"].keys() - ENDED
    if value["state"] != "running" or not live or live - {"blocked", "waiting"}:
        return state(value["state"])
    return state("paused" if value["hold"] else "waiting")


def _checkpoint_state(checkpoint: JSON) -> str:
    if checkpoint["damaged_at"]:
        return "damaged"
    return "being deleted" if checkpoint["deleted_at"] else "kept"


def _asked(changed: JSON) -> str:
    """What was asked of a request or task and is written down, though perhaps not yet done."""
    tasks = [task for task in changed.get("tasks", [changed]) if task["state"] not in ENDED]
    if any(task["cancel_asked"] for task in tasks):
        return "cancel"
    if holders := {task["hold"] for task in tasks} - {""}:
        return f"held by {', '.join(sorted(holders))}"
    if places := {to for task in tasks if (to := _where_to(task))}:
        return f"move to {', '.join(sorted(places))}"
    return ""


def _width(task: JSON) -> str:
    least, most = task["devices_min"], task["devices_max"]
    return f"{most}" if least == most else f"{least} to {most}"


def _too_late(changed: JSON) -> str:
    return f"already {changed['state']}; nothing changed" if changed["state"] in ENDED else ""


def _counted(states: JSON) -> str:
    return ", ".join(f"{count} {name}" for name, count in states.items())


def _times(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"


# --- tasks ----------------------------------------------------------------------------------------

TASKS = [
    Column("TASK", lambda t: t["name"]),
    Column("ID", lambda t: t["id"]),
    Column("STATE", lambda t: _task_state(t)),
    Column("DEVICE", lambda t: _seats(t) or (t["image_on"] and f"({t['image_on']})")),
    Column("STEP", lambda t: t["step"], right=True),
    Column("HELD", lambda t: seconds(_device_us(t)), right=True),
    Column("PAUSES", lambda t: t["pauses"], right=True),
    Column("LOST", lambda t: t["lost_steps"], right=True),
    Column("METRICS", lambda t: t["metrics"]),
]

OUTPUTS = [
    Column("TASK", lambda o: o["task"]),
    Column("OUTPUT", lambda o: o["name"]),
    Column("SIZE", lambda o: size(o["size_bytes"]), right=True),
    Column("FILE", lambda o: o["file"] or "for tasks only; publish it to have a file"),
    Column("DATABLOCK", lambda o: o["datablock"]),
]


def outputs(tasks: Iterable[JSON]) -> list[JSON]:
    """Each with the name of the `file` that it is downloaded as; None for what is in no format."""
    return [
        {
            "task": task["name"],
            "task_id": task["id"],
            "name": name,
            "size_bytes": kept["size_bytes"],
            "file": _file_name(f"{task['name']}-{name}", kept.get("format")),
            "datablock": kept.get("datablock"),
        }
        for task in tasks
        for name, kept in sorted(task["outputs"].items())
    ]


def _file_name(name: str, format: str | None) -> str | None:
    if name.endswith(f"-{ARTIFACTS}"):
        return name
    return f"{name}.{format}" if format else None


CHECKPOINTS = [
    Column("ID", lambda c: c["id"]),
    Column("STEP", lambda c: c["step"], right=True),
    Column("SIZE", lambda c: size(c["size_bytes"]), right=True),
    Column("NEW", lambda c: size(c["new_bytes"]), right=True),
    Column("HOST", lambda c: c["host"]),
    Column("WRITTEN", lambda c: ago(c["created_at"])),
    Column("STATE", lambda c: _checkpoint_state(c)),
]

DATABLOCKS = [
    Column("DATABLOCK", lambda b: f"{b['name']}@{b['version']}"),
    Column("SIZE", lambda b: size(b["size_bytes"]), right=True),
    Column("TENSORS", lambda b: _tensors(b)),
    Column("NEEDED BY", lambda b: b["holders"] and _times(b["holders"], "task")),
    Column("FROM", lambda b: b["task_id"] or "an upload"),
    Column("MADE", lambda b: ago(b["created_at"])),
]


def datablock(value: JSON) -> RenderableType:
    return facts(
        [
            ("datablock", f"{value['name']}@{value['version']}"),
            ("size", size(value["size_bytes"])),
            ("sha256", value["sha256"]),
            ("format", value["format"]),
            ("tensors", _tensors(value)),
        ]
    )


def _tensors(value: JSON) -> str:
    """The first three, and how many more."""
    told = [f"{t['name']} {t['dtype']}{t['shape']}".strip() for t in value["tensors"][:3]]
    more = value["tensor_count"] - len(told)
    return ", ".join([*told, *([f"{more} more"] if more else [])])


PLACEMENTS = [
    Column("EPOCH", lambda p: p["epoch"], right=True),
    Column("DEVICE", lambda p: p["device_id"]),
    Column("LAUNCHED", lambda p: clock(p["launched_at"])),
    Column("HELD", lambda p: seconds(p["held_us"]), right=True),
    Column("STEPS", lambda p: _steps(p)),
    Column("INPUTS", lambda p: size(p["input_bytes"]), right=True),
    Column("FETCHED", lambda p: size(p["fetched_bytes"]), right=True),
    Column("END", lambda p: p["end"] or "is there"),
]


def _seats(task: JSON) -> str:
    """All that it holds, its home first."""
    return ", ".join([task["seat"], *task["lent"]]) if task["seat"] else ""


def task(value: JSON, stays: Sequence[JSON]) -> RenderableType:
    head = facts(
        [
            ("task", value["id"]),
            ("of", value["request_id"]),
            ("name", value["name"]),
            ("state", _task_state(value)),
            ("device", _seats(value)),
            ("moves to", _where_to(value)),
            ("image in the memory of", value["image_on"]),
            ("inputs", value["inputs"]),
            ("publishes", value["publish"]),
            ("needs", [need["task"] for need in value["needs"]] or None),
            ("step", value["step"]),
            ("held", seconds(_device_us(value))),
            ("pauses", value["pauses"]),
            ("steps lost", value["lost_steps"]),
            ("metrics", value["metrics"]),
            ("result", value["result"]),
            ("outputs", ", ".join(value["outputs"])),
            ("can be", ", ".join(value["capabilities"])),
            ("preset", value["preset"]),
        ]
    )
    parts: list[RenderableType] = [head]
    if stays:
        parts += [Text(), table(stays, PLACEMENTS)]
    if value["cause"]:
        parts.append(failure(value))
    return Group(*parts)


def failure(task: JSON) -> Text:
    """Why its last attempt failed, with the traceback of the job."""
    text = Text("\n").append_text(
        words(f"{task['name']}: {task['cause']}: {task['message']}", "red")
    )
    for line in (task["detail"] or "").splitlines():
        text.append("\n  ").append_text(words(line))
    return text


def _task_state(task: JSON) -> Text:
    name = "paused" if task["state"] == "waiting" and task["step"] else task["state"]
    asked = _asked(task)
    return words(f"{name}, {asked}", "yellow") if asked else state(name)


def _where_to(task: JSON) -> str | None:
    to = task.get("move_to")
    return "any other device" if to == "*" else to


def _steps(stay: JSON) -> str:
    if stay["first_step"] is None:
        return ""
    return f"{stay['first_step']} to {stay['last_step']}"


# --- why ------------------------------------------------------------------------------------------

_WHAT_TO_DO = {
    "wait": "Nothing to do but wait",
    "change_request": "You can change that",
    "ask_admin": "Ask an administrator",
}


def explained(tasks: Iterable[JSON], failed: Iterable[JSON]) -> RenderableType:
    return Group(*(_explained(task) for task in tasks), *(_cause(task) for task in failed))


def waits(told: JSON) -> Text:
    """The first reason of one explanation, in a line."""
    place = f", place {told['place']} in line" if told["place"] else ""
    return words(f"{told['task']} is {told['state']}{place}: {told['message']}", "dim")


def silent(value: JSON) -> Text:
    """Of a request or task that has ended and printed nothing."""
    tasks = value.get("tasks", [value])
    text = words(f"{value['name']} is {value['state']} and printed nothing.")
    if failed := [task for task in tasks if task["state"] == "failed"]:
        return text.append(" ").append_text(_cause(failed[0], of=value["id"]))
    return text.append(f"  roundhouse show {value['id']}")


def quiet(value: JSON) -> Text:
    """Of one that has printed nothing so far."""
    text = words(f"{value['name']} is {value['state']} and has printed nothing yet.")
    return text.append(f"  roundhouse why {value['id']}")


def _cause(task: JSON, of: str = "") -> Text:
    first = (task["message"] or "").partition("\n")[0]
    text = words(f"{task['name']}: {task['cause']}: {first}", "red")
    return text.append(f"  roundhouse show {of or task['id']}", "default")


def _explained(task: JSON) -> Text:
    place = f", place {task['place']} in line" if task["place"] else ""
    text = Text.assemble(words(task["task"], "bold"), " is ", state(task["state"]), place)
    if not task["reasons"]:
        text.append("\n  ").append_text(words(task["message"]))
        return text.append("\n  ").append_text(_time_spent(task["time"]))
    for reason in task["reasons"]:
        text.append("\n  ").append_text(words(f"{reason['code']}  ", "dim"))
        text.append_text(words(reason["message"]))
        text.append("\n      ").append_text(words(_next(reason)))
    if len(task["reasons"]) > 1 and task["nearest"]:
        text.append("\n  ").append_text(
            words(f"To end first: {task['nearest']['message']}", "bold")
        )
    text.append("\n  ").append_text(words(_starts(task), "bold"))
    return text.append("\n  ").append_text(_time_spent(task["time"]))


def _time_spent(time: JSON) -> Text:
    """In a line, the longest first."""
    parts = sorted(time.items(), key=lambda part: -part[1])
    told = ", ".join(f"{name.removesuffix('_s')} {seconds(part_s * 1e6)}" for name, part_s in parts)
    return words(f"So far: {told}.", "dim")


def _starts(task: JSON) -> str:
    """When it is expected to start, or why that is not known."""
    if task["estimate"] is None:
        unknown = task["no_estimate"]
        return (
            f"When it starts is not known. {unknown['message']}" if unknown else "It starts soon."
        )
    p10, p50, p90 = (seconds(round(1e6 * task["estimate"][f"p{n}_s"])) for n in (10, 50, 90))
    return f"It is expected to start in {p50}; 80 % of such tasks start in {p10} to {p90}."


def _next(reason: JSON) -> str:
    if reason["code"] == "HELD_BY_USER":
        return "roundhouse resume lets it go on."
    what = _WHAT_TO_DO.get(reason["next_action"], reason["next_action"])
    if not reason["unblocked_by"]:
        return f"{what}."
    return f"{what}; it ends when: {reason['unblocked_by']}."


# --- events and logs ------------------------------------------------------------------------------


def event(value: JSON) -> Text:
    name = value["data"].get("task", "")
    head = words(f"{clock(value['at'])}  {name:12}  ", "dim")
    return head.append_text(words(value["message"]))


def log_line(value: JSON) -> Text:
    """As it was printed, so that a script can read it again."""
    return Text(value["text"])


# --- shares and devices ---------------------------------------------------------------------------

DEVICES = [
    Column("DEVICE", lambda d: d["id"]),
    Column("KIND", lambda d: d["kind"]),
    Column("STATE", lambda d: _device_state(d)),
    Column("TASK", lambda d: d["task_id"] or ("another's" if d["busy"] else "free")),
    Column("THREADS", lambda d: d["threads"], right=True),
    Column("MEMORY", lambda d: size(d["memory_bytes"]), right=True),
    Column("COST", lambda d: d["cost"], right=True),
    Column("HEARD", lambda d: ago(d["seen_at"])),
]

ENROLMENTS = [
    Column("DEVICE", lambda e: e["device_id"]),
    Column("STATE", lambda e: "revoked" if e["revoked_at"] else "enrolled"),
    Column("KEY", lambda e: e["key"]),
    Column("BY", lambda e: e["enrolled_by"]),
    Column("SINCE", lambda e: ago(e["revoked_at"] or e["enrolled_at"])),
]

_SHARES = [
    Column("TENANT", lambda t: "  " * t["depth"] + t["tenant"]),
    Column("WEIGHT", lambda t: t["weight"], right=True),
    Column("SHARE", lambda t: f"{t['share']:.0%}", right=True),
    Column("GUARANTEE", lambda t: t["guarantee"] or None, right=True),
    Column("FAIR NOW", lambda t: t["fair"], right=True),
    Column("HOLDS", lambda t: t["held"], right=True),
    Column("BORROWED", lambda t: t["borrowed"] or None, right=True),
    Column("WAITING", lambda t: t["waiting"], right=True),
    Column("USAGE", lambda t: seconds(t["usage_us"]), right=True),
]


def shares(value: JSON) -> RenderableType:
    tenants = value["tenants"] + ([value["others"]] if value["others"] else [])
    return Group(words(value["verdict"]), Text(), table(tenants, _SHARES), Text())


def standing(fair: JSON, devices: Sequence[JSON], running: Sequence[JSON]) -> RenderableType:
    """Who has what at one moment."""
    return Group(shares(fair), table(devices, DEVICES), Text(), table(running, REQUESTS))


PRESETS = [
    Column("TYPE", lambda p: p["task_type"]),
    Column("KIND", lambda p: p["kind"]),
    Column("PARAMETERS", lambda p: ", ".join(f"{k}={v}" for k, v in p["params"].items())),
    Column("VERSION", lambda p: p["version"], right=True),
]

CHECKS = [
    Column("CHECK", lambda c: c["check"]),
    Column("", lambda c: state("ok" if c["ok"] else "failed")),
    Column("", lambda c: c["detail"]),
]


def usage_columns(groups: Sequence[str]) -> list[Column]:
    columns = [Column(name.upper(), itemgetter(name)) for name in groups]
    return [
        *columns,
        Column("HELD", lambda row: seconds(row["held_us"]), right=True),
        Column("CHARGED", lambda row: seconds(row["charged_us"]), right=True),
    ]


def _device_state(device: JSON) -> Text:
    if not device["up"]:
        return state("down")
    return state("cordoned") if device["cordoned"] else words("up")


WEBHOOKS = [
    Column("ID", lambda w: w["id"]),
    Column("ADDRESS", lambda w: w["url"] or "(those that requests name)"),
    Column("ON", lambda w: ", ".join(event.removeprefix("request.") for event in w["events"])),
    Column("STATE", lambda w: "answered 410" if w["disabled_at"] else "on"),
]

DELIVERIES = [
    Column("ID", lambda d: d["id"]),
    Column("TYPE", lambda d: d["type"]),
    Column("REQUEST", lambda d: d["request_id"]),
    Column("STATE", lambda d: d["state"]),
    Column("TRIES", lambda d: len(d["attempts"]), right=True),
    Column("LAST", lambda d: _last_attempt(d)),
    Column("NEXT", lambda d: clock(d["due_at"])),
]


def _last_attempt(delivery: JSON) -> str:
    if not delivery["attempts"]:
        return ""
    last = delivery["attempts"][-1]
    return last["error"] or f"{last['status']} {ago(last['at'])}"


def webhook(value: JSON) -> RenderableType:
    return facts(
        [
            ("webhook", value["id"]),
            ("address", value["url"]),
            ("secret", value["secret"]),
            ("", "The secret is shown this once: check signatures with it."),
        ]
    )


KEYS = [
    Column("ID", lambda k: k["id"]),
    Column("NAME", lambda k: k["name"]),
    Column("USER", lambda k: k["user_id"]),
    Column("ROLE", lambda k: k["role"]),
    Column("SCOPES", lambda k: "all" if k["scopes"] is None else ", ".join(k["scopes"])),
    Column("STATE", lambda k: _key_state(k)),
    Column("USED", lambda k: ago(k["last_used_at"])),
]

USERS = [
    Column("ID", lambda u: u["id"]),
    Column("NAME", lambda u: u["name"]),
    Column("TENANT", lambda u: u["tenant_id"]),
    Column("WEIGHT", lambda u: u["weight"], right=True),
    Column("IS", lambda u: "a program" if u["service"] else "a person"),
    Column("MADE", lambda u: ago(u["created_at"])),
]

ACCOUNTS = [
    Column("ID", lambda a: a["id"]),
    Column("NAME", lambda a: a["name"]),
    Column("TENANT", lambda a: a["tenant_id"]),
    Column("MADE", lambda a: ago(a["created_at"])),
]


def _key_state(key: JSON) -> str:
    if key["revoked_at"]:
        return "revoked"
    if not key["expires_at"]:
        return "good"
    over = datetime.fromisoformat(key["expires_at"]) <= datetime.now(UTC)
    return "expired" if over else f"until {key['expires_at']}"


def key(value: JSON) -> RenderableType:
    return facts(
        [
            ("key", value["key"]),
            ("role", value["role"]),
            ("scopes", value["scopes"]),
            ("until", value["expires_at"]),
            ("", "The key is shown this once."),
        ]
    )


TENANTS = [
    Column("TENANT", lambda t: "  " * t["depth"] + t["name"]),
    Column("WEIGHT", lambda t: t["weight"], right=True),
    Column("GUARANTEE", lambda t: t["guarantee"] or None),
    Column("LIMIT", lambda t: t["limit"] or None),
    Column("MAX RUNNING", lambda t: t["max_running"], right=True),
    Column("MAX QUEUED", lambda t: t["max_queued"], right=True),
    Column("BEST TIER", lambda t: t["tier"]),
    Column("ID", lambda t: t["id"]),
]


def as_tree(tenants: Sequence[JSON]) -> list[JSON]:
    """Each after the one that it lies below, by name, with its `depth`."""
    seen = {tenant["id"] for tenant in tenants}
    below: dict[str | None, list[JSON]] = {}
    for tenant in sorted(tenants, key=itemgetter("name"), reverse=True):
        parent = tenant["parent_id"] if tenant["parent_id"] in seen else None
        below.setdefault(parent, []).append(tenant)
    found = []
    open_ = [{**tenant, "depth": 0} for tenant in below.get(None, [])]
    while open_:
        found.append(open_.pop())
        children, depth = below.get(found[-1]["id"], []), found[-1]["depth"] + 1
        open_ += [{**tenant, "depth": depth} for tenant in children]
    return found


def tenant(value: JSON) -> RenderableType:
    return facts(
        [
            ("tenant", value["id"]),
            ("name", value["name"]),
            ("below", value["parent_id"]),
            ("weight", value["weight"]),
            ("guarantee", value["guarantee"]),
            ("limit", value["limit"]),
            ("tasks on devices, at most", value["max_running"]),
            ("tasks that wait, at most", value["max_queued"]),
            ("best tier", value["tier"]),
        ]
    )


def user(value: JSON) -> RenderableType:
    names = ("id", "name", "tenant_id", "weight")
    return facts([(name.removesuffix("_id"), value[name]) for name in names])


def me(value: JSON) -> list[tuple[str, object]]:
    return [("user", value["user"]), ("tenant", value["tenant"]), ("role", value["role"])]


# --- what is sent, and what goes wrong ------------------------------------------------------------


def bundle(code: Bundle) -> Text:
    many = f"{len(code.files)} file{'' if len(code.files) == 1 else 's'}"
    return words(f"bundle {code.folder}: {many}, {size(len(code.body))}, {code.sha256[:12]}…")


def unparsed(found: JSON) -> Text:
    """Python files in the bundle that do not parse, if there are any."""
    text = Text("  sent")
    for name, why in found.get("unparsed", {}).items():
        text.append("\n  ").append_text(words(f"{name} does not parse: {why}", "yellow"))
    return text


def too_large(code: Bundle) -> Text:
    text = Text("  The biggest of its files:")
    for name, count in code.biggest():
        text.append("\n    ").append_text(words(f"{size(count):>10}  {name}"))
    return text.append(f"\n  Name what the job does not need in {IGNORE_FILE}.")


def problem(error: Problem) -> Text:
    """Title, detail, each pointer, and where it is explained."""
    text = words(error.title, "bold red")
    if not error.errors and error.detail != error.title:  # else each of them says more
        text.append("\n  ").append_text(words(error.detail))
    for entry in error.errors:
        where = entry.get("pointer") or "(the whole)"
        text.append("\n  ").append_text(words(f"{where}: ", "bold"))
        text.append_text(words(str(entry.get("detail", ""))))
    if action := _ACTIONS.get(error.type):
        text.append(f"\n  {action}")
    return text


_ACTIONS = {
    "validation-error": "Nothing was changed; mend it and try again.",
    "unsatisfiable": "roundhouse devices shows what there is.",
    "queue-full": "roundhouse ps lists what waits.",
    "idempotency-key-reused": "Take another --idempotency-key for another request.",
    "unauthenticated": "roundhouse login, or set ROUNDHOUSE_KEY.",
    "insufficient-scope": "roundhouse whoami shows your role.",
    "not-found": "roundhouse ps -a lists what is yours.",
    "unavailable": "Nothing is lost; try again in a moment.",
    "internal": "It is our mistake; an administrator finds it in the log of the API.",
}


def unreachable(error: Unreachable) -> Text:
    text = words(f"{error.url} does not answer", "bold red")
    text.append("\n  ").append_text(words(f"{error.cause or type(error.cause).__name__}"))
    return text.append("\n  Is it running (make up)?  Is the address right (roundhouse whoami)?")
