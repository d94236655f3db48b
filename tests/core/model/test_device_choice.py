"""A choice suits the devices that it names, and is the same after a way through its text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.model.device_choice import (
    CAPABILITY,
    MODEL,
    NEED,
    DeviceChoice,
    DeviceTraits,
    choice_in,
    text_of,
    traits_in,
)
from app.core.model.fields import NAME
from app.core.model.provisions.resources import FIELDS
from tests.thoroughness import examples

H100 = "NVIDIA H100 80GB HBM3"
A100 = "NVIDIA A100-SXM4-40GB"
INSTANCE = f"{H100} MIG 1g.10gb"


@pytest.mark.parametrize(
    ("asked", "models"),
    [
        ("", [H100, A100, INSTANCE, ""]),
        ("h100", [H100]),  # an instance is only a part of an H100
        ("H100 80GB", [H100]),
        ("80gb h100", [H100]),
        ("a100-sxm4", [A100]),
        ("a10", []),
        ("nvidia", [H100, A100]),
        ("1g.10gb", [INSTANCE]),
        ("h100 1g.10gb", [INSTANCE]),
        ("MIG", [INSTANCE]),
        ("a100 mig", []),
        ("2g.10gb", []),
    ],
)
def test_model_suits_names_with_all_its_words(asked: str, models: list[str]) -> None:
    choice = DeviceChoice(model=asked)
    found = [m for m in (H100, A100, INSTANCE, "") if choice.suits(DeviceTraits(model=m))]
    assert found == models


@pytest.mark.parametrize(
    ("least", "has", "suits"),
    [
        ("", "", True),
        ("", "9.0", True),
        ("9.0", "", False),
        ("9.0", "8.9", False),
        ("9.0", "9.0", True),
        ("9.0", "10.0", True),  # numbers, not texts
        ("10.0", "9.0", False),
        ("9.0", "gfx942", False),
    ],
)
def test_compute_capability_is_the_least_that_suits(least: str, has: str, suits: bool) -> None:
    assert DeviceChoice(compute_capability=least).suits(DeviceTraits(compute_capability=has)) == (
        suits
    )


def test_unmet_names_each_field_that_the_device_does_not_meet() -> None:
    choice = DeviceChoice(
        model="h100",
        compute_capability="9.0",
        labels=("fast",),
        avoid_labels=("spot",),
        needs=("egress", "mount:corpus"),
        resources=(("cpus", 1500), ("memory", 2**32)),
    )
    bad = DeviceTraits(model=A100, compute_capability="8.0", labels=("spot",))
    good = DeviceTraits(
        model=H100,
        compute_capability="9.0",
        labels=("big", "fast"),
        offers=("egress", "mount:corpus", "mount:other"),
        gives=(("cpus", 2000), ("disk", 5), ("memory", 2**32)),
    )
    assert list(choice.unmet(bad)) == [
        "model",
        "compute_capability",
        "labels",
        "avoid_labels",
        "needs",
        "resources",
    ]
    assert list(choice.unmet(good)) == []
    assert choice.told == (
        " of model h100 of compute capability 9.0 with label fast without label spot"
        " that offers egress and mount:corpus"
        " that gives a task 1.5 processors and 4.0 GiB of host memory"
    )
    assert choice.named.told == choice.told.replace(" that offers egress and mount:corpus", "")


def test_facts_without_traits_are_those_of_an_older_worker() -> None:
    assert traits_in({}) == DeviceTraits()
    facts = {"model": None, "compute_capability": "9.0", "labels": ["b", "a"], "offers": ["egress"]}
    found = DeviceTraits(compute_capability="9.0", labels=("b", "a"), offers=("egress",))
    facts["gives"] = {"memory": 5, "cpus": 4}
    found = replace(found, gives=(("cpus", 4), ("memory", 5)))
    assert traits_in(facts) == found


def test_confined_task_suits_the_devices_of_its_reservation() -> None:
    choice = DeviceChoice(reservation="rsv_1")
    assert choice.suits(DeviceTraits(kept_for="rsv_1"))
    assert not choice.suits(DeviceTraits(kept_for=""))
    assert not choice.suits(DeviceTraits(kept_for="rsv_2"))
    assert choice.suits(DeviceTraits())  # where nobody asks which device is kept
    assert choice.told == " of the reservation that it names"


names = st.lists(st.from_regex(NAME, fullmatch=True), unique=True, max_size=4)
needs = st.lists(st.from_regex(NEED, fullmatch=True), unique=True, max_size=4)
labels = names.map(lambda found: tuple(sorted(found)))
choices = st.builds(
    DeviceChoice,
    model=st.just("") | st.from_regex(MODEL, fullmatch=True),
    compute_capability=st.just("") | st.from_regex(CAPABILITY, fullmatch=True),
    labels=labels,
    avoid_labels=labels,
    needs=needs.map(lambda found: tuple(sorted(found))),
    resources=st.dictionaries(
        st.sampled_from(sorted(FIELDS)), st.integers(1, 2**50), max_size=4
    ).map(lambda found: tuple(sorted(found.items()))),
    reservation=st.sampled_from(("", "rsv_0Az")),
)


@settings(max_examples=examples(100))
@given(choices, choices)
def test_choice_read_from_its_text_suits_the_same_devices(
    choice: DeviceChoice, other: DeviceChoice
) -> None:
    text = text_of(choice)
    read = choice_in(text)
    assert text_of(read) == text
    assert (read.labels, read.avoid_labels) == (choice.labels, choice.avoid_labels)
    assert read.needs == choice.needs
    assert read.resources == choice.resources
    has = DeviceTraits(model=choice.model, compute_capability=choice.compute_capability,
                       labels=choice.labels, offers=choice.needs,
                       gives=other.resources)  # fmt: skip
    assert list(read.unmet(has)) == list(choice.unmet(has))
    assert (text_of(other) == text) == (choice_in(text_of(other)) == read)
