"""The command of a host: which devices it serves, and how they are called."""

from __future__ import annotations

import json
import os
import sys

import pytest

from app.settings import Settings
from workers.device import host_worker
from workers.device.host_worker import numbered


@pytest.fixture
def executed(monkeypatch, tmp_path):
    """Take note of the program that the command becomes."""
    monkeypatch.setattr(host_worker, "settings", lambda: Settings(home=tmp_path))
    for name in ("ROUNDHOUSE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    noted = []
    monkeypatch.setattr(os, "execv", lambda program, words: noted.append((program, words)))
    return noted


class TestNumbers:
    def test_device_keeps_its_number_while_others_come_and_go(self, tmp_path):
        file = tmp_path / "run" / "numbers.json"
        assert numbered(["cuda:a", "cuda:b"], file, host="h") == {0: "cuda:a", 1: "cuda:b"}
        assert numbered(["cuda:b"], file, host="h") == {1: "cuda:b"}
        assert numbered(["cuda:b", "cuda:a", "cuda:c"], file, host="h") == {
            0: "cuda:a",
            1: "cuda:b",
            2: "cuda:c",
        }

    def test_new_device_takes_the_place_of_the_one_that_it_replaced(self, tmp_path):
        file = tmp_path / "numbers.json"
        numbered(["cuda:a", "cuda:b"], file, host="h")
        assert numbered(["cuda:c", "cuda:b"], file, host="h") == {0: "cuda:c", 1: "cuda:b"}
        assert numbered(["cuda:a", "cuda:b", "cuda:c"], file, host="h") == {
            0: "cuda:c",
            1: "cuda:b",
            2: "cuda:a",
        }
        assert numbered(["cuda:x", "cuda:y"], file, host="h") == {0: "cuda:x", 1: "cuda:y"}

    def test_file_says_which_devices_are_served_now(self, tmp_path):
        file = tmp_path / "numbers.json"
        numbered(["cuda:a", "cuda:b"], file, host="h")
        numbered(["cuda:b"], file, host="h")
        assert json.loads(file.read_text())["serves"] == ["h.1"]

    def test_devices_that_are_named_alike_take_turns(self, tmp_path):
        file = tmp_path / "numbers.json"
        assert numbered(["cpu", "cuda:a", "cpu"], file, host="h") == {
            0: "cpu",
            1: "cuda:a",
            2: "cpu",
        }
        assert numbered(["cuda:a", "cpu", "cpu"], file, host="h") == {
            0: "cpu",
            1: "cuda:a",
            2: "cpu",
        }
        assert numbered(["cpu"] * 3, file, host="h") == {0: "cpu", 1: "cpu", 2: "cpu"}


class TestCommand:
    def test_command_becomes_one_worker_with_the_queues_of_the_host_and_its_devices(self, executed):
        host_worker.main(["--host", "host-b", "--device", "cuda:GPU-1", "--cpus", "2"])
        assert os.environ["ROUNDHOUSE_DEVICES"] == "host-b.0=cuda:GPU-1,host-b.1=cpu,host-b.2=cpu"
        [(program, words)] = executed
        assert program == words[0] == sys.executable
        queues = "device.host-b,device.host-b.0,device.host-b.1,device.host-b.2"
        assert " ".join(words[1:]) == (
            "-m celery -A workers.device.worker worker --pool threads -c 2"
            f" -Q {queues} -n host.host-b@%h -l WARNING"
        )

    def test_without_a_device_it_serves_all_gpus(self, executed, monkeypatch):
        monkeypatch.setattr(host_worker, "all_cuda", lambda **_: ["cuda:GPU-1", "cuda:MIG-2"])
        host_worker.main(["--host", "h"])
        assert os.environ["ROUNDHOUSE_DEVICES"] == "h.0=cuda:GPU-1,h.1=cuda:MIG-2"

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["--host", "h"], "name its devices: --cpus 2"),
            (["--host", "a b", "--cpus", "1"], "got --host 'a b'"),
        ],
    )
    def test_command_says_what_to_do(self, executed, monkeypatch, capsys, words, told):
        monkeypatch.setattr(host_worker, "all_cuda", lambda **_: [])
        assert host_worker.main(words) == 2
        assert told in capsys.readouterr().err
        assert executed == []

    def test_device_is_refused_that_no_setting_can_have(self, executed, capsys):
        with pytest.raises(SystemExit):
            host_worker.main(["--device", "cuda:0,1"])
        assert "expected KIND or KIND:WHICH" in capsys.readouterr().err
