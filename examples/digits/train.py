"""Learn to read handwritten digits: scikit-learn's 1,797 scanned digits, a small convolutional net.

A job is a class. It imports nothing of Roundhouse and has no code that saves or loads. It may be
paused between any two steps and go on elsewhere; the result has the same bits.
"""

import hashlib

import torch
from torch import nn
from torch.nn import functional as F

TRAINED_ON = 1500  # of 1,797; the rest is for testing
BATCH = 32


class Train:
    """A training job; `work` minibatches make one step."""

    def __init__(self, ctx, *, lr=2e-3, width=16, steps=400, seed=0, work=1):
        torch.manual_seed(seed)
        images, labels = (tensor.to(ctx.device) for tensor in digits())
        self.train = images[:TRAINED_ON], labels[:TRAINED_ON]
        self.test = images[TRAINED_ON:], labels[TRAINED_ON:]
        self.model = net(width).to(ctx.device)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr)
        self.rate = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, T_max=steps)
        # a torch generator, because its state can be captured
        self.dice = torch.Generator().manual_seed(seed)
        self.steps, self.work = steps, work

    def step(self, ctx):
        loss = sum(self.loss(*self.batch()) for _ in range(self.work)) / self.work
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        self.rate.step()
        if ctx.step % 100 == 0:
            print(f"step {ctx.step}: loss {loss.item():.4f}")
        if ctx.step == self.steps:
            ctx.finish(
                {
                    "loss": loss.item(),
                    "accuracy": self.accuracy(),
                    "parameters": fingerprint(self.model),
                }
            )
        return {"loss": loss.item()}

    def batch(self):
        images, labels = self.train
        chosen = torch.randint(len(labels), (BATCH,), generator=self.dice)
        return images[chosen], labels[chosen]

    def loss(self, images, labels):
        return F.cross_entropy(self.model(images), labels)

    @torch.no_grad()
    def accuracy(self):
        images, labels = self.test
        self.model.eval()
        return (self.model(images).argmax(1) == labels).float().mean().item()


def digits():
    """Return images (1797, 1, 8, 8) from 0 to 1, and labels (1797,)."""
    from sklearn.datasets import load_digits  # slow to import, and needed only once in a life

    bundled = load_digits()
    images = torch.tensor(bundled.images, dtype=torch.float32) / 16
    return images.unsqueeze(1), torch.tensor(bundled.target)


def net(width):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(2 * width * 4 * 4, 10),
    )


def fingerprint(model):
    """Return the SHA-256 of all parameters, bit by bit."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
