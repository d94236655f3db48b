"""Jobs as a tenant would write them; each is run by real residents."""

import hashlib
import os
import random
import sys
import time

import numpy as np
import torch


def digest(model):
    parts = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(parts).hexdigest()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(32, 16)
        self.inner = torch.nn.Linear(16, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.out = torch.nn.Linear(16, 32, bias=False)
        self.out.weight = self.embed.weight  # tied
        self.drop = torch.nn.Dropout(0.2)

    def forward(self, x):
        return self.out(self.drop(torch.relu(self.norm(self.inner(self.embed(x))))))


class Everything:
    """Dropout, three sources of randomness, AdamW, a schedule with a lambda, ties, views."""

    def __init__(self, ctx, *, steps=40, nap_s=0.0):
        self.model = Net().to(ctx.device)
        self.opt = torch.optim.AdamW(self.model.parameters(), 3e-3)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.opt, lambda e: 0.97**e)
        self.own = torch.Generator().manual_seed(5)
        self.rng = np.random.default_rng(7)
        self.order = iter([i % 7 for i in range(10_000)])
        self.table = np.zeros(8)
        self.table_as_tensor = torch.from_numpy(self.table)
        self.running = torch.zeros(4)
        self.row = self.running[1:3]  # a view
        self.seen = []
        self.steps, self.nap_s = steps, nap_s
        self.opt.register_step_post_hook(self.count)
        self.counted = 0
        print("built")

    def count(self, *_):
        self.counted += 1

    def step(self, ctx):
        x = torch.randint(0, 32, (16,), generator=self.own).to(ctx.device)
        noise = float(np.random.rand()) + random.random() + self.rng.normal()
        loss = torch.nn.functional.cross_entropy(self.model(x), (x + next(self.order)) % 32)
        (loss * (1 + 0.01 * noise)).backward()
        self.opt.step()
        self.opt.zero_grad()
        self.schedule.step()
        self.table_as_tensor += 1
        self.row += loss.detach().cpu()
        assert self.table[0] == ctx.step, "the array no longer looks into the tensor"
        assert self.running[1] == self.row[0], "the view no longer looks into its base"
        assert self.model.out.weight is self.model.embed.weight, "the tie is cut"
        assert self.counted == ctx.step, "the optimizer's hook is gone"
        self.seen.append(ctx.step)
        print(f"step {ctx.step}")
        time.sleep(self.nap_s)
        if ctx.step == self.steps:
            whole = self.seen == list(range(1, self.steps + 1))
            self.end(
                ctx,
                {
                    "digest": digest(self.model),
                    "loss": loss.item(),
                    "norm": self.model.norm.running_var.sum().item(),
                    "row": self.row.sum().item(),
                    "whole": whole,
                },
            )
        return {"loss": loss, "noise": noise}

    def end(self, ctx, result):
        ctx.finish(result)


class Patient(Everything):
    """Steps on with its result, which it gives once there is a file `end`."""

    def __init__(self, ctx, **options):
        super().__init__(ctx, **options)
        self.result = None

    def step(self, ctx):
        metrics = super().step(ctx)
        if self.result is not None and os.path.exists("end"):
            ctx.finish(self.result)
        return metrics

    def end(self, ctx, result):
        self.result = result


class Count:
    """Steps quickly and does nothing."""

    def __init__(self, ctx, *, steps=10**9, nap_s=0.005, megabytes=0):
        self.steps, self.nap_s, self.done = steps, nap_s, 0
        self.ballast = torch.ones(megabytes << 18, device=ctx.device)

    def step(self, ctx):
        self.done += 1
        assert self.done == ctx.step
        time.sleep(self.nap_s)
        if ctx.step == self.steps:
            ctx.finish({"done": self.done})
        return {"done": self.done}


class Hang:
    def __init__(self, ctx):
        pass

    def step(self, ctx):
        print("hanging")
        time.sleep(1000)


class Raise:
    def __init__(self, ctx, *, at=3):
        self.at = at

    def step(self, ctx):
        if ctx.step == self.at:
            self.deeper(ctx.step)

    def deeper(self, step):
        raise ValueError(f"no good at {step}")


class Chatty:
    def __init__(self, ctx, *, lines=1000):
        self.lines = lines

    def step(self, ctx):
        for i in range(self.lines):
            print(f"line {i}")
        print("to stderr", file=sys.stderr)
        print("no end", end="")
        ctx.finish()


def tokenize(ctx, *, text):
    print("tokenizing")
    return {"tokens": torch.tensor([ord(c) for c in text]), "count": len(text)}


def total(ctx, tokens, *, plus=0):
    return {"total": tokens.sum() + plus}


def length(ctx, words):
    return {"length": len(words), "words": words.decode()}


class Stamp:
    """Prints when each step began and ended, by the clock that all processes share.

    Its step `waits_in` makes a file `waits`, and lasts until there is a file `end`.
    """

    def __init__(self, ctx, *, nap_s=0.01, waits_in=0, path=None):
        self.nap_s, self.waits_in, self.path = nap_s, waits_in, path

    def step(self, ctx):
        began = time.monotonic()
        time.sleep(self.nap_s)
        if ctx.step == self.waits_in:
            open("waits", "w").close()
        while ctx.step == self.waits_in and not os.path.exists("end"):
            time.sleep(0.01)
        print(f"{began} {time.monotonic()}")
        if self.path:
            with open(self.path, "a") as file:
                file.write(f"{began}\n")


class Uncapturable:
    def __init__(self, ctx):
        self.data = Batches()

    def step(self, ctx):
        next(self.data._it)


class Batches:
    def __init__(self):
        self._it = (i for i in range(100))


class Flood:
    def __init__(self, ctx):
        pass

    def step(self, ctx):
        for i in range(60_000):
            print(f"{i} " + "x" * 90)
        ctx.finish()


class Look:
    """Says what it can reach."""

    def __init__(self, ctx, *, paths):
        self.paths = paths

    def step(self, ctx):
        import os
        import socket
        import subprocess

        found = {"pid": os.getpid(), "uid": os.getuid(), "environment": sorted(os.environ)}
        found["cwd"] = os.getcwd()
        for path in self.paths:
            found[f"see {path}"] = os.path.exists(path)
        for path in ("/usr/probe", "/code/probe", "/probe", "/etc/probe"):
            try:
                open(path, "w").close()
                found[f"write {path}"] = True
            except OSError:
                found[f"write {path}"] = False
        open("mine", "w").close()
        open("/tmp/mine", "w").close()
        try:
            socket.create_connection(("1.1.1.1", 53), timeout=2).close()
            found["network"] = True
        except OSError:
            found["network"] = False
        found["processes"] = sorted(int(p) for p in os.listdir("/proc") if p.isdigit())
        found["shell"] = subprocess.run(
            ["/bin/sh", "-c", "echo hi"], capture_output=True
        ).stdout.decode()
        unshared = subprocess.run(["unshare", "-Ur", "true"], capture_output=True)
        found["unshare"] = unshared.returncode == 0
        with open("/proc/self/status") as status:
            found["status"] = dict(line.split(None, 1) for line in status if len(line.split()) > 1)
        ctx.finish(found)


def repeat(ctx, *, times):
    return {"text": "x" * times}


class Meddle:
    """Writes to the socket that its process has to its supervisor."""

    def __init__(self, ctx, *, word):
        self.word = word

    def step(self, ctx):
        import json
        import os
        import socket
        import stat
        import struct

        def frame(message):
            body = json.dumps(message).encode()
            return struct.pack("!I", len(body)) + body

        said = {
            "garbage": b"\xff" * 64,
            "frame": struct.pack("!I", 5) + b"[1,2]",
            "paused": frame({"is": "paused", "step": "many"}),
            "saving": frame({"is": "saving", "what": "image", "at_step": 1, "index_bytes": 2**60}),
            "index": frame({"is": "saving", "what": "image", "at_step": 1, "index_bytes": 40}),
            "fd": frame({"is": "still"}),
            "stopped": frame({"is": "stopped", "step": 1}),
        }[self.word]
        sockets = [n for n in range(3, 64) if self.is_socket(n, os, stat)]
        control = socket.socket(fileno=os.dup(min(sockets)))
        socket.send_fds(control, [said], [1] if self.word == "fd" else [])
        time.sleep(5)

    def is_socket(self, n, os, stat):
        try:
            return stat.S_ISSOCK(os.fstat(n).st_mode)
        except OSError:
            return False
