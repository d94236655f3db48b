"""Every write to watched memory is seen, whoever makes it, and nothing else is."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import numpy
import pytest
import torch

from tests.workers.watching import WATCH
from workers.hardware.dirty_pages import PAGE, Range

SIZE = 64 * PAGE


@pytest.fixture
def watch():
    if WATCH is None:
        pytest.skip("this kernel cannot watch memory")
    return WATCH


def bytes_of(tensor: torch.Tensor) -> Range:
    return Range.inside(tensor.data_ptr(), tensor.untyped_storage().nbytes())


def memory(size: int = SIZE) -> torch.Tensor:
    """On pages of its own, so that nobody else writes to them."""
    return torch.zeros(size + 2 * PAGE, dtype=torch.uint8)


@pytest.mark.parametrize("at", [PAGE, SIZE // 2, SIZE])
def test_one_written_byte_is_noticed(watch, at):
    tensor = memory()
    assert watch.protect([bytes_of(tensor)]) == set()
    assert watch.written([bytes_of(tensor)]) == set()
    tensor[at] = 1
    assert watch.written([bytes_of(tensor)]) == {bytes_of(tensor)}


def test_reading_is_not_counted_as_writing(watch):
    tensor = memory()
    watch.protect([bytes_of(tensor)])
    assert int(tensor.sum()) == 0
    assert watch.written([bytes_of(tensor)]) == set()


def test_written_pages_are_forgotten_when_protected_again(watch):
    tensor = memory()
    watch.protect([bytes_of(tensor)])
    tensor.fill_(3)
    watch.protect([bytes_of(tensor)])
    assert watch.written([bytes_of(tensor)]) == set()
    tensor.numpy()[PAGE] = 4
    assert watch.written([bytes_of(tensor)]) == {bytes_of(tensor)}


def test_writes_not_counted_by_tensor_versions_are_noticed(watch):
    weight = torch.nn.Parameter(torch.ones(SIZE))
    watch.protect([bytes_of(weight)])
    version = weight._version
    weight.data.add_(1)
    assert weight._version == version
    assert watch.written([bytes_of(weight)]) == {bytes_of(weight)}


def test_writes_by_the_kernel_for_a_process_are_noticed(watch, tmp_path: Path):
    (tmp_path / "data").write_bytes(b"x" * SIZE)
    read, received = memory(), memory()
    watch.protect([bytes_of(read), bytes_of(received)])
    with (tmp_path / "data").open("rb", buffering=0) as file:
        assert file.readinto(memoryview(read.numpy())[PAGE : PAGE + SIZE]) == SIZE
    assert watch.written([bytes_of(read), bytes_of(received)]) == {bytes_of(read)}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"y" * 100)
        assert ours.recv_into(memoryview(received.numpy())[PAGE : 2 * PAGE]) == 100
    assert watch.written([bytes_of(received)]) == {bytes_of(received)}
    assert bytes(read[PAGE : PAGE + 2].numpy()) == b"xx"
    assert bytes(received[PAGE : PAGE + 2].numpy()) == b"yy"


def test_writes_of_a_child_to_its_copy_are_not_counted(watch):
    tensor = memory()
    watch.protect([bytes_of(tensor)])
    array = tensor.numpy()  # torch's threads do not live on in a child
    if not (child := os.fork()):
        array[:] = 7
        os._exit(int(array[PAGE]) - 7)
    assert os.waitpid(child, 0)[1] == 0
    assert watch.written([bytes_of(tensor)]) == set()
    tensor[2 * PAGE] = 1  # copies a page that the child shares
    assert watch.written([bytes_of(tensor)]) == {bytes_of(tensor)}


def test_released_pages_cost_and_report_nothing(watch):
    first, second = memory(), memory()
    both = [bytes_of(first), bytes_of(second)]
    watch.protect(both)
    watch.release([bytes_of(first)])
    second[PAGE] = 1
    assert bytes_of(second) in watch.written(both)
    first.fill_(1)
    assert bytes_of(first) in watch.written(both)  # not watched is as good as written


def test_neighbouring_regions_are_told_apart(watch):
    whole = memory(100 * PAGE)
    start = Range.inside(whole.data_ptr(), PAGE * 100).start
    parts = [Range(start + 10 * n * PAGE, start + (10 * n + 9) * PAGE) for n in range(10)]
    watch.protect(parts)
    for n in (3, 9):
        whole[parts[n].end - 1 - whole.data_ptr()] = 1
    whole[parts[5].end - whole.data_ptr()] = 1  # between two of them
    assert watch.written(parts) == {parts[3], parts[9]}


def test_more_scattered_writes_than_one_scan_reports_are_found(watch):
    whole = memory(4000 * PAGE)
    part = bytes_of(whole)
    watch.protect([part])
    for page in range(0, 4000, 2):
        whole[page * PAGE] = 1
    half = Range(part.start + 3990 * PAGE, part.end)
    assert watch.written([part]) == {part}
    assert watch.written([half]) == {half}


def test_memory_on_huge_pages_is_watched_to_the_page(watch):
    whole = torch.zeros(16 << 20, dtype=torch.uint8)
    part = bytes_of(whole)
    watch.protect([part])
    assert watch.written([part]) == set()
    whole[9 << 20] = 1
    assert watch.written([part]) == {part}


def test_memory_that_others_may_write_counts_as_written(watch, tmp_path: Path):
    (tmp_path / "data").write_bytes(b"\0" * SIZE)
    mapped = numpy.memmap(tmp_path / "data", mode="r+", dtype=numpy.uint8)
    part = Range.inside(mapped.ctypes.data, SIZE)
    shared, private = memory().share_memory_(), memory()
    ranges = [part, bytes_of(shared), bytes_of(private)]
    watch.protect(ranges)
    assert int(mapped.sum()) + int(shared.sum()) == 0  # its pages are there
    assert watch.written(ranges) == {part, bytes_of(shared)}


def test_memory_given_back_to_the_kernel_counts_as_written(watch):
    tensor = memory(64 << 20)
    part = bytes_of(tensor)
    watch.protect([part])
    tensor.untyped_storage().resize_(0)
    again = memory(64 << 20)  # may well lie at the same place
    assert bytes_of(again) != part or watch.written([part]) == {part}


@pytest.mark.parametrize("size", [0, 1, 10, PAGE - 1, PAGE])
def test_range_within_which_no_whole_page_lies_is_empty(size: int) -> None:
    found = Range.inside(7 * PAGE + 1, size)
    assert found.start == found.end
