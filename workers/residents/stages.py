"""The stages of a task, from its start to its final message."""

from __future__ import annotations

import json
import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from app.core.model import preset as presets
from app.core.model.graphs import task_graph
from app.core.model.provisions.folder import FOLDER
from app.core.placement import partitions
from app.core.placement.executors import spread
from workers.capture import tensor_io
from workers.capture.capture import Surroundings, Uncapturable, capture
from workers.graph import runner
from workers.graph.executor_job import ExecutorJob, LoadedExecutor
from workers.graph.runner import GraphJob, NodeFailed
from workers.hardware import preset
from workers.hardware.accelerator import Accelerator
from workers.hardware.memory_cap import cap_memory
from workers.process import slab as slabs
from workers.process.image_layout import from_json
from workers.process.isolation.sandbox import INPUTS
from workers.process.task_start import InputFile
from workers.residents import (
    coordinator,
    entry,
    inbox,
    late_inputs,
    orders,
    progress,
    safe_point,
)
from workers.residents.context import Context
from workers.residents.endings import JSON, Ending, as_ending, too_large, uncapturable
from workers.residents.images import Images
from workers.residents.late_inputs import NOT_LOADED, FirstExecutor
from workers.residents.outputs import Outgoing
from workers.residents.work import Work
from workers.switching import context_switch
from workers.switching.staging import ImageTooLarge

RESULT_LIMIT_BYTES = 256 * 1024  # in the form of JSON; larger values must be outputs


def take_start(work: Work) -> None:
    while work.start is None:
        inbox.listen(work, None)
        if "end" in work.wishes:
            return  # there is no further function
    os.environ.update(work.spec.env)  # must happen before any code of the tenant runs
    os.environ.update(work.start.secrets)


def read_graph(work: Work) -> None:
    """Read the graph and decide which executor runs each node.

    This is done before the executors are forked.
    """
    run = work.spec.run
    work.graph = partitions.of_run(task_graph.parse(_read_json(work.fds.pop(0))), run)
    if (executors := work.spec.world_size) > 1:
        work.spread = spread(work.graph, executors, order=partitions.order(run.part))


def configure(work: Work) -> None:
    """Configure torch as the preset says.

    If another function ran in this process before, that is done already.
    """
    shared = work.shared
    try:
        work.accelerator = Accelerator(work.start.kind)
        if shared.is_used:
            work.outgoing, work.images = Outgoing(work), Images(work)
            work.base_bytes, work.preset = shared.base_bytes, shared.preset
            return
        work.base_bytes = shared.base_bytes = progress.anonymous_bytes()
        cap_memory(work.accelerator, work.start.device_fraction)
        work.outgoing, work.images = Outgoing(work), Images(work)
        if work.member is not None:
            work.images.staging.offloaded = work.member.offload(work.accelerator)
        work.preset = shared.preset = preset.configure(work.start.preset)
    except preset.NotTaken as error:
        detail = "\n".join(error.differences)
        raise Ending("failed", cause="preset", message=str(error), detail=detail) from error
    except RuntimeError as error:
        raise Ending("failed", cause="preset", message=str(error), detail="") from error


def join(work: Work) -> None:
    """Prepare the default process group, so that the code of a rank finds it ready."""
    if work.member is not None:
        try:
            work.member.begin()
        except BaseException as error:
            raise as_ending(error) from error


def load_code(work: Work) -> None:
    start, spec, code = work.start, work.spec, Path(work.start.code)
    rank, ranks = (0, 1) if work.is_graph else (start.rank, spec.world_size)
    work.ctx = Context(
        device=work.accelerator.device, rank=rank, world_size=ranks, params={**spec.params}
    )
    work.around = Surroundings(code=code, scratch=Path(start.scratch), ctx=work.ctx)
    work.around.lent = work.lent
    if work.shared.is_used:
        work.entry = _find_entry(work)
        return
    entry.seed(work.accelerator)
    try:
        if work.is_graph:
            work.entry = _load_graph(work, code)
        else:
            work.entry = entry.load_entry(code, spec.run.entry)
    except BaseException as error:
        raise as_ending(error, cause="bundle") from error
    if start.rests:
        work.shared.note()


def _find_entry(work: Work) -> Any:
    """Return the function to run, in a process that has loaded its module for an earlier
    function.
    """
    try:
        return entry.find_entry(Path(work.start.code), work.spec.run.entry)
    except BaseException as error:
        raise as_ending(error, cause="bundle") from error


def _load_graph(work: Work, code: Path) -> runner.Loaded:
    host_bytes = work.slab.limit_bytes
    memory: JSON = {"budget_bytes": work.spec.devices.memory_bytes, "host_bytes": host_bytes}
    assert work.graph is not None, "read before anything else"
    late = partitions.late(work.spec.run.part)
    if work.spread is None or work.member is None:
        order = partitions.order(work.spec.run.part)
        return entry.load_graph(
            code, work.graph, work.accelerator, late=late, order=order, **memory
        )
    entry.make_room_for(code)
    return LoadedExecutor(
        *(work.graph, partial(entry.find_entry, code), work.accelerator),
        spread=work.spread,
        turns=work.member.rank.turns,
        around=work.around,
        late=late,
        is_part=work.spec.run.part is not None,
        **memory,
    )


def bring_in(work: Work) -> None:
    """Load the inputs. If the task has run before, load its image, too."""
    start = work.start
    try:
        for port, source in sorted(start.inputs.items()):
            work.ctx.inputs[port] = _input(work, port, source)
            if source.datablock:
                work.ctx.blocks[source.datablock] = port
    except BaseException as error:
        raise as_ending(error, cause="exception", begun=NOT_LOADED) from error
    promise = "exact" if presets.promises_bits(start.preset) else "equivalent"
    work.capabilities = [] if work.is_function else ["pause", "save", "move", promise]
    if start.image is None:
        return
    try:
        index = slabs.read_index(work.slab.fd, start.image.index_bytes)
        if preset.impose(index["fingerprint"], work.accelerator):
            work.capabilities = ["pause", "save", "move", "equivalent"]
        restored = _restored(work, index["layout"])
        if work.is_graph:
            work.job = _go_on(work, restored)
        else:
            work.restore(restored)
        work.step = start.image.step
        work.images.last_step = work.step if start.image.is_kept else None
    except BaseException as error:
        raise as_ending(error, cause="image", begun="The image could not be restored: ") from error


def _go_on(work: Work, state: Any) -> GraphJob:
    """Restore the graph's job, and give it the inputs that came after its image was made."""
    job: GraphJob = work.entry.go_on(state)
    for port in job.lacks.copy().values():
        if port in work.ctx.inputs:
            job.take(port, work.ctx.inputs.pop(port))
    return job


def _input(work: Work, port: str, source: InputFile) -> Any:
    fd, block = work.fds.pop(0), source.datablock
    if not source.format:
        return late_inputs.image_value(work, fd)
    if source.format == FOLDER:
        os.close(fd)  # its manifest
        return INPUTS / port
    try:
        # An image refers to a mapped value and does not contain it; and a function has no images.
        tensors = tensor_io.given(fd, mapped=bool(block) or work.is_function)
    finally:
        os.close(fd)
    if block:
        work.lent.add(block, tensors)
    return tensor_io.value(tensors)


def _restored(work: Work, layout: JSON) -> Any:
    around, accelerator, lies = work.around, work.accelerator, work.images.staging.lies
    if work.whole is None:
        return context_switch.restored(
            work.slab, layout, around=around, accelerator=accelerator, then=lies
        )
    whole = from_json(layout, limit_bytes=work.whole.limit_bytes)
    own = coordinator.parted(work.whole, whole, work.start.rank).as_json()
    return context_switch.restored(work.whole, own, around=around, accelerator=accelerator)


def take_seat(work: Work) -> None:
    """Report that all work that needs no device is done; then wait for the slot."""
    with work.away("its seat"):
        work.say("prepared", preset=work.preset, capabilities=work.capabilities)
        orders.wait_for_seat(work)


def build(work: Work) -> None:
    if work.job is not None or work.is_function:
        return
    try:
        if work.is_graph:
            work.job = work.entry.begin(work.ctx.inputs)
        else:
            work.job = work.entry(work.ctx, **work.spec.params)
    except BaseException as error:
        raise as_ending(error) from error


def run(work: Work) -> None:
    work.saved_s = time.monotonic()
    if isinstance(work.job, ExecutorJob):
        work.ctx.allocate = work.job.passing.empty
        if work.spec.run.part is not None and not work.start.rank:
            work.outside = FirstExecutor(work, work.job)
    checked = work.start.image is not None
    if work.is_graph and work.member is None:
        # store outputs of the image again, in case they were not stored before
        work.outgoing.give_early()
    while work.ctx.result is None:
        one_step(work)
        if not checked and work.ctx.result is None:
            _must_be_capturable(work)
            checked = True


def one_step(work: Work) -> None:
    """Run one step: from one safe point to the next."""
    safe_point.safe_point(work)
    work.images.lies = None
    try:
        if work.is_function:
            work.ctx.result = entry.call(work.entry, work.ctx)
            progress.add_row(work, work.step + 1, entry.metrics_of(work.ctx.logged))
        else:
            metrics = entry.take_step(work.job, work.ctx, work.step + 1)
            progress.add_row(work, work.step + 1, metrics)
    except NodeFailed as failed:
        raise as_ending(failed.__cause__ or failed, begun=f"In the {failed}: ") from failed
    except BaseException as error:
        raise as_ending(error) from error
    work.step = work.job.count if work.is_graph else work.step + 1
    if work.is_graph and work.member is None:
        work.outgoing.give_early()
    if progress.is_due(work):
        progress.report(work)


def settle(work: Work) -> None:
    """Store the outputs, then send the final message."""
    work.images.settle()
    result = dict(work.ctx.result or {})
    if work.member is not None and work.start.rank:
        result = {}  # the first rank's result is the gang's result
    for name in work.spec.outputs:
        if name not in result:
            told = f"the result lacks {name!r}, which the descriptor names in `outputs`"
            raise Ending("failed", cause="exception", message=told, detail="")
        work.outgoing.put(result.pop(name), name)
    try:
        said = entry.plain(result, "result")
        _must_be_small(said)
    except (TypeError, ValueError) as error:
        raise as_ending(error) from error
    if work.member is not None:
        work.member.end()
    _store_all(work)
    progress.report_all(work)
    passed = work.job.passed() if isinstance(work.job, ExecutorJob) else []
    took_ms = work.job.took_ms() if work.is_graph else {}
    made_bytes = work.job.made_bytes() if work.is_graph else {}
    measured = {"took_ms": took_ms, "made_bytes": made_bytes}
    raise Ending("finished", result=said, passed=passed, **measured)


def _store_all(work: Work) -> None:
    """Wait until all outputs are stored.

    While the store refuses one, the task waits without the slot and tries again. A gang of several
    hosts cannot wait, as its other hosts leave with its slots: it fails, and the supervisor knows
    that the store is the cause.
    """
    while True:
        while work.images.busy or work.outgoing.busy:
            inbox.listen(work, None)
        if not (unkept := work.outgoing.unkept):
            return
        if work.member is not None and work.member.rank.turns.arena.is_bridged:
            what = f"output:{unkept[0]}"
            told = f"{unkept[0]!r} could not be stored: {work.outgoing.settled[what]['error']}"
            raise Ending("failed", cause="exit", message=f"The output {told}", detail="")
        orders.pause(work, waits="store")
        work.outgoing.put_again()


def _must_be_small(result: JSON) -> None:
    size = len(json.dumps(result))
    if size > RESULT_LIMIT_BYTES:
        raise ValueError(
            f"the result must be at most {RESULT_LIMIT_BYTES} bytes as JSON; got {size}. Name "
            "large values in the descriptor's `outputs`"
        )


def _must_be_capturable(work: Work) -> None:
    """If the job cannot be captured, fail after the first step, not only at the first pause."""
    try:
        captured = capture(work.state, around=work.around, accelerator=work.accelerator)
        size = work.images.staging.must_fit(captured)
    except Uncapturable as error:
        raise uncapturable(error) from error
    except ImageTooLarge as error:
        raise too_large(error) from error
    if work.spec.checkpoint.every_s > 0:  # prepare the memory for an image, as one will follow
        threading.Thread(target=work.slab.make_ready, args=(size,), daemon=True).start()


def _read_json(fd: int) -> JSON:
    with os.fdopen(fd) as file:
        body: JSON = json.load(file)
    return body


ALL = (configure, join, load_code, bring_in, take_seat, build, run, settle)  # in this order
