"""A plain training script, as it would run anywhere: Roundhouse runs it unmodified.

It saves its own checkpoint into the folder it runs in, and goes on from it if there is one. Under
Roundhouse that folder is kept. A pause needs no checkpoint, because the processes are frozen.
"""

import argparse
import json
import os

import torch
from torch import nn

CHECKPOINT = "checkpoint.pt"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--save-every", type=int, default=50)
    options = parser.parse_args()

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
    print(f"begins after step {step}")

    while step < options.steps:
        x = torch.randn(64, 16, generator=dice)
        loss = (model(x) - x.sum(1, keepdim=True).sin()).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        if step % options.save_every == 0:
            save(model, opt, dice, step)
            report(step=step, loss=loss.item())
    os.makedirs("artifacts", exist_ok=True)
    torch.save(model.state_dict(), "artifacts/model.pt")  # `roundhouse outputs` downloads it
    total = sum(p.double().sum() for p in model.parameters())
    print(f"loss {loss.item()!r} parameters {total.item()!r}")


def save(model, opt, dice, step):
    """Save to a new file and rename it, so that there is always a complete checkpoint."""
    state = {"model": model.state_dict(), "opt": opt.state_dict(), "dice": dice.get_state()}
    torch.save({**state, "step": step}, f"{CHECKPOINT}.new")
    os.replace(f"{CHECKPOINT}.new", CHECKPOINT)


def report(**metrics):
    """Append metrics as lines of JSON for display; only under Roundhouse."""
    if path := os.environ.get("ROUNDHOUSE_METRICS"):
        with open(path, "a") as file:
            file.write(json.dumps(metrics) + "\n")


if __name__ == "__main__":
    main()
