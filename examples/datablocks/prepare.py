"""Digits as they were uploaded become examples to learn from: in one order, from -1 to 1, split."""

import torch


def split(ctx, digits, *, test=297, seed=0):
    """`digits` are tensors by name, as they lie in the datablock."""
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
