"""Numbers of the scheduler that no round could work with are refused when a process starts."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from app.settings import Settings


@pytest.mark.parametrize("number", ["-1", "0.5", "1e300", "inf", "nan"])
def test_settings_half_life_out_of_bounds_is_refused(
    monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    monkeypatch.setenv("ROUNDHOUSE_HALF_LIFE_S", number)
    with pytest.raises(ValidationError, match="must be 0"):
        Settings()


@pytest.mark.parametrize("name", ["TICK_S", "LEADER_S", "SLICE_MIN_S", "SLICE_MAX_S"])
@pytest.mark.parametrize("number", ["-1", "inf", "nan"])
def test_settings_scheduler_number_out_of_bounds_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, number: str
) -> None:
    monkeypatch.setenv(f"ROUNDHOUSE_{name}", number)
    with pytest.raises(ValidationError, match=f"ROUNDHOUSE_{name}|{name.lower()}"):
        Settings()


@pytest.mark.parametrize("labels", ["spot, old", "spot,", "Spot", "a,,b"])
def test_settings_device_labels_of_another_form_are_refused(
    monkeypatch: pytest.MonkeyPatch, labels: str
) -> None:
    monkeypatch.setenv("ROUNDHOUSE_DEVICE_LABELS", labels)
    with pytest.raises(ValidationError, match=r"DEVICE_LABELS|device_labels"):
        Settings()


@pytest.mark.parametrize("number", ["0", "1", "604800", "3162240000"])
def test_settings_half_life_within_bounds_is_taken(
    monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    monkeypatch.setenv("ROUNDHOUSE_HALF_LIFE_S", number)
    assert Settings().half_life_s == float(number)
