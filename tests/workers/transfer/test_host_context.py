"""What a device worker says of its device comes from its settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.core.model.protocol.messages import Alive, decode, encode
from app.settings import Settings
from workers.device.device_check import find_device
from workers.transfer.host_context import House


@pytest.mark.parametrize(("listed", "labels"), [("", []), ("spot,old,spot", ["old", "spot"])])
def test_labels_of_the_settings_are_facts_that_an_island_takes(
    tmp_path: Path, listed: str, labels: list[str]
) -> None:
    settings = Settings(home=tmp_path, device="h.0", device_labels=listed)
    house = House.of(settings, find_device(settings))
    told = Alive(
        device="h.0",
        incarnation="1",
        sent_us=1,
        facts=house.facts,
        residents=[],
        events=[],
        logs=[],
    )
    heard = decode(encode(told))
    assert isinstance(heard, Alive)
    assert heard.facts["labels"] == labels


@pytest.mark.parametrize(("set_", "location"), [("", []), ("numa0/s1", ["numa0", "s1"])])
def test_rack_and_location_of_the_settings_are_facts(
    tmp_path: Path, set_: str, location: list[str]
) -> None:
    settings = Settings(home=tmp_path, device="h.0", rack="r1", device_location=set_)
    found = House.of(settings, find_device(settings)).facts
    assert (found["rack"], found["location"]) == ("r1", location)


@pytest.mark.parametrize("name", ["rack", "device_location"])
@pytest.mark.parametrize("value", ["/a", "a//b", "a b", "a/", "/".join("abcdefghi")])
def test_a_location_that_is_no_path_is_refused(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(ValueError, match="should match pattern"):
        Settings(home=tmp_path, device="h.0", **{name: value})
