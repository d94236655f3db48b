"""Checkpoints at the edge: their tensors as a file, and runs that begin from one."""

from __future__ import annotations

import os
import struct
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load
from sqlalchemy import func, select, update

from app.core.model.checkpoints.manifest import About
from app.core.model.protocol.messages import CheckpointRef
from app.data import datablocks
from app.db.models import Checkpoint, Device, Request, RequestEvent, Task
from app.scheduling import journal, launch_order
from app.settings import settings
from app.storage.signing import Signer
from app.storage.store import Store, manifest
from app.storage.tensor_export import gathered
from tests.app.conftest import descriptor, problem
from tests.workers.slabs import Slab
from workers.transfer import checkpoint
from workers.transfer.checkpoint import Known

torch.manual_seed(3)
BASE = torch.randn(700, 900)
WIDE = torch.randn(1100, 1024).to(torch.bfloat16)  # 2.25 MB
TENSORS: dict[str, torch.Tensor] = {
    "base": BASE,
    "base.t": BASE.t(),
    "base.corner": BASE[10:20, ::7],
    "base.row": BASE[3],
    "base.spread": BASE[:5, :1].expand(5, 4),
    "wide": WIDE,
    "wide.t": WIDE.t(),
    "wide.permuted": WIDE.view(11, 100, 1024).permute(2, 0, 1),
    "flag": torch.rand(7, 3) > 0.5,
    "step": torch.tensor(4),
    "empty": torch.empty(0, 3),
    "half": torch.randn(9).half(),
    "double": torch.randn(2, 3, 4, dtype=torch.float64).transpose(0, 2),
    "bytes": torch.arange(256).to(torch.uint8)[::3],
    "short": torch.arange(9).to(torch.int16),
    "f8": torch.randn(8).to(torch.float8_e4m3fn),
    "f8b": torch.randn(8).to(torch.float8_e5m2),
    "wave": torch.randn(6, dtype=torch.complex64)[::2],
    "odd": torch.randn(3, dtype=torch.complex128),
}


def raw(storage: torch.UntypedStorage) -> bytes:
    """`bytes(storage)` would go through it element by element."""
    whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    return whole.numpy().tobytes()


def slab_of(tensors: dict[str, torch.Tensor]) -> tuple[Slab, dict[str, list[Any]]]:
    """Each storage once, as a capture lays them out, and the table of where tensors lie."""
    storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
    table: dict[str, list[Any]] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        number, _ = storages.setdefault(storage._cdata, (len(storages), storage))
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape, stride = list(tensor.shape), list(tensor.stride())
        table[name] = [number, dtype, shape, stride, tensor.storage_offset()]
    slab = Slab([storage.nbytes() for _, storage in storages.values()])
    for number, storage in storages.values():
        slab.fill(number, raw(storage))
    return slab, table


@pytest.fixture
def signer(tmp_path) -> Signer:
    return Signer.at(tmp_path / "key")


@pytest.fixture
def store() -> Store:
    return Store.at(settings().store_address)


@pytest.fixture
def task(session, submitted) -> Task:
    return session.scalars(select(Task).where(Task.request_id == submitted["id"])).one()


@pytest.fixture
def saved(session, task, signer, store) -> Checkpoint:
    """A checkpoint of red's task at step 40, with TENSORS in it."""
    slab, table = slab_of(TENSORS)
    about = About(tenant=task.tenant_id, task=task.id, epoch=1, step=40)
    written = checkpoint.write(
        slab.fd, slab.layout, about, tensors=table, store=store, signer=signer, known=Known()
    )
    row = Checkpoint(
        id=f"ckp_{1:032x}", task_id=task.id, tenant_id=task.tenant_id, epoch=1, step=40,
        sha256=written.sha256, size_bytes=written.size_bytes, new_bytes=written.new_bytes,
        took_us=7, host="h", key=signer.public,
    )  # fmt: skip
    session.add(row)
    session.commit()
    return row


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Bit for bit."""
    there, here = found.contiguous(), wanted.contiguous()
    equal = there.dtype == here.dtype and there.shape == here.shape
    return equal and raw(there.clone().untyped_storage()) == raw(here.clone().untyped_storage())


class TestShow:
    def test_list_says_what_each_checkpoint_added_and_who_signed_it(self, as_, task, saved, signer):
        answer = as_("red.viewer").get(f"/v1/tasks/{task.id}/checkpoints")
        (listed,) = answer.json()["items"]
        assert (listed["host"], listed["key"]) == ("h", signer.public)
        assert listed["new_bytes"] == saved.new_bytes
        assert as_("red.viewer").get(f"/v1/checkpoints/{saved.id}").json() == listed

    def test_tensors_of_a_checkpoint_are_listed(self, red, saved):
        items = red.get(f"/v1/checkpoints/{saved.id}/tensors").json()["items"]
        assert [item["name"] for item in items] == sorted(TENSORS)
        by_name = {item["name"]: item for item in items}
        assert by_name["base.t"]["shape"] == [900, 700]
        assert by_name["wide"]["size_bytes"] == 1100 * 1024 * 2
        assert by_name["odd"]["exported"] is False

    @pytest.mark.parametrize("path", ["", "/tensors", "/safetensors"])
    def test_other_tenant_learns_nothing_of_a_checkpoint(self, as_, saved, path):
        problem(as_("blue.tenant_admin").get(f"/v1/checkpoints/{saved.id}{path}"), 404, "not-found")
        problem(as_("").get(f"/v1/checkpoints/{saved.id}{path}"), 401, "unauthenticated")


class TestExport:
    def test_every_tensor_comes_out_bit_for_bit(self, red, saved):
        answer = red.get(f"/v1/checkpoints/{saved.id}/safetensors")
        assert answer.status_code == 200
        assert int(answer.headers["content-length"]) == len(answer.content)
        found = load(answer.content)
        assert found.keys() == TENSORS.keys() - {"odd"}
        assert [name for name in found if not same(found[name], TENSORS[name])] == []
        (length,) = struct.unpack("<Q", answer.content[:8])
        assert b'"roundhouse.left_out":"odd"' in answer.content[: 8 + length]

    def test_named_tensors_are_exported(self, red, saved):
        names = {"names": ["base.corner", "step"]}
        answer = red.get(f"/v1/checkpoints/{saved.id}/safetensors", params=names)
        found = load(answer.content)
        assert found.keys() == {"base.corner", "step"}
        assert same(found["base.corner"], TENSORS["base.corner"])

    @pytest.mark.parametrize("name", ["nobody", "odd"])
    def test_tensor_that_cannot_be_exported_is_refused(self, red, saved, name):
        path = f"/v1/checkpoints/{saved.id}/safetensors"
        problem(red.get(path, params={"names": name}), 422, "validation-error", "?names")

    def test_lost_manifest_is_reported(self, red, saved, store):
        store.place.delete(manifest(saved.tenant_id, saved.sha256))
        told = problem(red.get(f"/v1/checkpoints/{saved.id}/safetensors"), 410, "gone")
        assert "manifest" in told["detail"]

    def test_signature_of_an_unknown_host_is_reported(self, session, red, saved):
        saved.key = "ab" * 32
        session.commit()
        told = problem(red.get(f"/v1/checkpoints/{saved.id}/tensors"), 410, "gone")
        assert "not signed by" in told["detail"]


class TestPins:
    def test_pinned_checkpoint_says_so_until_it_is_unpinned(self, session, red, task, saved):
        for _ in range(2):  # asking again changes nothing
            answer = red.post(f"/v1/checkpoints/{saved.id}/pin")
            assert answer.status_code == 200, answer.text
        [listed] = red.get(f"/v1/tasks/{task.id}/checkpoints").json()["items"]
        assert listed["pinned_at"] == answer.json()["pinned_at"] is not None
        assert red.post(f"/v1/checkpoints/{saved.id}/unpin").json()["pinned_at"] is None
        query = select(RequestEvent.type).where(RequestEvent.type.startswith("checkpoint."))
        told = session.scalars(query.order_by(RequestEvent.id)).all()
        assert told == ["checkpoint.pinned", "checkpoint.unpinned"]

    @pytest.mark.parametrize("column", ["deleted_at", "damaged_at"])
    def test_checkpoint_that_is_of_no_use_is_not_pinned(self, session, red, saved, column):
        setattr(saved, column, func.now())
        session.commit()
        told = problem(red.post(f"/v1/checkpoints/{saved.id}/pin"), 409, "conflict-state")
        assert "cannot be pinned" in told["detail"]

    def test_tenant_pins_a_bounded_number(self, session, red, saved, monkeypatch):
        monkeypatch.setenv("ROUNDHOUSE_PINNED_CHECKPOINTS_MAX", "1")
        settings.cache_clear()
        about = {"epoch": 1, "size_bytes": 1, "took_us": 1, "pinned_at": func.now()}
        owner = {"task_id": saved.task_id, "tenant_id": saved.tenant_id}
        session.add(Checkpoint(id="ckp_other", step=1, sha256="x", **about, **owner))
        session.commit()
        told = problem(red.post(f"/v1/checkpoints/{saved.id}/pin"), 409, "quota-exceeded")
        assert "has 1 pinned checkpoint of at most 1" in told["detail"]
        session.execute(update(Checkpoint).values(pinned_at=None))
        session.commit()
        assert red.post(f"/v1/checkpoints/{saved.id}/pin").status_code == 200

    def test_others_may_not_pin(self, as_, saved):
        assert as_("blue.member").post(f"/v1/checkpoints/{saved.id}/pin").status_code == 404
        assert as_("red.viewer").post(f"/v1/checkpoints/{saved.id}/pin").status_code == 403

    def test_request_with_a_pinned_checkpoint_is_not_deleted(self, session, red, task, saved):
        red.post(f"/v1/checkpoints/{saved.id}/pin")
        task.state = "done"
        session.get_one(Request, task.request_id).state = "done"
        session.commit()
        told = problem(red.delete(f"/v1/requests/{task.request_id}"), 409, "conflict-state")
        assert told["detail"].startswith(f"its checkpoint {saved.id} is pinned. Unpin it first")
        red.post(f"/v1/checkpoints/{saved.id}/unpin")
        assert red.delete(f"/v1/requests/{task.request_id}").status_code == 202


@given(st.data())
def test_any_strided_view_is_gathered_as_torch_does(data):
    """Against torch's own copy of the same view."""
    dtype = data.draw(st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.int64]))
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4))
    stride = [data.draw(st.integers(0, 9)) for _ in shape]
    reach = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
    lying = torch.arange(reach).to(dtype)
    wanted = lying.as_strided(shape, stride).contiguous().clone()
    body = raw(lying.untyped_storage())
    found = b"".join(gathered(memoryview(body), lying.element_size(), shape, stride))
    assert found == raw(wanted.untyped_storage())


def test_a_row_longer_than_a_block_is_gathered_in_pieces():
    row = bytes(range(250)) * 2000  # 500,000 bytes, of which every second one
    pieces = list(gathered(memoryview(row), 1, [250_000], [2]))
    assert b"".join(pieces) == row[::2]
    assert max(len(piece) for piece in pieces) == 2**17
    assert sum(len(piece) for piece in gathered(memoryview(b"x"), 1, [10**6], [0])) == 10**6


class TestFork:
    """`from_checkpoint`: a task of its own that goes on from another one's checkpoint."""

    def fork(self, client, saved, **more):
        body = descriptor()
        body["tasks"][0] |= {"from_checkpoint": saved.id, **more}
        return client.post("/v1/requests", json=body)

    def forked(self, session, answer) -> Task:
        assert answer.status_code == 202, answer.text
        query = select(Task).where(Task.request_id == answer.json()["id"])
        return session.scalars(query).one()

    def test_fork_has_a_checkpoint_of_its_own_from_the_start(self, session, red, task, saved):
        task.descriptor = {**task.descriptor, "params": {"steps": 50}}
        session.commit()
        new = self.forked(session, self.fork(red, saved))
        assert new.step == 40
        assert new.descriptor["params"] == {"steps": 50}
        row = session.scalars(select(Checkpoint).where(Checkpoint.task_id == new.id)).one()
        assert row.id != saved.id
        assert (row.epoch, row.step, row.new_bytes) == (0, 40, 0)
        assert (row.sha256, row.key) == (saved.sha256, saved.key)
        assert (row.printed_epoch, row.printed_lines) == (None, None)

    def test_fork_of_processes_has_printed_nothing_before_them(self, session, red, saved):
        saved.printed_epoch, saved.printed_lines = 3, 17
        session.commit()
        new = self.forked(session, self.fork(red, saved))
        row = session.scalars(select(Checkpoint).where(Checkpoint.task_id == new.id)).one()
        assert (row.printed_epoch, row.printed_lines) == (0, 0)

    def test_first_launch_of_a_fork_names_the_image_and_its_key(self, session, red, saved):
        new = self.forked(session, self.fork(red, saved))
        device = session.get_one(Device, "h.0")
        wanted = [CheckpointRef(sha256=saved.sha256, step=40, key=saved.key)]
        assert launch_order.look_up(session, [(new, device)]).launch(new, device).images == wanted
        # A damaged one too: it fails by name, and does not quietly begin anew.
        row = session.scalars(select(Checkpoint).where(Checkpoint.task_id == new.id)).one()
        row.damaged_at = row.created_at
        session.commit()
        assert launch_order.look_up(session, [(new, device)]).launch(new, device).images == wanted

    def test_fork_may_repeat_its_parameters_but_not_change_them(self, session, red, task, saved):
        task.descriptor = {**task.descriptor, "params": {"steps": 50}}
        session.commit()
        self.forked(session, self.fork(red, saved, params={"steps": 50}))
        answer = self.fork(red, saved, params={"steps": 51})
        problem(answer, 422, "validation-error", "/tasks/0/params")

    def test_fork_with_another_job_is_refused(self, session, red, task, saved):
        task.descriptor = {**task.descriptor, "run": {"job": "train:Other"}}
        session.commit()
        problem(self.fork(red, saved), 422, "validation-error", "/tasks/0/run/job")

    def test_command_begins_in_the_folder_of_another_with_other_ranks_and_parameters(
        self, session, red, task, saved
    ):
        command = {"run": {"command": ["python", "train.py"]}, "world_size": 2}
        pointer = "/tasks/0/from_checkpoint"
        told = problem(self.fork(red, saved, **command), 422, "validation-error", pointer)
        assert "is a checkpoint of a job, and this is a command" in str(told["errors"])
        task.descriptor = {**task.descriptor, "run": command["run"], "world_size": 4}
        session.commit()
        new = self.forked(session, self.fork(red, saved, params={"lr": 2}, **command))
        assert (new.step, new.spec.world_size, new.spec.params) == (40, 2, {"lr": 2})
        device = session.get_one(Device, "h.0")
        wanted = [CheckpointRef(sha256=saved.sha256, step=40, key=saved.key)]
        assert launch_order.look_up(session, [(new, device)]).launch(new, device).images == wanted

    def test_function_cannot_be_forked(self, red, saved):
        answer = self.fork(red, saved, run={"function": "train:encode"})
        problem(answer, 422, "validation-error", "/tasks/0/from_checkpoint")

    def test_checkpoint_of_another_tenant_is_unknown(self, session, as_, red, saved):
        saved.tenant_id = "ten_blue"
        session.commit()
        pointer = "/tasks/0/from_checkpoint"
        told = problem(self.fork(red, saved), 422, "validation-error", pointer)
        assert "no such checkpoint" in str(told["errors"])

    @pytest.mark.parametrize("column", ["damaged_at", "deleted_at"])
    def test_deleted_checkpoint_is_unknown(self, session, red, saved, column):
        setattr(saved, column, saved.created_at)
        session.commit()
        problem(self.fork(red, saved), 422, "validation-error", "/tasks/0/from_checkpoint")

    def test_fork_without_a_valid_id_is_refused(self, red):
        body = descriptor()
        body["tasks"][0]["from_checkpoint"] = "the last one"
        answer = red.post("/v1/requests", json=body)
        problem(answer, 422, "validation-error", "/tasks/0/from_checkpoint")


class TestBest:
    """`from_checkpoint: NAME@best`, and what a checkpoint tells of its rank."""

    RULE: ClassVar[dict[str, Any]] = {"metric": "loss", "goal": "min", "keep": 2}

    def submit(self, client, name: str, *tasks: dict[str, Any]) -> dict[str, Any]:
        """Submit jobs with RULE."""
        body = descriptor(name=name)
        (job,) = body["tasks"]
        body["tasks"] = [{**job, "checkpoint": {"best": self.RULE}, **task} for task in tasks]
        answer = client.post("/v1/requests", json=body)
        assert answer.status_code == 202, answer.text
        return answer.json()

    def save(self, session, task_id: str, *values: float | None) -> list[str]:
        """Add checkpoints of these values at steps 1, 2, ..., all of them marked as best."""
        tenant = session.get_one(Task, task_id).tenant_id
        session.add_all(
            Checkpoint(
                id=f"ckp_{task_id[-8:]}{n:024x}", task_id=task_id, tenant_id=tenant, epoch=1,
                step=n, sha256=f"{n:064x}", size_bytes=1000, took_us=1,
                best=value is not None, ranked_value=value, ranked_step=n,
            )
            for n, value in enumerate(values, 1)
        )  # fmt: skip
        session.commit()
        return [f"ckp_{task_id[-8:]}{n:024x}" for n in range(1, len(values) + 1)]

    def begin(self, client, where: str, **more: Any):
        body = descriptor(**more)
        body["tasks"][0]["from_checkpoint"] = where
        return client.post("/v1/requests", json=body)

    def refusal(self, client, where: str) -> str:
        pointer = "/tasks/0/from_checkpoint"
        told = problem(self.begin(client, where), 422, "validation-error", pointer)
        (error,) = [each for each in told["errors"] if each["pointer"] == pointer]
        return str(error["detail"])

    def test_list_marks_the_best_and_tells_its_value(self, session, red):
        (task,) = self.submit(red, "tune", {})["tasks"]
        self.save(session, task["id"], 0.5, None)
        listed = red.get(f"/v1/tasks/{task['id']}/checkpoints").json()["items"]
        told = [(each["best"], each["ranked_value"], each["ranked_step"]) for each in listed]
        assert told == [(False, None, 2), (True, 0.5, 1)]

    def test_best_of_the_newest_request_of_the_name_is_taken_and_its_id_told(self, session, red):
        (old,) = self.submit(red, "tune", {})["tasks"]
        self.save(session, old["id"], 0.001)
        made = self.submit(red, "tune", {})
        (new,) = made["tasks"]
        ids = self.save(session, new["id"], 0.5, 0.25, 0.75)
        for where in ("tune@best", "tune/train@best", f"{made['id']}@best"):
            answer = self.begin(red, where, name="tune-again")
            assert answer.status_code == 202, answer.text
            (task,) = answer.json()["tasks"]
            assert (task["from_checkpoint"], task["step"]) == (ids[1], 2)
            assert red.get(f"/v1/tasks/{task['id']}").json()["from_checkpoint"] == ids[1]
        shown = red.get(f"/v1/requests/{made['id']}/best-checkpoint")
        assert (shown.status_code, shown.json()["id"]) == (200, ids[1])
        checked = red.post("/v1/requests:validate", json=self.body("tune@best")).json()
        assert checked["tasks"][0]["descriptor"]["from_checkpoint"] == ids[1]

    def body(self, where: str) -> dict[str, Any]:
        body = descriptor()
        body["tasks"][0]["from_checkpoint"] = where
        return body

    def test_best_of_a_lot_is_that_of_its_best_member(self, session, red):
        lot = {"name": "trial", "array": {"count": 3, "at_once": 3}}
        made = self.submit(red, "sweep", lot, {"name": "other"})
        assert journal.look_at_lots(session)
        members = session.scalars(
            select(Task).where(Task.lot_index.is_not(None)).order_by(Task.lot_index)
        ).all()
        values = [(0.5, 0.25), (0.125, 0.75), (None, 0.3)]
        saved = [self.save(session, m.id, *v) for m, v in zip(members, values, strict=True)]
        for where, id in {
            "sweep@best": saved[1][0],
            "sweep/trial@best": saved[1][0],
            "sweep/trial.0@best": saved[0][1],
        }.items():
            answer = self.begin(red, where)
            assert answer.status_code == 202, answer.text
            assert answer.json()["tasks"][0]["from_checkpoint"] == id
        self.save(session, made["tasks"][1]["id"], 0.01)
        told = self.refusal(red, "sweep@best")
        assert "name one of them: sweep/other@best, sweep/trial@best" in told
        path = f"/v1/requests/{made['id']}/best-checkpoint"
        assert "name one of them" in problem(red.get(path), 404, "not-found")["detail"]
        for task, id in {"trial": saved[1][0], "trial.0": saved[0][1]}.items():
            assert red.get(path, params={"task": task}).json()["id"] == id

    def test_name_without_a_best_checkpoint_is_refused_with_advice(self, session, as_, red):
        (plain,) = self.submit(red, "plain", {"checkpoint": {}})["tasks"]
        self.save(session, plain["id"], None)
        (tuned,) = self.submit(red, "tuned", {})["tasks"]
        self.save(session, tuned["id"], None)
        assert "submitted without checkpoint.best" in self.refusal(red, "plain@best")
        told = self.refusal(red, "tuned/train@best")
        assert "no checkpoint of tuned/train has a number as its loss yet" in told
        assert "has no task 'tests'" in self.refusal(red, "tuned/tests@best")
        assert "no request 'tined'; did you mean 'tuned'?" in self.refusal(red, "tined@best")
        self.save_first(session, tuned["id"])
        assert self.begin(red, "tuned@best").status_code == 202
        assert "no request 'tuned'" in self.refusal(as_("blue.member"), "tuned@best")
        assert "in a request of its own once" in self.refusal(red, "train@best")

    def save_first(self, session, task_id: str) -> None:
        row = session.scalars(select(Checkpoint).where(Checkpoint.task_id == task_id)).one()
        row.best, row.ranked_value = True, 1.0
        session.commit()

    @pytest.mark.parametrize("column", ["damaged_at", "deleted_at"])
    def test_checkpoint_of_no_use_is_not_the_best(self, session, red, column):
        (task,) = self.submit(red, "tune", {})["tasks"]
        first, second = self.save(session, task["id"], 0.25, 0.5)
        setattr(session.get_one(Checkpoint, first), column, func.now())
        session.commit()
        assert self.begin(red, "tune@best").json()["tasks"][0]["from_checkpoint"] == second

    def test_best_and_pinned_checkpoints_count_as_stored(self, session, red, monkeypatch):
        (task,) = self.submit(red, "tune", {})["tasks"]
        best, other = self.save(session, task["id"], 0.25, None)
        assert datablocks.kept_bytes(session, "ten_red") == 1000
        monkeypatch.setenv("ROUNDHOUSE_DATABLOCK_QUOTA_BYTES", "1999")
        settings.cache_clear()
        assert red.post(f"/v1/checkpoints/{best}/pin").status_code == 200
        assert datablocks.kept_bytes(session, "ten_red") == 1000
        told = problem(red.post(f"/v1/checkpoints/{other}/pin"), 409, "quota-exceeded")
        assert "stores 1000 of at most 1999 bytes" in told["detail"]
        session.get_one(Checkpoint, best).deleted_at = func.now()
        session.commit()
        assert red.post(f"/v1/checkpoints/{other}/pin").status_code == 200


def test_a_bundle_and_a_checkpoint_need_no_folder_when_the_store_is_a_bucket(monkeypatch):
    """Only which place it is; what it does there is tests/workers/transfer/test_checkpoint.py."""
    monkeypatch.setitem(os.environ, "AWS_REGION", "us-east-1")
    assert str(Store.at("s3://bucket/prefix").place) == "s3://bucket/prefix"
    assert str(Store.at("/some/folder").place) == "/some/folder"
