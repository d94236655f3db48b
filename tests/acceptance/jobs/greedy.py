"""A job that takes more and more memory."""

import torch


class Eat:
    def __init__(self, ctx):
        self.held = []

    def step(self, ctx):
        self.held.append(torch.ones(16 * 2**20, dtype=torch.uint8))
