"""The health of a device, as API, pages and command show it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from app.core.device import clock_skew
from app.core.device.health_cordons import Fitness, HealthReport
from app.core.device.health_findings import HealthVerdict
from app.core.model.protocol.protocol_version import told_version
from app.db.models import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHealthNote:
    at: datetime
    told: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHealthView:
    """Shows what is known of a device's health.

    `cordon_rule` and `cordon_reason` say why a rule has cordoned it, since `cordoned_at`; None
    without such a cordon.  `warnings` are findings that do not cordon.  `notes` are the newest
    first.
    """

    is_watched: bool
    is_checking: bool
    cordon_rule: str | None
    cordon_reason: str | None
    cordoned_at: datetime | None
    warnings: list[str]
    reading: dict[str, float]
    notes: list[DeviceHealthNote]


def device_health(device: Device) -> DeviceHealthView:
    report, fitness = HealthReport.of(device.health), Fitness.of(device.fitness)
    why, found = fitness.cordon, report.findings if report is not None else ()
    warned = [finding.reason for finding in found if finding.verdict == HealthVerdict.WARN]
    return DeviceHealthView(
        is_watched=report is not None,
        is_checking=fitness.is_checking,
        cordon_rule=why.rule if why is not None else None,
        cordon_reason=why.reason if why is not None else None,
        cordoned_at=_at(why.at_s) if why is not None else None,
        warnings=[*warned, *filter(None, [fitness.suspicion, *told_warnings(device)])],
        reading=device.health.get("reading", {}),
        notes=[
            DeviceHealthNote(at=_at(note.at_s), told=note.told) for note in reversed(fitness.notes)
        ],
    )


def told_warnings(device: Device) -> list[str]:
    """Say what is wrong with the device's host that no monitor of the device finds."""
    told = told_clock(device), told_version(device.facts)
    return [one for one in told if one]


def told_clock(device: Device) -> str:
    """Say how far the clock of the device's host is off; empty if it is right or unknown."""
    began_s = device.facts.get("clock_began_s")
    if began_s is None or device.seen_at is None:
        return ""
    heard_s = device.seen_at.timestamp()
    return clock_skew.told_skew(
        clock_skew.skew_s(began_s, sent_us=device.heard_us, heard_s=heard_s)
    )


def _at(at_s: float) -> datetime:
    return datetime.fromtimestamp(at_s, UTC)


def device_failure(device: Device) -> str:
    """Return why its worker could not serve the device when it last tried, or "".

    A device that is served tells other facts, so this is of one that is not up, or will not be when
    its lease ends.
    """
    return str(device.facts.get("failed") or device.facts.get("refuses") or "")
