"""Python values that change, and numbers that are drawn, while an iteration runs."""

from __future__ import annotations

import random

import numpy
import torch
from torch import nn

ANNEALED = 1.0


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1  # <- SM201 Counter
        return x / self.calls


class Counter_mended(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return x / self.calls


class Annealed(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = 2.0

    def _anneal(self):
        self.temperature *= 0.99  # <- SM201 Annealed

    def forward(self, x):
        self._anneal()
        return (x / self.temperature).softmax(-1)


class Annealed_mended(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("temperature", torch.tensor(2.0))

    def forward(self, x):
        self.temperature.mul_(0.99)
        return (x / self.temperature).softmax(-1)


class Options(nn.Module):
    def __init__(self):
        super().__init__()
        self.options = {"scale": 1.0, "seen": 0}

    def forward(self, x):
        self.options["seen"] += len(x)  # <- SM203 Options
        return x * self.options["scale"]


class Options_mended(nn.Module):
    def __init__(self):
        super().__init__()
        self.options = {"scale": 1.0}
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen.add_(len(x))
        return x * self.options["scale"]


def closure(build):
    scale = 1.0

    def loss_fn(model, batch):
        nonlocal scale
        scale *= 0.5  # <- SM202 closure
        return scale * model(**batch)

    return {**build(), "loss_fn": loss_fn}


def closure_mended(build):
    given = build()
    scalars = given["scalars"]
    return {**given, "loss_fn": lambda model, batch: scalars["scale"] * model(**batch)}


def global_variable(build):
    def loss_fn(model, batch):
        global ANNEALED
        ANNEALED *= 0.5  # <- SM202 global_variable
        return ANNEALED * model(**batch)

    return {**build(), "loss_fn": loss_fn}


def global_variable_mended(build):
    return {**build(), "loss_fn": lambda model, batch: ANNEALED * 0 + model(**batch)}


def drawn(x):
    if random.random() < 2:  # <- SM204 drawn
        x = x.flip(0)
    return x


def drawn_mended(x):
    return torch.where(torch.rand((), device=x.device) < 0.5, x.flip(0), x)


def _noise():
    return float(numpy.random.rand())  # <- SM205 drawn_by_numpy


def drawn_by_numpy(x):
    return x * _noise()


def drawn_by_numpy_mended(x):
    return x * torch.rand((), device=x.device)


class Lazy_mended(nn.Module):
    """Values that settle in the first call are no fault."""

    def __init__(self):
        super().__init__()
        self.table, self.width = None, None

    def forward(self, x):
        if self.table is None:
            self.width = x.shape[-1]
            self.table = torch.arange(self.width, device=x.device) * 2.0
        return x * self.table
