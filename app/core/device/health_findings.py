"""Finds what is wrong with a device, from the readings of its monitor.

A device worker runs these rules on its own device, by its own clock. Each finding is a warning, or
a reason for a cordon. The island takes the findings in: `core.device.health_cordons` decides
whether the device takes work.

The meaning of each Xid code, and whether it asks for a reset, is NVIDIA's: "Analyzing Xid Errors
with the Xid Catalog" (docs.nvidia.com/deploy/xid-errors). The catalog's immediate action is quoted
beside each code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from app.core.device.health_readings import Reading, figures, is_worth_telling

JSON = dict[str, Any]

WHY_MOST = 200  # most characters of the reason why a monitor does not work


class HealthVerdict(StrEnum):
    """Names what the island does because of a finding."""

    WARN = "warn"  # the fault is reported; the device still serves
    CORDON = "cordon"  # the device takes no new work


class Effect(StrEnum):
    """Names what happens to the tasks on the device."""

    STAY = "stay"
    MOVE = "move"  # tasks move while they run, or pause: no step is lost
    RESTART = "restart"  # the device cannot give up their state: they resume from a checkpoint


class HealthRule(StrEnum):
    """The rules by which a device is judged."""

    XID = "xid"
    ECC = "ecc"
    REMAP = "remap"
    TEMPERATURE = "temperature"
    LOST = "lost"
    HANG = "hang"
    MONITOR = "monitor"
    FAILURES = "failures"
    FAULT = "fault"
    FLAPPING = "flapping"


#: Rules whose finding ends by itself; the device may serve again then.
PASSING = frozenset({HealthRule.TEMPERATURE, HealthRule.HANG, HealthRule.MONITOR})


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Describes something that is wrong with a device. `reason` has no number that changes with
    time.
    """

    rule: HealthRule
    verdict: HealthVerdict
    effect: Effect
    reason: str

    @property
    def cordons(self) -> bool:
        return self.verdict == HealthVerdict.CORDON


def warning(rule: HealthRule, reason: str) -> Finding:
    return Finding(rule=rule, verdict=HealthVerdict.WARN, effect=Effect.STAY, reason=reason)


def cordon(rule: HealthRule, reason: str, effect: Effect = Effect.MOVE) -> Finding:
    return Finding(rule=rule, verdict=HealthVerdict.CORDON, effect=effect, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class XidRule:
    """Describes an Xid code.

    A warning becomes a cordon when the code comes `most` times in a window.
    """

    means: str
    finding: HealthVerdict
    effect: Effect = Effect.MOVE
    most: int = 0  # 0: never


_CORDON, _WARN = HealthVerdict.CORDON, HealthVerdict.WARN

#: The codes with a rule.
XIDS: Mapping[int, XidRule] = {
    48: XidRule(means="double-bit ECC error", finding=_CORDON),  # WORKFLOW_XID_48
    63: XidRule(means="a memory row is to be remapped", finding=_WARN, most=8),  # IGNORE
    64: XidRule(means="a memory row could not be remapped", finding=_CORDON),  # RESET_GPU
    74: XidRule(means="NVLink error", finding=_CORDON),  # WORKFLOW_NVLINK_ERR
    79: XidRule(  # RESTART_BM
        means="fell off the bus", finding=_CORDON, effect=Effect.RESTART
    ),
    94: XidRule(means="contained ECC error", finding=_WARN, most=3),  # RESTART_APP
    95: XidRule(means="uncontained ECC error", finding=_CORDON),  # RESET_GPU
    119: XidRule(means="the GPU's system processor does not answer", finding=_CORDON),  # RESET_GPU
}
#: Codes that a program causes by its own mistake (RESTART_APP or IGNORE in the catalog).
CAUSED_BY_PROGRAMS = frozenset({13, 31, 32, 43, 45})


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthLimits:
    """Lists how long and how often something may be wrong before it counts.

    `patience_us` is how long a device may be too hot, not answer, or have no monitor. It counts as
    well only after it has been well for as long.
    """

    patience_us: int = 30_000_000
    # after a silence of this length, state on the device can no longer be taken off it
    stuck_us: int = 300_000_000
    window_us: int = 24 * 3_600_000_000  # period in which Xid codes are counted
    warned_us: int = 3_600_000_000  # how long a warning of an event stands
    ecc_window_us: int = 3_600_000_000
    ecc_most: int = 3  # uncorrectable errors in that window
    cooler_c: int = 5  # a hot device counts as cool when it is this far below its limit
    hot_c: int = 95  # the limit of a device that names none
    idle_below_percent: int = 2  # utilisation below which a device computes nothing


@dataclass(slots=True)
class _Passing:
    """Tracks a condition that begins and ends. `bad_us`, `well_us`: since when, by the device's
    clock.
    """

    bad_us: int | None = None
    well_us: int | None = None
    counts: bool = False

    def see(self, is_bad: bool, now_us: int, patience_us: int) -> None:
        if is_bad:
            self.bad_us = now_us if self.bad_us is None else self.bad_us
            self.well_us = None
            self.counts |= now_us - self.bad_us >= patience_us
            return
        self.bad_us = None
        self.well_us = now_us if self.well_us is None else self.well_us
        self.counts &= now_us - self.well_us < patience_us


class HealthWatch:
    """Judges one device by its readings; a check forgets all findings and starts over.

    During a check there is no patience: a fault at the first reading counts at once, so that a
    faulty device never begins to serve.
    """

    def __init__(self, limits: HealthLimits, now_us: int) -> None:
        self.limits = limits
        self.told: JSON = {}  # the figures in the heartbeats
        self.check(0, now_us)

    def check(self, number: int, now_us: int) -> None:
        """Begin a check. The device has passed it if its next reading gives no reason for a
        cordon.
        """
        self.number, self.is_checked = number, False
        self.heard_us = now_us  # when the monitor answered last
        self._standing: dict[tuple[HealthRule, str], Finding] = {}  # until the next check
        self._warned: dict[tuple[HealthRule, str], tuple[int, Finding]] = {}  # since
        self._hot, self._gone, self._silent = _Passing(), _Passing(), _Passing()
        self._gone_why = ""
        self._limit_c = self.limits.hot_c
        self._idle_us: int | None = None  # since when it computes nothing
        self._came: dict[int, deque[int]] = {}  # Xid code -> when it came
        self._ecc: deque[tuple[int, int]] = deque()  # times, each with the count of errors then

    # --- what the monitor says ---

    def read(self, reading: Reading, now_us: int) -> None:
        """Judge a reading."""
        patience_us = self._answered(now_us)
        self._gone.see(False, now_us, patience_us)
        if is_worth_telling(self.told, now := figures(reading)):
            self.told = now
        for code in reading.xids:
            self._take_xid(code, now_us)
        if reading.remap_failed:
            self._stand(
                cordon(HealthRule.REMAP, "A faulty row of its memory could not be replaced.")
            )
        self._take_ecc(reading.ecc_uncorrected, now_us)
        self._take_temperature(reading, now_us, patience_us)
        self._take_load(reading.utilisation_percent, now_us)
        self.is_checked = True

    def lose(self, now_us: int) -> None:
        """Judge that the driver no longer finds the device."""
        self._answered(now_us)
        told = "The driver no longer finds the device: it fell off the bus."
        self._stand(cordon(HealthRule.LOST, told, Effect.RESTART))
        self.is_checked = True

    def miss(self, why: str, now_us: int) -> None:
        """Judge that the monitor itself does not work."""
        patience_us = self._answered(now_us)
        self._gone_why = _sentence(why)
        self._gone.see(True, now_us, patience_us)
        self.is_checked = True

    def look(self, now_us: int) -> None:
        """Judge the silence of the monitor."""
        is_silent = now_us - self.heard_us >= self.limits.patience_us
        self._silent.see(is_silent, now_us, 0 if is_silent else self.limits.patience_us)
        self.is_checked |= is_silent

    def _answered(self, now_us: int) -> int:
        """Record that the monitor answered; return how long a condition must last before it
        counts.
        """
        self.heard_us = now_us
        self._silent.see(False, now_us, self.limits.patience_us)
        return self.limits.patience_us if self.is_checked else 0

    # --- rules ---

    def _take_xid(self, code: int, now_us: int) -> None:
        if code in CAUSED_BY_PROGRAMS:
            return
        rule = XIDS.get(code)
        if rule is None:
            self._warn(warning(HealthRule.XID, f"Xid {code}."), now_us)
            return
        told = f"Xid {code} ({rule.means})"
        if rule.finding == HealthVerdict.CORDON:
            self._stand(cordon(HealthRule.XID, f"{told}.", rule.effect))
            return
        came = self._came.setdefault(code, deque(maxlen=max(rule.most, 1)))
        came.append(now_us)
        if rule.most and len(came) == rule.most and now_us - came[0] <= self.limits.window_us:
            self._stand(
                cordon(HealthRule.XID, f"{told}: {rule.most} times within a day.", rule.effect)
            )
        else:
            self._warn(warning(HealthRule.XID, f"{told}."), now_us)

    def _take_ecc(self, count: int | None, now_us: int) -> None:
        """Judge how fast the count of uncorrectable errors grows.

        A lower count starts the judgement over: the driver was loaded again.
        """
        if count is None:
            return
        if self._ecc and count < self._ecc[-1][1]:
            self._ecc.clear()
        if self._ecc and count > self._ecc[-1][1]:
            self._warn(warning(HealthRule.ECC, "Uncorrectable memory errors (ECC)."), now_us)
        if not self._ecc or count != self._ecc[-1][1]:
            self._ecc.append((now_us, count))
        since_us = now_us - self.limits.ecc_window_us
        while len(self._ecc) > 1 and self._ecc[1][0] <= since_us:
            self._ecc.popleft()  # the first entry left is the count at the window's beginning
        if count - self._ecc[0][1] >= self.limits.ecc_most:
            told = f"{self.limits.ecc_most} or more uncorrectable memory errors (ECC) in an hour."
            self._stand(cordon(HealthRule.ECC, told))

    def _take_temperature(self, reading: Reading, now_us: int, patience_us: int) -> None:
        if reading.temperature_c is None:
            return
        self._limit_c = reading.temperature_limit_c or self.limits.hot_c
        was_hot = self._hot.bad_us is not None or self._hot.counts
        least_c = self._limit_c - (self.limits.cooler_c if was_hot else 0)
        self._hot.see(reading.temperature_c >= least_c, now_us, patience_us)

    def _take_load(self, percent: int | None, now_us: int) -> None:
        if percent is None or percent >= self.limits.idle_below_percent:
            self._idle_us = None
        elif self._idle_us is None:
            self._idle_us = now_us

    def _stand(self, finding: Finding) -> None:
        self._standing.setdefault((finding.rule, finding.reason), finding)

    def _warn(self, finding: Finding, now_us: int) -> None:
        self._warned[finding.rule, finding.reason] = (now_us, finding)

    # --- the judgement ---

    def findings(self, now_us: int) -> list[Finding]:
        """Return what is wrong now: the worst first, equal ones in the order in which they were
        found.
        """
        found = [*self._standing.values(), *self._passing(now_us)]
        named = {(finding.rule, finding.reason) for finding in found}
        for name, (since_us, finding) in list(self._warned.items()):
            if now_us - since_us >= self.limits.warned_us:
                del self._warned[name]
            elif name not in named:
                found.append(finding)
        return sorted(found, key=lambda finding: _GRAVITY[finding.verdict, finding.effect])

    def _passing(self, now_us: int) -> list[Finding]:
        hot = f"Its temperature is at its limit of {self._limit_c} °C or above."
        gone = f"It cannot be monitored: {self._gone_why}"
        found = [
            (cordon if condition.counts else warning)(rule, told)
            for rule, condition, told in (
                (HealthRule.TEMPERATURE, self._hot, hot),
                (HealthRule.MONITOR, self._gone, gone),
            )
            if condition.counts or condition.bad_us is not None
        ]
        if self._silent.counts:
            is_stuck = now_us - self.heard_us >= self.limits.stuck_us
            effect = Effect.RESTART if is_stuck else Effect.MOVE
            found.append(cordon(HealthRule.HANG, "Its driver does not answer.", effect))
        return found

    def report(self, now_us: int) -> JSON:
        """Return what a heartbeat says of the device's health."""
        found = [
            {
                "rule": finding.rule.value,
                "verdict": finding.verdict.value,
                "effect": finding.effect.value,
                "reason": finding.reason,
            }
            for finding in self.findings(now_us)
        ]
        is_idle = self._idle_us is not None and now_us - self._idle_us >= self.limits.patience_us
        told = {"reading": self.told, "findings": found, "idle": is_idle}
        checked = self.number if self.is_checked else -1
        return {"checked": checked, **{name: value for name, value in told.items() if value}}


def _sentence(text: str) -> str:
    """Return a foreign text in the form that a heartbeat may carry."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text)
    return shown[:WHY_MOST]


_GRAVITY = {
    (HealthVerdict.CORDON, Effect.RESTART): 0,
    (HealthVerdict.CORDON, Effect.MOVE): 1,
    (HealthVerdict.WARN, Effect.STAY): 2,
}
