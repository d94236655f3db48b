"""What is decided about a device that fails, and when: each simulated failure, on a virtual clock.

The device is read every `EVERY_S`, and each reading goes up in a heartbeat at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import pytest

from app.core.device import health_cordons, health_findings
from app.core.device.health_cordons import Fitness, HealthReport, TaskFailure
from app.core.device.health_findings import (
    CAUSED_BY_PROGRAMS,
    XIDS,
    Effect,
    HealthLimits,
    HealthRule,
    HealthVerdict,
    HealthWatch,
)
from app.core.device.health_readings import Reading, figures, is_worth_telling, reading_of

EVERY_S = 5
DAY_S = 24 * 3600
WELL = Reading(
    utilisation_percent=80,
    memory_used_bytes=2**30,
    power_w=300.0,
    temperature_c=60,
    temperature_limit_c=90,
    ecc_uncorrected=0,
)
HOT = replace(WELL, temperature_c=91)


@dataclass
class PlayedDevice:
    """A device and what its island thinks of it.  `now_s` starts at 0, when the first reading is
    due.
    """

    limits: HealthLimits = field(default_factory=HealthLimits)
    now_s: float = 0.0
    fitness: Fitness = field(default_factory=Fitness)
    by_hand: bool = False  # an administrator has cordoned it

    def __post_init__(self) -> None:
        self.watch = HealthWatch(self.limits, 0)

    @property
    def now_us(self) -> int:
        return int(self.now_s * 1e6)

    @property
    def is_cordoned(self) -> bool:
        return self.by_hand or self.fitness.cordon is not None

    def read(self, reading: Reading | str | None = WELL) -> PlayedDevice:
        """Let time pass up to the next reading; a text is why there is none, None is silence."""
        if isinstance(reading, Reading):
            self.watch.read(reading, self.now_us)
        elif reading == "lost":
            self.watch.lose(self.now_us)
        elif reading is not None:
            self.watch.miss(reading, self.now_us)
        self.watch.look(self.now_us)
        self.report()
        self.now_s += EVERY_S
        return self

    def report(self) -> None:
        said = json.loads(json.dumps(self.watch.report(self.now_us)))
        stored = json.loads(json.dumps(self.fitness.as_json()))
        assert Fitness.of(stored) == self.fitness
        self.fitness = health_cordons.heard(
            self.fitness, HealthReport.of(said), now_s=self.now_s, is_cordoned=self.is_cordoned
        )

    def reads(self, reading: Reading | str | None, for_s: float) -> PlayedDevice:
        until_s = self.now_s + for_s
        while self.now_s < until_s:
            self.read(reading)
        return self

    def undrain(self) -> PlayedDevice:
        """An administrator lets it serve; the device hears of it with the next answer."""
        self.by_hand = False
        self.fitness = health_cordons.let_serve_asked(self.fitness, by="ada", now_s=self.now_s)
        if self.fitness.check > self.watch.number:
            self.watch.check(self.fitness.check, self.now_us)
        return self

    def fail(self, tenant: str, task: str, *, others_serve: bool = True) -> PlayedDevice:
        failure = TaskFailure(at_s=self.now_s, tenant=tenant, task=task)
        self.fitness = health_cordons.task_failed(
            self.fitness, failure, others_serve=others_serve, is_cordoned=self.is_cordoned
        )
        return self

    @property
    def warnings(self) -> list[str]:
        return [
            f.reason for f in self.watch.findings(self.now_us) if f.verdict == HealthVerdict.WARN
        ]

    @property
    def why(self) -> tuple[HealthRule, str, Effect] | None:
        cordon = self.fitness.cordon
        return None if cordon is None else (cordon.rule, cordon.reason, cordon.effect)


def well_then(
    reading: Reading | str | None, *, at_most_s: float, after_s: float = 60
) -> tuple[PlayedDevice, float]:
    """Return a device after it was well and then read so, and the seconds until it was cordoned."""
    device = PlayedDevice().reads(WELL, after_s)
    assert device.fitness == Fitness()
    began_s = device.now_s
    while device.fitness.cordon is None and device.now_s - began_s <= at_most_s:
        device.read(reading)
    assert device.fitness.cordon is not None
    return device, device.fitness.cordon.at_s - began_s


# --- the simulated failures -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "reason", "effect"),
    [
        (48, "Xid 48 (double-bit ECC error).", Effect.MOVE),
        (64, "Xid 64 (a memory row could not be remapped).", Effect.MOVE),
        (74, "Xid 74 (NVLink error).", Effect.MOVE),
        (79, "Xid 79 (fell off the bus).", Effect.RESTART),
        (95, "Xid 95 (uncontained ECC error).", Effect.MOVE),
        (119, "Xid 119 (the GPU's system processor does not answer).", Effect.MOVE),
    ],
)
def test_a_grave_xid_cordons_at_its_reading_and_for_good(code, reason, effect):
    device, after_s = well_then(replace(WELL, xids=(code,)), at_most_s=0)
    assert after_s == 0
    assert device.why == (HealthRule.XID, reason, effect)
    assert device.reads(WELL, DAY_S / 100).why == (HealthRule.XID, reason, effect)


@pytest.mark.parametrize(("code", "most"), [(63, 8), (94, 3)])
def test_a_light_xid_warns_and_cordons_when_it_comes_again_and_again(code, most):
    device = PlayedDevice().read()
    for _ in range(most - 1):
        device.read(replace(WELL, xids=(code,))).reads(WELL, 600)
        assert device.warnings == [f"Xid {code} ({XIDS[code].means})."]
        assert device.why is None
    device.read(replace(WELL, xids=(code,)))
    told = f"Xid {code} ({XIDS[code].means}): {most} times within a day."
    assert device.why == (HealthRule.XID, told, Effect.MOVE)


@pytest.mark.parametrize(("code", "most"), [(63, 8), (94, 3)])
def test_a_light_xid_that_comes_once_a_day_never_cordons(code, most):
    device = PlayedDevice().read()
    for _ in range(2 * most):
        device.read(replace(WELL, xids=(code,)))
        device.now_s += DAY_S / (most - 1) + 1
    assert device.why is None


def test_a_warning_of_an_xid_ends_after_an_hour():
    device = PlayedDevice().read().read(replace(WELL, xids=(94,)))
    assert device.warnings
    device.now_s += 3600
    assert device.read().warnings == []


@pytest.mark.parametrize("code", sorted(CAUSED_BY_PROGRAMS))
def test_an_xid_that_programs_cause_says_nothing_about_the_device(code):
    device = PlayedDevice().read().read(replace(WELL, xids=(code,) * 10))
    assert (device.warnings, device.why) == ([], None)


def test_an_xid_without_a_rule_warns():
    device = PlayedDevice().read().read(replace(WELL, xids=(62,)))
    assert (device.warnings, device.why) == (["Xid 62."], None)


def test_ecc_errors_that_grow_warn_first_and_cordon_at_the_third_in_an_hour():
    device = PlayedDevice().reads(replace(WELL, ecc_uncorrected=7), 60)
    assert device.warnings == [], "what was counted before says nothing"
    for count in (8, 9):
        device.reads(replace(WELL, ecc_uncorrected=count), 600)
        assert device.warnings == ["Uncorrectable memory errors (ECC)."]
        assert device.why is None
    began_s = device.now_s
    device.reads(replace(WELL, ecc_uncorrected=10), 600)
    assert device.fitness.cordon is not None
    assert device.fitness.cordon.at_s == began_s
    told = "3 or more uncorrectable memory errors (ECC) in an hour."
    assert device.why == (HealthRule.ECC, told, Effect.MOVE)


def test_ecc_errors_that_come_slowly_never_cordon_and_a_new_driver_begins_at_zero():
    device = PlayedDevice()
    for count in range(10):
        device.read(replace(WELL, ecc_uncorrected=count))
        device.now_s += 1801
    device.read(replace(WELL, ecc_uncorrected=0)).read(replace(WELL, ecc_uncorrected=2))
    assert device.why is None


def test_an_ecc_error_of_exactly_an_hour_ago_does_not_count():
    device = PlayedDevice().read()
    for count in (1, 2, 3):
        device.read(replace(WELL, ecc_uncorrected=count))
        device.now_s += 1800 - EVERY_S
    assert device.why is None


def test_a_row_that_cannot_be_replaced_cordons_at_once():
    device, after_s = well_then(replace(WELL, remap_failed=True), at_most_s=0)
    assert (after_s, device.why[0]) == (0, HealthRule.REMAP)


def test_heat_warns_at_once_cordons_after_its_patience_and_returns_when_cool_for_as_long():
    device = PlayedDevice().reads(WELL, 60).read(HOT)
    hot = "Its temperature is at its limit of 90 °C or above."
    assert (device.warnings, device.why) == ([hot], None)
    device.reads(HOT, 25)
    assert device.why is None
    assert device.read(HOT).why == (HealthRule.TEMPERATURE, hot, Effect.MOVE)
    assert device.fitness.cordon.at_s == 60 + 30
    device.reads(replace(WELL, temperature_c=86), 600)  # not cool yet
    assert device.is_cordoned
    cool_s = device.now_s
    device.reads(replace(WELL, temperature_c=84), 30)
    assert device.is_cordoned
    assert not device.read().is_cordoned
    assert device.fitness.notes[-1].at_s - cool_s == 30


def test_heat_for_a_moment_only_warns():
    device = PlayedDevice().reads(WELL, 60)
    for _ in range(20):
        device.reads(HOT, 25).reads(WELL, 10)
    assert device.fitness == Fitness()


def test_a_device_that_names_no_limit_is_hot_from_95_degrees_on():
    nameless = replace(WELL, temperature_limit_c=None)
    device = PlayedDevice().reads(replace(nameless, temperature_c=94), 300)
    assert device.why is None
    assert device.reads(replace(nameless, temperature_c=95), 60).why[0] == HealthRule.TEMPERATURE


def test_a_device_that_fell_off_the_bus_cordons_at_once_and_its_tasks_resume_elsewhere():
    device, after_s = well_then("lost", at_most_s=0)
    assert after_s == 0
    told = "The driver no longer finds the device: it fell off the bus."
    assert device.why == (HealthRule.LOST, told, Effect.RESTART)
    assert device.reads(WELL, 3600).why is not None, "an administrator must let it serve"


def test_a_hang_cordons_after_its_patience_then_gives_up_what_cannot_leave():
    device, after_s = well_then(None, at_most_s=60)
    assert after_s == 25, "30 s after the last answer"
    assert device.why == (HealthRule.HANG, "Its driver does not answer.", Effect.MOVE)
    device.reads(None, 300)
    assert device.why[2] == Effect.RESTART
    assert device.reads(WELL, 30).is_cordoned
    assert not device.read(WELL).is_cordoned


def test_a_monitor_that_is_gone_warns_then_cordons_and_returns_with_it():
    device, after_s = well_then("NVML: driver not loaded", at_most_s=60)
    assert after_s == 30
    told = "It cannot be monitored: NVML: driver not loaded"
    assert device.why == (HealthRule.MONITOR, told, Effect.MOVE)
    assert device.reads(WELL, 30).is_cordoned
    assert not device.read(WELL).is_cordoned


def test_what_a_monitor_says_of_its_failure_is_cut_and_made_printable():
    watch = HealthWatch(HealthLimits(), 0)
    watch.miss("no\nfile\x00" + 300 * "x", 0)
    [finding] = watch.findings(0)
    assert finding.reason == f"It cannot be monitored: no file {192 * 'x'}"


def test_tasks_of_two_tenants_that_fail_one_after_another_warn_then_cordon():
    device = PlayedDevice().reads(WELL, 60)
    device.fail("blue", "t1").fail("blue", "t1").fail("red", "t2")
    assert device.why is None
    assert device.fitness.suspicion == "2 tasks of 2 tenants failed one after another."
    device.fail("red", "t3")
    told = "3 tasks of 2 tenants failed on it one after another."
    assert device.why == (HealthRule.FAILURES, told, Effect.MOVE)
    assert device.fitness.cordon.at_s == 60
    assert health_cordons.excuses(device.fitness)
    assert device.reads(WELL, 3600).is_cordoned


def test_failures_of_one_tenant_never_cordon():
    device = PlayedDevice()
    for n in range(20):
        device.fail("blue", f"t{n}")
    assert (device.why, device.fitness.suspicion) == (None, "")


def test_failures_with_a_task_that_went_well_between_them_never_cordon():
    device = PlayedDevice()
    for n in range(10):
        device.fail("blue", f"b{n}").fail("red", f"r{n}")
        device.fitness = health_cordons.task_went_well(device.fitness)
    assert device.why is None


def test_failures_an_hour_apart_never_cordon():
    device = PlayedDevice()
    for n, tenant in enumerate(["blue", "red"] * 5):
        device.fail(tenant, f"t{n}")
        device.now_s += 3600
    assert device.why is None


def test_failures_on_the_last_device_of_a_kind_only_warn():
    device = PlayedDevice()
    for n, tenant in enumerate(["blue", "red"] * 5):
        device.fail(tenant, f"t{n}", others_serve=False)
    assert device.why is None
    assert "2 tenants" in device.fitness.suspicion


def test_flapping_keeps_a_device_cordoned_from_the_third_time_within_a_day():
    device = PlayedDevice().reads(WELL, 60)
    for _ in range(2):
        device.reads(HOT, 35)
        assert device.why[0] == HealthRule.TEMPERATURE
        device.reads(WELL, 600)
        assert not device.is_cordoned
    device.reads(HOT, 35)
    told = "Cordoned 3 times within a day, now because: Its temperature is at its limit of 90 °C"
    assert device.why == (HealthRule.FLAPPING, f"{told} or above.", Effect.MOVE)
    assert device.reads(WELL, 3600).is_cordoned
    assert not device.undrain().read(WELL).is_cordoned
    assert device.reads(HOT, 40).why[0] == HealthRule.TEMPERATURE, "counted anew"


def test_three_cordons_over_two_days_are_no_flapping():
    device = PlayedDevice().read()
    for _ in range(6):
        device.reads(HOT, 35).reads(WELL, 60)
        assert not device.is_cordoned
        device.now_s += DAY_S / 2
        device.read()


def test_a_repaired_device_serves_after_its_next_reading():
    device, _ = well_then(replace(WELL, xids=(48,)), at_most_s=0)
    device.reads(WELL, 600).undrain()
    assert device.is_cordoned, "not before it was checked"
    asked_s = device.now_s
    device.read(WELL)
    assert not device.is_cordoned
    assert device.fitness.notes[-1].at_s == asked_s
    assert [note.told for note in device.fitness.notes] == [
        "Cordoned: Xid 48 (double-bit ECC error).",
        "ada lets it serve; it is checked first.",
        "Takes work again: It passed its check.",
    ]


@pytest.mark.parametrize(
    ("broken", "within_s", "reason"),
    [
        ("lost", 0, "The driver no longer finds the device: it fell off the bus."),
        ("NVML: not found", 0, "It cannot be monitored: NVML: not found"),
        (HOT, 0, "Its temperature is at its limit of 90 °C or above."),
        (replace(WELL, remap_failed=True), 0, "A faulty row of its memory could not be replaced."),
        (None, 30, "Its driver does not answer."),
    ],
)
def test_a_device_that_is_not_repaired_does_not_pass_its_check(broken, within_s, reason):
    device, _ = well_then("lost", at_most_s=0)
    asked_s = device.undrain().now_s
    device.reads(broken, within_s + EVERY_S)
    assert not device.fitness.is_checking
    assert device.fitness.cordon.at_s - asked_s == within_s
    assert device.why[1] == f"It did not pass its check. {reason}"


@pytest.mark.parametrize("broken", ["lost", "NVML: not found", HOT])
def test_a_device_that_is_faulty_from_its_start_never_serves(broken):
    device = PlayedDevice().read(broken)
    assert device.fitness.cordon.at_s == 0


def test_a_device_that_hangs_from_its_start_never_serves():
    device = PlayedDevice()
    assert device.watch.report(0)["checked"] == -1, "it is not judged, so it must not report yet"
    device.reads(None, 35)
    assert device.why[0] == HealthRule.HANG


# --- one cordon, several causes -------------------------------------------------------------------


def test_a_graver_cause_replaces_the_one_that_would_pass():
    device = PlayedDevice().reads(WELL, 60).reads(HOT, 35)
    device.read(replace(HOT, xids=(79,)))
    assert device.why == (HealthRule.XID, "Xid 79 (fell off the bus).", Effect.RESTART)
    assert device.reads(WELL, 3600).is_cordoned
    assert len(device.fitness.cordons_s) == 1


@pytest.mark.parametrize("before", [True, False])
def test_a_device_that_an_administrator_cordoned_does_not_return_by_itself(before):
    device = PlayedDevice(by_hand=before).reads(WELL, 60).reads(HOT, 35)
    if not before:
        device.fitness = health_cordons.cordon_asked(device.fitness)
    assert device.reads(WELL, 3600).fitness.cordon is not None
    assert device.undrain().read().fitness.cordon is None


def test_a_new_worker_that_finds_nothing_leaves_a_grave_cordon_and_ends_one_that_passes():
    for reading, stays in ((replace(WELL, xids=(48,)), True), (None, False)):
        device, _ = well_then(reading, at_most_s=60)
        device.watch = HealthWatch(device.limits, device.now_us)  # the worker was restarted
        assert device.read(WELL).is_cordoned is stays


def test_findings_before_a_check_are_not_counted_after_it():
    device, _ = well_then(replace(WELL, xids=(48,)), at_most_s=0)
    device.fitness = health_cordons.let_serve_asked(device.fitness, by="ada", now_s=device.now_s)
    device.read()  # the answer that asks for the check is still on its way
    assert device.is_cordoned
    assert device.fitness.is_checking
    device.watch.check(1, device.now_us)
    device.report()
    assert device.is_cordoned
    assert not device.read().is_cordoned


def test_a_device_whose_monitor_was_taken_away_serves_when_it_is_let():
    device, _ = well_then("lost", at_most_s=0)
    asked = health_cordons.let_serve_asked(device.fitness, by="ada", now_s=0.0)
    for before, is_cordoned in ((device.fitness, True), (asked, False)):
        after = health_cordons.heard(before, HealthReport.of({}), now_s=0.0, is_cordoned=True)
        assert (after.cordon is not None) == is_cordoned


def test_a_finding_of_a_newer_worker_is_left_out():
    told = {"rule": "humidity", "verdict": "cordon", "effect": "move", "reason": "wet"}
    report = HealthReport.of({"checked": 0, "findings": [told, {"rule": "xid"}]})
    assert report == HealthReport(checked=0)


# --- what heartbeats say --------------------------------------------------------------------------


def test_heartbeats_of_a_device_that_changes_little_are_equal():
    device = PlayedDevice().read()
    first = device.watch.report(device.now_us)
    for n in range(100):
        little = replace(
            WELL,
            utilisation_percent=80 + n % 10,
            temperature_c=60 + n % 3,
            power_w=300.0 + n % 20,
            memory_used_bytes=2**30 + n * 2**18,
        )
        device.read(little)
        assert device.watch.report(device.now_us) == first
    device.read(replace(WELL, temperature_c=63))
    assert device.watch.report(device.now_us)["reading"]["temperature_c"] == 63


@pytest.mark.parametrize(
    "more", [{"ecc_uncorrected": 1}, {"processes": ((7, 100),)}, {"power_w": None}]
)
def test_a_count_and_a_figure_that_comes_or_goes_are_worth_telling(more):
    assert is_worth_telling(figures(WELL), figures(replace(WELL, **more)))


def test_a_reading_that_a_program_wrote_is_checked():
    written = {"temperature_c": 50, "processes": {"7": 100}, "remap_failed": True, "xids": [79]}
    assert reading_of(written) == Reading(
        temperature_c=50, processes=((7, 100),), remap_failed=True
    )
    for wrong in ({"heat": 1}, {"power_w": "much"}, {"temperature_c": True}):
        with pytest.raises(ValueError, match=r"heat|must be a number"):
            reading_of(wrong)


def test_every_named_xid_has_a_rule():
    assert set(health_findings.XIDS) == {48, 63, 64, 74, 79, 94, 95, 119}
    assert not CAUSED_BY_PROGRAMS & set(XIDS)
