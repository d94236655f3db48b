"""Ten programs of small tasks on real data, each as one graph; their functions are in
examples/graphs.

    python -m examples.programs                    # their names
    python -m examples.programs ensemble           # a request with the graph, but for the bundle
    roundhouse submit FILE --bundle examples/graphs

Calling the functions here only writes the graph down; nothing is run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from app.cli.graph_tracing import Block, each, graph, node

JSON = dict[str, Any]

load = node("digit_ops:load", "x", "y", "x_test", "y_test")
values = node("digit_ops:values", "values")
fresh = node("digit_ops:fresh", "model")
fit = node("digit_ops:fit", "model", inout=["model"])
scores = node("digit_ops:scores", "p")
accuracy = node("digit_ops:accuracy", "accuracy")
shards = node("digit_ops:shards", "shards")


def ensemble() -> JSON:
    """Preprocess, augment, train an ensemble, evaluate each, vote."""
    standardized = node("digit_ops:standardized", "x", "x_test")
    augmented = node("digit_ops:augmented", "x", "y")
    vote = node("digit_ops:vote", "each", "together")
    with graph() as g:
        x, y, x_test, y_test = load()
        x, x_test = standardized(x=x, x_test=x_test)
        x, y = augmented(x=x, y=y, seed=5)
        models = fresh(seed=each(values(values=[11, 12, 13, 14, 15])))
        models = fit(model=each(models), x=x, y=y, seed=1)
        one, all_ = vote(ps=scores(model=each(models), x=x_test), y=y_test)
        g.output(each=one, together=all_)
    return g.json()


def text() -> JSON:
    """Tokenize, cut into shards, count letter pairs in each, merge, test."""
    with graph() as g:
        raw = node("text_ops:read", "text")(limit=300_000)
        train, test = node("text_ops:tokenized", "train", "test")(text=raw)
        pieces = node("text_ops:sharded", "shards")(tokens=train, count=7)
        counts = node("text_ops:pairs", "counts")(shard=each(pieces))
        model = node("text_ops:merged", "model")(counts=counts, smoothing=0.5)
        g.output(bits=node("text_ops:surprise", "bits")(model=model, tokens=test))
    return g.json()


def sweep() -> JSON:
    """Try eight learning rates; after each rung the worse half is stopped."""
    train = node("digit_ops:train_run", "run", inout=["run"])
    better = node("digit_ops:better_half", "runs")
    with graph() as g:
        x, y, x_test, y_test = load()
        rates = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 100.0]
        runs = node("digit_ops:begin_runs", "runs")(rates=rates, seed=0)
        for epochs in (5, 10, 20):
            runs = better(runs=train(run=each(runs), x=x, y=y, epochs=epochs))
        lr, right = node("digit_ops:winner", "lr", "accuracy")(runs=runs, x=x_test, y=y_test)
        g.output(lr=lr, accuracy=right)
    return g.json()


def k_fold() -> JSON:
    """Train a model for each of five folds; mean and deviation of their accuracies."""
    with graph() as g:
        x, y, _, _ = load()
        held = node("digit_ops:folds", "folds")(x=x, y=y, k=5)
        right = node("digit_ops:fit_fold", "accuracy")(fold=each(held), seed=3, steps=80)
        mean, deviation = node("digit_ops:spread", "mean", "deviation")(values=right)
        g.output(mean=mean, deviation=deviation)
    return g.json()


def features() -> JSON:
    """Compute random features of each shard, sum their moments, and solve one regression."""
    made = {"seed": 2, "width": 200}
    with graph() as g:
        x, y, x_test, y_test = load()
        sums = node("digit_ops:moments", "sums")(shard=each(shards(x=x, y=y, count=6)), **made)
        w = node("digit_ops:solved", "w")(sums=sums, ridge=0.1)
        h = node("digit_ops:features", "h")(x=x_test, **made)
        g.output(accuracy=node("digit_ops:regressed", "accuracy")(h=h, w=w, y=y_test))
    return g.json()


def k_means() -> JSON:
    """Run rounds of a graph within the graph: assign each shard, move the centers."""
    assigned = node("digit_ops:assigned", "sums")
    moved = node("digit_ops:moved_centers", "centers", "inertia", inout=["centers"])
    with graph("round") as round_:
        given = round_.input("centers")
        sums = assigned(shard=each(round_.input("shards")), centers=given)
        centers, inertia = moved(centers=given, sums=sums)
        round_.output(centers=centers, inertia=inertia)
    with graph() as g:
        x, y, _, _ = load()
        pieces = shards(x=x, y=y, count=4)
        centers = node("digit_ops:first_centers", "centers")(x=x, count=10, seed=4)
        for _ in range(8):
            centers, inertia = round_(centers=centers, shards=pieces)
        g.output(inertia=inertia)
    return g.json()


def directions() -> JSON:
    """Find the direction of most variance, by two hundred small nodes in a chain."""
    sharpened = node("digit_ops:sharpened", "v", draws=False)
    with graph() as g:
        x, _, _, _ = load()
        c = node("digit_ops:covariance", "c")(x=x)
        v = node("digit_ops:first_direction", "v")(seed=8)
        for _ in range(200):
            v = sharpened(c=c, v=v)
        g.output(part=node("digit_ops:explained", "part")(c=c, v=v))
    return g.json()


def distillation() -> JSON:
    """Train a wide teacher on labels, and a narrow student on the teacher's output."""
    heat = {"temperature": 2.0}
    with graph() as g:
        x, y, x_test, y_test = load()
        teacher = fit(model=_model(21, 128), x=x, y=y, seed=6, steps=150)
        soft = node("digit_ops:soft_labels", "soft")(model=teacher, x=x, **heat)
        learn = node("digit_ops:taught", "model", inout=["model"])
        student = learn(model=_model(22, 12), x=x, soft=soft, lr=1.0, steps=150, **heat)
        for name, model in (("teacher", teacher), ("student", student)):
            right = accuracy(p=scores(model=model, x=x_test), y=y_test)
            g.output(**{name: right})
    return g.json()


def _model(seed: int, width: int) -> Block:
    made: Block = fresh(seed=seed, width=width)
    return made


def federated() -> JSON:
    """Train on four private shards; after each round the four models are averaged."""
    locally = node("digit_ops:locally", "model", inout=["model"])
    averaged = node("digit_ops:averaged", "model")
    with graph("round") as round_:
        given = round_.input("model")
        trained = locally(shard=each(round_.input("shards")), model=given, lr=0.5, steps=10)
        round_.output(model=averaged(models=trained))
    with graph() as g:
        x, y, x_test, y_test = load()
        pieces = shards(x=x, y=y, count=4)
        model = _model(31, 32)
        for _ in range(5):
            model = round_(model=model, shards=pieces)
        g.output(accuracy=accuracy(p=scores(model=model, x=x_test), y=y_test))
    return g.json()


def seeds() -> JSON:
    """Train the same from six seeds, a branch for each: how much of a result is luck?"""
    with graph() as g:
        x, y, x_test, y_test = load()
        right = [
            accuracy(p=scores(model=fit(model=_model(s, 32), x=x, y=y, seed=s), x=x_test), y=y_test)
            for s in range(40, 46)
        ]
        mean, deviation = node("digit_ops:spread", "mean", "deviation")(values=right)
        g.output(mean=mean, deviation=deviation)
    return g.json()


PROGRAMS: dict[str, Callable[[], JSON]] = {
    program.__name__.replace("_", "-"): program
    for program in (
        *(ensemble, text, sweep, k_fold, features, k_means, directions, distillation),
        *(federated, seeds),
    )
}


def request(name: str) -> JSON:
    """Return a request that runs the program; its only task's result has the outputs."""
    return {"name": name, "tasks": [{"name": "graph", "run": {"graph": PROGRAMS[name]()}}]}


def main(arguments: list[str]) -> int:
    if len(arguments) == 1 and arguments[0] in PROGRAMS:
        print(json.dumps(request(arguments[0]), indent=1))
        return 0
    for name, program in PROGRAMS.items():
        print(f"{name:14}{program.__doc__}")
    return 0 if not arguments else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
