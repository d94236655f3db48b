"""Values of secrets leave nothing in texts, in whatever usual form; all other text stays."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from app.core.security.redaction import (
    MARK,
    MAX_BYTES,
    MAX_LINES,
    MIN_BYTES,
    Redactor,
    are_too_long,
    fault_of,
)
from tests.thoroughness import examples

TOKEN = "hf_Zq8/Wm+3 k=é\"'\\x"
VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\0*"), min_size=8, max_size=40)


def clean(value: str, said: str) -> str:
    return Redactor([value]).clean(said.encode()).decode()


@pytest.mark.parametrize(
    ("form", "left"),
    [
        (TOKEN, MARK),
        (json.dumps({"token": TOKEN}), f'{{"token": "{MARK}"}}'),
        (json.dumps([TOKEN], ensure_ascii=False), f'["{MARK}"]'),
        (quote(TOKEN), MARK),
        (quote(TOKEN, safe=""), MARK),
        (f"https://example.org/?q={quote_plus(TOKEN)}&x=1", f"https://example.org/?q={MARK}&x=1"),
        (repr({"token": TOKEN}), f"{{'token': '{MARK}'}}"),
        (repr(TOKEN.encode()), f"b'{MARK}'"),
    ],
)
def test_usual_form_of_a_value_is_replaced(form: str, left: str) -> None:
    assert clean(TOKEN, f"before {form} after") == f"before {left} after"


@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
@pytest.mark.parametrize("before", [b"", b"u", b"us", b"use", b"user:"])
def test_value_inside_base64_is_replaced(encode: Callable[[bytes], bytes], before: bytes) -> None:
    form = encode(before + TOKEN.encode() + b" and more").decode()
    cleaned = clean(TOKEN, form)
    assert MARK in cleaned
    around = len(form) - len(encode(TOKEN.encode()))
    assert len(cleaned) <= around + len(MARK) + 4  # digits at the edges belong to both
    assert not any(form[at : at + 12] in cleaned for at in range(8, 30 - 12))


@settings(max_examples=examples(100))
@given(VALUES, st.text(max_size=20), st.text(max_size=20))
def test_value_between_any_texts_is_replaced(value: str, before: str, after: str) -> None:
    assume(not fault_of(value))
    line = value.strip().splitlines()[0].strip()
    assume(len(line.encode()) >= MIN_BYTES)
    data = "\n".join((before + line + after).splitlines()).encode("utf-8", "surrogatepass")
    assert line.encode() not in Redactor([value]).clean(data)


@settings(max_examples=examples(100))
@given(st.lists(VALUES, max_size=3), st.binary(max_size=200))
def test_other_bytes_are_unchanged(values: list[str], data: bytes) -> None:
    redactor = Redactor(values)
    assume(not any(form in data for form in redactor._forms))
    assert redactor.clean(data) == data
    assert not redactor or redactor.split(data, 10) == (data[:10], data[10:])


@settings(max_examples=examples(200))
@given(st.data())
def test_cut_of_a_long_line_divides_no_value(data: st.DataObject) -> None:
    values = data.draw(st.lists(st.text("ab", min_size=MIN_BYTES, max_size=9), max_size=3))
    redactor = Redactor(values)
    line = data.draw(st.text("ab ", min_size=40, max_size=80)).encode()
    at = data.draw(st.integers(0, len(line) - redactor.longest))
    first, rest = redactor.split(line, at)
    whole = first + redactor.clean(rest)
    assert not any(value.encode() in whole for value in values)
    assert line.endswith(rest)


def test_lines_of_a_value_are_replaced_one_by_one() -> None:
    value = "-----BEGIN KEY-----\nMIIEvQIBADANBgkqhki\nG9w0BAQEFAASC\n-----END KEY-----\n"
    said = f"key:\n  {value.replace(chr(10), chr(10) + '  ')}done\n"
    assert clean(value, said) == f"key:\n  {MARK}\n  {MARK}\n  {MARK}\n  {MARK}\n  done\n"
    assert "MII" not in clean(value, json.dumps({"key": value}))
    assert clean(value, base64.b64encode(value.encode()).decode()).startswith(MARK)


def test_values_that_overlap_leave_nothing() -> None:
    redactor = Redactor(["abcdefgh", "ghijklmn", "cdefgh"])
    assert redactor.clean(b"<abcdefghijklmn>") == b"<***>"
    assert redactor.clean(b"abcdefgh-cdefgh-ghijklmn") == b"***-***-***"


def test_value_inside_a_longer_value_leaves_nothing_of_either() -> None:
    redactor = Redactor(["password-of-the-database", "of-the-"])
    assert redactor.clean(b"<password-of-the-database>") == b"<***>"


def test_text_that_was_cut_shows_no_part_of_a_value() -> None:
    redactor = Redactor(["0123456789abcdef"])
    long = 40 * "."
    assert redactor.text(f"{long}0123456789a") == f"{long}{MARK}"
    assert redactor.text(f"6789abcdef{long}") == f"{MARK}{long}"
    for text in (f"{long}01234", f"6789abc{long}", "0123456789"):  # too little to be known
        assert redactor.text(text) == text


def test_names_texts_and_numbers_of_a_result_are_replaced() -> None:
    redactor = Redactor(["hf_secret_token", "12345678"])
    told: dict[str, Any] = {
        "hf_secret_token": ["a hf_secret_token", {"x": 12345678, "y": -12345678.5, "z": 1234567}],
        "none": None,
        "flag": True,
    }
    assert redactor.json(told) == {
        MARK: [f"a {MARK}", {"x": MARK, "y": f"-{MARK}.5", "z": 1234567}],
        "none": None,
        "flag": True,
    }
    assert Redactor().json(told) is told


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("", "at least 6 bytes"),
        ("short", "at least 6 bytes"),
        ("  short \n", "at least 6 bytes"),
        ("with\0nul", "NUL"),
        ("x" * (MAX_BYTES + 1), "at most 32768 bytes"),
        ("line of it\n" * (MAX_LINES + 1), "at most 64 lines"),
    ],
)
def test_text_that_cannot_be_kept_out_of_logs_is_no_secret(value: str, told: str) -> None:
    assert told in fault_of(value)


def test_longest_secrets_of_a_task_are_bounded_together() -> None:
    longest = "line of it\n" * MAX_LINES
    assert not fault_of(longest)
    assert not are_too_long([longest, longest])
    assert are_too_long([longest, longest, "one more"])
