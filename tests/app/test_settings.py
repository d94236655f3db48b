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


def test_settings_negative_number_of_kept_requests_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROUNDHOUSE_KEPT_REQUESTS_MAX", "-1")
    with pytest.raises(ValidationError, match=r"KEPT_REQUESTS_MAX|kept_requests_max"):
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


@pytest.mark.parametrize("name", ["STORE", "ARCHIVE"])
@pytest.mark.parametrize("address", ["archive", "~/archive", "S3://bucket", "s3://", "gs://bucket"])
def test_settings_place_that_would_be_a_relative_folder_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, address: str
) -> None:
    monkeypatch.setenv(f"ROUNDHOUSE_{name}", address)
    with pytest.raises(ValidationError, match="must be an absolute path, or s3://BUCKET/PREFIX"):
        Settings()


@pytest.mark.parametrize("address", ["", "/srv/archive/", "s3://bucket", "s3://bucket/a/b"])
def test_settings_archive_is_a_folder_or_a_bucket(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("ROUNDHOUSE_ARCHIVE", address)
    assert Settings().archive == address


@pytest.mark.parametrize("name", ["REQUESTS", "CHECKPOINTS", "DECISIONS", "DELIVERIES"])
@pytest.mark.parametrize("days", ["-1", "inf", "nan", "1e308", "1000001"])
def test_settings_kept_days_before_all_timestamps_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, days: str
) -> None:
    monkeypatch.setenv(f"ROUNDHOUSE_{name}_KEPT_DAYS", days)
    with pytest.raises(ValidationError, match=f"{name}_KEPT_DAYS|{name.lower()}_kept_days"):
        Settings()


@pytest.mark.parametrize("listed", ["debian", "https://docker.io", "docker.io ghcr.io"])
def test_settings_image_registries_of_another_form_are_refused(
    monkeypatch: pytest.MonkeyPatch, listed: str
) -> None:
    monkeypatch.setenv("ROUNDHOUSE_IMAGE_REGISTRIES", listed)
    with pytest.raises(ValidationError, match="must be registries such as"):
        Settings()
