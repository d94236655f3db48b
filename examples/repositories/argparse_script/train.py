"""Train a small classifier on two spirals; an ordinary script with argparse and a progress bar."""

import argparse
import pathlib

import pandas as pd
import torch
from torch import nn
from tqdm import tqdm


def spirals(count, generator):
    angle = torch.rand(count, generator=generator) * 3 * torch.pi
    label = torch.randint(0, 2, (count,), generator=generator)
    turned = angle + label * torch.pi
    points = torch.stack([angle * turned.cos(), angle * turned.sin()], 1) / 10
    return points + 0.02 * torch.randn(points.shape, generator=generator), label


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"))
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    points, labels = spirals(4096, torch.Generator().manual_seed(args.seed))
    model = nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    rows = []
    for epoch in tqdm(range(args.epochs), desc="epochs"):
        for batch in torch.randperm(len(points)).split(args.batch_size):
            loss = nn.functional.cross_entropy(model(points[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (model(points).argmax(1) == labels).float().mean().item()
        rows.append({"epoch": epoch, "loss": loss.item(), "accuracy": accuracy})

    args.out.mkdir(parents=True, exist_ok=True)
    history = pd.DataFrame(rows)
    history.to_csv(args.out / "history.csv", index=False)
    torch.save(model.state_dict(), args.out / "model.pt")
    print(history.tail(3).to_string(index=False))


if __name__ == "__main__":
    main()
