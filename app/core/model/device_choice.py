"""Decides whether a device suits what a task asks of it, apart from kind and memory.

A task chooses by model, compute capability and labels (`DeviceChoice`); a device has them
(`DeviceTraits`). What else a task needs of a host, such as a mount, follows from the fields of its
descriptor (`needs`); a device tells what its host can do (`offers`). `DeviceChoice.suits` is the
only place that compares both. Tables and queue classes hold a choice as one short text (`text_of`,
`choice_in`), so equal choices are equal texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from app.core.model.provisions import resources

#: A version of a GPU's instruction set, as CUDA counts them.
CAPABILITY = re.compile(r"[0-9]{1,3}\.[0-9]{1,2}")
#: A part of a model's name. It has no ",", which separates the items of a choice's text.
MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._/()+-]{0,62}")
#: Something that a host can do and a task may need: a word, or a sort and a name, as in
#: `mount:imagenet`, or a sort and the address of a server, as in `registry:localhost:5000`.
NEED = re.compile(r"[a-z][a-z-]{0,30}(:[a-z0-9][a-z0-9._-]{0,62}(:[0-9]{1,5})?)?")
#: The beginning of a need for packages; the lock of packages that must be ready on the host
#: follows.
PACKAGES = "packages:"
_WORD = re.compile(r"[a-z0-9.+]+")
_MIG = "mig"  # the word before the profile in the name of a MIG instance


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageBuild:
    """Describes an environment that is not ready on a host: `state` is one of BUILD_STATES.

    `told` is the message of a failure, or says what the build waits for.
    """

    lock: str
    state: str
    told: str = ""


#: States of an environment that a host must build but does not have ready.
BUILD_STATES = ("waiting", "building", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTraits:
    """Holds what a device says about itself; the model of a GPU instance (MIG) includes its
    profile.

    Ranks can take turns on the device if it can `splice`. If a host reports its `builds`, the
    packages of a task must be ready there before the task may start.
    """

    model: str = ""
    compute_capability: str = ""
    labels: tuple[str, ...] = ()
    splice: bool = True
    offers: tuple[str, ...] = ()
    gives: tuple[tuple[str, int], ...] = ()  # resource -> the most that one task may take
    # None: not known, or packages are installed at a launch
    builds: tuple[PackageBuild, ...] | None = None
    # the id of the reservation that keeps this very device now; None: not known
    kept_for: str | None = None


NO_TRAITS = DeviceTraits()
WHOLE_MILLI = 1000  # thousandths in a whole device
TRAITS = (
    "model",
    "compute_capability",
    "labels",
    "splice",
    "offers",
    resources.GIVES,
)  # the names of the facts that are traits
#: Facts that are traits too, where it matters which packages are ready (`traits_now`).
NOW = ("environments", "builds")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChoice:
    """Holds what a task asks of each of its devices, and of their number on each host; an empty
    field asks for nothing.

    `model` has words of the model's name, such as `h100`.  A device has at least
    `compute_capability`, all of `labels` and none of `avoid_labels`, and offers all of `needs`
    (NEED); the three are sorted.  The task takes `fraction_milli` thousandths of its device; other
    tasks may have the rest at the same time.  If it names more than one of `hosts`, its devices lie
    on so many, as many on each.
    """

    model: str = ""
    compute_capability: str = ""
    labels: tuple[str, ...] = ()
    avoid_labels: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    fraction_milli: int = WHOLE_MILLI
    hosts: int = 0
    resources: tuple[tuple[str, int], ...] = ()  # `provisions.resources`, sorted by name
    avoid_devices: tuple[str, ...] = ()  # ids of devices on which the task failed, sorted
    reservation: str = ""  # id of a reservation of certain devices, which alone the task may have

    def suits(self, has: DeviceTraits, device: str = "") -> bool:
        """True if the device meets every field; `device` is its id."""
        return device not in self.avoid_devices and not any(self.unmet(has))

    def unmet(self, has: DeviceTraits) -> Iterator[str]:
        """Yield the names of the fields that the device does not meet."""
        if self.model and not _is_model(_words(self.model), _words(has.model)):
            yield "model"
        if self.compute_capability and _version(self.compute_capability) > _version(
            has.compute_capability
        ):
            yield "compute_capability"
        if self.labels and not {*self.labels} <= {*has.labels}:
            yield "labels"
        if self.avoid_labels and not {*self.avoid_labels}.isdisjoint(has.labels):
            yield "avoid_labels"
        if self.needs:
            needs = {*self.needs} if has.builds is not None else {*self.lasting.needs}
            if not needs <= {*has.offers}:
                yield "needs"
        if self.resources and any(resources.lacking(self.resources, dict(has.gives))):
            yield "resources"
        if self.reservation and has.kept_for not in (None, self.reservation):
            yield "reservation"

    @property
    def lock(self) -> str:
        """Return the lock of the packages that must be ready on the host; "" if there are none."""
        return next((need[len(PACKAGES) :] for need in self.needs if need.startswith(PACKAGES)), "")

    @property
    def lasting(self) -> DeviceChoice:
        """Return the choice without the packages: any host that builds environments can have those
        ready.
        """
        if not self.lock:
            return self
        return replace(self, needs=tuple(n for n in self.needs if not n.startswith(PACKAGES)))

    @property
    def named(self) -> DeviceChoice:
        """Return what the descriptor names, without the needs that follow from what a task
        brings.
        """
        return replace(self, needs=())

    @property
    def told(self) -> str:
        """Return the choice in words to be put behind `device`; "" if any device will do."""
        parts = [
            f" of model {self.model}" * bool(self.model),
            f" of compute capability {self.compute_capability}" * bool(self.compute_capability),
            f" with label {' and '.join(self.labels)}" * bool(self.labels),
            f" without label {' or '.join(self.avoid_labels)}" * bool(self.avoid_labels),
            f" that offers {' and '.join(self.lasting.needs)}" * bool(self.lasting.needs),
            f" that gives a task {resources.told_of(self.resources)}" * bool(self.resources),
            " of the reservation that it names" * bool(self.reservation),
        ]
        return "".join(parts)


ANY_DEVICE = DeviceChoice()


def text_of(choice: DeviceChoice) -> str:
    """Return the choice as a text: its items with "," between them; "" if any device will do."""
    items = (
        *([f"={' '.join(_words(choice.model))}"] if choice.model else ()),
        *([f">{choice.compute_capability}"] if choice.compute_capability else ()),
        *(f"+{label}" for label in choice.labels),
        *(f"-{label}" for label in choice.avoid_labels),
        *(f"!{need}" for need in choice.needs),
        *([f"%{choice.fraction_milli}"] if choice.fraction_milli < WHOLE_MILLI else ()),
        *([f"#{choice.hosts}"] if choice.hosts else ()),
        *(f"&{name}={most}" for name, most in choice.resources),
        *(f"~{device}" for device in choice.avoid_devices),
        # last, as SQL appends it to the text (`intake`, `lots`) and cuts it off (`reserved_tasks`)
        *([f"@{choice.reservation}"] if choice.reservation else ()),
    )
    return ",".join(items)


def with_packages(text: str, lock: str) -> str:
    """Return the text of a choice that also needs the packages of this lock."""
    choice = choice_in(text).lasting
    needs = (*choice.needs, PACKAGES + lock) if lock else choice.needs
    return text_of(replace(choice, needs=tuple(sorted(needs))))


def with_reservation(text: str, reservation: str) -> str:
    """Return the text of a choice of devices of this reservation alone; "" for any."""
    return text_of(replace(choice_in(text), reservation=reservation))


@lru_cache(maxsize=4096)
def choice_without(text: str, devices: tuple[str, ...]) -> str:
    """Return the text of a choice that none of these devices suits."""
    avoided = {*choice_in(text).avoid_devices, *devices}
    return text_of(replace(choice_in(text), avoid_devices=tuple(sorted(avoided))))


@lru_cache(maxsize=4096)
def choice_in(text: str) -> DeviceChoice:
    """Read a choice that `text_of` wrote."""
    items = [(item[0], item[1:]) for item in text.split(",") if item]

    def named(sign: str) -> tuple[str, ...]:
        return tuple(value for mark, value in items if mark == sign)

    return DeviceChoice(
        model="".join(named("=")),
        compute_capability="".join(named(">")),
        labels=named("+"),
        avoid_labels=named("-"),
        needs=named("!"),
        fraction_milli=int("".join(named("%")) or WHOLE_MILLI),
        hosts=int("".join(named("#")) or 0),
        resources=tuple(_resource(said) for said in named("&")),
        avoid_devices=named("~"),
        reservation="".join(named("@")),
    )


def _resource(said: str) -> tuple[str, int]:
    name, _, most = said.partition("=")
    return name, int(most)


def traits_in(facts: Any) -> DeviceTraits:
    """Read the traits among the facts that a device reports."""
    model, compute_capability, labels, splice, offers, gives = map(facts.get, TRAITS)
    return DeviceTraits(
        model=model or "",
        compute_capability=compute_capability or "",
        labels=tuple(labels or ()),
        splice=splice is not False,
        offers=tuple(offers or ()),
        gives=tuple(sorted((gives or {}).items())),
    )


def traits_now(facts: Any) -> DeviceTraits:
    """Read the traits, and which packages are ready on the host or are being installed there."""
    lasting, (ready, builds) = traits_in(facts), map(facts.get, NOW)
    if builds is None:
        return lasting
    words = (PACKAGES + lock for lock in sorted(ready or ()))
    return replace(lasting, offers=(*lasting.offers, *words), builds=tuple(_builds(builds)))


def _builds(told: Mapping[str, Sequence[str]]) -> Iterator[PackageBuild]:
    for lock in sorted(told):
        state, why = told[lock]
        yield PackageBuild(lock=lock, state=state, told=why)


def _is_model(asked: tuple[str, ...], found: tuple[str, ...]) -> bool:
    """True if the found name has all words of the name that was asked for.

    The name of a GPU instance begins with the name of its GPU, but an instance is only a part of
    that GPU. So it suits only a task that asks for its profile, or for the word `mig`.
    """
    if _MIG in found and not {*asked} & {*found[found.index(_MIG) :]}:
        return False
    return {*asked} <= {*found}


@lru_cache(maxsize=4096)
def _words(name: str) -> tuple[str, ...]:
    return tuple(_WORD.findall(name.lower()))


def _version(said: str) -> tuple[int, ...]:
    return tuple(map(int, said.split("."))) if CAPABILITY.fullmatch(said) else ()
