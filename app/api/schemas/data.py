"""Models of bundles, graphs, datablocks and uploads."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from app.api.descriptor_schema import GRAPH_EXAMPLE
from app.api.schemas.base import (
    EXAMPLE_AT,
    EXAMPLE_SHA256,
    EXAMPLE_TENANT,
    EXAMPLE_USER,
    In,
    Out,
    example,
    example_of,
)
from app.core.model.provisions.folder import MAX_FILE_BYTES, MAX_FILES, MAX_PATH, SMALL_FILES


class BundleOut(Out):
    model_config = example(
        sha256=EXAMPLE_SHA256,
        size_bytes=1834,
        entry_points={"train:Train": "class", "ops:tokenize": "function"},
        created_at=EXAMPLE_AT,
    )
    sha256: str
    size_bytes: int
    entry_points: dict[str, str] = Field(description="The entry points that `run` may name.")
    created_at: datetime


class BundleStored(BundleOut):
    model_config = example(
        **example_of(BundleOut),
        files=2,
        unparsed={},
    )
    files: int
    unparsed: dict[str, str] = Field(description="Python files with syntax errors, and the errors.")


# --- graphs -------------------------------------------------------------------------------------


class GraphSummary(Out):
    model_config = example(sha256=EXAMPLE_SHA256, nodes=2, created_at=EXAMPLE_AT)
    sha256: str
    nodes: int = Field(description="Number of functions, including those of nested graphs.")
    created_at: datetime


class GraphOut(GraphSummary):
    model_config = example(
        **example_of(GraphSummary),
        body=GRAPH_EXAMPLE,
    )
    body: dict[str, Any]


# --- datablocks ---------------------------------------------------------------------------------


class TensorOfBlock(Out):
    """A tensor of a datablock; the tensor of an npy file has no name."""

    name: str
    dtype: str
    shape: list[int]


class DatablockOut(Out):
    model_config = example(
        id="blk_0192f0c1b7e97d3e9a4c5b6d7e8f9a0e",
        tenant_id=EXAMPLE_TENANT,
        user_id=EXAMPLE_USER,
        name="faces",
        version=3,
        format="safetensors",
        sha256=EXAMPLE_SHA256,
        size_bytes=786_560,
        tensors=[{"name": "pixels", "dtype": "uint8", "shape": [64, 64, 64, 3]}],
        tensor_count=1,
        file_count=0,
        file_bytes=0,
        task_id=None,
        output="",
        holders=2,
        created_at=EXAMPLE_AT,
        deleted_at=None,
    )
    id: str
    tenant_id: str
    user_id: str = Field(
        description="The user who uploaded the version, or whose task published it."
    )
    name: str = Field(description="The name of the datablock; `NAME@VERSION` names this version.")
    version: int = Field(description="From 1; a number is never reused.")
    format: Literal["safetensors", "npy", "folder"]
    sha256: str = Field(description="SHA-256 of the downloaded bytes.")
    size_bytes: int = Field(description="Of the downloaded bytes: of a folder, the list of files.")
    tensors: list[TensorOfBlock] = Field(description="The first 100 tensors.")
    tensor_count: int
    file_count: int = Field(description="The number of files of a folder.")
    file_bytes: int = Field(description="The size of all files of a folder.")
    task_id: str | None = Field(
        description="The task that published the version; null if it was uploaded."
    )
    output: str = Field(description="The name of the output of that task.")
    holders: int = Field(
        description="Number of unfinished tasks that need this version; its bytes are kept for "
        "them."
    )
    created_at: datetime
    deleted_at: datetime | None


_EXAMPLE_FILE = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"


class FileOut(Out):
    model_config = example(sha256=EXAMPLE_SHA256, size_bytes=1834)
    sha256: str
    size_bytes: int


class SmallFileIn(In):
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    content: str = Field(description="The bytes of the file, in Base64.")


class SmallFilesIn(In):
    model_config = example(files=[{"sha256": _EXAMPLE_FILE, "content": "Zm9v"}])
    files: list[SmallFileIn] = Field(min_length=1, max_length=SMALL_FILES)


class SmallFilesOut(Out):
    model_config = example(new=1)
    new: int = Field(description="How many of the files your tenant did not have.")


class FolderFileIn(In):
    path: str = Field(max_length=MAX_PATH, description="Inside the folder, such as `a/b.txt`.")
    size_bytes: int = Field(ge=0, le=MAX_FILE_BYTES)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    executable: bool = Field(False, description="Whether the file may be run.")


class FolderIn(In):
    model_config = example(
        files=[{"path": "train/a.txt", "size_bytes": 3, "sha256": _EXAMPLE_FILE}]
    )
    files: list[FolderFileIn] = Field(min_length=1, max_length=MAX_FILES)


class FolderMissing(Out):
    model_config = example(missing=[_EXAMPLE_FILE])
    missing: list[str] = Field(description="The hashes of files that your tenant lacks.")


class UploadOut(Out):
    """The progress of an upload: continue from `received_bytes`."""

    model_config = example(
        name="faces", sha256=EXAMPLE_SHA256, size_bytes=786_560, received_bytes=524_288
    )
    name: str = Field(description="The datablock's name; empty for a bundle.")
    sha256: str
    size_bytes: int
    received_bytes: int = Field(description="Bytes that are stored durably; continue after them.")
