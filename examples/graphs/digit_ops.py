"""Functions of graphs on scikit-learn's 1,797 handwritten digits.

A function takes the blocks that its ports read, and returns a dict of the blocks that it writes. It
imports nothing of Roundhouse. Random numbers come from given seeds, so a plain loop draws the same.
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

TRAINED_ON = 1500  # the rest is for testing


def load(ctx):
    """Return images (n, 64) from 0 to 1 and labels, for training and for testing."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x = torch.tensor(found.data, dtype=torch.float32) / 16
    y = torch.tensor(found.target)
    return {
        **{"x": x[:TRAINED_ON], "y": y[:TRAINED_ON]},
        **{"x_test": x[TRAINED_ON:], "y_test": y[TRAINED_ON:]},
    }


def standardized(ctx, x, x_test):
    mean, scale = x.mean(0), x.std(0) + 0.1
    return {"x": (x - mean) / scale, "x_test": (x_test - mean) / scale}


def augmented(ctx, x, y, *, seed):
    """Add each image once more, moved by up to a pixel in each direction."""
    dice = torch.Generator().manual_seed(seed)
    down, right = torch.randint(-1, 2, (2, len(x)), generator=dice)
    moved = [
        image.roll((int(d), int(r)), (0, 1))
        for image, d, r in zip(x.view(-1, 8, 8), down, right, strict=True)
    ]
    return {"x": torch.cat([x, torch.stack(moved).view(-1, 64)]), "y": torch.cat([y, y])}


def values(ctx, *, values):
    """Return a list to map over."""
    return {"values": list(values)}


def fresh(ctx, seed, *, width=32):
    torch.manual_seed(seed)
    return {"model": nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))}


def fit(ctx, model, x, y, *, seed=0, lr=0.5, steps=60, batch=128):
    """Train the given model in place."""
    dice = torch.Generator().manual_seed(seed)
    opt = torch.optim.SGD(model.parameters(), lr)
    for _ in range(steps):
        chosen = torch.randint(len(x), (batch,), generator=dice)
        loss = F.cross_entropy(model(x[chosen]), y[chosen])
        opt.zero_grad()
        loss.backward()
        opt.step()
    model.zero_grad()
    ctx.log(loss=loss.item())
    return {"model": model}


def scores(ctx, model, x):
    with torch.no_grad():
        return {"p": F.softmax(model(x), -1)}


def accuracy(ctx, p, y):
    return {"accuracy": (p.argmax(-1) == y).float().mean().item()}


def vote(ctx, ps, y):
    """Return the accuracy of each model, and of all of them together."""
    each = [(p.argmax(-1) == y).float().mean().item() for p in ps]
    together = (torch.stack(list(ps)).sum(0).argmax(-1) == y).float().mean().item()
    return {"each": each, "together": together}


# --- a sweep that stops early -------------------------------------------------------------------


def begin_runs(ctx, *, rates, seed):
    """Return the runs of a sweep: {lr, model, opt}."""
    runs = []
    for lr in rates:
        torch.manual_seed(seed)
        model = nn.Linear(64, 10)
        runs.append({"lr": lr, "model": model, "opt": torch.optim.SGD(model.parameters(), lr)})
    return {"runs": runs}


def train_run(ctx, run, x, y, *, epochs):
    """Train the given run in place."""
    for _ in range(epochs):
        loss = F.cross_entropy(run["model"](x), y)
        run["opt"].zero_grad()
        loss.backward()
        run["opt"].step()
    return {"run": {**run, "loss": loss.item()}}


def better_half(ctx, runs):
    """Return the better half of the runs; nothing more is computed for the others."""
    best = sorted(runs, key=lambda run: run["loss"])
    return {"runs": best[: max(1, len(best) // 2)]}


def winner(ctx, runs, x, y):
    (run,) = runs
    with torch.no_grad():
        right = (run["model"](x).argmax(-1) == y).float().mean().item()
    return {"lr": run["lr"], "accuracy": right}


# --- k-fold -------------------------------------------------------------------------------------


def folds(ctx, x, y, *, k):
    """Return for each fold its training and its test data."""
    parts = [torch.arange(n, len(x), k) for n in range(k)]
    held = []
    for n, part in enumerate(parts):
        rest = torch.cat(parts[:n] + parts[n + 1 :])
        held.append({"x": x[rest], "y": y[rest], "x_test": x[part], "y_test": y[part]})
    return {"folds": held}


def fit_fold(ctx, fold, *, seed, steps):
    torch.manual_seed(seed)
    model = nn.Linear(64, 10)
    fit(ctx, model, fold["x"], fold["y"], seed=seed, steps=steps)
    with torch.no_grad():
        right = (model(fold["x_test"]).argmax(-1) == fold["y_test"]).float().mean().item()
    return {"accuracy": right}


def spread(ctx, values):
    found = torch.tensor(values, dtype=torch.float64)
    return {"mean": found.mean().item(), "deviation": found.std().item()}


# --- features, map and reduce -------------------------------------------------------------------


def shards(ctx, x, y, *, count):
    pairs = zip(x.chunk(count), y.chunk(count), strict=True)
    return {"shards": [{"x": part.clone(), "y": labels.clone()} for part, labels in pairs]}


def features(ctx, x, *, seed, width):
    """Return fixed random features, as in an extreme learning machine."""
    dice = torch.Generator().manual_seed(seed)
    weights = torch.randn(64, width, generator=dice) / 8
    return {"h": torch.tanh(x @ weights).double()}


def moments(ctx, shard, *, seed, width):
    """Return a shard's part of the normal equations."""
    h = features(ctx, shard["x"], seed=seed, width=width)["h"]
    return {"sums": (h.T @ h, h.T @ F.one_hot(shard["y"], 10).double())}


def solved(ctx, sums, *, ridge):
    """Solve the ridge regression on all shards at once."""
    gram = sum(one for one, _ in sums)
    hit = sum(other for _, other in sums)
    return {"w": torch.linalg.solve(gram + ridge * torch.eye(len(gram)), hit)}


def regressed(ctx, h, w, y):
    return accuracy(ctx, h @ w, y)


# --- k-means, rounds of map and reduce ----------------------------------------------------------


def first_centers(ctx, x, *, count, seed):
    dice = torch.Generator().manual_seed(seed)
    return {"centers": x[torch.randperm(len(x), generator=dice)[:count]].clone()}


def assigned(ctx, shard, centers):
    """Return for each center the sum and the number of its nearest images, and the inertia."""
    distance = torch.cdist(shard["x"], centers)
    one_hot = F.one_hot(distance.argmin(1), len(centers)).float()
    inertia = distance.min(1).values.square().sum()
    return {"sums": (one_hot.T @ shard["x"], one_hot.sum(0), inertia)}


def moved_centers(ctx, centers, sums):
    total = sum(one for one, _, _ in sums)
    count = sum(many for _, many, _ in sums)
    filled = count > 0
    centers[filled] = total[filled] / count[filled].unsqueeze(1)
    return {"centers": centers, "inertia": sum(one for _, _, one in sums).item()}


# --- principal directions, a long chain of small nodes ------------------------------------------


def covariance(ctx, x):
    centered = (x - x.mean(0)).double()
    return {"c": centered.T @ centered / (len(x) - 1)}


def first_direction(ctx, *, seed):
    dice = torch.Generator().manual_seed(seed)
    v = torch.randn(64, generator=dice, dtype=torch.float64)
    return {"v": v / v.norm()}


def sharpened(ctx, c, v):
    v = c @ v
    return {"v": v / v.norm()}


def explained(ctx, c, v):
    """Return the fraction of the variance that lies along v."""
    return {"part": (v @ c @ v / c.trace()).item()}


# --- a teacher and its student ------------------------------------------------------------------


def soft_labels(ctx, model, x, *, temperature):
    with torch.no_grad():
        return {"soft": F.softmax(model(x) / temperature, -1)}


def taught(ctx, model, x, soft, *, temperature, lr, steps):
    """Train the student on the teacher's soft labels; it never sees the true labels."""
    opt = torch.optim.SGD(model.parameters(), lr)
    for _ in range(steps):
        loss = F.cross_entropy(model(x) / temperature, soft)
        opt.zero_grad()
        loss.backward()
        opt.step()
    model.zero_grad()
    return {"model": model}


# --- federated averaging ------------------------------------------------------------------------


def locally(ctx, shard, model, *, lr, steps):
    """Train the model on one shard alone; each shard gets a copy."""
    opt = torch.optim.SGD(model.parameters(), lr)
    for _ in range(steps):
        loss = F.cross_entropy(model(shard["x"]), shard["y"])
        opt.zero_grad()
        loss.backward()
        opt.step()
    model.zero_grad()
    return {"model": model}


def averaged(ctx, models):
    # a copy, because a function must not change blocks that it only reads
    mean = copy.deepcopy(models[0])
    with torch.no_grad():
        for own, *parts in zip(*(m.parameters() for m in (mean, *models)), strict=True):
            own.copy_(torch.stack(parts).mean(0))
    return {"model": mean}
