"""A layout is only ever what fits into its slab, whoever sent it."""

from __future__ import annotations

from typing import Any

import pytest

from workers.process.image_layout import ALIGNMENT, BadLayout, Extent, Layout, from_json, laid_out


def test_parts_of_an_image_follow_each_other_on_pages_of_their_own():
    layout = laid_out(10, [(5000, "cpu", False), (0, "cpu", False), (7, "cuda", True)])
    assert [part.offset for part in layout.storages] == [ALIGNMENT, 3 * ALIGNMENT, 3 * ALIGNMENT]
    assert layout.end == 3 * ALIGNMENT + 7
    assert layout.held_bytes == 10 + 5000 + 7


def test_layout_survives_json():
    layout = laid_out(3, [(9, "cuda", True)])
    assert from_json(layout.as_json(), limit_bytes=layout.end) == layout


@pytest.mark.parametrize(
    "spoilt",
    [
        None,
        {},
        {"graph": {"offset": 0, "size": 4}},
        {"graph": {"offset": 0, "size": 4}, "storages": [{"offset": 2, "size": 4}]},
        {"graph": {"offset": 0, "size": 101}, "storages": []},
        {"graph": {"offset": -1, "size": 4}, "storages": []},
        {"graph": {"offset": True, "size": 4}, "storages": []},
        {"graph": {"offset": 0, "size": 4, "path": "/etc/passwd"}, "storages": []},
        {"graph": {"offset": 0, "size": 4, "device": "../cpu"}, "storages": []},
    ],
)
def test_contradictory_layout_is_refused(spoilt: Any):
    with pytest.raises(BadLayout):
        from_json(spoilt, limit_bytes=100)


def test_empty_storage_may_be_anywhere_between():
    graph = Extent(offset=0, size=8)
    layout = Layout(graph=graph, storages=(Extent(offset=8, size=0), Extent(offset=8, size=4)))
    assert from_json(layout.as_json(), limit_bytes=12) == layout
