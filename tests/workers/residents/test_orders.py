"""How the image of a rank goes with its outputs."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import torch

from tests.workers.starts import start_of
from workers.capture.capture import Surroundings
from workers.hardware.accelerator import Accelerator
from workers.process.slab import Slab, made
from workers.process.wire import Trust, TrustSeen, Wire, pair
from workers.ranks.shared_memory import close, make
from workers.residents import orders
from workers.residents.images import Images
from workers.residents.member import Member
from workers.residents.outputs import Outgoing
from workers.residents.work import Work


def test_rank_makes_its_image_at_the_cut_though_an_output_is_leaving(tmp_path):
    """The other ranks make theirs there, and what they go on to do is not in them."""
    wire, theirs = pair()
    bulk, bulk_end = socket.socketpair()
    supervisor, trust, handles = Wire(theirs), Trust(), make(2)
    trust.extend(2**62)
    work = Work(wire, bulk, TrustSeen(trust.fd), Slab(made(1 << 22)), watch=None)
    work.start = start_of({"job": "m:J"})
    work.accelerator, work.ctx = Accelerator("cpu"), SimpleNamespace(result=None)
    work.around = Surroundings(code=tmp_path, scratch=tmp_path, ctx=work.ctx)
    work.outgoing, work.images = Outgoing(work), Images(work)
    work.member = Member(handles, 0, collective=False)
    work.job, work.step = {"weights": torch.ones(3)}, 5

    def said():
        supervisor.wait(30.0)
        return [(message["what"], message["at_step"]) for message in supervisor.receive()]

    for name in ("y", "z"):
        work.outgoing.put(torch.zeros(3), name)
    assert said() == [("output:y", 5)]
    supervisor.send({"is": "kept", "what": "output:y", "files": 0})
    work.wishes.add("save")
    orders._save_if_wished(work)
    assert said() == [("image", 5)]
    supervisor.send({"is": "kept", "what": "image"})
    orders.obey(work)
    assert said() == [("output:z", 5)]
    for end in (wire, supervisor, bulk, bulk_end, trust):
        end.close()
    close(handles)
