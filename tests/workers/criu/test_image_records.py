from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.criu.made_image import message
from workers.criu.image_records import (
    INVENTORY,
    BadRecord,
    ImageFile,
    ImageRecord,
    read_varint,
    varint,
)

MAGIC = 0x55053847
numbers = st.integers(0, 2**64 - 1)
fields = st.dictionaries(st.integers(1, 2**29 - 1), numbers | st.binary(max_size=40), max_size=8)


@given(numbers)
def test_number_is_read_as_it_was_written(value):
    assert read_varint(varint(value), 0) == (value, len(varint(value)))


@given(fields)
def test_record_is_written_as_it_was_read(found):
    data = message(found)
    assert ImageRecord.read(data).encoded() == data


@given(st.lists(fields, max_size=4), st.binary(max_size=20), st.sampled_from([MAGIC, INVENTORY]))
def test_file_is_written_as_it_was_read(found, rest, magic):
    records = tuple(ImageRecord.read(message(each)) for each in found)
    data = ImageFile(magic, records, rest).encoded()
    again = ImageFile.read(data, magic, records_most=len(records))
    assert (again.records, again.rest, again.encoded()) == (records, rest, data)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_record_or_refused(data):
    try:
        record = ImageRecord.read(data)
    except BadRecord:
        return
    assert ImageRecord.read(record.encoded()) == record


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"\x80" * 11, "a number has no end"),
        (b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x02", "a number has no end"),
        (b"\x00\x01", "expected a field number"),
        (b"\x0b", "unknown form"),  # a group
        (b"\x0a\x05abc", "truncated"),
        (b"\x09abc", "truncated"),
        (varint((2**29 + 1) << 3) + b"\x00", "expected a field number"),
    ],
)
def test_what_readers_may_understand_differently_is_refused(data, told):
    with pytest.raises(BadRecord, match=told):
        ImageRecord.read(data)


def test_field_that_is_there_twice_is_no_single_value():
    record = ImageRecord.read(message({1: [5, 6], 2: [b"a", b"b"], 3: {1: 1}}))
    for read in (lambda: record.number(1), lambda: record.text(2), lambda: record.message(2)):
        with pytest.raises(BadRecord):
            read()
    assert record.numbers(1) == [5, 6]
    assert record.message(3).number(1) == 1
    with pytest.raises(BadRecord):
        record.number(9)
    assert record.number(9, 4) == 4


def test_packed_numbers_are_read():
    assert ImageRecord.read(message({1: [7, b"\x01\x80\x01"]})).numbers(1) == [7, 1, 128]


@pytest.mark.parametrize(("value", "read"), [(2**32 - 1, 2**32 - 1), (2**64 - 1, 2**32 - 1)])
def test_negative_number_of_32_bits_is_one(value, read):
    assert ImageRecord.read(message({1: value})).number(1) == read


@pytest.mark.parametrize("value", [2**32, 2**63, 2**64 - 2**31 - 1])
def test_number_of_more_than_32_bits_is_refused(value):
    with pytest.raises(BadRecord, match="more than 32 bits"):
        ImageRecord.read(message({1: value})).number(1)


def test_changed_field_leaves_the_others():
    record = ImageRecord.read(message({1: 5, 2: {1: 7, 2: b"x"}, 3: 9}))
    changed = record.with_message(2, lambda inner: inner.with_int(1, 300)).with_int(8, 1)
    assert changed.encoded() == message({1: 5, 2: {1: 300, 2: b"x"}, 3: 9})


def test_file_of_another_kind_is_refused():
    with pytest.raises(BadRecord, match="does not begin"):
        ImageFile.read(ImageFile(MAGIC, ()).encoded(), INVENTORY)
