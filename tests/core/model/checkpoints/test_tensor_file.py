"""Headers of safetensors and npy: what their own writers make is read, nothing else is taken."""

from __future__ import annotations

import io
import json
import struct
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from app.core.model.checkpoints.manifest import DTYPES
from app.core.model.checkpoints.tensor_file import (
    HEAD_BYTES,
    SAID,
    BadTensorFile,
    FileTensor,
    read,
    written,
)

ARRAYS = {
    "b": numpy.arange(6, dtype=numpy.float32).reshape(2, 3),
    "a": numpy.array(7, dtype=numpy.uint8),
    "none": numpy.zeros((0, 4), dtype=numpy.int64),
}


def npy(array: Any, **how: Any) -> bytes:
    out = io.BytesIO()
    numpy.save(out, array, **how)
    return out.getvalue()


def safe(header: Any, data: bytes = b"") -> bytes:
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(body)) + body + data


def entry(dtype: Any = "U8", shape: Any = (2,), offsets: Any = (0, 2)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def raw_npy(header: bytes, version: bytes = b"\x01\x00") -> bytes:
    return b"\x93NUMPY" + version + struct.pack("<H", len(header)) + header


def lying_in(body: bytes, tensor: FileTensor) -> Any:
    array = numpy.frombuffer(
        body, dtype=tensor.dtype, count=prod(tensor.shape), offset=tensor.offset
    )
    return array.reshape(tensor.shape, order="F" if tensor.reversed else "C")


# --- what is read ---------------------------------------------------------------------------------


def test_the_tensors_of_a_safetensors_file_lie_where_it_says() -> None:
    body = save(ARRAYS, {"by": "a test"})
    found = read(body, len(body))
    assert found.format == "safetensors"
    for tensor in found.tensors:
        assert (lying_in(body, tensor) == ARRAYS[tensor.name]).all()
        assert tensor.shape == ARRAYS[tensor.name].shape
    assert found.summary()["tensor_count"] == 3
    assert {"name": "b", "dtype": "float32", "shape": [2, 3]} in found.summary()["tensors"]


@pytest.mark.parametrize("dtype", ["?", "u1", "i2", "u2", "f2", "f4", "f8", "c8"])
def test_every_type_that_safetensors_writes_is_known(dtype: str) -> None:
    array = numpy.arange(6).reshape(2, 3).astype(dtype)
    body = save({"x": array})
    [tensor] = read(body, len(body)).tensors
    assert tensor.dtype == array.dtype.name
    assert (lying_in(body, tensor) == array).all()


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["?", "u1", "<i2", "<f2", "<f8", "<c16"])
def test_an_npy_is_one_tensor_without_a_name(dtype: str, order: str, version: Any) -> None:
    array = numpy.asarray(numpy.arange(6).reshape(2, 3).astype(dtype), order=order)
    out = io.BytesIO()
    numpy.lib.format.write_array(out, array, version=version)
    [tensor] = read(out.getvalue(), len(out.getvalue())).tensors
    assert (lying_in(out.getvalue(), tensor) == array).all()
    assert tensor.name == ""


def test_header_can_be_read_from_the_beginning_of_a_file() -> None:
    body = save({"x": numpy.zeros(HEAD_BYTES + 9, dtype=numpy.uint8)})
    assert read(body[:HEAD_BYTES], len(body)) == read(body, len(body))


# --- what is not taken ----------------------------------------------------------------------------

BAD = {
    "nothing": b"",
    "a few bytes": b"abc",
    "a pickle": b"\x80\x04\x95" + b"." * 60,
    "a zip": b"PK\x03\x04" + b"\x00" * 60,
    "a header that ends early": struct.pack("<Q", 90) + b"{}",
    "a header that is too long": struct.pack("<Q", 2**62) + b"{}",
    "no JSON": safe(b"{'a': 1}"),
    "no text": safe(b'{"\xff": 1}'),
    "a list": safe([]),
    "deep": safe(b"[" * 100_000),
    "a huge number": safe(b'{"a": ' + b"9" * 9000 + b"}"),
    "a name twice": safe(
        b'{"a": {"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b' "a": {"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        b"ab",
    ),
    "metadata that is no text": safe({"__metadata__": {"a": 1}}),
    "metadata that is no table": safe({"__metadata__": "a"}),
    "no table": safe({"a": 1}),
    "an unknown field": safe({"a": {**entry(), "device": "cpu"}}, b"ab"),
    "an unknown type": safe({"a": entry("F4")}, b"ab"),
    "a type that is a list": safe({"a": entry([1])}, b"ab"),
    "a negative size": safe({"a": entry(shape=[-1, -2])}, b"ab"),
    "half a size": safe({"a": entry(shape=[2.0])}, b"ab"),
    "a truth for a size": safe({"a": entry(shape=[True, 2])}, b"ab"),
    "another size": safe({"a": entry(shape=[3])}, b"abc"),
    "backwards": safe({"a": entry(offsets=[2, 0])}, b"ab"),
    "three offsets": safe({"a": entry(offsets=[0, 1, 2])}, b"ab"),
    "a hole before": safe({"a": entry(offsets=[1, 3])}, b"-ab"),
    "a hole between": safe({"a": entry(), "b": entry(offsets=[3, 5])}, b"ab-ab"),
    "an overlap": safe({"a": entry(), "b": entry(offsets=[1, 3])}, b"aab"),
    "something behind": safe({"a": entry()}, b"ab-"),
    "the end missing": safe({"a": entry()}, b"a"),
    "a NUL in a name": safe({"a\x00": entry()}, b"ab"),
    "half a surrogate pair": safe(b'{"\\ud800": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
    "a long name": safe({"a" * 2000: entry()}, b"ab"),
    "too many dimensions": safe({"a": entry(shape=[1] * 65, offsets=[0, 1])}, b"a"),
    "objects": npy(numpy.array([{}, ()], dtype=object), allow_pickle=True),
    "texts": npy(numpy.array(["ab"])),
    "records": npy(numpy.zeros(2, dtype=[("a", "u1")])),
    "big endian": npy(numpy.zeros(2, dtype=">f4")),
    "times": npy(numpy.zeros(2, dtype="<M8[s]")),
    "an npy that ends early": npy(numpy.zeros(9))[:-1],
    "an npy of the future": b"\x93NUMPY\x09\x00" + b"\x00" * 60,
    "half a magic": b"\x93NUMPY",
    "an npy that ends in its header": npy(numpy.zeros(9))[:40],
    "a call": raw_npy(b"{'descr': __import__('os'), 'fortran_order': False, 'shape': ()}"),
    "no dictionary": raw_npy(b"(1, 2)"),
    "no Python": raw_npy(b"{'descr':"),
    "deep Python": raw_npy(b"(" * 60_000),
    "no shape": raw_npy(b"{'descr': '|u1', 'fortran_order': False}"),
    "a shape of texts": raw_npy(b"{'descr': '|u1', 'fortran_order': False, 'shape': ('a',)}"),
    "an order that is a number": raw_npy(b"{'descr': '|u1', 'fortran_order': 1, 'shape': (0,)}"),
}


@pytest.mark.parametrize("name", BAD)
def test_fault_of_a_tensor_file_is_reported(name: str) -> None:
    with pytest.raises(BadTensorFile, match=r"\w{2}"):
        read(BAD[name], len(BAD[name]))


@given(st.data())
def test_damaged_header_is_reported_or_harmless(data: st.DataObject) -> None:
    """Whatever byte is changed: either it is refused, or every tensor still lies in the file."""
    body = bytearray(data.draw(st.sampled_from([save(ARRAYS), npy(ARRAYS["b"])])))
    for at in data.draw(st.lists(st.integers(0, len(body) - 1), min_size=1, max_size=4)):
        body[at] = data.draw(st.integers(0, 255))
    try:
        found = read(bytes(body), len(body))
    except BadTensorFile:
        return
    for tensor in found.tensors:
        assert 0 < tensor.offset <= tensor.offset + tensor.size <= len(body)


# --- what is written ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Out:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype]


def test_file_that_we_write_is_read_by_safetensors() -> None:
    outs = [Out(name, str(array.dtype), array.shape) for name, array in ARRAYS.items()]
    head, ordered = written(outs, {"by": "a test"})
    body = head + b"".join(ARRAYS[out.name].tobytes() for out in ordered)
    loaded = load(body)
    assert loaded.keys() == ARRAYS.keys()
    assert all((loaded[name] == ARRAYS[name]).all() for name in ARRAYS)


@given(st.lists(st.tuples(st.sampled_from(sorted(SAID)), st.lists(st.integers(0, 4), max_size=3))))
def test_file_that_we_write_is_read_back(wanted: list[tuple[str, list[int]]]) -> None:
    outs = [Out(f"t{n}", dtype, tuple(shape)) for n, (dtype, shape) in enumerate(wanted)]
    head, ordered = written(outs, {})
    found = read(head, len(head) + sum(out.size for out in outs))
    assert [(t.name, t.dtype, t.shape) for t in found.tensors] == [
        (out.name, out.dtype, out.shape) for out in ordered
    ]
    assert all(tensor.offset % DTYPES[tensor.dtype] == 0 for tensor in found.tensors)
