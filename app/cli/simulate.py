"""Defines the command `roundhouse simulate`: it replays a list of jobs here, or the history of a
service there.

A list is replayed in this process by the scheduler's own code; no service is needed. `history`
calls a service (POST /v1/simulations). A second `--policy` is replayed and shown beside the first.
"""

from __future__ import annotations

import gzip
import math
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from app.cli import credentials, replay_svg
from app.cli.bundling import UnreadablePath
from app.cli.client import JSON, Client
from app.cli.tables import Column, Output, err, facts, show, table
from app.core.fairness.fair_tree import ALL
from app.core.fairness.usage_decay import half_life
from app.core.model.snapshot import TIERS, BoardDevice, BoardTenant, Policy
from app.core.simulation.simulator import Costs, InvariantBroken
from app.core.simulation.trace import BadTrace, Trace, read
from app.core.simulation.what_if import POLICIES, Setup, run

HISTORY = "history"
DAY_S = 86400.0
SWITCH_S = 60.0  # default cost of a pause, and of a resume
ANSWER_S = 120.0  # time for a service to replay its history


def _finite(seconds: float | None) -> float | None:
    if seconds is not None and not math.isfinite(seconds):
        raise typer.BadParameter(f"must be a number of seconds or days; got {seconds}")
    return seconds


def _half_life_days(days: float | None) -> float | None:
    if days is not None:
        try:
            half_life(days * DAY_S)
        except ValueError as error:
            raise typer.BadParameter(f"{days:g} days: {error}") from error
    return days


Several = list[str] | None
Devices = Annotated[
    str,
    typer.Option(
        "--devices",
        "-d",
        help="number of devices, such as 640, or by kind: cuda=512,cpu=16",
        metavar="DEVICES",
    ),
]
Named = Annotated[
    Several,
    typer.Option("--policy", help=f"one of {', '.join(POLICIES)}; repeat to compare policies"),
]
Weights = Annotated[
    Several, typer.Option("--weights", help="weights: TENANT=WEIGHT,...; default 1")
]
Guarantees = Annotated[
    Several, typer.Option("--guarantee", help="guaranteed devices: TENANT=KIND:DEVICES; repeatable")
]
Limits = Annotated[
    Several,
    typer.Option("--limit", help="maximum of devices: TENANT=KIND:DEVICES; * means all kinds"),
]
PauseCost = Annotated[
    float | None,
    typer.Option(
        min=0,
        callback=_finite,
        help="seconds that a pause occupies devices; default for a list: 60",
    ),
]
ResumeCost = Annotated[
    float | None,
    typer.Option(
        min=0,
        callback=_finite,
        help="seconds that a resume occupies devices; default for a list: 60",
    ),
]
ResizeCost = Annotated[
    float | None,
    typer.Option(
        min=0,
        callback=_finite,
        help="seconds that a resize occupies devices; default: half of a pause and a resume",
    ),
]


# --- a list, here -------------------------------------------------------------------------------


def replay_file(source: Path, asked: SimulateOptions) -> JSON:
    """Replay a list of jobs under each policy.

    Returns {"trace", "jobs", "left_out", "runs": [report of `core.simulation.what_if`, with
    `took_s`]}.
    """
    if asked.devices is None:
        raise typer.BadParameter("--devices is needed: a number such as 640, or cuda=512,cpu=16")
    kind = next(iter(asked.devices))
    trace = opened(source, kind=kind, tier=asked.tier, expected=not asked.unknown)
    setup = setup_of(trace, asked)
    runs = []
    for name in asked.named:
        began_s = time.process_time()
        try:
            _, report = run(replace(setup, named=name))
        except InvariantBroken as error:
            told = f"{source} cannot be replayed: the scheduler broke one of its invariants"
            raise UnreadablePath(f"{told}: {error}") from error
        runs.append({**report, "took_s": round(time.process_time() - began_s, 2)})
    jobs = len(setup.arrivals)
    return {"trace": str(source), "jobs": jobs, "left_out": trace.left_out, "runs": runs}


def setup_of(trace: Trace, asked: SimulateOptions) -> Setup:
    devices = asked.devices or {}
    unknown = {arrival.kind for arrival in trace.arrivals} - set(devices)
    if unknown:
        told = (
            f"jobs ask for {', '.join(sorted(unknown))}; give their number with --devices "
            "KIND=N,..."
        )
        raise typer.BadParameter(told)
    _check_kinds(asked, devices)
    pause_s = SWITCH_S if asked.pause_s is None else asked.pause_s
    resume_s = SWITCH_S if asked.resume_s is None else asked.resume_s
    slice_s = asked.slice_s or max(1.0, (pause_s + resume_s) / Policy().switch_share)
    half_life_s = Policy().half_life_s if asked.half_life_s is None else asked.half_life_s
    until_s = math.inf if asked.until_s is None else asked.until_s
    return Setup(
        arrivals=[arrival for arrival in trace.arrivals if arrival.at_s <= until_s],
        devices=imagined(devices),
        tenants=_tenants(trace, asked),
        policy=Policy(half_life_s=half_life_s, slice_min_s=slice_s, slice_max_s=slice_s),
        costs=Costs(image_s=pause_s, resume_s=resume_s, resize_s=asked.resize_s),
        until_s=until_s,
    )


def _check_kinds(asked: SimulateOptions, devices: Collection[str]) -> None:
    """Refuse a guarantee or a limit of a kind of which there are no devices."""
    for option, given in (("--guarantee", asked.guarantees), ("--limit", asked.limits)):
        named = {kind for kinds in given.values() for kind in kinds}
        if strangers := sorted(named.difference(devices, [ALL] if option == "--limit" else ())):
            raise typer.BadParameter(
                f"{option}: there are no {strangers[0]} devices; the kinds are {', '.join(devices)}"
            )


def opened(source: Path, *, kind: str, tier: str, expected: bool) -> Trace:
    """Read a trace.  Raises Unreadable, which says what is wrong, where, and what would be
    right.
    """
    try:
        with _lines(source) as lines:
            trace = read(lines, kind=kind, tier=tier, expected=expected)
    except BadTrace as error:
        raise UnreadablePath(f"{source}, {error}") from error
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UnreadablePath(f"cannot read {source}: {error}") from error
    if not trace.arrivals:
        raise UnreadablePath(f"{source} has no jobs; its first line must name the columns")
    return trace


@contextmanager
def _lines(source: Path) -> Iterator[IO[str]]:
    packed = source.suffix == ".gz"
    with gzip.open(source, "rt", newline="") if packed else source.open(newline="") as file:
        yield file


def imagined(devices: dict[str, int]) -> list[BoardDevice]:
    return [
        BoardDevice(id=f"{kind}.{n:06}", host="imaginary", kind=kind, memory_bytes=1 << 60)
        for kind, count in devices.items()
        for n in range(count)
    ]


def _tenants(trace: Trace, asked: SimulateOptions) -> list[BoardTenant]:
    names = sorted({arrival.tenant for arrival in trace.arrivals})
    given = {
        "weights": list(asked.weights),
        "guarantee": list(asked.guarantees),
        "limit": list(asked.limits),
    }
    for option, named in given.items():
        if stranger := next((name for name in named if name not in names), None):
            shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
            raise typer.BadParameter(
                f"--{option}: unknown tenant {stranger!r}; the tenants are {shown}"
            )
    return [
        BoardTenant(
            id=name,
            name=name,
            weight=round(1000 * asked.weights.get(name, 1.0)),
            guarantee=asked.guarantees.get(name, {}),
            limit=asked.limits.get(name, {}),
        )
        for name in names
    ]


# --- options ------------------------------------------------------------------------------------


def parse_devices(text: str) -> dict[str, int]:
    """Parse numbers of devices by kind; a plain number, like "640", means cuda=640."""
    if _count(text) is not None:
        return {"cuda": _device_count(text)}
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(kind and equals for kind, equals, _ in pairs):
        raise typer.BadParameter(
            f"--devices must be a number or KIND=N,..., such as cuda=64; got {text!r}"
        )
    return {kind.strip(): _device_count(count) for kind, _, count in pairs}


def parse_weights(given: Several) -> dict[str, float]:
    found = {}
    for text in _split(given):
        name, equals, number = text.rpartition("=")
        try:
            found[name] = float(number)
        except ValueError:
            equals = ""
        if not equals or not 0.001 <= found[name] <= 1e6:
            raise typer.BadParameter(
                f"--weights must be TENANT=WEIGHT with a weight of 0.001 to 1e6; got {text!r}"
            )
    return found


def parse_kinds(option: str, given: Several) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for text in _split(given):
        name, equals, rest = text.rpartition("=")
        kind, colon, count = rest.partition(":")
        if not (equals and colon and name and kind) or _count(count) is None:
            raise typer.BadParameter(
                f"{option} must be TENANT=KIND:DEVICES, such as lab=cuda:4; got {text!r}"
            )
        found.setdefault(name, {})[kind] = int(count)
    return found


def _split(given: Several) -> list[str]:
    return [part for text in given or () for part in text.split(",") if part]


def _count(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 7 else None


def _device_count(text: str) -> int:
    if not (count := _count(text.strip())):
        raise typer.BadParameter(f"--devices must be a number of devices above 0; got {text!r}")
    return count


# --- output -------------------------------------------------------------------------------------


def told(value: JSON) -> RenderableType:
    """Show the runs side by side, then the tenants and widths of each."""
    runs = value["runs"]
    parts: list[RenderableType] = [table(runs, _RUNS), Text()]
    for run_ in runs:
        named = run_.get("run") or run_["policy"]
        parts += [Text(f"{named}, by tenant", style="bold"), table(run_["tenants"], _TENANTS)]
        parts += [Text(), Text(f"{named}, by devices of a job", style="bold")]
        parts += [table(run_["widths"], [Column("DEVICES", lambda w: w["devices"]), *_FIGURES])]
        parts += [Text()]
    return Group(facts(_facts(value)), Text(), *parts)


def _facts(value: JSON) -> list[tuple[str, object]]:
    first = value["runs"][0]
    too_wide = f"{first['left_out']} ask for more devices than exist" if first["left_out"] else ""
    return [
        ("jobs", value["jobs"]),
        ("of", value.get("trace")),
        ("left out", ", ".join(filter(None, [str(value["left_out"] or ""), too_wide]))),
        ("devices", first["devices"]),
        ("lost", "end - arrival - work: waits, pauses and switches"),
    ]


def _time(of: str, figure: str) -> Any:
    return lambda row: _duration(row[of][figure])


def _duration(seconds: float | None) -> str:
    return "" if seconds is None else replay_svg.duration(seconds)


_FIGURES = [
    Column("JOBS", lambda r: r["jobs"], right=True),
    Column("FIRST WAIT", _time("wait_s", "mean"), right=True),
    Column("LOST P50", _time("lost_s", "p50"), right=True),
    Column("P95", _time("lost_s", "p95"), right=True),
    Column("SLOWDOWN", lambda r: r["slowdown"]["p50"], right=True),
    Column("DONE", lambda r: r["finished"], right=True, wide=True),
    Column("LOST, MEAN", _time("lost_s", "mean"), right=True, wide=True),
    Column("LOST P99", _time("lost_s", "p99"), right=True, wide=True),
    Column("LOST MAX", _time("lost_s", "max"), right=True, wide=True),
    Column("SLOWDOWN P95", lambda r: r["slowdown"]["p95"], right=True, wide=True),
    Column("PAUSES", lambda r: r["pauses"], right=True),
]
_RUNS = [
    Column("RUN", lambda r: r.get("run") or r["policy"]),
    *_FIGURES,
    Column("USED", lambda r: f"{r['utilisation']:.1%}", right=True),
    Column("UNFAIR", lambda r: f"{r['fairness_error']:.1%}", right=True),
    Column("LASTED", lambda r: _duration(r["lasted_s"]), right=True, wide=True),
]
_TENANTS = [
    Column("TENANT", lambda t: t["tenant"]),
    *_FIGURES,
    Column("WEIGHT", lambda t: t["weight"], right=True, wide=True),
    Column("DEVICE H", lambda t: f"{t['device_h']:,.0f}", right=True, wide=True),
    Column("SHARE", lambda t: f"{t['share']:.1%}", right=True),
    Column("FAIR", lambda t: f"{t['fair_share']:.1%}", right=True),
]


def write_plot(value: JSON, file: Path) -> None:
    of = value.get("trace") or "history"
    title = f"{value['jobs']} jobs of {Path(of).name}"
    try:
        file.write_text(replay_svg.svg(value["runs"], title=title), encoding="utf-8")
    except OSError as error:
        raise UnreadablePath(f"cannot write {file}: {error}") from error
    err().print(f"Wrote the plot to {file}.")


# --- the verb -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """The parsed options; None means that an option was not given."""

    named: list[str]
    devices: dict[str, int] | None
    weights: dict[str, float]
    guarantees: dict[str, dict[str, int]]
    limits: dict[str, dict[str, int]]
    half_life_s: float | None
    slice_s: float | None
    pause_s: float | None
    resume_s: float | None
    resize_s: float | None
    tier: str
    unknown: bool
    until_s: float | None


def simulate(
    ctx: typer.Context,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE|history", help="a list of jobs (.csv, .csv.gz, sacct), or `history`"
        ),
    ],
    devices: Devices = "",
    policy: Named = None,
    weights: Weights = None,
    guarantee: Guarantees = None,
    limit: Limits = None,
    half_life: Annotated[
        float | None,
        typer.Option(
            "--half-life",
            callback=_half_life_days,
            help="half-life of usage in days; 0: usage never decays",
        ),
    ] = None,
    slice_s: Annotated[
        float | None,
        typer.Option(
            "--slice",
            min=0.1,
            callback=_finite,
            help="length of a time slice in seconds; default: from the costs",
        ),
    ] = None,
    pause_s: PauseCost = None,
    resume_s: ResumeCost = None,
    resize_s: ResizeCost = None,
    tier: Annotated[str, typer.Option(help="tier of jobs without one")] = "basic",
    unknown: Annotated[
        bool,
        typer.Option("--unknown-durations", help="hide the durations of jobs from the scheduler"),
    ] = False,
    until: Annotated[
        float | None,
        typer.Option("--until", min=0.00001, callback=_finite, help="stop after this many days"),
    ] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="output format")] = (
        Output.table
    ),
    draw: Annotated[Path | None, typer.Option("--plot", help="SVG file to write")] = None,
) -> None:
    """Replay a list of jobs, or `history`, through the scheduler: waits, shares, pauses."""
    asked = SimulateOptions(
        named=parse_policies(policy),
        devices=parse_devices(devices) if devices else None,
        weights=parse_weights(weights),
        guarantees=parse_kinds("--guarantee", guarantee),
        limits=parse_kinds("--limit", limit),
        half_life_s=None if half_life is None else half_life * DAY_S,
        slice_s=slice_s,
        pause_s=pause_s,
        resume_s=resume_s,
        resize_s=resize_s,
        tier=_one_of("tier", tier, TIERS),
        unknown=unknown,
        until_s=None if until is None else until * DAY_S,
    )
    if str(source) == HISTORY:
        value = ask(credentials.found(ctx.obj), asked)
    else:
        value = replay_file(source, asked)
    show(value, output, lambda: told(value))
    if draw is not None:
        write_plot(value, draw)


def parse_policies(given: Several) -> list[str]:
    return [_one_of("policy", name, POLICIES) for name in _split(given)] or ["fair"]


def _one_of(what: str, name: str, words: Iterable[str]) -> str:
    if name not in words:
        raise typer.BadParameter(f"{what} must be one of {', '.join(words)}; got {name!r}")
    return name


# --- history, there -----------------------------------------------------------------------------


def ask(who: credentials.Login, asked: SimulateOptions) -> JSON:
    """Return the answer of POST /v1/simulations; raises Problem and Unreachable."""
    if len(asked.named) > 1 or asked.until_s is not None or asked.unknown:
        raise typer.BadParameter(
            f"{HISTORY} takes exactly one --policy, and neither --until nor --unknown-durations"
        )
    given = {
        "policy": asked.named[0],
        "devices": asked.devices,
        "weights": asked.weights,
        "guarantees": asked.guarantees,
        "limits": asked.limits,
        "half_life_s": asked.half_life_s,
        "slice_min_s": asked.slice_s,
        "slice_max_s": asked.slice_s,
        "pause_s": asked.pause_s,
        "resume_s": asked.resume_s,
        "resize_s": asked.resize_s,
    }
    body = {name: value for name, value in given.items() if value not in (None, {})}
    with Client(who.url, who.key, timeout_s=ANSWER_S) as client:
        return client.post("/v1/simulations", {"source": HISTORY, **body})
