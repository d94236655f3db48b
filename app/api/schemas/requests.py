"""Models of requests: what a POST makes, changes and plans."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from app.api.schemas.base import (
    EXAMPLE_AT,
    EXAMPLE_REQUEST,
    EXAMPLE_SHA256,
    EXAMPLE_TENANT,
    EXAMPLE_USER,
    PHASE_TEXT,
    In,
    Labels,
    Out,
    PhaseWord,
    RequestState,
    Tier,
    example,
    example_of,
)
from app.api.schemas.tasks import NeedOut, RequestNeedOut, TaskOut
from app.core.model.provisions.lots import MOST_AT_ONCE, MOST_MEMBERS
from app.core.model.provisions.stop_rule import MOST_KEEP


class RequestPatch(In):
    model_config = example(priority=10, labels={"exp": "a1"})
    priority: int | None = Field(None, ge=-100, le=100)
    labels: Labels | None = Field(None, max_length=32)
    keep: bool | None = Field(
        None, description="true: keep it with its checkpoints, however old it is; false: let it go."
    )
    at_once: int | None = Field(
        None,
        ge=0,
        le=MOST_AT_ONCE,
        description="Most members of its lots that are queued or run; 0 starts no more of them.",
    )
    max_failures: int | None = Field(
        None, ge=0, le=MOST_MEMBERS, description="More failures hold its lots."
    )
    keep_best: float | None = Field(
        None,
        gt=0,
        le=MOST_KEEP,
        description="Share of the members that goes on past a rung, of its lots with `stop`. A "
        "higher one lets paused members go on.",
    )


class RetryIn(In):
    model_config = example(states=["failed"])
    states: list[Literal["failed", "cancelled"]] = Field(
        ["failed"], min_length=1, max_length=2, description="Tasks in these states start again."
    )


class RequestSummary(Out):
    model_config = example(
        id=EXAMPLE_REQUEST,
        name="sweep-7",
        state="running",
        phase="running",
        tier="standard",
        priority=0,
        labels={"exp": "a1"},
        tenant_id=EXAMPLE_TENANT,
        tenant="vision",
        user_id=EXAMPLE_USER,
        user="ada",
        submitted_at=EXAMPLE_AT,
        ended_at=None,
        task_states={"running": 1, "blocked": 1},
        task_phases={"running": 1, "queued": 1},
    )
    id: str
    name: str
    state: RequestState = Field(
        description="The request is `running` from its first start to its end."
    )
    phase: PhaseWord = Field(description=PHASE_TEXT + " The phase of its most advanced task.")
    tier: str
    priority: int
    labels: dict[str, Any]
    tenant_id: str
    tenant: str
    user_id: str
    user: str
    submitted_at: datetime
    ended_at: datetime | None
    keep: bool = Field(
        False, description="It is not deleted, however old it is, nor are its checkpoints."
    )
    delete_asked_at: datetime | None = Field(
        None, description="Since when it is to be deleted; some minutes later it is gone."
    )
    task_states: dict[str, int] = Field(description="Number of tasks in each state.")
    task_phases: dict[str, int] = Field(description="Number of tasks in each phase.")
    hold: str = Field(
        "", description="Who paused all tasks that have not ended: `user`, `admin` or `idle`."
    )


class RequestOut(RequestSummary):
    model_config = example(
        **example_of(RequestSummary),
        bundle=EXAMPLE_SHA256,
        tasks=[example_of(TaskOut)],
    )
    bundle: str
    tasks: list[TaskOut] = Field(
        description="Its tasks, without the members of lots: `GET /v1/tasks?lot=ID` lists these."
    )
    notes: list[str] = Field(
        default=[],
        description="Warnings about likely mistakes; only in the response to a submission.",
    )


class SubmittedOut(Out):
    model_config = example(
        request_id=EXAMPLE_REQUEST,
        descriptor={"name": "digits", "tasks": [{"name": "train", "run": {"job": "train:Train"}}]},
    )
    request_id: str
    descriptor: dict[str, Any] = Field(
        description="The body of the `POST /v1/requests` that made the request.  Only its own user"
        " is shown the URL in `notify`."
    )


class ValidatedTask(Out):
    """A task as it would be submitted, with every default filled in."""

    name: str
    type: str
    kind: str
    needs: list[NeedOut]
    after_requests: list[RequestNeedOut] = []
    descriptor: dict[str, Any]


class Validated(Out):
    model_config = example(
        name="sweep-7",
        tier="standard",
        tasks=[{"name": "train", "type": "train", "kind": "cpu", "needs": [], "descriptor": {}}],
    )
    name: str
    tier: Tier
    tasks: list[ValidatedTask]
    notes: list[str] = Field(default=[], description="Warnings: valid, but a likely mistake.")


class NodePlace(Out):
    node: str
    executor: int | None = Field(
        description="null: a mapped node, of which each executor runs some items."
    )


class CopyOut(Out):
    """A block, or one executor's part of a list, that passes to another executor."""

    block: str
    source: int = Field(description="The executor that produced the block.")
    target: int
    planned_bytes: int | None = Field(
        description="As declared, else as measured in an earlier run of the graph; null: unknown."
    )
    moved_bytes: int | None = Field(description="null until the task is done; includes headers.")


class GraphPlan(Out):
    task: str
    graph: str = Field(description="SHA-256 of the graph.")
    executors: int
    nodes: list[NodePlace] = Field(description="In the order in which all executors run them.")
    copies: list[CopyOut]
    planned_bytes: int = Field(description="Total of the copies of known size.")
    moved_bytes: int | None = Field(description="Total of all copies; null until the task is done.")


class TaskPlace(Out):
    task: str
    island: str | None = Field(
        description="null: no islands have the devices for the whole request."
    )
    because: str
    crossing_bytes: int = Field(
        description="Expected size of the inputs from tasks on other islands, when the island was "
        "assigned."
    )


class CrossingOut(Out):
    """An output of a task that another island takes; one entry per such island."""

    block: str
    source: str = Field(description="The island that produces the output.")
    target: str
    planned_bytes: int | None = Field(
        description="For a graph over islands: as declared, else as measured in an earlier run, "
        "else 1 MiB; null for other tasks."
    )
    moved_bytes: int | None = Field(
        description="null until the output was transferred; without the header."
    )
    head_bytes: int | None = Field(
        description="Size of the file's header; null until the output was transferred."
    )
    ways: list[Literal["host", "store"]] = Field(
        description="How the output was transferred: from the producing host or from the store. "
        "Both, if it was transferred more than once. Empty before the first transfer, or if it "
        "was already on the receiving host."
    )


class RequestPlan(Out):
    model_config = example(
        tasks=[
            {
                **{"task": "whole", "island": "local", "crossing_bytes": 0},
                "because": "Only local has such devices.",
            }
        ],
        crossings=[],
        graphs=[
            {
                "task": "whole",
                "graph": EXAMPLE_SHA256,
                "executors": 2,
                "nodes": [{"node": "encode", "executor": 0}, {"node": "vote", "executor": 1}],
                "copies": [
                    {
                        **{"block": "encode.h", "source": 0, "target": 1},
                        **{"planned_bytes": 4096, "moved_bytes": 4160},
                    }
                ],
                **{"planned_bytes": 4096, "moved_bytes": 4160},
            }
        ],
    )
    tasks: list[TaskPlace] = Field(description="The island of each task, and the reason.")
    crossings: list[CrossingOut] = Field(description="Transfers between islands.")
    graphs: list[GraphPlan] = Field(description="The graphs of the request's tasks, as submitted.")
