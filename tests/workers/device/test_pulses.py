"""A device whose island takes pulses: what it sends, and when the whole report."""

from __future__ import annotations

from dataclasses import replace

from app.core.model.protocol.messages import LeaseRenewal, Paused, ReportWanted, Started


def more_pulses(rig, count=2):
    """Wait for pulses that are sent from now on; return the newest."""
    before = len(rig.pulses)
    rig.until(lambda: len(rig.pulses) >= before + count)
    return rig.pulses[-1]


def test_a_device_that_continues_sends_pulses_and_keeps_its_lease(rig):
    rig.takes_pulses = True
    rig.launch("t1", "jobs:Hang")
    rig.until(lambda: rig.printed("t1") == ["hanging"])
    pulse = more_pulses(rig)
    assert pulse.report in {report.sent_us for report in rig.reports}
    [[step, held_us, _]] = pulse.progress
    [[_, later_us, _]] = more_pulses(rig).progress
    assert (step, later_us > held_us > 0) == (0, True)
    lease = rig.supervisor.stays.machine.lease
    assert lease.answered_us >= pulse.sent_us
    assert lease.ends_us == lease.answered_us + int(rig.lease_s * 1e6)


def test_events_are_reported_at_once(rig):
    rig.takes_pulses = True
    more_pulses(rig)
    rig.launch("t1", "jobs:Count")
    rig.event(Started, "t1")
    rig.steps("t1", 3)
    rig.pause("t1")
    rig.event(Paused, "t1")
    assert more_pulses(rig).progress[0][0] == rig.view("t1").step


def test_the_whole_report_is_sent_if_the_island_asks(rig):
    rig.takes_pulses = True
    rig.launch("t1", "jobs:Hang")
    rig.until(lambda: rig.printed("t1") == ["hanging"])
    more_pulses(rig)
    before, rig.takes_pulses = len(rig.reports), False
    rig.until(lambda: len(rig.reports) > before + 1)
    assert rig.view("t1").state == "running"
    rig.takes_pulses = True
    more_pulses(rig)


def test_late_repeated_and_foreign_messages_change_nothing(rig):
    rig.takes_pulses = True
    pulse = more_pulses(rig)
    about = {"device": pulse.device, "incarnation": pulse.incarnation, "sent_us": 2**60}
    renewal = LeaseRenewal(**about, answer=pulse.answer)
    wanted = ReportWanted(**about)
    seen = []
    answers, machine = rig.supervisor.answers, rig.supervisor.stays.machine

    def take():
        lease = machine.lease
        for wrong in (
            replace(renewal, incarnation="0"),
            replace(renewal, answer=pulse.answer + 1),
            replace(renewal, sent_us=lease.answered_us),
        ):
            answers.renew(wrong)
        seen.append(machine.lease is lease)
        answers.rhythm.happened = False
        for wrong in (replace(wanted, incarnation="0"), replace(wanted, sent_us=0)):
            answers.tell_all(wrong)
        seen.append(answers.rhythm.happened)
        for _ in range(2):
            answers.rhythm.happened = False
            answers.tell_all(wanted)
            seen.append(answers.rhythm.happened)

    rig.supervisor.receive(take)
    rig.until(lambda: len(seen) == 4)
    assert seen == [True, False, True, False]
