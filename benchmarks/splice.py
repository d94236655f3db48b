"""Compare N ranks on one device with N times one rank's step: cost of turns, gain of squashing.

    python -m benchmarks.splice [--quick]

An ordinary DDP training of a small transformer with AdamW runs with 2 and 4 ranks on one CPU slot,
in four ways: squashed or not, with or without device memory moved to the host at each switch. The
peers are the same code without DDP, a slot for every rank, and stock gloo with N processes. Each is
compared with the step of the same code in one process (a world of one under stock gloo), times N,
on the same core. Processor time counts, summed over all processes, because the machine has other
work. The two that are compared run in the same stretch of time and alternate every fifth of a
second, so that other load slows both. Figures are medians over the rounds.

Memory is the most that is on the device (the slot's common copy, and what the running rank has
brought in) over one replica of parameters, gradients and optimizer state. Activations count on
neither side. `host` is the memory that all processes together really occupy, with contributions and
offloaded memory, above what they had before the job was built.

The bits of all ways are compared: the parameters, optimizer state and losses must be those of a
slot for every rank. The long form also runs the rows of the feature matrix that are too slow for
`make test`, and 100 seeded violations: one rank adds 1e-7 to one element of a parameter after a
random step.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import Target, quick, report

JSON = dict[str, Any]

JOB, MLP, ROWS = "benchmarks.splice:Train", "jobs:Mlp", "features:every"
ONE, SPREAD = "N x one rank", "a seat for each"
AIMED_AT = ("squashed", "plain")
SHARE_S = 0.2  # seconds on the core, for one of two gangs that are compared
WARM_STEPS = 5  # until DDP's buckets settle and the optimizer is watched and squashed
PINNED = ("taskset", "-c", "0")
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
WAYS: dict[str, JSON] = {
    "squashed": {},
    "plain": {"squash": False},
    "squashed, moved": {"swap": True},
    "plain, moved": {"squash": False, "swap": True},
}


# --- the job --------------------------------------------------------------------------------------


class Transformer(nn.Module):
    def __init__(self, *, width: int, layers: int, words: int) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(words, width), nn.Linear(width, words)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, norm_first=True)
            for _ in range(layers)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        out: torch.Tensor = self.out(hidden)
        return out


class Train:
    """Acts as a tenant's job; it has dropout, so every rank draws numbers of its own."""

    def __init__(
        self,
        ctx: Any,
        *,
        batch: int,
        bare: bool = False,
        width: int = 384,
        layers: int = 6,
        words: int = 2000,
    ) -> None:
        torch.manual_seed(1)
        self.before = _own_bytes()
        net = Transformer(width=width, layers=layers, words=words)
        self.count = sum(p.numel() for p in net.parameters())
        self.net = net if bare else DistributedDataParallel(net)
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=1e-4)
        self.batch, self.vocabulary = batch, words
        self.host = 0
        torch.manual_seed(100 + ctx.rank)

    def step(self, ctx: Any) -> JSON:
        tokens = torch.randint(self.vocabulary, (self.batch, 65))
        out = self.net(tokens[:, :-1])
        loss = nn.functional.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        if ctx.step == 8:
            self.host = _own_bytes() - self.before
        return {"loss": loss.item(), "host": self.host, "count": self.count}


def _own_bytes() -> int:
    """Return this process's part of its memory: a shared page counts in part for each process that
    has it.
    """
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel tells no proportional set size")


# --- a host of gangs ------------------------------------------------------------------------------


class WarmProcess:
    """Keeps a warm process, started once, that runs gangs by `examples.gang_alone.serve`."""

    def __init__(
        self, *, before: tuple[str, ...] = (), warm: tuple[str, ...] = (), **environment: str
    ) -> None:
        """Start the process.

        `before` is a command to run it under, like taskset, `warm` lists modules to import first.
        """
        self.process = subprocess.Popen(
            [
                *(*before, sys.executable, "-W", "ignore", "-m", "examples.gang_alone", "--serve"),
                *(f"--warm={module}" for module in warm),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,  # so that all its processes can be stopped as one group
        )

    def run(self, entry: str, *, peers: bool = False, **gang: Any) -> list[JSON]:
        """Run a gang and return each rank's report.

        With `peers` it runs under stock gloo and without slots.
        """
        ask, answers = self.process.stdin, self.process.stdout
        assert ask is not None
        assert answers is not None
        with tempfile.TemporaryDirectory() as folder:
            place = f"{folder}/peers" if peers else ""
            ask.write(json.dumps({"entry": entry, "seats": 1, **gang, "peers": place}) + "\n")
            ask.flush()
            stories: list[JSON] = json.loads(answers.readline())
        return stories

    def close(self) -> None:
        self.process.communicate(timeout=30)


# --- measuring ------------------------------------------------------------------------------------


class Pair:
    """Keeps two hosts of gangs on the same core, of which one at a time may run.

    They alternate every SHARE_S, so other load of the machine affects both.
    """

    def __init__(self) -> None:
        self.hosts = [WarmProcess(before=PINNED, warm=(), **MALLOC) for _ in range(2)]

    def run(self, one: JSON, other: JSON) -> list[list[JSON]]:
        with ThreadPoolExecutor(2) as threads:
            gangs = zip(self.hosts, (one, other), strict=True)
            runs = [threads.submit(host.run, JOB, **gang) for host, gang in gangs]
            try:
                for turn in itertools.cycle((0, 1)):
                    if any(run.done() for run in runs):
                        break
                    self._signal(1 - turn, signal.SIGSTOP)
                    time.sleep(SHARE_S)
                    self._signal(1 - turn, signal.SIGCONT)
            finally:
                for turn in (0, 1):
                    self._signal(turn, signal.SIGCONT)
            return [_right(run.result()) for run in runs]

    def _signal(self, turn: int, number: signal.Signals) -> None:
        os.killpg(self.hosts[turn].process.pid, number)

    def close(self) -> None:
        for host in self.hosts:
            host.close()


def measure(pair: Pair, *, ranks: int, batch: int, steps: int, repeats: int) -> JSON:
    """Return the median milliseconds of processor time per step of all ranks, by way.

    Ways without a target are measured only in every second round.
    """
    params = {"batch": batch}
    # As much work as the gang's, so that both last equally long.
    one = _gang(1, WARM_STEPS * ranks, steps * ranks, peers=True, params=params)
    ways = {
        "N x one rank, without DDP": one | {"params": params | {"bare": True}},
        **{
            name: _gang(ranks, WARM_STEPS, steps, params=params, **way)
            for name, way in WAYS.items()
        },
        SPREAD: _gang(ranks, WARM_STEPS, steps, params=params, seats=ranks, squash=False),
        "gloo": _gang(ranks, WARM_STEPS, steps, params=params, peers=True),
    }
    found: dict[str, list[float]] = {name: [] for name in (ONE, *ways)}
    over: dict[str, list[float]] = {name: [] for name in ways}
    stories: dict[str, list[JSON]] = {}
    for number, (name, way) in itertools.product(range(repeats), ways.items()):
        if number % 2 == 0 or name in AIMED_AT:
            base, stories[name] = pair.run(one, way)
            base_ms, ms = _ms(base, steps), _ms(stories[name], steps)
            found[ONE].append(base_ms)
            found[name].append(ms)
            over[name].append(ms / base_ms - 1)
    bits = [[story["hash"] for story in stories[name]] for name in (*WAYS, SPREAD)]
    return {
        "ms": {name: round(statistics.median(values), 1) for name, values in found.items()},
        "over": {name: round(statistics.median(values), 4) for name, values in over.items()},
        "between": {
            name: [round(min(values), 3), round(max(values), 3)] for name, values in over.items()
        },
        "same_bits": all(hashes == bits[0] for hashes in bits),
        "moved_mb": {
            name: round(
                sum(s["out_bytes"] + s["in_bytes"] for s in stories[name])
                / (WARM_STEPS + steps)
                / 1e6,
                1,
            )
            for name in WAYS
        },
    }


def _gang(ranks: int, warm: int, steps: int, **more: Any) -> JSON:
    return {"ranks": ranks, "seats": 1, "steps": warm + steps, "measure_from": warm + 1, **more}


def _ms(stories: list[JSON], steps: int) -> float:
    """Return the time of one step of all ranks.

    A lone rank has made as many steps as all ranks together.
    """
    return float(sum(story["cpu_s"] for story in stories) / steps * 1000)


def _right(stories: list[JSON]) -> list[JSON]:
    for story in stories:
        if "error" in story or "killed" in story:
            raise RuntimeError(story.get("trace", str(story)))
    return stories


def _memory(stories: list[JSON]) -> JSON:
    """Return memory over one rank's: parameters, gradients, two moments, and DDP's buckets."""
    last = [story["losses"][-1] for story in stories]
    replica = 5 * 4 * last[0]["count"]
    steady = max(s["common_bytes"] + s["last_bytes"] for s in stories)
    first = max(s["largest_bytes"] for s in stories)  # before anything is common
    return {
        "device": round(max(steady, first) / replica, 3),
        "host": round(sum(one["host"] for one in last) / replica, 3),
    }


def memory(host: WarmProcess, *, ranks: int) -> dict[str, JSON]:
    gang = {"ranks": ranks, "steps": WARM_STEPS + 4, "params": {"batch": 1}}
    ways = {name: way for name, way in WAYS.items() if "moved" in name}
    return {name: _memory(_right(host.run(JOB, **{**gang, **way}))) for name, way in ways.items()}


# --- checks that are too slow for `make test` -----------------------------------------------------


def slow_rows(host: WarmProcess) -> dict[str, bool]:
    """Run the compilers' rows of the feature matrix; one and three slots must give equal bits."""
    found = {}
    for name in ("compiled_aot", "compiled_inductor"):
        gang: JSON = {"ranks": 3, "params": {"names": [name]}, "path": "tests/workers/ddp"}
        one, three = (_right(host.run(ROWS, seats=seats, **gang)) for seats in (1, 3))
        found[name] = [s["losses"] for s in one] == [s["losses"] for s in three]
    return found


def faults(host: WarmProcess, count: int) -> int:
    """Return how many of `count` seeded violations were found at once, with right bits."""
    right = 0
    for seed in range(count):
        dice = random.Random(seed)
        ranks, steps = dice.choice([2, 3, 4]), 8
        spoil = {
            "rank": dice.randrange(ranks),
            "step": dice.randint(3, steps - 1),
            "at": dice.randrange(2048),
        }
        gang: JSON = {"ranks": ranks, "steps": steps, "params": {"spoil": spoil}}
        gang["path"] = "tests/workers/ddp"
        squashed, spread = (_right(host.run(MLP, seats=seats, **gang)) for seats in (1, ranks))
        told = [event for event in squashed[0]["events"] if event["kind"] == "violation"]
        found = (
            told[0]["step"] == spoil["step"] + 1 and f"rank {spoil['rank']}: " in told[0]["what"]
        )
        right += found and [_bits(s) for s in squashed] == [_bits(s) for s in spread]
    return right


def _bits(story: JSON) -> tuple[str, str]:
    return story["hash"], str(story["losses"])


# --- the report -----------------------------------------------------------------------------------


def main() -> int:
    short = quick()
    cases = [(2, 1), (4, 1)] if short else [(2, 1), (4, 1), (2, 4), (4, 4)]
    pair = Pair()
    times = {
        f"{ranks} ranks, batch {batch}": measure(
            pair, ranks=ranks, batch=batch, steps=6, repeats=3 if short else 6
        )
        for ranks, batch in cases
    }
    pair.close()
    host = WarmProcess()
    room = memory(host, ranks=4)
    found = faults(host, 5 if short else 100)
    rows = {} if short else slow_rows(host)
    host.close()
    targets = [target for name, case in times.items() for target in _targets(name, case)]
    device = room["squashed, moved"]["device"]
    targets += [
        Target(name="device memory, 4 ranks", value=device, unit="replicas", op="<=", bound=1.2),
        Target(
            name="seeded violations found, with right bits",
            value=found / (5 if short else 100),
            unit="",
            op=">=",
            bound=1.0,
        ),
    ]
    targets += [
        Target(name=f"{name}: same bits", value=int(same), unit="", op=">=", bound=1)
        for name, same in rows.items()
    ]
    return report("splice", targets, peers={"times": times, "memory": room})


def _targets(name: str, case: JSON) -> list[Target]:
    over = case["over"]
    return [
        Target(
            name=f"overhead squashed, {name}", value=over["squashed"], unit="", op="<=", bound=0.0
        ),
        Target(name=f"overhead plain, {name}", value=over["plain"], unit="", op="<=", bound=0.03),
        Target(name=f"same bits, {name}", value=int(case["same_bits"]), unit="", op=">=", bound=1),
    ]


if __name__ == "__main__":
    sys.exit(main())
