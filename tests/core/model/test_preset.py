"""Presets: only what is listed, within its range, and every difference is told."""

from __future__ import annotations

from typing import Any

import pytest

from app.core.model import preset


def test_a_cpu_device_is_deterministic_unless_told_otherwise() -> None:
    assert preset.defaults("cpu", threads=3) == {
        "threads": 3,
        "interop_threads": 1,
        "deterministic": True,
        "float32_matmul_precision": "highest",
        "flush_denormal": False,
    }


@pytest.mark.parametrize("kind", ["cuda", "xpu", "sim"])
def test_accelerator_default_warns_of_operations_without_a_deterministic_kernel(kind: str) -> None:
    assert preset.defaults(kind)["deterministic"] == "warn"


@pytest.mark.parametrize(("value", "promised"), [(True, True), ("warn", False), (False, False)])
def test_only_a_deterministic_preset_promises_bits(value: Any, promised: bool) -> None:
    assert preset.check({"deterministic": value}, kind="cpu") == ()
    assert preset.promises_bits({"deterministic": value}) is promised


@pytest.mark.parametrize("kind", ["cpu", "cuda", "xpu"])
def test_default_values_are_allowed_values(kind: str) -> None:
    assert preset.check(preset.defaults(kind), kind=kind) == ()


@pytest.mark.parametrize(
    ("params", "pointer", "code"),
    [
        ([], "/params", "type"),
        ({"thread": 1}, "/params/thread", "unknown-field"),
        ({"a/b": 1}, "/params/a~1b", "unknown-field"),
        ({"cudnn_benchmark": True}, "/params/cudnn_benchmark", "unknown-field"),  # not on a cpu
        ({"power_limit_w": 200}, "/params/power_limit_w", "unknown-field"),
        ({"threads": 0}, "/params/threads", "range"),
        ({"threads": True}, "/params/threads", "type"),
        ({"threads": 1.0}, "/params/threads", "type"),
        ({"deterministic": 1}, "/params/deterministic", "type"),
        ({"deterministic": "warm"}, "/params/deterministic", "type"),
        ({"float32_matmul_precision": True}, "/params/float32_matmul_precision", "type"),
        ({"float32_matmul_precision": "low"}, "/params/float32_matmul_precision", "invalid"),
    ],
)
def test_forbidden_value_is_reported_with_its_pointer(params: Any, pointer: str, code: str) -> None:
    (fault,) = preset.check(params, kind="cpu")
    assert (fault.pointer, fault.code) == (pointer, code)


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({"power_limit_w": 300, "compute_mode": "exclusive_process"}, None),
        ({"graphics_clock_mhz": 1410, "memory_clock_mhz": 1593}, None),
        ({"power_limit_w": 0}, "range"),
        ({"power_limit_w": 300.5}, "type"),
        ({"graphics_clock_mhz": None}, "type"),
        ({"compute_mode": "prohibited"}, "invalid"),
    ],
)
def test_settings_of_the_device_are_parameters_of_accelerators(
    params: dict[str, Any], code: str | None
) -> None:
    for kind in ("cuda", "xpu"):
        assert [fault.code for fault in preset.check(params, kind=kind)] == ([code] if code else [])


def test_a_preset_has_a_part_for_the_process_and_one_for_the_device() -> None:
    whole = {**preset.defaults("cuda"), "power_limit_w": 300}
    assert preset.of_device(whole) == {"power_limit_w": 300}
    assert preset.of_process(whole) == preset.defaults("cuda")
    assert preset.of_device(preset.defaults("cuda")) == {}, "they stay as they are"


def test_unknown_parameter_gets_a_suggestion() -> None:
    (fault,) = preset.check({"thread": 1}, kind="cpu")
    assert fault.detail == "a cpu device has no parameter 'thread'; did you mean 'threads'?"


def test_equal_presets_have_equal_names_in_any_order() -> None:
    assert preset.sha256({"a": 1, "b": 2}) == preset.sha256({"b": 2, "a": 1})
    assert preset.sha256({"a": 1}) != preset.sha256({"a": True})


def test_every_difference_is_reported() -> None:
    wanted = {"threads": 2, "deterministic": True, "flush_denormal": False}
    assert preset.differences(wanted, {**wanted, "more": 1}) == []
    assert preset.differences(wanted, {"threads": 1, "deterministic": 1}) == [
        "deterministic: set to True, but the device reports 1",
        "flush_denormal: set to False, but the device does not report it",
        "threads: set to 2, but the device reports 1",
    ]
