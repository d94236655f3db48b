"""Recognises commands that start their ranks by themselves, such as torchrun, in their usual forms.

What a script of the bundle starts cannot be known here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_SHELLS = frozenset({"sh", "bash", "dash", "zsh"})
_BEFORE = frozenset({"exec", "env", "time", "nohup", "uv", "poetry", "pixi", "run"})
_PROGRAMS = {"torchrun": "torchrun", "deepspeed": "deepspeed"}
_MODULES = {
    "torch.distributed.run": "torch.distributed.run",
    "torch.distributed.launch": "torch.distributed.launch",
    "accelerate.commands.launch": "accelerate launch",
    "deepspeed.launcher.runner": "deepspeed",
}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*")
_NUMBER = re.compile(
    r"--(?:nproc[-_]per[-_]node|num[-_]processes|num[-_]gpus)(?:=| )(\d{1,6})(?: |$)"
)
_BETWEEN = re.compile(r"&&|\|\||[;|&\n]")  # commands of a shell


@dataclass(frozen=True, slots=True)
class Launcher:
    """Names the launcher, the ranks that it starts (0: not told), and the program of each rank."""

    name: str
    ranks: int
    program: tuple[str, ...]

    @property
    def advice(self) -> str:
        """Say what to run instead, with which number of ranks."""
        program = shlex.join(self.program) or "python SCRIPT"
        return f"--ranks {self.ranks or 'N'} -- {program}"


def find_launcher(argv: Sequence[str]) -> Launcher | None:
    """Return the launcher that the command runs; None if it runs none."""
    words = _without_prefix(argv)
    if not words:
        return None
    program = words[0].rpartition("/")[2]
    if program in _SHELLS:
        return _in_shell(words)
    if program in _PROGRAMS:
        return _launcher(_PROGRAMS[program], words[1:])
    if program == "accelerate" and words[1:2] == ["launch"]:
        return _launcher("accelerate launch", words[2:])
    if program.startswith("python"):
        return _of_module(words[1:])
    return None


def _without_prefix(argv: Sequence[str]) -> list[str]:
    words = [*argv]
    while words and (words[0] in _BEFORE or _VARIABLE.fullmatch(words[0])):
        del words[0]
    return words


def _in_shell(words: list[str]) -> Launcher | None:
    """Look into the script of `bash -c SCRIPT`."""
    for option, script in pairwise(words[1:]):
        if not option.startswith("-"):
            return None
        if not option.startswith("--") and "c" in option:
            found = (find_launcher(part) for part in _commands(script))
            return next((each for each in found if each is not None), None)
    return None


def _commands(script: str) -> list[list[str]]:
    try:
        return [shlex.split(part) for part in _BETWEEN.split(script)]
    except ValueError:  # a quoted text has such a character
        return []


def _of_module(words: list[str]) -> Launcher | None:
    """Look for `-m MODULE` among the options of Python."""
    for n, word in enumerate(words):
        if word == "-m":
            name = _MODULES.get(words[n + 1]) if n + 1 < len(words) else None
            return _launcher(name, words[n + 2 :]) if name else None
        if not word.startswith("-"):
            return None
    return None


def _launcher(name: str, words: list[str]) -> Launcher:
    script = next((n for n, word in enumerate(words) if word.endswith(".py")), len(words))
    number = _NUMBER.search(" ".join(words[:script]))
    program = ("python", *words[script:]) if words[script:] else ()
    return Launcher(name, int(number[1]) if number else 0, program)
