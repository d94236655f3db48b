"""Ranks at outposts: residents with a slab each, joined by TCP, as those of several hosts are."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.workers.resident_gangs import LIMIT_BYTES, RANKS, Gang, Residents, next_said
from workers.process import slab
from workers.process.image_layout import laid_out
from workers.process.slab import Slab
from workers.ranks.host_bridge import Link
from workers.residents.remote_ranks import ImageParts

JSON = dict[str, Any]


@pytest.fixture(scope="module")
def residents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Residents]:
    found = Residents(tmp_path_factory.mktemp("hosts"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def undisturbed(residents: Residents) -> JSON:
    """What the job gives on one device of one host."""
    gang = Gang(residents, [1]).begin()
    result = gang.finished()
    gang.end()
    return result


@pytest.mark.parametrize("hosts", [[2, 1], [1, 1, 1]], ids=str)
def test_ranks_of_several_hosts_give_the_bits_of_one_device(
    residents: Residents, undisturbed: JSON, hosts: list[int]
) -> None:
    gang = Gang(residents, hosts).begin()
    assert gang.finished() == undisturbed
    gang.must_end()
    gang.end()


def test_gang_on_several_hosts_is_paused_and_resumed_in_place(
    residents: Residents, undisturbed: JSON
) -> None:
    gang = Gang(residents, [2, 1], pace=0.01).begin()
    step = 0
    for _ in range(3):
        gang.until("progress", step + 1)
        gang.order("pause")
        paused = gang.until("paused")
        assert paused["has_state"]
        assert paused["step"] > step
        step = paused["step"]
        off = next_said(gang.wires[1])  # whoever comes next has that seat
        assert (off["is"], off["has_state"], off["step"]) == ("paused", True, step)
        gang.order("go", seats=gang.hosts, linked=False)
    assert gang.finished() == undisturbed
    gang.end()


def test_gang_resumes_on_any_hosts_from_the_image_of_a_cut(
    residents: Residents, undisturbed: JSON
) -> None:
    """One host, two, three, two others, one: each time all ranks begin again from one image."""
    image: JSON | None = None
    kept = slab.made(LIMIT_BYTES)
    for hosts in ([1], [2, 1], [1, 1, 1], [1, 2]):
        gang = Gang(residents, hosts, image=image, slab_fd=kept, pace=0.02).begin()
        gang.until("progress", (image or {"step": 0})["step"] + 1)
        image = gang.paused_image()
        gang.end()
    gang = Gang(residents, [1], image=image, slab_fd=kept).begin()
    assert gang.finished() == undisturbed
    gang.end()


def test_hosts_of_a_gang_change_while_it_runs(residents: Residents, undisturbed: JSON) -> None:
    """To other hosts, more, fewer, none; what was asked meanwhile comes after."""
    gang, step = Gang(residents, [1], pace=0.02).begin(), 0
    for hosts in ([2, 1], [1, 1, 1], [3], [1, 2], [1]):
        gang.until("progress", step + 1)
        gang.change(hosts)
        if len(hosts) == 2:
            gang.order("save")
        resized = gang.until("resized")
        assert resized["seats"] == hosts
        assert resized["step"] > step
        step = resized["step"]
        if len(hosts) == 2:
            assert gang.until("saving")["at_step"] >= step
    gang.order("pause")
    assert gang.until("paused")["step"] >= step
    gang.order("go", seats=[2], linked=False)
    assert gang.finished() == undisturbed
    gang.must_end()
    gang.end()


def test_hosts_of_a_gang_change_while_it_has_no_slots(
    residents: Residents, undisturbed: JSON
) -> None:
    gang = Gang(residents, [1], pace=0.02)
    gang.until("prepared")
    for hosts in ([2, 1], [1, 1, 1], [1], [1, 2]):
        gang.go_to(hosts)
        step = gang.until("progress", 1)["step"]
        gang.order("pause")
        assert gang.until("paused")["step"] >= step
    gang.go_to([1, 1])
    assert gang.finished() == undisturbed
    gang.must_end()
    gang.end()


def test_gang_paused_before_its_hosts_change_stays_where_it_was(
    residents: Residents, undisturbed: JSON
) -> None:
    gang = Gang(residents, [2, 1], pace=0.02).begin()
    gang.until("progress", 1)
    gang.change([1, 1, 1])
    gang.order("pause")
    paused = gang.until("paused")
    image = gang.until("saving")
    assert image["at_step"] == paused["step"]
    gang.end()
    kept = {"step": image["at_step"], "index_bytes": image["index_bytes"]}
    again = Gang(residents, [1, 2], image=kept, slab_fd=gang.slab).begin()
    assert again.finished() == undisturbed
    again.end()


def test_output_of_remote_ranks_is_in_the_log_of_the_task(residents: Residents) -> None:
    gang = Gang(residents, [1, 1, 1], entry="ranks:Prints").begin()
    gang.until("finished")
    gang.must_end()
    log = gang.folder.joinpath("log").read_text()
    assert sorted(log.splitlines()) == sorted(f"rank {rank}, step 3" for rank in range(RANKS))
    gang.end()


def test_equal_storages_of_an_image_are_sent_once() -> None:
    """Those of replicas are, and what is nowhere else equal is as it was."""
    one, other = (Slab(slab.made(LIMIT_BYTES)) for _ in range(2))
    sizes = [5, 100_000, 100_000, 100_000, 0]
    layout = laid_out(10, [(size, "cpu", False) for size in sizes])
    for number, extent in enumerate(layout.storages):
        filled = b"a" if number in (1, 3) else b"b"
        one.view(extent.offset, extent.size)[:] = filled * extent.size
    ends = socket.socketpair()
    sender, receiver = (Link(host, end) for host, end in enumerate(ends))
    ImageParts(one, sender).send(0, layout)
    came, taken = ImageParts(other, receiver), []
    while len(taken) < 1 + len(sizes):
        sender.flush()
        for said, body in receiver.receive(came.place):
            assert came.take(said, body)
            taken.append(said[0])
    assert taken == ["part", "part", "part", "part", "copy", "part"]
    for extent in (layout.graph, *layout.storages):
        place = extent.offset, extent.size
        assert bytes(other.view(*place)) == bytes(one.view(*place))
    for end in ends:
        end.close()


def test_gang_on_several_hosts_is_saved_while_it_runs(
    residents: Residents, undisturbed: JSON
) -> None:
    gang = Gang(residents, [1, 1], pace=0.02).begin()
    gang.until("progress", 1)
    gang.order("save")
    saving = gang.until("saving")
    image = {"step": saving["at_step"], "index_bytes": saving["index_bytes"]}
    gang.end()
    again = Gang(residents, [2, 1], image=image, slab_fd=gang.slab).begin()
    assert again.finished() == undisturbed
    again.end()


def test_lost_remote_host_ends_the_gang_with_its_name(residents: Residents) -> None:
    gang = Gang(residents, [2, 1], pace=0.02).begin()
    gang.until("progress", 1)
    gang.wires[1].close()
    told = gang.until("failed")["message"]
    assert "host 1" in told
    assert "is lost" in told
    gang.end()


def test_all_finished_work_is_saved_before_a_host_stops(
    residents: Residents, undisturbed: JSON
) -> None:
    gang = Gang(residents, [2, 1], pace=0.02).begin()
    gang.until("progress", 3)
    gang.wires[1].send({"is": "pause"})
    saving = gang.until("saving")
    failed = gang.until("failed", saving["at_step"])
    assert (failed["cause"], failed["step"]) == ("host", saving["at_step"])
    gang.end()
    image = {"step": saving["at_step"], "index_bytes": saving["index_bytes"]}
    again = Gang(residents, [1], image=image, slab_fd=gang.slab).begin()
    assert again.finished() == undisturbed
    again.end()


def test_remote_ranks_end_with_their_coordinator(residents: Residents) -> None:
    gang = Gang(residents, [1, 1, 1], pace=0.02).begin()
    gang.until("progress", 1)
    gang.home.close()
    gang.wires = gang.wires[1:]
    gang.must_end()
    gang.end()


def test_failed_remote_rank_is_named(residents: Residents) -> None:
    gang = Gang(residents, [1, 1, 1], entry="ranks:LastFails").begin()
    assert gang.until("failed")["message"] == "rank 4: ValueError: the last rank has had enough"
    gang.end()


def test_all_ranks_are_cancelled(residents: Residents) -> None:
    gang = Gang(residents, [2, 1], pace=0.02).begin()
    gang.until("progress", 1)
    gang.order("cancel")
    gang.must_end()
    gang.end()
