"""A file of the archive is durable, readable by common tools, and the same in a bucket."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
import zstandard

from app.scheduling.archive import Archive, CannotArchive
from app.storage.backend import Folder
from tests.s3 import serving

AT = datetime(2026, 11, 26, 23, 59, tzinfo=UTC)
ROWS = {
    "logs": ['{"id": 1, "text": "a\\nb"}', '{"id": 2, "text": "\u00e4"}'],
    "tasks": ['{"id": "t"}'],
}


@pytest.fixture(params=["folder", "bucket"])
def place(request, tmp_path):
    if request.param == "folder":
        yield Folder(tmp_path)
    else:
        with serving() as s3:
            yield s3.bucket()


def test_file_has_a_line_for_each_row_and_the_day_in_its_name(place):
    name = Archive(place).keep(ROWS, AT)
    assert name.startswith("archive/2026/11/26/del_")
    assert name.endswith(".jsonl.zst")
    lines = zstandard.decompress(place.get(name)).decode().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"table": "logs", "row": {"id": 1, "text": "a\nb"}},
        {"table": "logs", "row": {"id": 2, "text": "\u00e4"}},
        {"table": "tasks", "row": {"id": "t"}},
    ]


def test_names_of_files_sort_by_time(tmp_path):
    archive = Archive(Folder(tmp_path))
    names = [archive.keep(ROWS, AT) for _ in range(5)]
    assert names == sorted(names)


def test_bucket_that_is_away_takes_nothing(tmp_path):
    with serving() as s3:
        archive = Archive(s3.bucket(patience_s=1.0))
    with pytest.raises(CannotArchive, match="s3://"):
        archive.keep(ROWS, AT)
