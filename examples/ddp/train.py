"""Learn to read handwritten digits with several ranks: plain DistributedDataParallel.

The default process group exists when the job begins. The ranks take turns on as many devices as the
task holds at the time. The result has the same bits, however many devices it holds and when.
"""

import hashlib

import torch
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TRAINED_ON = 1500  # of 1,797; the rest is for testing
BATCH = 16  # of each rank


class Train:
    """A training job.

    `work` minibatches on each rank make one step, and the ranks see different digits.
    """

    def __init__(self, ctx, *, lr=2e-3, width=64, steps=400, seed=0, work=4):
        torch.manual_seed(seed)  # all ranks begin with the same parameters
        images, labels = (tensor.to(ctx.device) for tensor in digits())
        self.train = images[:TRAINED_ON], labels[:TRAINED_ON]
        self.test = images[TRAINED_ON:], labels[TRAINED_ON:]
        self.model = DistributedDataParallel(net(width).to(ctx.device))
        self.opt = torch.optim.AdamW(self.model.parameters(), lr)
        torch.manual_seed(1000 * seed + ctx.rank)  # and each draws random numbers of its own
        self.steps, self.work = steps, work

    def step(self, ctx):
        self.opt.zero_grad()
        for n in range(self.work):
            if n < self.work - 1:
                with self.model.no_sync():  # gradients add up; the last one is averaged
                    self.loss().backward()
            else:
                loss = self.loss()
                loss.backward()
        self.opt.step()
        distributed.all_reduce(total := loss.detach().clone())
        mean = total.item() / ctx.world_size
        if ctx.step % 100 == 0 and ctx.rank == 0:
            print(f"step {ctx.step}: loss {mean:.4f}")
        if ctx.step == self.steps:
            told = {"loss": mean, "accuracy": self.accuracy()}
            ctx.finish({**told, "parameters": fingerprint(self.model.module)})
        return {"loss": mean}

    def loss(self):
        images, labels = self.train
        chosen = torch.randint(len(labels), (BATCH,))
        return F.cross_entropy(self.model(images[chosen]), labels[chosen]) / self.work

    @torch.no_grad()
    def accuracy(self):
        images, labels = self.test
        self.model.eval()
        return (self.model(images).argmax(1) == labels).float().mean().item()


def digits():
    """Return images (1797, 64) from 0 to 1, and labels (1797,)."""
    from sklearn.datasets import load_digits  # slow to import, and needed only once in a life

    bundled = load_digits()
    return torch.tensor(bundled.data, dtype=torch.float32) / 16, torch.tensor(bundled.target)


def net(width):
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.25), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, 10),
    )  # fmt: skip


def fingerprint(model):
    """Return the SHA-256 of all parameters, bit by bit."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
