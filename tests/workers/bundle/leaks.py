"""Code that tells a secret in every way that happens by accident."""

import base64
import json
import os
import subprocess
import sys
import time
import urllib.parse


def in_pieces(token):
    for at in range(0, len(token), 5):
        sys.stdout.write(token[at : at + 5])
        sys.stdout.flush()
        time.sleep(0.02)
    print(" was told")


def in_a_long_line(token):
    print("x" * 8190 + token + "y" * 9000 + token)


def without_an_end(token):
    sys.stdout.write("begin " + token)


def in_encodings(token):
    print(base64.b64encode(f"user:{token}".encode()).decode())
    print(urllib.parse.quote(token, safe=""), json.dumps(token), repr(token.encode()))


def in_lines(token):
    print(os.environ["PEM"])
    print(json.dumps({"pem": os.environ["PEM"]}))


def in_a_traceback(token):
    raise ValueError(f"cannot log in as {token!r}")


def in_a_child(token):
    subprocess.run([sys.executable, "-c", "import os; print(dict(os.environ))"], check=True)


class Leak:
    """Tells the variable HF_TOKEN by one of the functions above."""

    def __init__(self, ctx, *, how):
        self.how = how

    def step(self, ctx):
        globals()[self.how](os.environ["HF_TOKEN"])
        ctx.finish({"how": self.how})


class Metrics:
    """Tells the variable HF_TOKEN in names and texts of metrics, and in its result."""

    def __init__(self, ctx):
        pass

    def step(self, ctx):
        token = os.environ["HF_TOKEN"]
        ctx.log(**{"token": token, f"of {token}": 1.0, "long": "m" * 170 + token, "pin": 73918264})
        if ctx.step == 3:
            ctx.finish({token: [token, {"url": f"https://{token}@hub"}], "pin": 73918264})
        time.sleep(0.6)  # so that a report has the metrics of this step
        return {token: token}


class Compare:
    """Tells in each step what it sees, until there is a file `end`."""

    def __init__(self, ctx):
        self.lengths = []

    def step(self, ctx):
        self.lengths.append(len(os.environ["HF_TOKEN"]))
        time.sleep(0.02)
        if os.path.exists("end"):
            is_whole = len(self.lengths) == ctx.step
            ctx.finish({"lengths": sorted(set(self.lengths)), "is_whole": is_whole})
        return {"length": self.lengths[-1]}
