"""Secrets on a device: given to the task only, and kept out of all that it says."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from app.core.model.protocol.messages import (
    Failed,
    Finished,
    Paused,
    Saved,
    Started,
    about_secrets,
    encode,
)
from app.core.security.redaction import MARK, Redactor
from app.storage.sealing import sealed_to
from tests.workers.conftest import DeviceRig
from workers.device.log_buffer import LINE_LIMIT_BYTES, Log

TOKEN = "hf_Correct/Horse+Battery"
PEM = "-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG9w0\nBAQEFAASCBKcwggSj\n-----END KEY-----"
SECRETS = {"HF_TOKEN": TOKEN, "PEM": PEM, "PIN": "73918264"}


def sealed(rig: DeviceRig, task: str, epoch: int, values: dict[str, str]) -> dict[str, Any]:
    house = rig.house
    announced = house.facts["sealing_key"]
    about = about_secrets(task, epoch, house.device)
    return {
        "mark": str(hash(tuple(sorted(values.items())))),
        "sealed": sealed_to(announced, json.dumps(values), about, host_key=house.signer.public),
    }


def launch(
    rig: DeviceRig, task: str, run: Any, epoch: int = 1, values: Any = None, **more: Any
) -> None:
    values = values or SECRETS
    given = {"secret_names": sorted(values), "secrets": sealed(rig, task, epoch, values)}
    rig.launch(task, run, epoch, **{**given, **more})


def leak(rig: DeviceRig, how: str) -> list[str]:
    """What the task printed that tells a secret in this way."""
    launch(rig, "t1", "leaks:Leak", params={"how": how})
    return ended(rig, "t1")


def ended(rig: DeviceRig, task: str) -> list[str]:
    """Return what the task has printed; no value is in any report of the device."""
    rig.until(lambda: rig.all(Finished, task) or rig.all(Failed, task))
    rig.until(lambda: rig.view(task, 1) is None)
    told = json.dumps([encode(report) for report in rig.reports])
    for part in (TOKEN, "Correct", "MIIEvQ", "wggSj", "73918264"):
        assert part not in told
        assert base64.b64encode(part.encode()).decode()[1:-3] not in told
    return rig.printed(task, 1)


# --- what a task says --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "printed"),
    [
        ("in_pieces", [f"{MARK} was told"]),
        ("without_an_end", [f"begin {MARK}"]),
        ("in_encodings", [MARK, f"{MARK} \"{MARK}\" b'{MARK}'"]),
        ("in_lines", [MARK] * 4 + [f'{{"pem": "{MARK}"}}']),
    ],
)
def test_secret_that_is_printed_is_replaced(rig, how, printed):
    lines = leak(rig, how)
    if how == "in_encodings":  # some digits of Base64 belong to what stands before it too
        assert MARK in lines[0]
        assert len(lines[0]) <= len(MARK) + 12
        lines[0] = MARK
    assert lines == printed


def test_secret_across_the_cut_of_a_long_line_is_replaced(rig):
    whole = "".join(leak(rig, "in_a_long_line"))
    assert whole == "x" * 8190 + MARK + "y" * 9000 + MARK


def test_secret_in_a_traceback_is_replaced(rig):
    leak(rig, "in_a_traceback")
    failed = rig.event(Failed, "t1")
    assert failed.message == f"ValueError: cannot log in as '{MARK}'"
    assert failed.detail.rstrip().endswith(failed.message)


def test_secret_in_the_environment_of_a_child_is_replaced(rig):
    (line,) = leak(rig, "in_a_child")
    assert f"'HF_TOKEN': '{MARK}'" in line
    assert "'PATH'" in line


def test_secret_in_metrics_and_in_a_result_is_replaced(rig):
    launch(rig, "t1", "leaks:Metrics")
    ended(rig, "t1")
    seen = [view.metrics for report in rig.reports for view in report.residents if view.metrics]
    told = {"token": MARK, f"of {MARK}": 1.0, "pin": MARK, "long": "m" * 170 + MARK, MARK: MARK}
    assert told in seen
    result = rig.event(Finished, "t1").result
    assert result == {MARK: [MARK, {"url": f"https://{MARK}@hub"}], "pin": MARK}


def test_secret_in_progress_and_failure_of_a_command_is_replaced(rig):
    tell = """printf '{"a": "%s", "%s": 1}\\n' $HF_TOKEN $HF_TOKEN >> $ROUNDHOUSE_METRICS"""
    launch(rig, "t1", ["bash", "-c", f"{tell}; sleep 1; echo no $HF_TOKEN >&2; exit 3"])
    assert ended(rig, "t1") == [f"no {MARK}"]
    assert rig.event(Failed, "t1").detail == f"no {MARK}"
    seen = [view.metrics for report in rig.reports for view in report.residents if view.metrics]
    assert seen[-1] == {"a": MARK, MARK: 1}


def test_each_rank_has_the_secrets(rig):
    say = "echo $RANK ${#HF_TOKEN} $HF_TOKEN"
    launch(rig, "t1", ["bash", "-c", say], world_size=2)
    rig.event(Finished, "t1")
    rig.until(lambda: rig.view("t1", 1) is None)
    assert sorted(rig.printed("t1", 1)) == [f"{n} {len(TOKEN)} {MARK}" for n in range(2)]
    launch(rig, "t2", "leaks:Leak", params={"how": "without_an_end"}, world_size=2)
    rig.event(Finished, "t2")


def test_next_task_of_the_device_has_no_secret(rig):
    leak(rig, "without_an_end")
    rig.launch("t2", "variables:seen", params={"names": ["HF_TOKEN", "PEM"]})
    assert rig.event(Finished, "t2").result == {"HF_TOKEN": [None] * 3, "PEM": [None] * 3}


# --- what a task is given ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda rig: {"refused": "it names HF_TOKEN"}, "it names HF_TOKEN"),
        (lambda rig: {}, "do not open here"),
        (lambda rig: sealed(rig, "t2", 1, SECRETS), "do not open here"),
        (lambda rig: sealed(rig, "t1", 2, SECRETS), "do not open here"),
        (lambda rig: sealed(rig, "t1", 1, {"OTHER": TOKEN}), "not those that it names"),
        (
            lambda rig: sealed(rig, "t1", 1, {name: "line of it\n" * 60 for name in SECRETS}),
            "more than 128 lines",
        ),
    ],
)
def test_task_does_not_run_without_its_secrets(rig, change, told):
    rig.launch("t1", "leaks:Compare", secret_names=sorted(SECRETS), secrets=change(rig))
    failed = rig.event(Failed, "t1")
    assert failed.cause == "secret"
    assert told in failed.message
    assert not rig.all(Started, "t1")


def paused(rig: DeviceRig, run: Any, **more: Any) -> None:
    launch(rig, "t1", run, **more)
    started = rig.event(Started, "t1")
    rig.steps("t1", started.step + 3)
    rig.pause("t1")
    rig.event(Paused, "t1")
    rig.event(Saved, "t1")


def test_job_goes_on_in_its_process_while_its_secrets_are_the_same(rig):
    paused(rig, "leaks:Compare")
    launch(rig, "t1", "leaks:Compare", 2)
    assert rig.event(Started, "t1", 2).resumed == "resident"


def test_job_goes_on_with_a_secret_that_was_changed_while_it_was_paused(rig):
    paused(rig, "leaks:Compare")
    changed = {**SECRETS, "HF_TOKEN": "hf_another"}
    images = [rig.image(rig.event(Saved, "t1"))]
    launch(rig, "t1", "leaks:Compare", 2, changed, images=images)
    assert rig.event(Started, "t1", 2).resumed == "image"
    rig.let_end("t1", 2)
    result = rig.event(Finished, "t1", 2).result
    assert result == {"lengths": sorted([len(TOKEN), len("hf_another")]), "is_whole": True}


def test_job_fails_if_a_secret_was_removed_while_it_was_paused(rig):
    paused(rig, "leaks:Compare")
    refused = {"mark": "gone", "refused": "it names HF_TOKEN, which is not there"}
    more = {
        "secret_names": sorted(SECRETS),
        "secrets": refused,
        "images": [rig.image(rig.event(Saved, "t1"))],
    }
    rig.launch("t1", "leaks:Compare", 2, **more)
    failed = rig.event(Failed, "t1", 2)
    assert "it names HF_TOKEN, which is not there" in failed.message
    assert not rig.all(Started, "t1", 2)


# --- lines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 100, 5000, 10**6])
def test_log_without_a_value_is_the_same_however_it_is_cut(size):
    text = f"a {TOKEN}\n{'b' * 8185}{TOKEN}{TOKEN}{'c' * 20_000}\r{TOKEN}d\n\n{TOKEN[:10]}\n{TOKEN}"
    data = text.encode()
    log, plain = Log(), Log()
    log.redactor = Redactor([TOKEN])
    for at in range(0, len(data), size):
        log.write("stdout", data[at : at + size])
        plain.write("stdout", data[at : at + size].replace(b"\r", b"."))
    log.end()
    lines = [line for _, line in log.waiting]
    assert not any(TOKEN in line for line in lines)
    assert all(len(line) <= LINE_LIMIT_BYTES for line in lines)
    assert lines[0] == f"a {MARK}"
    assert lines[-4:] == [f"{MARK}d", "", TOKEN[:10], MARK]
    assert len(log._open["stdout"]) == 0
    assert log.redactor.longest < LINE_LIMIT_BYTES


def test_value_that_a_pause_cuts_in_two_is_replaced():
    before, after = Log(), Log()
    before.redactor = after.redactor = Redactor([TOKEN])
    before.write("stdout", b"first\nnow " + TOKEN[:9].encode())
    after.goes_on_from(before)
    before.end()
    after.write("stdout", TOKEN[9:].encode() + b" is told\n")
    assert [line for _, line in before.waiting] == ["first"]
    assert [line for _, line in after.waiting] == [f"now {MARK} is told"]
