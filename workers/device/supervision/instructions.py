"""Carries out the instructions of the device's machine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from app.core.device.device_events import (
    ContinueProcess,
    DropStay,
    ExpectHosts,
    ExtendTrust,
    FetchInputs,
    ForgetHosts,
    ForgetStay,
    GiveNotice,
    GiveSlot,
    Instruction,
    KillProcess,
    OpenStay,
    ReportSoon,
    SendWord,
    StayKey,
    TellIsland,
    TellSaved,
    TellVerdict,
)
from app.core.model.checkpoints.migration import MOVABLE
from app.core.model.protocol import messages
from workers.device import prefetch
from workers.device.heartbeat import Rhythm
from workers.device.host.device_presets import DevicePresets
from workers.device.host.egress import EgressDesk
from workers.device.host.gang_hosts import GangHosts
from workers.device.memory_tiers import Residency
from workers.device.prefetch import Lookout
from workers.device.processes.process_ends import close_all
from workers.device.processes.resident import Resident
from workers.device.stay import Stay
from workers.device.stays.admission import Admission
from workers.device.stays.device_stays import DeviceStays
from workers.device.stays.storing import ResultStore
from workers.device.stays.verdicts import last_word
from workers.device.store_io import Fetched, NotFetched
from workers.device.supervision.late_inputs import LateInputs
from workers.device.supervision.side_work import SideWork
from workers.process.wire import Trust
from workers.transfer.host_context import House

log = logging.getLogger(__name__)


class InstructionRunner:
    """Carries out what the machine says, and decides nothing."""

    def __init__(
        self,
        house: House,
        trust: Trust,
        stays: DeviceStays,
        hosts: GangHosts,
        storing: ResultStore,
        late: LateInputs,
        admission: Admission,
        residency: Residency,
        lookout: Lookout,
        rhythm: Rhythm,
        side: SideWork,
        presets: DevicePresets,
        egress: EgressDesk,
    ) -> None:
        self.house = house
        self.trust = trust
        self.stays = stays
        self.hosts = hosts
        self.storing = storing
        self.late = late
        self.admission = admission
        self.residency = residency
        self.lookout = lookout
        self.rhythm = rhythm
        self.side = side
        self.presets = presets
        self.egress = egress
        self._runs: dict[type[Instruction], Callable[[Any, int], None]] = {
            OpenStay: self._open_stay,
            FetchInputs: self._fetch_inputs,
            ContinueProcess: self._continue_process,
            ExtendTrust: self._extend_trust,
            SendWord: self._send_word,
            GiveNotice: self._give_notice,
            GiveSlot: self._give_slot,
            KillProcess: self._kill_process,
            TellIsland: self._tell_island,
            TellSaved: self._tell_saved,
            TellVerdict: self._tell_verdict,
            DropStay: self._drop_stay,
            ForgetStay: self._forget_stay,
            ExpectHosts: self._expect_hosts,
            ForgetHosts: self._forget_hosts,
            ReportSoon: self._report_soon,
        }

    def run(self, instruction: Instruction, now: int) -> None:
        """Carry out one instruction, which the machine gave at the time `now`."""
        self._runs[type(instruction)](instruction, now)

    def _find(self, key: StayKey) -> Stay | None:
        """Return the stay; None if it was forgotten."""
        return self.stays.by_key.get(key)

    # --- stays ---

    def _open_stay(self, opening: OpenStay, now: int) -> None:
        key = opening.launch.task, opening.launch.epoch
        record = self.stays.machine.stays[key]
        self.stays.by_key[key] = Stay.of(opening.launch, record)

    def _fetch_inputs(self, fetching: FetchInputs, now: int) -> None:
        stay = self.stays.by_key[fetching.stay]
        stay.launch = self.storing.with_newest_image(stay.launch)
        launch, house, came = stay.launch, self.house, self.lookout.came
        taken = self.lookout.launched(launch.task)
        self.side.aside(
            lambda: prefetch.fetch(launch, house, came, taken),
            lambda fetched: self._take_fetched(stay, fetched),
            is_long=launch.spec.environment is not None or launch.spec.image is not None,
        )

    def _take_fetched(self, stay: Stay, fetched: Fetched | BaseException) -> None:
        if isinstance(fetched, Fetched):
            self.admission.take(stay, fetched)
        elif isinstance(fetched, NotFetched):
            self.stays.fail(stay, fetched.cause, fetched.message, "unfetched")
        else:
            log.error("cannot fetch the inputs of task %s", stay.launch.task, exc_info=fetched)
            told = f"Its inputs could not be fetched: {type(fetched).__name__}."
            self.stays.fail(stay, "store", told, "unfetched")

    def _tell_island(self, telling: TellIsland, now: int) -> None:
        if (stay := self._find(telling.stay)) is not None:
            stay.tell(telling.kind, now, **telling.details)
            if telling.is_end:
                self.hosts.forget(stay)

    def _drop_stay(self, dropping: DropStay, now: int) -> None:
        if (stay := self._find(dropping.stay)) is not None:
            self.hosts.forget(stay)

    def _forget_stay(self, forgetting: ForgetStay, now: int) -> None:
        self.stays.by_key.pop(forgetting.stay)

    def _expect_hosts(self, expecting: ExpectHosts, now: int) -> None:
        self.hosts.expect(self.stays.by_key[expecting.stay], expecting.slots, expecting.how)

    def _forget_hosts(self, forgetting: ForgetHosts, now: int) -> None:
        if (stay := self._find(forgetting.stay)) is not None:
            self.hosts.forget(stay)

    def _report_soon(self, reporting: ReportSoon, now: int) -> None:
        if reporting.is_urgent:
            self.rhythm.happened = True
        else:
            self.rhythm.chatter = True

    # --- processes ---

    def _continue_process(self, continuing: ContinueProcess, now: int) -> None:
        resident = self.stays.residents[continuing.process]
        before, stay = resident.stay, self.stays.by_key[continuing.stay]
        stay.goes_on_from(before)
        before.log.end()
        stay.resumed, stay.resident, resident.stay = "resident", resident, stay
        stay.unstaged_us = resident.staged_us
        self.egress.renew(resident)
        self.late.bring(stay)

    def _extend_trust(self, extending: ExtendTrust, now: int) -> None:
        self.trust.extend(extending.until_us)

    def _send_word(self, sending: SendWord, now: int) -> None:
        if self.presets.keeps_back(sending.process, lambda at: self._send_word(sending, at)):
            return
        resident = self.stays.residents[sending.process]
        if sending.word == "pause":
            resident.send("pause", **self.residency.with_pause(resident, now))
        elif sending.word == "resize":
            self.hosts.send_resize(resident)
        else:
            resident.send(sending.word)

    def _give_notice(self, giving: GiveNotice, now: int) -> None:
        resident = self.stays.residents[giving.process]
        resident.send("notice", why=giving.why, left_us=giving.until_us - now)

    def _give_slot(self, giving: GiveSlot, now: int) -> None:
        resident = self.stays.residents[giving.process]
        self.presets.begin(resident, lambda at: self._go(resident, giving, at), now)

    def _go(self, resident: Resident, giving: GiveSlot, now: int) -> None:
        if giving.is_first:
            self._begin(resident, giving.waited_us, now)
        else:
            resident.send("go", seats=resident.stay.record.slots, linked=False)

    def _begin(self, resident: Resident, waited_us: int, now: int) -> None:
        stay = resident.stay
        resident.was_absent(now)
        fds = stay.hand_over()
        resident.send("go", fds, seats=stay.record.slots, linked=bool(fds))
        close_all(fds)
        stay.tell(
            messages.Started,
            now,
            preset={**resident.preset, **resident.device_preset},
            capabilities=_capabilities(resident),
            bound_because=resident.bound_because,
            resumed=stay.resumed,
            switch_us=waited_us,
            input_bytes=stay.input_bytes,
            fetched_bytes=stay.fetched_bytes,
            ways=stay.ways,
        )
        if stay.spec.run.kind == "function":  # such a task cannot pause, and may end in a moment
            self.rhythm.soon(now, is_followed=self.stays.machine.is_followed)
        else:
            self.rhythm.happened = True

    def _kill_process(self, killing: KillProcess, now: int) -> None:
        resident = self.stays.residents[killing.process]
        if killing.reason == "lease":
            log.warning(
                "%s lost its island during a step of %s, which was ended",
                self.house.device,
                resident.task,
            )
        elif killing.why:
            log.warning("task %s sent a malformed message: %s", resident.task, killing.why)
        resident.kill()

    def _tell_saved(self, telling: TellSaved, now: int) -> None:
        resident = self.stays.residents[telling.process]
        assert resident.saved is not None
        self.storing.tell_saved(resident.stay, resident.saved)

    def _tell_verdict(self, telling: TellVerdict, now: int) -> None:
        resident = self.stays.residents[telling.process]
        stay = resident.stay
        said = last_word(resident, was_stopping=telling.was_stopping)
        stay.tell(said.pop("is"), now, **said)
        self.hosts.forget(stay)


def _capabilities(resident: Resident) -> list[str]:
    """Return what the task supports.

    Whether a command can move is known only to the device worker, so it is added here.
    """
    if not resident.is_command:
        return resident.capabilities
    others = [each for each in resident.capabilities if each != MOVABLE]
    return others if resident.bound_because else [*others, MOVABLE]
