"""Trains a small classifier on a table, and writes the model and its history to ./out."""

import argparse
from pathlib import Path

import pandas as pd
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--out", type=Path, default=Path("out"))
options = parser.parse_args()

torch.manual_seed(0)
points = torch.randn(1_000, 2)
table = pd.DataFrame(points.numpy(), columns=["x", "y"])
table["label"] = ((table.x**2 + table.y**2) > 1.4).astype("int64")
train = table.sample(frac=0.8, random_state=0)
test = table.drop(train.index)


def tensors(rows: pd.DataFrame) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(rows[["x", "y"]].to_numpy()), torch.tensor(rows["label"].to_numpy())


model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
features, labels = tensors(train)
history = []
for epoch in range(options.epochs):
    loss = nn.functional.cross_entropy(model(features), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    seen, wanted = tensors(test)
    accuracy = (model(seen).argmax(1) == wanted).float().mean().item()
    history.append({"epoch": epoch, "loss": loss.item(), "accuracy": accuracy})

options.out.mkdir(exist_ok=True)
pd.DataFrame(history).to_csv(options.out / "history.csv", index=False)
torch.save(model.state_dict(), options.out / "model.pt")
Path("notes.txt").write_text("not kept\n")
print(f"accuracy {history[-1]['accuracy']:.2f}")
