"""What a class of a bundle can be called with: what is told when parameters do not fit."""

from __future__ import annotations

from app.core.model.graphs.entry_signature import LISTED, Signature, faults


def test_many_unknown_parameters_are_counted_and_not_all_listed() -> None:
    known = Signature(takes=("lr", "steps"), needs=(), place="train.py, line 1")
    found = list(faults("train:Train", known, {f"p{n}": 1 for n in range(LISTED + 5)}))
    assert len(found) == LISTED + 1
    assert found[-1] == ("", "train:Train has 5 more unknown parameters")
