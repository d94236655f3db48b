"""Launchers of ranks are recognised in the forms in which people write them."""

from __future__ import annotations

import pytest

from app.core.model.launchers import find_launcher

COMMANDS = [
    (["torchrun", "--nproc-per-node", "4", "train.py", "--lr", "1"], "torchrun", 4),
    (["/opt/bin/torchrun", "--standalone", "--nproc_per_node=2", "train.py"], "torchrun", 2),
    (["torchrun", "--nproc-per-node=gpu", "train.py"], "torchrun", 0),
    (["python", "-u", "-m", "torch.distributed.run", "train.py"], "torch.distributed.run", 0),
    (["accelerate", "launch", "--num_processes", "8", "train.py"], "accelerate launch", 8),
    (["python3", "-m", "accelerate.commands.launch", "train.py"], "accelerate launch", 0),
    (["deepspeed", "--num_gpus=2", "train.py"], "deepspeed", 2),
    (["uv", "run", "torchrun", "--nproc-per-node", "2", "train.py"], "torchrun", 2),
    (["bash", "-c", "cd src && torchrun --nproc-per-node 2 train.py"], "torchrun", 2),
    (["bash", "-lc", "A=1 exec torchrun --nproc-per-node 2 train.py"], "torchrun", 2),
]


@pytest.mark.parametrize(("argv", "name", "ranks"), COMMANDS)
def test_launcher_is_found_with_its_ranks_and_program(argv, name, ranks):
    found = find_launcher(argv)
    assert found is not None
    assert (found.name, found.ranks) == (name, ranks)
    assert found.program[:2] == ("python", "train.py")
    assert found.advice.startswith(f"--ranks {ranks or 'N'} -- python train.py")


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["env"],
        ["python", "train.py", "-m", "torch.distributed.run"],
        ["python", "-m", "pytest"],
        ["python", "-m"],
        ["bash", "run.sh", "-c", "torchrun"],
        ["bash", "-c", "echo 'torchrun; x"],
        ["bash", "-c", "echo torchrun"],
        ["accelerate", "config"],
        ["sh"],
    ],
)
def test_other_command_has_no_launcher(argv):
    assert find_launcher(argv) is None
