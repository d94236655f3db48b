"""Words the output of the `roundhouse` command: which facts of an answer are shown, and how.

There is one function or list of columns for each kind of answer. This module calls nothing and
prints nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from operator import itemgetter
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from app.cli.tables import (
    JSON,
    Column,
    ago,
    cell,
    clock,
    facts,
    seconds,
    short,
    size,
    state,
    table,
    words,
)
from app.core import units
from app.core.model.run_comparison import as_text
from app.core.units import counted

if TYPE_CHECKING:  # these imports would slow down every command
    from app.cli.bundling import PackedBundle
    from app.cli.client import ApiProblem, Unreachable

ENDED = frozenset({"done", "failed", "cancelled"})
_IGNORE_FILE = ".roundhouseignore"

# --- requests -------------------------------------------------------------------------------------

REQUESTS = [
    Column("NAME", lambda r: r["name"]),
    Column("ID", lambda r: short(r["id"]), whole=True),
    Column("STATE", lambda r: state(r["phase"]), whole=True),
    Column("TENANT", lambda r: r["tenant"]),
    Column("USER", lambda r: r["user"]),
    Column("TASKS", lambda r: _counted(r["task_phases"])),
    Column("SUBMITTED", lambda r: ago(r["submitted_at"]), whole=True),
    Column("FULL ID", lambda r: r["id"], whole=True, wide=True),
]

VALIDATED = [
    Column("TASK", lambda t: t["name"]),
    Column("TYPE", lambda t: t["type"]),
    Column("DEVICE", lambda t: t["kind"]),
    Column("NEEDS", lambda t: ", ".join(need["task"] for need in t["needs"])),
]


def validated(checked: JSON) -> RenderableType:
    notes = [words(f"Note: {note}") for note in checked["notes"]]
    return Group(table(checked["tasks"], VALIDATED), *notes)


def accepted(request: JSON) -> Text:
    """Say that the request was submitted, and name the next commands."""
    text = words(f"Submitted {request['name']} ({short(request['id'])}): {request['phase']}.")
    if others := comes_after(request["tasks"]):
        text.append(f"\n  It comes after {', '.join(others)}.")
    for note in request["notes"]:
        text.append(f"\nNote: {note}")
    for verb, use in (("watch  ", "what happens to it"), ("logs -f", "what it prints")):
        text.append(f"\n  roundhouse {verb} {request['name']:<24}  {use}")
    return text


def comes_after(tasks: Iterable[JSON]) -> list[str]:
    """Name the other requests that these tasks come after, and what is awaited of each."""
    found = dict[str, None]()
    for need in (need for task in tasks for need in task.get("after_requests", ())):
        named = f"{need['request']}/{need['task']}" if need["task"] else need["request"]
        went = "" if need["outcome"] == "waits" else f", {_WENT[need['outcome']]}"
        found[f"{named} ({short(need['request_id'])}: {need['on']}{went})"] = None
    return [*found]


_WENT = {
    "met": "has happened",
    "fail": "did not happen",
    "hold": "did not happen: held",
    "run": "did not happen: it runs all the same",
    "waived": "did not happen: resumed",
}


def ended(request: JSON) -> RenderableType:
    held = sum(map(device_us, request["tasks"]))
    pauses = sum(task["pauses"] for task in request["tasks"])
    lost = sum(task["lost_steps"] for task in request["tasks"])
    counts = f"{counted(pauses, 'pause')}, {counted(lost, 'lost step')}"
    told = Text.assemble(
        words(f"{request['name']}: "),
        state(request["phase"]),
        f", {seconds(held)} of device time, {counts}.",
    )
    failed = [task for task in request["tasks"] if task["state"] == "failed"]
    return Group(told, *_results(request["tasks"]), *map(failure, failed))


def device_us(task: JSON) -> int:
    """The time on the task's slot and on devices lent to it, in microseconds."""
    return int(task["held_us"] + task["guest_held_us"])


def request(value: JSON) -> RenderableType:
    head = facts(
        [
            ("request", value["id"]),
            ("name", value["name"]),
            ("state", state(value["phase"])),
            ("owner", f"{value['user']} of {value['tenant']}"),
            ("tier", value["tier"]),
            ("priority", value["priority"] or None),
            ("labels", value["labels"]),
            ("bundle", value["bundle"]),
            ("comes after", comes_after(value["tasks"]) or None),
            ("submitted", ago(value["submitted_at"])),
            ("ended", ago(value["ended_at"])),
            ("look inside", "" if value["ended_at"] else _look_inside_first(value)),
        ]
    )
    tasks = value["tasks"]
    failures = [failure(task) for task in tasks if task["state"] == "failed"]
    return Group(head, Text(), table(tasks, TASKS), *_results(tasks), *failures)


def _results(tasks: Iterable[JSON]) -> list[Text]:
    """Return one line for each result, since a result may be far wider than a column."""
    return [
        Text.assemble("\n", words(f"Result of {task['name']}: ", "dim"), cell(task["result"]))
        for task in tasks
        if task["result"]
    ]


def checkpoint_state(checkpoint: JSON) -> str:
    if checkpoint["damaged_at"]:
        return "damaged"
    if checkpoint["deleted_at"]:
        return "being deleted"
    is_kept = {"best": checkpoint.get("best"), "pinned": checkpoint.get("pinned_at")}
    return ", ".join(word for word, given in is_kept.items() if given) or "kept"


def asked(verb: str, given: str, now: JSON) -> Text:
    """Say what the verb has done with `given`, and what happens next."""
    given = called(given)
    if verb in _OF_ANY:
        return words(f"{given}: {_OF_ANY[verb]}")
    if now["state"] in ENDED:
        return words(f"{given}: already {now['state']}; nothing changed.")
    tasks = [task for task in now.get("tasks", [now]) if task["state"] not in ENDED]
    on_devices = [task for task in tasks if task["seat"]]
    if verb == "resume":
        return words(f"{given}: resumed. `roundhouse why {given}` says when it runs.")
    if verb == "pause":
        told, next_ = "paused.", f"`roundhouse resume {given}` resumes it."
        if on_devices:
            told = f"pause requested{_at_step(on_devices)}."
            next_ = f"It stops at its next safe point and frees its device. {next_}"
        return words(f"{given}: {told} {next_}")
    if on_devices:
        return words(
            f"{given}: cancel requested{_at_step(on_devices)}. It ends at its next safe point."
        )
    return words(f"{given}: cancel requested. It ends before it runs again.")


_OF_ANY = {
    "retry": "what failed starts again. `roundhouse ps` counts it.",
    "at-once": "set. Members that run go on.",
    "keep-best": "set. Members that are among the best now go on.",
    "keep": "it is kept with its checkpoints, however old it is. `roundhouse keep --release` lets "
    "it go.",
    "release": "it is no longer kept.",
    "delete": "it is gone in some minutes. Its device time stays charged.",
}


def called(given: str) -> str:
    """Shorten an id for use in a sentence; the result can still be typed as an argument."""
    return short(given) if given.startswith("req_") else given


def _at_step(tasks: Sequence[JSON]) -> str:
    return f" at step {tasks[0]['step']:,}" if len(tasks) == 1 and tasks[0]["step"] else ""


def moving(given: str, now: JSON, *, is_busy: bool) -> Text:
    """Say what `migrate` of one task has done; `is_busy` means that its new device is not free."""
    to = where_to(now)
    if to is None:
        return words(f"{now['name']}: on {now['seat'] or 'no device'} as before; nothing changed.")
    when = f" when {to} is free" if is_busy else ""
    told = f"{now['name']}: moves to {to}{when}; it runs until then."
    return words(f"{told} `roundhouse watch {given}` shows the move.")


def resized(given: str, before: JSON, now: JSON) -> Text:
    """Say what `resize` changed in one task, and what the task holds at this moment."""
    was, most = before["devices_max"], now["devices_max"]
    held = len(now["lent"]) + (1 if now["seat"] else 0)
    bound = f"{now['name']}: at most {counted(most, 'device')}"
    changed = f"{bound} (before: {was})" if was != most else f"{bound}, as before"
    next_ = "; its next step begins with fewer" if held > most else ""
    shown = f" `roundhouse show {given}` shows what it holds." if held != most else ""
    return words(f"{changed}. It holds {counted(held, 'device')} now{next_}.{shown}")


def saving(given: str, now: JSON) -> Text:
    told = f"{now['name']}: checkpoint requested{_at_step([now])}."
    return words(f"{told} `roundhouse checkpoints {given}` shows it when it is durable.")


def _counted(states: JSON) -> str:
    if sum(states.values()) == 1:
        return "1"
    return " · ".join(f"{count:,} {name}" for name, count in states.items())


# --- tasks ----------------------------------------------------------------------------------------


def lot(task: JSON) -> str:
    """Return how many members of a lot are in each phase; "" for other tasks."""
    return _counted(task["lot"]["phases"]) if task.get("lot") else ""


TASKS = [
    Column("TASK", lambda t: t["name"]),
    Column("STATE", lambda t: lot(t) or _task_state(t)),
    Column("DEVICE", lambda t: _seats(t) or (t["image_on"] and f"({t['image_on']})")),
    Column("STEP", lambda t: t["step"] or None, right=True),
    Column("HELD", lambda t: seconds(device_us(t)), right=True),
    Column("PAUSES", lambda t: t["pauses"], right=True),
    Column("LOST", lambda t: t["lost_steps"], right=True),
    Column("METRICS", lambda t: t["metrics"]),
    Column("ID", lambda t: t["id"], whole=True, wide=True),
]

MEMBERS = [
    Column("MEMBER", lambda t: t["name"]),
    Column("VALUES", lambda t: t["lot_values"]),
    Column("STATE", lambda t: _task_state(t)),
    Column("STEP", lambda t: t["step"] or None, right=True),
    Column("HELD", lambda t: seconds(device_us(t)), right=True),
    Column("METRICS", lambda t: t["metrics"]),
    Column("ID", lambda t: t["id"], whole=True, wide=True),
]


def compared(headings: Sequence[str]) -> list[Column]:
    """Return the columns of a comparison of runs."""

    def of(place: int) -> Callable[[JSON], object]:
        return lambda row: as_text(row["values"][place])

    columns = [Column(heading, of(place)) for place, heading in enumerate(headings)]
    return [Column("FIELD", lambda row: row["field"], whole=True), *columns]


OUTPUTS = [
    Column("TASK", lambda o: o["task"]),
    Column("OUTPUT", lambda o: o["name"]),
    Column("SIZE", lambda o: size(o["size_bytes"]), right=True),
    Column("FILE", lambda o: o["file"] or "none: publish the output to get a file"),
    Column("DATABLOCK", lambda o: o["datablock"]),
]


KEPT_FILES = [
    Column("TASK", lambda f: f["task"]),
    Column("FILE", lambda f: f["file"], whole=True),
    Column("SIZE", lambda f: size(f["size_bytes"]), right=True),
]


RUNNING_FILES = [
    Column("FILE", lambda f: f["path"], whole=True),
    Column("SIZE", lambda f: size(f["size_bytes"]), right=True),
    Column("CHANGED", lambda f: ago(f["modified_at"]), right=True),
]


def outputs(tasks: Iterable[JSON]) -> list[JSON]:
    """List outputs, each with the name of the `file` as which it is downloaded; None if it has no
    format.
    """
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


def no_outputs(value: JSON) -> Text:
    """Say that a request or task has no outputs."""
    text = words(f"{value['name']} ({value['phase']}) has no outputs or artifacts.")
    return text.append(
        "\n  The outputs of a task are named in its descriptor (`outputs`); files that a command "
        "writes are kept if they are below a path in `artifacts` (`submit --out`)."
    )


def artifacts_name() -> str:
    """Return the name of the output that holds the kept files of a command."""
    # imported here because it is slow and seldom needed
    from app.core.model.protocol.messages import ARTIFACTS

    return ARTIFACTS


def _file_name(name: str, format: str | None) -> str | None:
    if name.endswith(f"-{artifacts_name()}"):
        return name
    return f"{name}.{format}" if format else None


CHECKPOINTS = [
    Column("ID", lambda c: c["id"], whole=True),
    Column("TASK", lambda c: c["task"]),
    Column("STEP", lambda c: c["step"], right=True),
    Column("SIZE", lambda c: size(c["size_bytes"]), right=True),
    Column("WRITTEN", lambda c: ago(c["created_at"]), whole=True),
    Column("STATE", lambda c: "best of all" if c["best_of_lot"] else checkpoint_state(c)),
    Column("VALUE", lambda c: c.get("ranked_value"), right=True),
    Column("NEW", lambda c: size(c["new_bytes"]), right=True, wide=True),
    Column("HOST", lambda c: c["host"], wide=True),
]

PINNED = [
    Column("STATE", checkpoint_state) if column.heading == "STATE" else column
    for column in CHECKPOINTS
    if column.heading != "TASK"
]

DATABLOCKS = [
    Column("DATABLOCK", lambda b: f"{b['name']}@{b['version']}"),
    Column("SIZE", lambda b: size(b["file_bytes"] or b["size_bytes"]), right=True),
    Column("CONTENT", lambda b: _content(b)),
    Column("USED BY", lambda b: b["holders"] and counted(b["holders"], "task")),
    Column("FROM", lambda b: "a task" if b["task_id"] else "an upload"),
    Column("CREATED", lambda b: ago(b["created_at"]), whole=True),
    Column("TASK", lambda b: b["task_id"], whole=True, wide=True),
]


def datablock(value: JSON) -> RenderableType:
    return facts(
        [
            ("datablock", f"{value['name']}@{value['version']}"),
            ("size", size(value["file_bytes"] or value["size_bytes"])),
            ("sha256", value["sha256"]),
            ("format", value["format"]),
            ("files" if value["format"] == "folder" else "tensors", _content(value)),
        ]
    )


def _content(value: JSON) -> str:
    """Return the number of files; or the first three tensors and the number of the others."""
    if value["format"] == "folder":
        return counted(value["file_count"], "file")
    told = [f"{t['name']} {t['dtype']}{t['shape']}".strip() for t in value["tensors"][:3]]
    more = value["tensor_count"] - len(told)
    return ", ".join([*told, *([f"{more} more"] if more else [])])


PLACEMENTS = [
    Column("EPOCH", lambda p: p["epoch"], right=True),
    Column("DEVICE", lambda p: p["device_id"]),
    Column("STARTED", lambda p: clock(p["launched_at"])),
    Column("HELD", lambda p: seconds(p["held_us"]), right=True),
    Column("STEPS", lambda p: _steps(p)),
    Column("INPUTS", lambda p: size(p["input_bytes"]), right=True),
    Column("FETCHED", lambda p: size(p["fetched_bytes"]), right=True),
    Column("END", lambda p: p["end"] or "holds it now"),
]


def _seats(task: JSON) -> str:
    """All devices that the task holds, its home device first."""
    return ", ".join([task["seat"], *task["lent"]]) if task["seat"] else ""


def _peaks(task: JSON) -> str:
    """The most memory that the task held on a device, and of the host for its images."""
    peaks = {
        "on the device": task["peak_device_bytes"],
        "of the host for images": task["peak_host_bytes"],
    }
    return ", ".join(f"{size(peak)} {where}" for where, peak in peaks.items() if peak)


def _network_use(used: JSON | None) -> str:
    """Say what the task may reach of the network, and what it used of it."""
    if used is None:
        return ""
    told = [counted(used["connections"], "connection")]
    told += [f"{used['refused']} refused"] if used["refused"] else []
    for way in ("sent", "received"):
        told.append(f"{size(used[f'{way}_bytes']) or '0 B'} {way}")
    return f"{', '.join(used['allow'])}: {', '.join(told)}"


def _next_request(task: JSON) -> str:
    asked = task["memory_to_request_bytes"]
    device = "" if asked is None else f"{size(asked)} (devices.memory_bytes: {asked})"
    limits = _given(task.get("resources_to_request") or {})
    said = ", ".join(f"{name}: {value:.15g}" for name, value in limits.items())
    return "; ".join(filter(None, (device, said and f"resources: {{{said}}}")))


def _given(resources: JSON) -> JSON:
    return {name: value for name, value in resources.items() if value}


def _host_peaks(task: JSON) -> str:
    """The most that the task took of its host."""
    peaks = _given(task.get("peak_resources") or {})
    told = {
        "cpus": lambda n: f"{n:.1f} processors",
        "memory_bytes": lambda n: f"{size(n)} of memory",
        "disk_bytes": lambda n: f"{size(n)} of disk",
        "processes": lambda n: f"{n} processes",
    }
    return ", ".join(told[name](value) for name, value in peaks.items())


def _dropped(task: JSON) -> str:
    """Say which files of a command were not kept."""
    # imported here because it is slow and seldom needed
    from app.core.model.provisions.artifacts import dropped_told

    return dropped_told(task.get("dropped") or {})


def task(value: JSON, stays: Sequence[JSON]) -> RenderableType:
    head = facts(
        [
            ("task", value["id"]),
            ("of", value["request_id"]),
            ("name", value["name"]),
            ("state", _task_state(value)),
            ("device", _seats(value)),
            ("moves to", where_to(value)),
            ("state saved on", value["image_on"]),
            ("inputs", value["inputs"]),
            ("publishes", value["publish"]),
            ("needs", [need["task"] for need in value["needs"]] or None),
            ("comes after", comes_after([value]) or None),
            ("step", value["step"]),
            ("held", seconds(device_us(value))),
            ("pauses", value["pauses"]),
            ("steps lost", value["lost_steps"]),
            ("peak memory", _peaks(value)),
            ("peaks on its host", _host_peaks(value)),
            ("next time request", _next_request(value)),
            ("network", _network_use(value.get("network"))),
            ("metrics", value["metrics"]),
            ("result", value["result"]),
            ("outputs", ", ".join(value["outputs"])),
            ("files", _dropped(value)),
            ("store refuses", value.get("unstored")),
            ("ranks", value.get("behind")),
            ("look inside", _look_inside(value, short(value["request_id"]) + "/" + value["name"])),
            ("can be", ", ".join(value["capabilities"])),
            ("elsewhere", value["movement"]),
            ("preset", value["preset"]),
        ]
    )
    parts: list[RenderableType] = [head]
    if stays:
        parts += [Text(), table(stays, PLACEMENTS)]
    if value["cause"]:
        parts.append(failure(value))
    return Group(*parts)


def _look_inside(task: JSON, given: str) -> str:
    """Say how to get a terminal or a port of the task, or why there is none."""
    if task["no_tunnel"]:
        return f"no shell: {task['no_tunnel']}"
    given = shlex.quote(given)
    waits = "" if task["state"] == "running" else "; it waits until the task runs"
    return f"roundhouse shell {given}, or roundhouse forward {given} PORT{waits}"


def _look_inside_first(request: JSON) -> str:
    """Say how to look into the first task that permits it, else why the first task does not."""
    tasks, end = request["tasks"], short(request["id"])
    first = next((task for task in tasks if not task["no_tunnel"]), tasks[0])
    return _look_inside(first, end if len(tasks) == 1 else f"{end}/{first['name']}")


def _failed(task: JSON) -> str:
    """Name a task and the cause of its failure; a lot has no cause of its own."""
    return f"{task['name']}: {task['cause']}" if task["cause"] else str(task["name"])


def failure(task: JSON) -> Text:
    """Say why the task's last attempt failed, with the traceback of the job."""
    text = Text("\n").append_text(words(f"{_failed(task)}: {task['message']}", "red"))
    told = (task["message"] or "").splitlines()
    for line in (task["detail"] or "").splitlines():
        if line in told:
            continue  # the last line of a traceback is the message
        text.append("\n  ").append_text(words(line))
    seen = f"{task['message']}\n{task['detail']}"
    hint = next((hint for sign, hint in _HINTS if sign in seen), "")
    return text.append(f"\n{hint}") if hint else text


_NO_NETWORK = (
    "A task reaches only what its `network.allow` names, through the proxy of http_proxy. Without "
    "it, send data in its folder."
)
_HINTS = (
    (
        "ModuleNotFoundError: No module named",
        "A task finds its own files and the packages that the service was installed with. To bring "
        "others, name them in requirements.txt or pyproject.toml of its folder, and submit it with "
        "--environment FILE.",
    ),
    ("Temporary failure in name resolution", _NO_NETWORK),
    ("Network is unreachable", _NO_NETWORK),
)


def _task_state(task: JSON) -> Text:
    """The state, and the actions that were requested and are not done yet."""
    told = state(task["phase"])
    if task["state"] in ENDED:
        return told
    if task["cancel_asked"]:
        told.append(", cancel requested")
    elif task["hold"] and task["phase"] != "paused":
        told.append(", pause requested")
    if (to := where_to(task)) is not None:
        told.append(f", moves to {to}")
    return told


def where_to(task: JSON) -> str | None:
    to = task.get("move_to")
    return "any other device" if to == "*" else to


def _steps(stay: JSON) -> str:
    if stay["first_step"] is None:
        return ""
    return f"{stay['first_step']} to {stay['last_step']}"


# --- why ------------------------------------------------------------------------------------------

_WHAT_TO_DO = {
    "wait": "Clears when",
    "change_request": "You can change this. It clears when",
    "ask_admin": "Ask an administrator. It clears when",
}


def explained(tasks: Iterable[JSON], failed: Iterable[JSON], given: str) -> RenderableType:
    """Explain why tasks wait or failed; `given` is the name that the user typed."""
    return Group(*(_explained(task, given) for task in tasks), *(_cause(task) for task in failed))


def waits(told: JSON, build_s: float = 0.0) -> Text:
    """The first reason of one explanation and the expected start, in one line.

    `build_s` is for how many seconds a build of packages has been going on.
    """
    place = f", place {told['place']} in the queue" if told["place"] else ""
    line = f"{told['task']}: {told['phase']}{place}. {told['message']}"
    if build_s >= 1.0:
        line = f"{line} For {units.duration(round(build_s))} so far."
    elif told["phase"] != "paused" and first_code(told) != "NOT_LOOKED_AT":
        line = f"{line} {_starts(told)}"
    return words(line, "dim")


def first_code(told: JSON) -> str:
    """Return the code of the first reason of an explanation; "" without one."""
    return str(told["reasons"][0]["code"]) if told["reasons"] else ""


def is_build(told: JSON) -> bool:
    return first_code(told) in ("ENVIRONMENT_PENDING", "PACKAGES_INSTALLING")


def notebook_at(url: str) -> Text:
    return words(f"JupyterLab: {url}\nCtrl-C leaves it running.")


def left_notebook(id: str, port: int) -> Text:
    return words(
        f"The notebook goes on.  `roundhouse forward {id} {port}` reaches it again, `roundhouse "
        f"cancel {id}` ends it."
    )


def ended_notebook(task: JSON) -> Text:
    told = words(f"The notebook has ended: it is {task['state']}.")
    if "No module named" in (task["detail"] or ""):
        told.append(
            "  Python has no jupyterlab there: put it into a requirements.txt of a folder, and "
            "give --folder and --environment; or ask the administrator to install it."
        )
    elif task["message"]:
        told.append(f"  {task['message']}")
        if task["cause"] == "environment":
            told.append(f"\n{task['detail'] or ''}")  # in the words of uv
    return told


def left_session(id: str) -> Text:
    return words(
        f"The session goes on.  `roundhouse shell {id}` enters it again, `roundhouse cancel {id}` "
        "ends it."
    )


def forwarding(here: str, port: int) -> Text:
    return words(f"{here} is port {port} of the task.  Ctrl-C ends it.")


def silent(value: JSON) -> Text:
    """Say that a request or task has ended and printed nothing."""
    tasks = value.get("tasks", [value])
    text = words(f"{value['name']} ({value['phase']}) printed nothing.")
    if failed := [task for task in tasks if task["state"] == "failed"]:
        return text.append(" ").append_text(_cause(failed[0], of=value["id"]))
    return text.append(f"  roundhouse show {value['id']}")


def quiet(value: JSON, given: str) -> Text:
    """Say that a request or task has printed nothing so far."""
    text = words(f"{value['name']} ({value['phase']}) has printed nothing yet.")
    verb = "logs -f" if value["phase"] == "running" else "why"
    return text.append(f"  roundhouse {verb} {given}")


def _cause(task: JSON, of: str = "") -> Text:
    first = (task["message"] or "").partition("\n")[0]
    text = words(f"{_failed(task)}: {first}", "red")
    return text.append(f"  roundhouse show {of or task['id']}", "default")


def _explained(task: JSON, given: str) -> Text:
    place = f", place {task['place']} in the queue" if task["place"] else ""
    text = Text.assemble(words(task["task"], "bold"), ": ", state(task["phase"]), place)
    if not task["reasons"]:
        text.append("\n  ").append_text(words(task["message"]))
        return _at_its_end(text, task)
    for reason in task["reasons"]:
        text.append("\n  ").append_text(words(reason["message"]))
        text.append("\n    ").append_text(words(_next(reason, given)))
        text.append_text(words(f"  [{reason['code']}]", "dim"))
    if len(task["reasons"]) > 1 and task["nearest"]:
        text.append("\n  ").append_text(
            words(f"Most likely next: {task['nearest']['message']}", "bold")
        )
    if task["phase"] != "running":
        text.append("\n  ").append_text(words(_starts(task), "bold"))
    return _at_its_end(text, task)


def _at_its_end(text: Text, task: JSON) -> Text:
    """Append what is said about every task, with or without reasons to wait."""
    return text.append_text(_movement(task)).append("\n  ").append_text(_time_spent(task["time"]))


def _movement(task: JSON) -> Text:
    """Say in a line of its own whether the task can move; nothing is said before its first
    start.
    """
    movement = task.get("movement", "")
    return Text.assemble("\n  ", words(movement)) if movement else Text()


_SPENT = {
    "waited_s": "queued",
    "switched_s": "starting",
    "moved_s": "migrating",
    "computed_s": "running",
    "staged_s": "saving state",
}


def _time_spent(time: JSON) -> Text:
    """The time spent in each phase, in one line, the longest first."""
    parts = sorted(time.items(), key=lambda part: -part[1])
    told = [f"{_SPENT[name]} {seconds(part_s * 1e6)}" for name, part_s in parts if part_s >= 0.05]
    return words(f"Time so far: {', '.join(told) or 'none'}.", "dim")


def _starts(task: JSON) -> str:
    """Say when the task is expected to start, or why that is not known."""
    if task["estimate"] is None:
        unknown = task["no_estimate"]
        return f"Start time unknown. {unknown['message']}" if unknown else "Starts soon."
    p10, p50, p90 = (seconds(round(1e6 * task["estimate"][f"p{n}_s"])) for n in (10, 50, 90))
    if task["estimate"]["p90_s"] < 1.0:
        return "Expected to start within a second."
    return f"Expected to start in {p50} (80 % of such tasks: {p10} to {p90})."


def _next(reason: JSON, given: str) -> str:
    if reason["code"] in ("HELD_BY_USER", "HELD_BY_RULE", "IDLE_SESSION", "LOST_AT_RUNG"):
        return f"Run `roundhouse resume {given}`."
    if reason["code"] == "REQUEST_MISSED":
        other = short(reason["change"]["of"])
        return f"Run `roundhouse retry {other}`, or `roundhouse resume {given}`."
    what = _WHAT_TO_DO.get(reason["next_action"], reason["next_action"])
    return f"{what} {reason['unblocked_by']}." if reason["unblocked_by"] else ""


# --- events and logs ------------------------------------------------------------------------------


def event(value: JSON) -> Text:
    name = value["data"].get("task", "")
    head = words(f"{clock(value['at'])}  {name:12}  ", "dim")
    return head.append_text(words(value["message"]))


def log_line(value: JSON) -> Text:
    """A log line as it was printed, so that a script can read it again."""
    return Text(value["text"])


# --- shares and devices ---------------------------------------------------------------------------

DEVICES = [
    Column("DEVICE", lambda d: d["id"]),
    Column("KIND", lambda d: d["kind"]),
    Column("STATE", lambda d: _device_state(d)),
    Column("TASK", lambda d: _device_tasks(d)),
    Column("HEALTH", lambda d: device_health(d)),
    Column("THREADS", lambda d: d["threads"], right=True),
    Column("MEMORY", lambda d: size(d["memory_bytes"]), right=True),
    Column("COST", lambda d: d["cost"], right=True),
    Column("MODEL", lambda d: d["facts"].get("model"), wide=True),
    Column("CAPABILITY", lambda d: d["facts"].get("compute_capability"), wide=True),
    Column("LOCATION", lambda d: _location(d["facts"]), wide=True),
    Column("LABELS", lambda d: ", ".join(d["facts"].get("labels", ())), wide=True),
    Column("LAST SEEN", lambda d: ago(d["seen_at"]), whole=True),
    Column("TASK ID", lambda d: d["task_id"], whole=True, wide=True),
]

ENROLMENTS = [
    Column("NAME", lambda e: e["device_id"], whole=True),
    Column("STATE", lambda e: "revoked" if e["revoked_at"] else "enrolled"),
    Column("BY", lambda e: e["enrolled_by"]),
    Column("KEY", lambda e: e["key"]),
    Column("SINCE", lambda e: ago(e["revoked_at"] or e["enrolled_at"])),
]

_SHARES = [
    Column("TENANT", lambda t: "  " * t["depth"] + t["tenant"]),
    Column("WEIGHT", lambda t: t["weight"], right=True),
    Column("SHARE", lambda t: f"{t['share']:.0%}", right=True),
    Column("GUARANTEE", lambda t: t["guarantee"] or None, right=True),
    Column("ENTITLED", lambda t: t["fair"], right=True),
    Column("IN USE", lambda t: t["held"], right=True),
    Column("QUEUED", lambda t: t["waiting"], right=True),
    Column("USAGE", lambda t: seconds(t["usage_us"]), right=True),
    Column("ABOVE GUARANTEE", lambda t: t["borrowed"] or None, right=True, wide=True),
]


def shares(value: JSON) -> RenderableType:
    tenants = value["tenants"] + ([value["others"]] if value["others"] else [])
    return Group(words(value["verdict"]), Text(), table(tenants, _SHARES), Text())


def named_devices(devices: Iterable[JSON], named: Mapping[str, str]) -> list[JSON]:
    """Add to each device the name of its `task`, as far as it is known here."""
    return [{**device, "task": _on_device(device, named)} for device in devices]


def _on_device(device: JSON, named: Mapping[str, str]) -> str:
    if device["task_id"]:
        return named.get(device["task_id"]) or str(device["task_id"])
    return "(other tenant)" if device["busy"] else "free"


def standing(
    fair: JSON, devices: Sequence[JSON], running: Sequence[JSON], named: Mapping[str, str]
) -> RenderableType:
    """Show the shares, the devices and the running requests at one moment."""
    on_devices = table(named_devices(devices, named), DEVICES)
    none = "Nothing of yours is running."
    return Group(shares(fair), on_devices, Text(), table(running, REQUESTS, empty=none))


def served(verb: str, devices: Sequence[JSON], named: Mapping[str, str]) -> RenderableType:
    """Say what `drain` or `undrain` changed, and what happens next."""
    many, busy = counted(len(devices), "device"), sum(device["busy"] for device in devices)
    told = f"{many} {'takes' if len(devices) == 1 else 'take'} work again."
    if checking := sum(_health_of(device).get("is_checking", False) for device in devices):
        told = f"{counted(checking, 'device')} will take work again after a health check."
    if verb == "drain":
        told = f"{many} drained: no new work starts there."
        if busy:
            told += (
                " What runs there moves to free devices, or is paused until one is free; no step"
                " is lost. `roundhouse devices` shows when they are empty."
            )
    return Group(words(told), Text(), table(named_devices(devices, named), DEVICES))


def _health_of(device: JSON) -> JSON:
    """Return the health of a device; empty if nothing watches it, or for an older service."""
    health: JSON = device.get("health", {})
    is_known = any(health.get(name) for name in ("is_watched", "cordon_reason", "warnings"))
    return health if is_known else {}


def _device_tasks(device: JSON) -> str:
    """Name one task on the device, and count the others that take turns or share it."""
    more = len(device.get("tasks", ())) - 1
    return f"{device['task']} and {more} more" if more > 0 else device["task"]


def device_health(device: JSON) -> str:
    """Say in a few words how a device is: why it is cordoned, or what is wrong, or its figures."""
    health = _health_of(device)
    if device.get("failure"):
        return str(device["failure"])
    if not health:
        return ""
    if health["is_checking"]:
        return "is being checked"
    if health["cordon_reason"]:
        return str(health["cordon_reason"])
    return " ".join(health["warnings"]) or ", ".join(_figures(health["reading"]))


def _figures(reading: Mapping[str, float]) -> list[str]:
    """Return the figures of a device that say most, with their units."""
    shown = (
        ("utilisation_percent", "{:.0f} %"),
        ("temperature_c", "{:.0f} °C"),
        ("power_w", "{:.0f} W"),
    )
    return [form.format(reading[name]) for name, form in shown if name in reading]


def one_device(device: JSON, named: Mapping[str, str]) -> RenderableType:
    """Show a device, all its figures, and what rules decided about it."""
    health = _health_of(device)
    lines = [
        ("device", device["id"]),
        ("state", _device_state(device)),
        *([("failure", told)] if (told := device.get("failure")) else []),
        ("task", named.get(device["task_id"] or "", "")),
        ("health", device_health(device) if health else "not watched"),
    ]
    if not health:
        return facts(lines)
    since = health["cordoned_at"]
    lines += [("cordoned", ago(since))] if since else []
    lines += [("warning", told) for told in health["warnings"]]
    lines += [(name, _figure(name, value)) for name, value in sorted(health["reading"].items())]
    lines += [(ago(note["at"]), note["told"]) for note in health["notes"]]
    return facts(lines)


def _figure(name: str, value: float) -> str:
    return size(int(value)) if name.endswith("_bytes") else f"{value:g}"


PRESETS = [
    Column("TYPE", lambda p: p["task_type"]),
    Column("KIND", lambda p: p["kind"]),
    Column("PARAMETERS", lambda p: ", ".join(f"{k}={v}" for k, v in p["params"].items())),
    Column("VERSION", lambda p: p["version"], right=True),
]

ENVIRONMENTS = [
    Column("ENVIRONMENT", lambda e: e["path"]),
    Column("", lambda e: state(e["state"])),
    Column("PACKAGES", lambda e: len(e["packages"]) or "-", right=True),
    Column("PYTHON", lambda e: e["python"]),
    Column("SIZE", lambda e: _largest(e["hosts"], "size_bytes", size), right=True),
    Column("BUILT IN", lambda e: _largest(e["hosts"], "build_us", lambda us: f"{us / 1e6:.1f} s")),
    Column("HOSTS", lambda e: len(e["hosts"]) or "-", right=True),
    Column("USED", lambda e: ago(e["used_at"]) if e["used_at"] else "-", whole=True),
    Column("ID", lambda e: e["id"], whole=True, wide=True),
]


def _largest(hosts: list[JSON], name: str, told: Callable[[int], str]) -> str:
    """Return the largest figure of the hosts that have something, in words."""
    figures = [host[name] for host in hosts]
    return told(max(figures)) if figures else "-"


MOUNTS = [
    Column("NAME", lambda m: m["name"]),
    Column("PATH", lambda m: m["path"] or "-"),
    Column("TENANTS", lambda m: _whose_mount(m)),
    Column("HOSTS", lambda m: m["hosts"], right=True),
]


IMAGES = [
    *MOUNTS,
    Column("DIGEST", lambda m: m["unpacked"][0]["digest"][7:19] if m["unpacked"] else "-"),
    Column("SIZE", lambda m: _largest(m["unpacked"], "size_bytes", size), right=True),
    Column(
        "UNPACKED IN",
        lambda m: _largest(m["unpacked"], "unpack_us", lambda us: f"{us / 1e6:.1f} s"),
    ),
]


def _whose_mount(mount: JSON) -> str:
    if mount["path"] is None:
        return "yours"  # other users are not told
    return "all" if mount["tenants"] is None else ", ".join(mount["tenants"])


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


def _location(of_device: JSON) -> str:
    """Return the location of a device: its rack, then where it is inside its host."""
    parts = [of_device.get("rack"), *of_device.get("location", ())]
    return "/".join(part for part in parts if part)


def _device_state(device: JSON) -> Text:
    if not device["up"]:
        return state("failed" if device.get("failure") else "down")
    if device["cordoned"]:
        return state("cordoned")
    return state("stopping") if device.get("stopping") else words("up")


WEBHOOKS = [
    Column("ID", lambda w: w["id"], whole=True),
    Column("URL", lambda w: w["url"] or "(those that requests name)"),
    Column("EVENTS", lambda w: ", ".join(event.removeprefix("request.") for event in w["events"])),
    Column("STATE", lambda w: "answered 410" if w["disabled_at"] else "on"),
]

DELIVERIES = [
    Column("ID", lambda d: d["id"], whole=True),
    Column("TYPE", lambda d: d["type"]),
    Column("STATE", lambda d: d["state"]),
    Column("TRIES", lambda d: len(d["attempts"]), right=True),
    Column("LAST", lambda d: _last_attempt(d)),
    Column("NEXT", lambda d: clock(d["due_at"]), whole=True, wide=True),
    Column("REQUEST", lambda d: d["request_id"], whole=True, wide=True),
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
            ("URL", value["url"]),
            ("signing secret", value["secret"]),
            ("", "Copy the signing secret now: it is not shown again."),
        ]
    )


CHANNELS = [
    Column("NAME", lambda c: c["name"], whole=True),
    Column("KIND", lambda c: c["kind"]),
    Column("STATE", lambda c: "answered 410" if c["disabled_at"] else "on"),
    Column("ID", lambda c: c["id"], whole=True, wide=True),
    Column("TENANT ID", lambda c: c["tenant_id"], whole=True, wide=True),
]

USUAL_CHANNELS = [
    Column("CHANNEL", lambda c: c["to"], whole=True),
    Column("TOLD OF", lambda c: ", ".join(c["on"])),
]


def channel(value: JSON) -> RenderableType:
    told: list[tuple[str, object]] = [("channel", value["name"]), ("kind", value["kind"])]
    if value["kind"] == "webhook":
        told += [
            ("signing secret", value["secret"]),
            ("", "Copy the signing secret now: it is not shown again."),
        ]
    return facts(told)


SECRETS = [
    Column("NAME", lambda s: s["name"], whole=True),
    Column("FOR", lambda s: "the tenant" if s["user_id"] is None else "you"),
    Column("SET", lambda s: ago(s["set_at"])),
    Column("USED", lambda s: ago(s["last_used_at"])),
    Column("TENANT ID", lambda s: s["tenant_id"], whole=True, wide=True),
]

KEYS = [
    Column("ID", lambda k: k["id"], whole=True),
    Column("NAME", lambda k: k["name"]),
    Column("USER", lambda k: k["user"]),
    Column("ROLE", lambda k: k["role"]),
    Column("SCOPES", lambda k: "all" if k["scopes"] is None else ", ".join(k["scopes"])),
    Column("STATE", lambda k: _key_state(k)),
    Column("USED", lambda k: ago(k["last_used_at"])),
    Column("USER ID", lambda k: k["user_id"], whole=True, wide=True),
]

USERS = [
    Column("NAME", lambda u: u["name"]),
    Column("TENANT", lambda u: u["tenant"]),
    Column("WEIGHT", lambda u: u["weight"], right=True),
    Column("IS", lambda u: "a program" if u["service"] else "a person"),
    Column("CREATED", lambda u: ago(u["created_at"]), whole=True),
    Column("ID", lambda u: short(u["id"]), whole=True),
    Column("FULL ID", lambda u: u["id"], whole=True, wide=True),
]

ACCOUNTS = [column for column in USERS if column.heading not in ("IS", "WEIGHT")]


def _key_state(key: JSON) -> str:
    if key["revoked_at"]:
        return "revoked"
    if not key["expires_at"]:
        return "active"
    over = datetime.fromisoformat(key["expires_at"]) <= datetime.now(UTC)
    return "expired" if over else f"until {key['expires_at']}"


def work_taken(tenant: str, done: JSON, verb: str) -> Text:
    asked = f"{verb} requested for {counted(done['requests'], 'request')}."
    return words(f"{tenant}: {asked if done['requests'] else f'no request to {verb}.'}")


def keys_revoked(user: str, done: JSON) -> Text:
    if not done["revoked"]:
        return words(f"{user}: no other key was valid; nothing changed.")
    return words(f"{user}: {counted(done['revoked'], 'key')} revoked.")


def key(value: JSON) -> RenderableType:
    return facts(
        [
            ("key", value["key"]),
            ("role", value["role"]),
            ("scopes", value["scopes"]),
            ("expires", value["expires_at"]),
            ("", "Copy it now: it is not shown again."),
        ]
    )


TENANTS = [
    Column("TENANT", lambda t: "  " * t["depth"] + t["name"]),
    Column("WEIGHT", lambda t: t["weight"], right=True),
    Column("GUARANTEE", lambda t: t["guarantee"] or None),
    Column("LIMIT", lambda t: t["limit"] or None),
    Column("RUN MAX", lambda t: t["max_running"], right=True),
    Column("QUEUE MAX", lambda t: t["max_queued"], right=True),
    Column("MAX TIER", lambda t: t["tier"]),
    Column("ID", lambda t: t["id"], whole=True, wide=True),
]


def as_tree(tenants: Sequence[JSON]) -> list[JSON]:
    """Sort tenants by name, each after its parent, and add the `depth`."""
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
            ("parent", value["parent_id"]),
            ("weight", value["weight"]),
            ("guarantee", value["guarantee"]),
            ("limit", value["limit"]),
            ("max running tasks", value["max_running"]),
            ("max queued tasks", value["max_queued"]),
            ("idle tasks pause after", _idle_pause(value.get("idle_pause_s"))),
            ("sessions end after", _idle_pause(value.get("session_end_s"))),
            ("network", _network_policy(value.get("network"))),
            ("each user", _limits(value.get("user_defaults") or {})),
            ("max tier", value["tier"]),
        ]
    )


def _network_policy(allow: list[str] | None) -> str | None:
    return None if allow is None else ", ".join(allow) or "nothing"


def _idle_pause(pause_s: int | None) -> str | None:
    return None if pause_s is None else seconds(pause_s * 1_000_000)


def user(value: JSON) -> RenderableType:
    names = ("id", "name", "tenant_id", "weight")
    shown = [(name.removesuffix("_id"), value[name]) for name in names]
    return facts([*shown, ("limits", _limits(value))])


def _limits(value: JSON) -> str | None:
    """Return the limits of a user; None without any."""
    devices = [f"{kind} {most}" for kind, most in (value.get("limit") or {}).items()]
    told = [f"devices {', '.join(devices)}"] if devices else []
    for name in ("max_running", "max_queued", "max_sessions"):
        if (most := value.get(name)) is not None:
            told.append(f"{name.removeprefix('max_')} {most}")
    if (longest_s := value.get("max_duration_s")) is not None:
        told.append(f"duration {seconds(round(longest_s * 1_000_000))}")
    if (terms := value.get("budget")) is not None:
        told.append(f"budget {_granted(terms)} each {_period_of(terms)}")
    return "; ".join(told) or None


BUDGET = [
    Column("KIND", lambda k: "all kinds" if k["kind"] == "*" else k["kind"]),
    Column("GRANTED", lambda k: device_hours(k["granted_hours"]), right=True),
    Column("CARRIED", lambda k: device_hours(k["carried_hours"]), right=True),
    Column("ADJUSTED", lambda k: device_hours(k["adjusted_hours"]), right=True),
    Column("SPENT", lambda k: device_hours(k["spent_hours"]), right=True),
    Column("LEFT", lambda k: device_hours(k["left_hours"]), right=True),
    Column("RUNS OUT", lambda k: k["runs_out_at"] and k["runs_out_at"][:10]),
    Column("IN FORCE", lambda k: k["in_force"]),
]


def device_hours(hours: float) -> str:
    return f"{hours:,.1f} h" if abs(hours) >= 10 else f"{hours:.3g} h"


def budget(value: JSON) -> RenderableType:
    """Show a budget and what is spent of it in this period."""
    terms = value["budget"]
    if terms is None:
        return Text("There is no budget; --grant sets one.")
    shown = facts(
        [
            ("set by", "user_defaults of the tenant" if value.get("is_default") else None),
            ("period", _period_of(terms)),
            ("from", f"{value['begins_at'][:16]} to {value['ends_at'][:16]} (UTC)"),
            ("begins at midnight of", terms["timezone"]),
            ("then", ", ".join(f"at {p} % {action}" for p, action in terms["at"].items())),
            ("told to", ", ".join(terms["to"]) or None),
            ("carries over", f"{terms['carry']:.0%} of what is left" if terms["carry"] else None),
        ]
    )
    return Group(shown, Text(), table(value["kinds"], BUDGET))


def budget_of_each_user(terms: JSON | None) -> RenderableType:
    """Show the budget of each user of a tenant that has no own one."""
    if terms is None:
        return Text("There is no budget of each user; --grant sets one.")
    return facts(
        [
            ("each user", _granted(terms)),
            ("period", _period_of(terms)),
            ("begins at midnight of", terms["timezone"]),
            ("then", ", ".join(f"at {p} % {action}" for p, action in terms["at"].items())),
            ("told to", ", ".join(terms["to"]) or None),
            ("carries over", f"{terms['carry']:.0%} of what is left" if terms["carry"] else None),
        ]
    )


def _period_of(terms: JSON) -> str:
    period = terms["period"]
    return period if isinstance(period, str) else counted(period["days"], "day")


def _granted(terms: JSON) -> str:
    return ", ".join(
        f"{'all kinds' if kind == '*' else kind} {device_hours(hours)}"
        for kind, hours in terms["device_hours"].items()
    )


def _reserved(it: JSON) -> str:
    if it["maintenance"]:
        return "maintenance of " + ", ".join(it["device_ids"])
    numbers = ", ".join(f"{kind}={number}" for kind, number in sorted(it["devices"].items()))
    labels = f" with label {' and '.join(it['labels'])}" if it["labels"] else ""
    return ", ".join(it["device_ids"]) or numbers + labels


def _window(window: JSON) -> str:
    return f"{window['begins_at'][:16]} to {window['ends_at'][:16]}"


RESERVATIONS = [
    Column("NAME", lambda r: r["name"], whole=True),
    Column("STATE", lambda r: r["state"]),
    Column("DEVICES", _reserved),
    Column("NEXT (UTC)", lambda r: _window(r["windows"][0]) if r["windows"] else None),
    Column("WINDOWS", lambda r: r["windows_ahead"]),
    Column("ISLAND", lambda r: r["island"], wide=True),
    Column("TENANT ID", lambda r: r["tenant_id"], whole=True, wide=True),
    Column("USER ID", lambda r: r["user_id"], whole=True, wide=True),
    Column("ID", lambda r: r["id"], whole=True, wide=True),
]

FREE_TIMES = [
    Column("FROM (UTC)", lambda w: w["begins_at"][:16]),
    Column("TO", lambda w: w["ends_at"][:16]),
]


def reservation(it: JSON) -> RenderableType:
    """Show a reservation and the windows that it has before it."""
    serve = ", ".join(f"{kind}={number}" for kind, number in sorted(it["available"].items()))
    shown = facts(
        [
            ("reservation", it["name"]),
            ("state", it["state"]),
            ("devices", _reserved(it)),
            ("serving now", serve),
            ("kept for it now", ", ".join(it["kept_device_ids"]) or None),
            ("island", it["island"]),
            ("repeats", f"{it['rule']} ({it['timezone']})" if it["rule"] else None),
            ("windows", it["windows_ahead"]),
            ("note", it["note"]),
            ("made by", it["created_by"]),
        ]
    )
    return Group(shown, Text(), table(it["windows"], FREE_TIMES))


def me(value: JSON) -> list[tuple[str, object]]:
    return [("user", value["user"]), ("tenant", value["tenant"]), ("role", value["role"])]


# --- bundles and errors ---------------------------------------------------------------------------


def bundle(code: PackedBundle) -> Text:
    many = counted(len(code.files), "file")
    text = words(f"bundle {code.folder}: {many}, {size(len(code.body))}, {code.sha256[:12]}…")
    if code.withheld:
        some = ", ".join(code.withheld[:5]) + (", ..." if len(code.withheld) > 5 else "")
        told = (
            f"not sent, as it may contain secrets: {some} (to send it, add a line "
            f"!{code.withheld[0]} to {_IGNORE_FILE})"
        )
        text.append("\n  ").append_text(words(told, "yellow"))
    return text


def unparsed(found: JSON) -> Text:
    """List the Python files in the bundle that do not parse, if there are any."""
    text = Text("  sent")
    for name, why in found.get("unparsed", {}).items():
        text.append("\n  ").append_text(words(f"{name} cannot be parsed: {why}", "yellow"))
    return text


def too_large(code: PackedBundle) -> Text:
    text = Text("  Its largest files:")
    for name, held in code.biggest():
        text.append("\n    ").append_text(words(f"{size(held):>10}  {name}"))
    return text.append(f"\n  List unneeded files in {_IGNORE_FILE}.")


def problem(error: ApiProblem) -> Text:
    """Show the title, the detail, each pointer, and the next action."""
    text = words(error.title, "bold red")
    if not error.errors and error.detail != error.title:  # the errors say more than the detail
        text.append("\n  ").append_text(words(error.detail))
    for entry in error.errors:
        where = entry.get("pointer") or "(the whole)"
        text.append("\n  ").append_text(words(f"{where}: ", "bold"))
        text.append_text(words(str(entry.get("detail", ""))))
    if action := _ACTIONS.get(error.type):
        text.append(f"\n  {action}")
    return text


_ACTIONS = {
    "validation-error": "Nothing was changed.",
    "unsatisfiable": "`roundhouse devices` lists the existing devices.",
    "queue-full": "`roundhouse ps` lists queued tasks.",
    "idempotency-key-reused": "Use another --idempotency-key for another request.",
    "unauthenticated": "Run `roundhouse login`, or set ROUNDHOUSE_KEY.",
    "insufficient-scope": "`roundhouse whoami` shows your role.",
    "not-found": "`roundhouse ps -a` lists your requests.",
    "unavailable": "Nothing was lost; try again in a moment.",
    "internal": "An administrator can find the cause in the log of the API.",
}


def unreachable(error: Unreachable) -> Text:
    text = words(f"{error.url} does not answer", "bold red")
    text.append("\n  ").append_text(words(f"{error.cause or type(error.cause).__name__}"))
    if error.proxy:
        text.append("\n  ").append_text(words(f"It was called through the proxy of {error.proxy}."))
        return text.append("\n  Is the proxy right?  NO_PROXY=HOST calls HOST without it.")
    if error.hint:
        return text.append("\n  ").append_text(words(error.hint))
    return text.append("\n  Is it running (make up)?  Is the address right (roundhouse whoami)?")
