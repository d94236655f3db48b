"""The demo's display: a live picture on a terminal, plain lines anywhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from examples.judge import Life, Verdict, Window

JSON = dict[str, Any]

PLAIN_EVERY_S = 5.0
ENDED = ("done", "failed", "cancelled")
BAR = 24  # characters for all device time


class View:
    """The display; `weights` and `names` (of tenants by id) do not change while it runs."""

    def __init__(self, console: Console, weights: Mapping[str, float], devices: Sequence[str]):
        self.console, self.weights, self.devices = console, weights, devices
        self.notes: list[str] = []
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._shown_s = -PLAIN_EVERY_S

    def __enter__(self) -> View:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def note(self, at_s: float, what: str) -> None:
        """Record an event that stays visible."""
        self.notes.append(f"[{at_s:5.1f} s] {what}")
        if not self.console.is_terminal:
            self.console.print(self.notes[-1], markup=False, highlight=False)

    def show(
        self, at_s: float, tasks: Mapping[str, Sequence[JSON]], used_us: Mapping[str, int]
    ) -> None:
        """Show the state now; `tasks` by tenant."""
        if self.console.is_terminal:
            self._live.update(self._picture(at_s, tasks, used_us))
        elif at_s >= self._shown_s + PLAIN_EVERY_S:
            self._shown_s = at_s
            line = f"[{at_s:5.1f} s] {self._line(tasks, used_us)}"
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _line(self, tasks: Mapping[str, Sequence[JSON]], used_us: Mapping[str, int]) -> str:
        seats = _seats(tasks)
        held = "  ".join(f"{device}: {seats.get(device, '-')}" for device in self.devices)
        total = max(1, sum(used_us.values()))
        parts = (
            f"{tenant} {used_us[tenant] / 1e6:.0f} s {used_us[tenant] / total:.0%}"
            f" {_count(tasks[tenant], 'done')}/{len(tasks[tenant])} done"
            for tenant in self.weights
        )
        return f"{held} | {' | '.join(parts)}"

    def _picture(
        self, at_s: float, tasks: Mapping[str, Sequence[JSON]], used_us: Mapping[str, int]
    ) -> Group:
        seats = _seats(tasks)
        devices = Table(title=f"devices, {at_s:.0f} s", title_justify="left")
        devices.add_column("device")
        devices.add_column("held now by", min_width=32)
        for device in self.devices:
            devices.add_row(device, seats.get(device, "[dim]nobody[/dim]"))
        return Group(devices, self._tenants(tasks, used_us), *self.notes[-6:])

    def _tenants(self, tasks: Mapping[str, Sequence[JSON]], used_us: Mapping[str, int]) -> Table:
        table = Table(title="tenants", title_justify="left")
        for name in ("tenant", "weight", "share of device time", "used", "run", "wait", "paused"):
            table.add_column(name)
        table.add_column("done")
        table.add_column("steps", justify="right")
        total, weights = max(1, sum(used_us.values())), sum(self.weights.values())
        for tenant, weight in self.weights.items():
            own = tasks[tenant]
            paused = sum(1 for task in own if task["state"] == "waiting" and task["pauses"])
            table.add_row(
                tenant,
                f"{weight:g}",
                _bar(used_us[tenant] / total, weight / weights),
                f"{used_us[tenant] / 1e6:.1f} s",
                str(_count(own, "running", "pausing", "starting")),
                str(_count(own, "waiting", "blocked") - paused),
                str(paused),
                f"{_count(own, 'done')}/{len(own)}",
                str(sum(task["step"] for task in own)),
            )
        return table


def summary(window: Window, weights: Mapping[str, float], lives: Sequence[Life]) -> Group:
    """Return tables of device-seconds against weights, and of pauses and lost steps per job."""
    total = sum(weights.values())
    shares = Table(
        title=f"device-seconds in {window.seconds:.0f} s of full demand",
        title_justify="left",
    )
    for name in ("tenant", "weight", "device-seconds", "share", "by weight"):
        shares.add_column(name, justify="right")
    for tenant, weight in weights.items():
        used_s, share = window.used_us.get(tenant, 0) / 1e6, window.share(tenant)
        wanted = f"{weight / total:.1%}"
        shares.add_row(tenant, f"{weight:g}", f"{used_s:.1f}", f"{share:.1%}", wanted)
    jobs = Table(title="jobs", title_justify="left")
    for name in ("job", "state", "steps", "device-s", "pauses", "devices", "steps lost", "loss"):
        jobs.add_column(name, justify="right")
    for life in lives:
        jobs.add_row(*_job_row(life))
    return Group(shares, jobs)


def verdicts(found: Sequence[Verdict]) -> Table:
    table = Table(title="what was promised", title_justify="left", show_lines=True)
    table.add_column("")
    table.add_column("promise")
    table.add_column("seen")
    for verdict in found:
        mark = "[green]held[/green]" if verdict.held else "[red]BROKEN[/red]"
        table.add_row(mark, verdict.promise, verdict.numbers)
    return table


def _job_row(life: Life) -> tuple[str, ...]:
    task = life.task
    devices = ", ".join(sorted({placement["device_id"] for placement in life.placements}))
    loss = (task["result"] or {}).get("loss")
    return (
        life.name,
        task["state"],
        str(task["step"]),
        f"{task['held_us'] / 1e6:.1f}",
        str(task["pauses"]),
        devices,
        str(task["lost_steps"]),
        f"{loss:.4f}" if loss is not None else "-",
    )


def _seats(tasks: Mapping[str, Sequence[JSON]]) -> dict[str, str]:
    """Return for each device the task that holds it or was lent it, with its step."""
    holding = ("starting", "running", "pausing")
    return {
        device: f"{tenant} {task['name']} step {task['step']}"
        for tenant, own in tasks.items()
        for task in own
        if task["seat"] and task["state"] in holding
        for device in (task["seat"], *task["lent"])
    }


def _count(tasks: Sequence[JSON], *states: str) -> int:
    return sum(1 for task in tasks if task["state"] in states)


def _bar(share: float, wanted: float) -> str:
    """Return a bar as long as the share, with a mark where the weight says it should end."""
    filled, mark = round(share * BAR), min(BAR - 1, round(wanted * BAR))
    cells = ["█" if n < filled else "·" for n in range(BAR)]
    cells[mark] = "[bold yellow]|[/bold yellow]"
    return "".join(cells) + f" {share:5.1%}"
