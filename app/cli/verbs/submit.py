"""The verbs submit and rerun: find out what is to run, send its code, post the request."""

from __future__ import annotations

import posixpath
import re
import sys
import uuid
from pathlib import Path
from typing import Annotated, Any

import typer
from typer._click.exceptions import NoSuchOption
from typer.core import TyperCommand

from app.cli import names, package_files, root_command, watching, wording
from app.cli.bundling import PackedBundle, UnreadablePath, bundle_file, bundle_folder
from app.cli.client import JSON, ApiProblem, Client, Unreachable
from app.cli.root_command import WORK, Format, Which, app
from app.cli.tables import Output, err, show, transfer


class _Submit(TyperCommand):
    """The command `submit`, which explains where the options of a script belong."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except NoSuchOption as error:
            error.message += (
                ". Options of the script belong after --, as in `roundhouse submit train.py -- "
                "--epochs 2`."
            )
            raise


@app.command(cls=_Submit, rich_help_panel=WORK)
def submit(
    ctx: typer.Context,
    source: Annotated[
        Path | None,
        typer.Argument(metavar="FILE|FOLDER", help="a script, a descriptor, or a folder with code"),
    ] = None,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- WORDS", help="arguments of the script, or the command to run in the folder"
        ),
    ] = None,
    job: Annotated[str, typer.Option(help="class to run from the folder: module:Class")] = "",
    bundle: Annotated[Path | None, typer.Option(help="folder or archive with the code")] = None,
    param: Annotated[
        list[str] | None,
        typer.Option("--param", "-p", help="parameter of the job: name=value; repeatable"),
    ] = None,
    name: Annotated[str, typer.Option(help="name of the request; default: the code's")] = "",
    ranks: Annotated[
        int,
        typer.Option(min=1, help="number of ranks of a job or command, which share its devices"),
    ] = 1,
    devices: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="devices that it needs at once; a command without --ranks has them in one process,"
            " as torchrun or accelerate launch wants them",
        ),
    ] = None,
    hosts: Annotated[
        int | None,
        typer.Option(min=1, help="with --job: hosts on which its devices lie, as many on each"),
    ] = None,
    kind: Annotated[
        str, typer.Option(help="kind of device; each rank of a command gets an accelerator")
    ] = "cpu",
    collectives: Annotated[
        str,
        typer.Option(help="native: the ranks use torch's own, NCCL or gloo, on a device each"),
    ] = "",
    out: Annotated[
        list[str] | None,
        typer.Option("--out", help="file or folder of the command that is kept; repeatable"),
    ] = None,
    network: Annotated[
        list[str] | None,
        typer.Option("--network", help="what it may reach, such as huggingface.co:443; repeatable"),
    ] = None,
    mount: Annotated[
        list[str] | None,
        typer.Option("--mount", help="folder of its host, such as /data=imagenet; repeatable"),
    ] = None,
    image: Annotated[
        str,
        typer.Option(
            "--image",
            help="container image of the command: a name, or REGISTRY/NAME@sha256:DIGEST",
        ),
    ] = "",
    environment: Annotated[
        str,
        typer.Option(
            "--environment",
            "-e",
            metavar="FILE",
            help="file of the folder that names its packages, such as requirements.txt or uv.lock",
        ),
    ] = "",
    python: Annotated[str, typer.Option(help="version of Python, with --environment")] = "",
    env: Annotated[
        list[str] | None,
        typer.Option("--env", help="environment variable: NAME=VALUE; repeatable"),
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option("--secret", help="secret that becomes a variable of its name; repeatable"),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", help="label of the request: NAME=VALUE; repeatable"),
    ] = None,
    cpus: Annotated[float | None, typer.Option(help="processor cores of its host")] = None,
    memory: Annotated[str, typer.Option(help="memory of its host, such as 16GB")] = "",
    time: Annotated[str, typer.Option(help="longest time on its devices, such as 4h")] = "",
    reservation: Annotated[
        str, typer.Option(help="reservation in whose windows alone it runs")
    ] = "",
    priority: Annotated[
        int | None, typer.Option(help="its place among your own requests, from -100 to 100")
    ] = None,
    tier: Annotated[str, typer.Option(help="premium, standard or basic")] = "",
    retry: Annotated[
        str,
        typer.Option(help="further attempts after a failure, or: never, not even a lost device"),
    ] = "",
    array: Annotated[
        str,
        typer.Option(help="so many members from one description: 0-9999%200, 200 of them at once"),
    ] = "",
    matrix: Annotated[
        list[str] | None,
        typer.Option(
            "--matrix", help="a member for each value: lr=1e-3,1e-4, or seed=0-9; repeatable"
        ),
    ] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(
            "--search",
            help="draw a value for each trial: layers=2,4,8, or lr=log:1e-5,1e-2; also uniform, int"
            " and log_int; repeatable",
        ),
    ] = None,
    method: Annotated[
        str, typer.Option(help="with --search: random, grid or tpe, which learns from a metric")
    ] = "",
    trials: Annotated[int | None, typer.Option(help="with --search: how many members")] = None,
    seed: Annotated[int | None, typer.Option(help="with --search: another draws others")] = None,
    stop: Annotated[
        str,
        typer.Option(
            help="of a lot: pause the members that do worse at these steps: loss@1000,3000,9000, or"
            " max:accuracy@10,30"
        ),
    ] = "",
    keep_best: Annotated[
        float | None, typer.Option(help="with --stop: the share that goes on; default: a third")
    ] = None,
    max_failures: Annotated[
        float | None,
        typer.Option(help="of a lot: more failures hold it; below 1 a share"),
    ] = None,
    after: Annotated[
        list[str] | None,
        typer.Option(
            "--after",
            help="another request, by name or id, that must be done first; NAME:ended, NAME:failed"
            " or NAME:started awaits that, NAME:done:hold or :run is what else to do; repeatable",
        ),
    ] = None,
    checkpoint: Annotated[
        str,
        typer.Option("--from", help="checkpoint from which it begins: ckp_..., or NAME@best"),
    ] = "",
    notify: Annotated[
        list[str] | None,
        typer.Option(
            "--notify",
            help="channel that is told of it: ml-alerts, or ml-alerts:failed,preempted; repeatable",
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="print events until the request ends")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="validate only; submit nothing")] = False,
    key: Annotated[
        str, typer.Option("--idempotency-key", help="submits at most once for this key")
    ] = "",
    output: Format = Output.table,
) -> None:
    """Submit work: a script, a descriptor in YAML or JSON, or a job or command of a folder.

    \b
    roundhouse submit train.py -- --epochs 2  (a script; its folder is sent along)
    roundhouse submit job.sh  (a shell script, which bash runs)
    roundhouse submit folder -- python train.py --lr 0.1
    roundhouse submit train.py -e requirements.txt -- --epochs 2  (with packages)
    roundhouse submit folder --job train:Train -p lr=0.1
    roundhouse submit folder --job train:Train --from sweep@best
    roundhouse submit folder --job train:Train --ranks 16 --devices 16 --hosts 2
    roundhouse submit train.py --matrix lr=1e-3,1e-4 --matrix seed=0-9 -- --lr '${matrix.lr}'
    roundhouse submit train.py --search lr=log:1e-5,1e-2 --trials 20 -- --lr '${search.lr}'
    roundhouse submit train.py --matrix seed=0-9 --stop loss@1000,3000 -- --seed '${matrix.seed}'
    roundhouse submit train.py --ranks 4 --kind cuda --collectives native
    roundhouse submit folder --devices 4 --kind cuda -- torchrun --nproc-per-node 4 train.py
    roundhouse submit eval.py --after train --after baseline:ended
    roundhouse submit request.yaml
    roundhouse submit folder                  (with a roundhouse.yaml in it)
    """
    usual_name = _usual_name(source)
    if param:
        _must_read_params(source, job)
    source, command = _script(source, command or [])
    run = _run(source, job, command, bundle)
    descriptor = _descriptor(
        source,
        run,
        ranks=ranks,
        devices=devices,
        hosts=hosts,
        kind=kind,
        collectives=collectives,
    )
    if name or (run is not None and usual_name):
        descriptor["name"] = name or usual_name
    if param:
        _set_params(descriptor, param)
    if network:
        _only_task(descriptor, "--network")["network"] = {"allow": network}
    if reservation:
        _only_task(descriptor, "--reservation")["reservation"] = reservation
    _set_begin_and_end(descriptor, checkpoint, out or [])
    _set_files(descriptor, mount or [], image)
    _set_limits(descriptor, {"cpus": cpus, "memory": memory, "time": time, "retry": retry})
    _set_variables(descriptor, env or [], secret or [])
    _set_search(descriptor, search or [], {"method": method, "trials": trials, "seed": seed})
    _set_lot(descriptor, array, matrix or [], max_failures)
    _set_stop(descriptor, stop, keep_best)
    _set_order(descriptor, label or [], priority, tier)
    _set_after(descriptor, after or [])
    _set_notify(descriptor, notify or [])
    folder = next((each for each in (bundle, source) if each is not None and each.is_dir()), None)
    is_offered = run is not None and not descriptor.get("environment")
    more = _environment(descriptor, folder, environment, python, is_offered=is_offered)
    code = _code(descriptor, source, bundle, more)
    key = key or str(uuid.uuid4())
    with root_command.connect(ctx) as client:
        if code is not None:
            upload(client, code)
            descriptor["bundle"] = f"sha256:{code.sha256}"
        if check:
            checked = client.post("/v1/requests:validate", descriptor)
            show(checked, output, lambda: wording.validated(checked))
            return
        _post(ctx, client, descriptor, key, watch, output)


def _post(
    ctx: typer.Context, client: Client, descriptor: JSON, key: str, watch: bool, output: Output
) -> None:
    """Submit the descriptor, at most once for this key, and show the new request."""
    try:
        request = client.submit(descriptor, key=key)
    except Unreachable:
        err().print(
            "The submission may have arrived. It is safe to repeat it with --idempotency-key "
            f"{key}."
        )
        raise
    if not watch:
        show(request, output, lambda: wording.accepted(request))
        return
    err().print(wording.accepted(request))
    watching.follow(ctx, client, request["id"], output)


@app.command(rich_help_panel=WORK)
def rerun(
    ctx: typer.Context,
    given: Which,
    param: Annotated[
        list[str] | None,
        typer.Option("--param", "-p", help="another parameter of the job: name=value; repeatable"),
    ] = None,
    name: Annotated[str, typer.Option(help="another name for the new request")] = "",
    print_only: Annotated[
        bool, typer.Option("--print", help="print its descriptor as YAML; submit nothing")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="print events until the request ends")
    ] = False,
    key: Annotated[
        str, typer.Option("--idempotency-key", help="submits at most once for this key")
    ] = "",
    output: Format = Output.table,
) -> None:
    """Submit a request once more, with the code and the fields that it was submitted with.

    \b
    roundhouse rerun digits -p lr=0.01
    roundhouse rerun digits --print > digits.yaml  (then change it, and submit digits.yaml)
    """
    with root_command.connect(ctx) as client:
        kind, id = names.resolve(client, given)
        if kind == "tasks":
            id = client.get(f"/v1/tasks/{id}")["request_id"]
        descriptor = client.get(f"/v1/requests/{id}/descriptor")["descriptor"]
        if name:
            descriptor["name"] = name
        if param:
            _set_params(descriptor, param)
        if print_only:
            show(descriptor, Output.yaml if output == Output.table else output, lambda: "")
            return
        _post(ctx, client, descriptor, key or str(uuid.uuid4()), watch, output)


def _script(source: Path | None, words: list[str]) -> tuple[Path | None, list[str]]:
    """Return the folder and the command.

    A script becomes the command `python SCRIPT`, or `bash SCRIPT`, in the script's own folder.
    """
    if misplaced := [word for word in words if word in _OWN_OPTIONS]:
        err().print(
            f"{misplaced[0]} stands after --, so it is passed to the script, not to submit."
        )
    if source is None or source.is_dir():
        return source, words
    if not source.exists():
        raise typer.BadParameter(_not_there(source, words))
    if (program := _PROGRAMS.get(source.suffix)) is None:
        return source, words
    return source.parent, [program, source.name, *words]


def _usual_name(source: Path | None) -> str:
    """Return a name for the request, made from the script's or folder's name; "" if that gives
    none.
    """
    named = "" if source is None else source.resolve().stem.lower()
    return re.sub(r"[^a-z0-9._-]+", "-", named).strip("._-")[:63]


_PROGRAMS = {".py": "python", ".sh": "bash"}  # what runs a script
_NUMBER = re.compile(r"\d+(\.\d+)?")  # bytes or seconds; otherwise the text has a unit
_OWN_OPTIONS = {
    "--environment",
    "--watch",
    "--check",
    "--ranks",
    "--devices",
    "--hosts",
    "--kind",
    "--collectives",
    "--network",
    "--mount",
    "--image",
    "--env",
    "--secret",
    "--label",
    "--cpus",
    "--memory",
    "--reservation",
    "--priority",
    "--tier",
    "--retry",
    "--array",
    "--matrix",
    "--search",
    "--method",
    "--trials",
    "--seed",
    "--stop",
    "--keep-best",
    "--max-failures",
    "--after",
    "--from",
    "--notify",
    "--idempotency-key",
}


def _not_there(source: Path, words: list[str]) -> str:
    told = f"no such file or folder: {source}"
    if not words:
        return told
    return f"{told}; to run a command, name its folder first: roundhouse submit FOLDER -- COMMAND"


def _run(source: Path | None, job: str, command: list[str], bundle: Path | None) -> JSON | None:
    """Return what to run, if the options say so; None if a descriptor says it."""
    if job and command:
        raise typer.BadParameter("--job and a command exclude each other")
    if not job and not command:
        return None
    if source is not None and not source.is_dir():
        raise typer.BadParameter(
            f"{source} is neither a folder nor a Python script; with --job or a command, name the "
            "folder of the code"
        )
    if source is not None and bundle is not None:
        raise typer.BadParameter(
            f"{source} and --bundle {bundle} both name the code; give only one"
        )
    return {"job": job} if job else {"command": command}


def _descriptor(
    source: Path | None,
    run: JSON | None,
    *,
    ranks: int,
    devices: int | None,
    hosts: int | None,
    kind: str,
    collectives: str,
) -> JSON:
    if run is not None:
        name = "train" if "job" in run else "command"
        task: JSON = {"name": name, "type": "train", "run": run, "world_size": ranks}
        if devices is None and kind != "cpu" and "command" in run:
            devices = ranks
        given = {name: n for name, n in (("min", devices), ("hosts", hosts)) if n is not None}
        if given or kind != "cpu":
            task["devices"] = {"kind": kind, **given}
        if collectives:
            task["collectives"] = collectives
        return {"tasks": [task]}
    if source is None:
        raise typer.BadParameter(
            "name what to submit: a script, a descriptor, or a folder with code"
        )
    if ranks > 1 or devices is not None or hosts is not None or kind != "cpu" or collectives:
        raise typer.BadParameter(
            "--ranks, --devices, --hosts, --kind and --collectives do not apply to a descriptor; "
            "set world_size, devices and collectives in its tasks"
        )
    from app.cli.descriptor_file import read_descriptor

    return read_descriptor(source)


def _set_files(descriptor: JSON, mounts: list[str], image: str) -> None:
    """Say which files of its host the only task sees."""
    if mounts:
        _only_task(descriptor, "--mount")["mounts"] = _mounts(mounts)
    if image:
        _only_task(descriptor, "--image")["image"] = image


def _set_begin_and_end(descriptor: JSON, checkpoint: str, out: list[str]) -> None:
    """Say from which checkpoint the only task begins, and which of its files are kept."""
    if checkpoint:
        _only_task(descriptor, "--from")["from_checkpoint"] = checkpoint
    if out:
        kept = [posixpath.normpath(path) for path in out]  # ./out/ is out
        _only_task(descriptor, "--out")["artifacts"] = kept


def _set_limits(descriptor: JSON, given: JSON) -> None:
    """Say what the only task may use; the service checks the values and their units."""
    places = {"cpus": "cpus", "memory": "memory_bytes"}
    for option, value in given.items():
        if value in (None, ""):
            continue
        task = _only_task(descriptor, f"--{option}")
        value = float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
        if option == "time":
            task["max_duration_s"] = value
        elif option == "retry":
            policy = task.get("retry")
            others = policy if isinstance(policy, dict) else {}
            task["retry"] = value if value == "never" else {**others, "max": value}
        else:
            task["resources"] = {**(task.get("resources") or {}), places[option]: value}


def _set_variables(descriptor: JSON, env: list[str], secrets: list[str]) -> None:
    if env:
        task = _only_task(descriptor, "--env")
        task["env"] = {**(task.get("env") or {}), **_pairs("--env", "NAME=VALUE", env)}
    if secrets:
        task = _only_task(descriptor, "--secret")
        task["secrets"] = [*dict.fromkeys([*(task.get("secrets") or []), *secrets])]


def _set_lot(descriptor: JSON, array: str, matrix: list[str], max_failures: float | None) -> None:
    """Turn the request's only task into a lot, by its options --array, --matrix and the like."""
    if not (array or matrix or max_failures is not None):
        return
    task = _only_task(
        descriptor, "--array" if array else "--matrix" if matrix else "--max-failures"
    )
    if not (array or matrix or task.get("search")):
        raise typer.BadParameter("--max-failures goes with --array, --matrix or --search")
    if matrix:
        values = _pairs("--matrix", "KEY=VALUE,...", matrix)
        task["matrix"] = {key: _values(said) for key, said in values.items()}
    found = _ARRAY.fullmatch(array)
    drawn = "--matrix" if matrix else "--search" if task.get("search") else ""
    if array and (found is None or (found["last"] and drawn)):
        told = f"with {drawn} only %N, which says how many run at once" if drawn else "0-LAST%N"
        raise typer.BadParameter(f"--array must be {told}; got {array}")
    said = found.groupdict() if found is not None else {}
    last, at_once = said.get("last"), said.get("at_once")
    given = {
        "count": int(last) + 1 if last else None,
        "at_once": int(at_once) if at_once else None,
        "max_failures": max_failures,
    }
    task["array"] = {name: value for name, value in given.items() if value is not None} or None


def _set_search(descriptor: JSON, search: list[str], given: JSON) -> None:
    """Let the only task draw the values of its members."""
    said = {name: value for name, value in given.items() if value not in (None, "")}
    if not search:
        if unused := [*said]:
            raise typer.BadParameter(f"--{unused[0]} goes with --search")
        return
    space = _pairs("--search", "KEY=VALUE,... or KEY=SCALE:LOW,HIGH", search)
    drawn = {key: _space(values) for key, values in space.items()}
    _only_task(descriptor, "--search")["search"] = {**said, "space": drawn}


def _set_stop(descriptor: JSON, stop: str, keep_best: float | None) -> None:
    """Let the members of the only task be compared at rungs."""
    if not stop:
        if keep_best is not None:
            raise typer.BadParameter("--keep-best goes with --stop")
        return
    found = _STOP.fullmatch(stop)
    if found is None:
        raise typer.BadParameter(f"--stop must be METRIC@STEP,STEP,...; got {stop}")
    rule = {
        "metric": found["metric"],
        "goal": found["goal"],
        "rungs": [int(step) for step in found["rungs"].split(",")],
        "keep": keep_best,
    }
    given = {name: value for name, value in rule.items() if value is not None}
    _only_task(descriptor, "--stop")["stop"] = given


_STOP = re.compile(r"((?P<goal>min|max):)?(?P<metric>.+)@(?P<rungs>\d{1,16}(,\d{1,16})*)")


def _space(said: str) -> Any:
    """Return the values of a key, or its interval; the service checks both."""
    scale, colon, bounds = said.partition(":")
    return {scale: _values(bounds)} if colon and scale.isidentifier() else _values(said)


_ARRAY = re.compile(r"(0-(?P<last>\d{1,9}))?(%(?P<at_once>\d{1,9}))?")


def _values(said: str) -> Any:
    """Return the values of a key; the service reads a range."""
    if re.fullmatch(r"\d{1,9}-\d{1,9}", said):
        return said
    from app.cli.descriptor_file import parse_param

    return [parse_param(f"value={each}")[1] for each in said.split(",")]


def _set_order(descriptor: JSON, labels: list[str], priority: int | None, tier: str) -> None:
    if labels:
        given = _pairs("--label", "NAME=VALUE", labels)
        descriptor["labels"] = {**(descriptor.get("labels") or {}), **given}
    if priority is not None:
        descriptor["priority"] = priority
    if tier:
        descriptor["tier"] = tier


def _set_after(descriptor: JSON, after: list[str]) -> None:
    """Let the only task, or each of several, come after other requests."""
    if not after:
        return
    tasks = descriptor.get("tasks")
    if not isinstance(tasks, list) or not all(isinstance(task, dict) for task in tasks):
        raise typer.BadParameter("--after needs a descriptor with tasks")
    for task in tasks:
        start = task.get("start") or {}
        others = start.get("after_requests") or []
        task["start"] = {**start, "after_requests": [*others, *map(_after, after)]}


def _after(said: str) -> JSON:
    """Return an entry of `after_requests`; the service checks its words."""
    name, *more = said.split(":")
    if not name or len(more) > 2:
        raise typer.BadParameter(f"--after must be NAME, NAME:ON or NAME:ON:ELSE; got {said}")
    return {"request": name, **dict(zip(("on", "else"), more, strict=False))}


def _set_notify(descriptor: JSON, notify: list[str]) -> None:
    if not notify:
        return
    others = descriptor.get("notify") or []
    if not isinstance(others, list):
        raise typer.BadParameter("--notify names channels, and the descriptor names a webhook")
    descriptor["notify"] = [*others, *map(channel_wish, notify)]


def channel_wish(said: str) -> JSON:
    """Return an entry of `notify`; the service checks its words."""
    name, colon, events = said.partition(":")
    return {"to": name, **({"on": events.split(",")} if colon else {})}


def _must_read_params(source: Path | None, job: str) -> None:
    """Refuse parameters for a script that cannot see them."""
    if job or source is None or source.suffix != ".py" or not source.is_file():
        return
    if b"ROUNDHOUSE_PARAMS" not in source.read_bytes():
        raise typer.BadParameter(
            f"--param is for jobs, and {source} does not read ROUNDHOUSE_PARAMS; options of a "
            f"script belong after --: roundhouse submit {source} -- --lr 0.1"
        )


def _mounts(given: list[str]) -> JSON:
    """Return the mounts by target; the service checks both."""
    return _pairs("--mount", "TARGET=MOUNT", given)


def _pairs(option: str, form: str, given: list[str]) -> JSON:
    pairs = [each.partition("=") for each in given]
    if wrong := [each for each, (_, equals, _) in zip(given, pairs, strict=True) if not equals]:
        raise typer.BadParameter(f"{option} must be {form}; got {wrong[0]}")
    return {name: value for name, _, value in pairs}


def _only_task(descriptor: JSON, option: str) -> JSON:
    """Return the descriptor's task; an option says nothing of several tasks."""
    tasks = descriptor.get("tasks")
    if not isinstance(tasks, list) or len(tasks) != 1 or not isinstance(tasks[0], dict):
        raise typer.BadParameter(f"{option} needs a single task; set it for several in the file")
    task: JSON = tasks[0]
    return task


def _environment(
    descriptor: JSON, folder: Path | None, path: str, python: str, *, is_offered: bool
) -> dict[str, bytes]:
    """Say which packages the request brings; return files to send beside the code."""
    if not path and python:
        raise typer.BadParameter("--python goes with --environment")
    if not path and is_offered and folder is not None:
        path = _offered(folder)
    if not path:
        return {}
    descriptor["environment"], more = package_files.environment_of(folder, path, python)
    return more


def _offered(folder: Path) -> str:
    """Ask a person whether the packages that the folder names are wanted; "" if not."""
    found = package_files.find_usual(folder)
    if not found:
        return ""
    if sys.stdin.isatty() and sys.stderr.isatty():
        asked = f"{found} names packages. Install them for the task?"
        return found if typer.confirm(asked, default=True, err=True) else ""
    err().print(f"{found} is not used. To install its packages: --environment {found}")
    return ""


def _set_params(descriptor: JSON, params: list[str]) -> None:
    task = _only_task(descriptor, "--param")
    from app.cli.descriptor_file import parse_param

    try:
        given = dict(parse_param(text) for text in params)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    task["params"] = {**(task.get("params") or {}), **given}


def _code(
    descriptor: JSON, source: Path | None, given: Path | None, more: dict[str, bytes]
) -> PackedBundle | None:
    """Return the code to send, with `more` files; None if the descriptor names a bundle that the
    service already has.
    """
    named = descriptor.get("bundle")
    if given is not None:
        place = given
    elif isinstance(named, str) and not named.startswith("sha256:"):
        assert source is not None, "only a file can name a bundle"
        place = (source if source.is_dir() else source.parent) / named
        if not place.exists():
            raise UnreadablePath(f"{source}: its bundle {named} does not exist ({place})")
    elif named is None and source is not None and source.is_dir():
        place = source
    else:
        return None
    return bundle_file(place) if place.is_file() else bundle_folder(place, more)


def upload(client: Client, code: PackedBundle) -> None:
    err().print(wording.bundle(code))
    try:
        with transfer("Sending the code", len(code.body)) as passed:
            sent = client.upload(code.sha256, code.body, sent=passed)
    except ApiProblem as problem:
        if problem.status == 413:
            err().print(wording.too_large(code))
        raise
    err().print("  the service already has it" if sent is None else wording.unparsed(sent))
