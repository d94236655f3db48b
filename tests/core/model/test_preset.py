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


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_defaults_are_themselves_allowed(kind: str) -> None:
    assert preset.check(preset.defaults(kind), kind=kind) == ()


@pytest.mark.parametrize(
    ("params", "pointer", "code"),
    [
        ([], "/params", "type"),
        ({"thread": 1}, "/params/thread", "unknown-field"),
        ({"a/b": 1}, "/params/a~1b", "unknown-field"),
        ({"cudnn_benchmark": True}, "/params/cudnn_benchmark", "unknown-field"),  # not on a cpu
        ({"threads": 0}, "/params/threads", "range"),
        ({"threads": True}, "/params/threads", "type"),
        ({"threads": 1.0}, "/params/threads", "type"),
        ({"deterministic": 1}, "/params/deterministic", "type"),
        ({"float32_matmul_precision": "low"}, "/params/float32_matmul_precision", "invalid"),
    ],
)
def test_what_is_not_allowed_is_pointed_at(params: Any, pointer: str, code: str) -> None:
    (fault,) = preset.check(params, kind="cpu")
    assert (fault.pointer, fault.code) == (pointer, code)


def test_an_unknown_parameter_says_what_was_meant() -> None:
    (fault,) = preset.check({"thread": 1}, kind="cpu")
    assert fault.detail == "a cpu device has no parameter 'thread'; did you mean 'threads'?"


def test_equal_presets_have_equal_names_in_whatever_order() -> None:
    assert preset.sha256({"a": 1, "b": 2}) == preset.sha256({"b": 2, "a": 1})
    assert preset.sha256({"a": 1}) != preset.sha256({"a": True})


def test_every_difference_is_told() -> None:
    wanted = {"threads": 2, "deterministic": True, "flush_denormal": False}
    assert preset.differences(wanted, {**wanted, "more": 1}) == []
    assert preset.differences(wanted, {"threads": 1, "deterministic": 1}) == [
        "deterministic: set to True, but the device reports 1",
        "flush_denormal: set to False, but the device does not report it",
        "threads: set to 2, but the device reports 1",
    ]
