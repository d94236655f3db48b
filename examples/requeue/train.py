"""A training script as people bring it from a batch system: it saves when a signal tells it to.

The handler of SIGUSR1 only takes a note. The loop sees it between two steps, saves a checkpoint and
ends with exit status 85, which asks to begin again. Nothing is saved at any other time.
"""

import argparse
import json
import os
import signal
import sys
import time

import torch
from torch import nn

CHECKPOINT = "checkpoint.pt"
BEGIN_AGAIN = 85


class Preempted:
    """Notes that the signal came, as the handlers of Lightning, submitit and NeMo do."""

    def __init__(self):
        self.is_asked = False
        signal.signal(signal.SIGUSR1, self.note)

    def note(self, number, frame):
        self.is_asked = True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--step-s", type=float, default=0.0)
    options = parser.parse_args()

    preempted = Preempted()
    torch.manual_seed(0)
    dice = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    step = 0
    if os.path.exists(CHECKPOINT):
        state = torch.load(CHECKPOINT)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        dice.set_state(state["dice"])
        step = state["step"]
    print(f"begins after step {step}", flush=True)

    while step < options.steps:
        x = torch.randn(64, 16, generator=dice)
        loss = (model(x) - x.sum(1, keepdim=True).sin()).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        time.sleep(options.step_s)
        report(step=step, loss=loss.item())
        if preempted.is_asked:
            state = {"model": model.state_dict(), "opt": opt.state_dict(), "dice": dice.get_state()}
            torch.save({**state, "step": step}, CHECKPOINT)
            print(f"saved after step {step}: {why()}", flush=True)
            sys.exit(BEGIN_AGAIN)
    total = sum(p.double().sum() for p in model.parameters())
    print(f"loss {loss.item()!r} parameters {total.item()!r}")


def why():
    """Return why the process is stopped; a batch system would not say."""
    with open(os.environ["ROUNDHOUSE_NOTICE"]) as file:
        return json.load(file)["why"]


def report(**metrics):
    """Append metrics as lines of JSON for display; only under Roundhouse."""
    if path := os.environ.get("ROUNDHOUSE_METRICS"):
        with open(path, "a") as file:
            file.write(json.dumps(metrics) + "\n")


if __name__ == "__main__":
    main()
