"""Turn uploaded digits into training examples: shuffled once, scaled to -1..1, and split."""

import torch


def split(ctx, digits, *, test=297, seed=0):
    """Split the digits; `digits` are the datablock's tensors by name."""
    images = digits["images"].float().div(8).sub(1).unsqueeze(1)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    images, labels = images[order], digits["labels"][order]
    return {
        "examples": {
            "train.images": images[test:],
            "train.labels": labels[test:],
            "test.images": images[:test],
            "test.labels": labels[:test],
        }
    }
