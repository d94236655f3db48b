"""A policy that learns in a numpy world, with a replay buffer that torch and numpy share."""

import collections
import random

import numpy as np
import torch
from torch import nn


class World:
    """A pole to be balanced, roughly."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.state = self.rng.normal(size=4)
        self.age = 0

    def move(self, action):
        push = (1.0 if action else -1.0) + 0.1 * self.rng.normal()
        self.state = self.state + 0.1 * np.array([self.state[1], push, self.state[3], -push])
        self.age += 1
        reward = 1.0 - abs(self.state[2])
        if self.age > 20 or abs(self.state[2]) > 2:
            self.state, self.age = self.rng.normal(size=4), 0
        return self.state, reward


class Train:
    def __init__(self, ctx):
        self.world = World(3)
        self.policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2)).to(ctx.device)
        self.target = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2)).to(ctx.device)
        self.target.load_state_dict(self.policy.state_dict())
        self.opt = torch.optim.Adam(self.policy.parameters(), 1e-2)
        self.seen = np.zeros((64, 10), np.float32)
        self.replay = torch.from_numpy(self.seen)  # one memory
        self.rewards = collections.deque(maxlen=50)
        self.greed = 0.1

    def step(self, ctx):
        for n in range(8):
            before = self.world.state
            values = self.policy(torch.tensor(before, dtype=torch.float32, device=ctx.device))
            action = random.randrange(2) if random.random() > self.greed else int(values.argmax())
            after, reward = self.world.move(action)
            self.seen[(ctx.step * 8 + n) % 64] = [*before, *after, action, reward]
            self.rewards.append(reward)
        rows = self.replay[torch.from_numpy(np.random.choice(64, 16))].to(ctx.device)
        with torch.no_grad():
            wanted = rows[:, 9] + 0.9 * self.target(rows[:, 4:8]).amax(1)
        found = self.policy(rows[:, :4]).gather(1, rows[:, 8:9].long())[:, 0]
        loss = nn.functional.smooth_l1_loss(found, wanted)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        for slow, fast in zip(self.target.parameters(), self.policy.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.05)
        self.greed = min(0.95, self.greed * 1.1)
        return {"loss": loss, "reward": float(np.mean(self.rewards))}
