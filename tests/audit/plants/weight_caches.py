"""Banks of weights behind caches, casts that autocast keeps, memory that moves, sparse tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Bank(nn.Module):
    """Stacks the weights of its experts once, and says so to nobody."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        self._bank = None

    def forward(self, x):
        if self._bank is None:
            self._bank = torch.stack([expert.weight for expert in self.experts])
        y = sum(expert(x) for expert in self.experts)
        return y + torch.einsum("th,eoh->to", x, self._bank)  # <- SM401 Bank


class Bank_mended(nn.Module):
    def __init__(self):
        super().__init__()
        self.bank = nn.Parameter(torch.randn(2, 8, 8))

    def forward(self, x):
        return torch.einsum("th,eoh->to", x, self.bank)


class NamedBank(nn.Module):
    """Keyed by a name, made without a gradient."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        self._cache = {}

    def forward(self, x):
        key = "bank"
        if key not in self._cache:
            with torch.no_grad():
                self._cache[key] = torch.stack([expert.weight for expert in self.experts])
        y = sum(expert(x) for expert in self.experts)
        return y + (x @ self._cache[key].sum(0))  # <- SM402 NamedBank


class NamedBank_mended(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x):
        bank = torch.stack([expert.weight for expert in self.experts])
        return x @ bank.sum(0)


class Experts(nn.Module):
    """Experts that are used beside their bank as well, so that they have gradients of their own."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        self._bank, self._key, self._banks = None, None, {}

    def stacked(self):
        return torch.stack([expert.weight for expert in self.experts])

    def beside(self, x):
        return sum(expert(x) for expert in self.experts)

    def forward(self, x):
        return self.beside(x) + torch.einsum("th,eoh->to", x, self.stacked())


class FloatKeyBank(Experts):
    """Keyed by a number that a schedule moves between steps: within one value the bank is stale."""

    alpha = 1.0

    def forward(self, x):
        if self.alpha not in self._banks:
            self._banks[self.alpha] = self.alpha * self.stacked()
        return self.beside(x) + torch.einsum("th,eoh->to", x, self._banks[self.alpha])  # <- SM401 FloatKeyBank


FloatKeyBank_mended = Experts


class VersionedBank(Experts):
    """Keyed by version counters."""

    def forward(self, x):
        key = [expert.weight._version for expert in self.experts]  # <- SM404 VersionedBank
        if key != self._key:
            self._bank, self._key = self.stacked(), key
        return self.beside(x) + torch.einsum("th,eoh->to", x, self._bank)  # <- SM401 VersionedBank


VersionedBank_mended = Experts


class GradModeBank(Experts):
    """Keyed by the grad mode, so that evaluation gets a bank of its own; both are kept."""

    def forward(self, x):
        mode = torch.is_grad_enabled()
        if mode not in self._banks:
            self._banks[mode] = self.stacked()
        return self.beside(x) + torch.einsum("th,eoh->to", x, self._banks[mode])  # <- SM401 GradModeBank


GradModeBank_mended = Experts


class WarmBank(Experts):
    """An uncaptured step has stacked the bank before."""

    def __init__(self):
        super().__init__()
        self(torch.randn(4, 8)).sum().backward()

    def forward(self, x):
        if self._bank is None:
            self._bank = self.stacked()
        return self.beside(x) + torch.einsum("th,eoh->to", x, self._bank)  # <- SM403 WarmBank


WarmBank_mended = Experts


class WarmCopy(Experts):
    """As above, without a history: only its values give it away."""

    def __init__(self):
        super().__init__()
        self._banks["transposed"] = self.stacked().detach().mT.bfloat16().contiguous()

    def forward(self, x):
        bank = self._banks["transposed"].sum(0)  # <- SM403 WarmCopy
        return self.beside(x) + x @ bank.float()


class WarmCopy_mended(Experts):
    """Constants that are no weights, a frozen copy in a buffer, and copies of what does not train."""

    def __init__(self):
        super().__init__()
        self.register_buffer("anchor", self.stacked().detach())
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self._banks = {"noise": torch.randn(2, 8, 8), "mask": torch.ones(8, 8), "frozen": self.frozen.weight.clone()}
        self._once = None

    def forward(self, x):
        if self._once is None:
            self._once = self.frozen.weight.mT.contiguous()
        banks = self.stacked() * self._banks["mask"] + self._banks["noise"] * self._banks["frozen"] + self.anchor
        return self.beside(x) + torch.einsum("th,eoh->to", x, banks) @ self._once


class Cast(nn.Module):
    """A half-precision copy of its weight that it makes once."""

    def __init__(self):
        super().__init__()
        self.inner, self.half = nn.Linear(8, 8), {}

    def forward(self, x):
        if not self.half:
            self.half["weight"] = self.inner.weight.detach().bfloat16()
        y = x.bfloat16() @ self.half["weight"]  # <- SM402 Cast
        return self.inner(x) + y.float()


class Cast_mended(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x) + (x.bfloat16() @ self.inner.weight.bfloat16()).float()


class Autocast(nn.Module):
    """Under an outer autocast region that spans iterations, its casts are kept."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
            return F.linear(x, self.inner.weight).float()  # <- SM206 Autocast


class Autocast_mended(Autocast):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x).float()


class Resized(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("space", torch.zeros(8))

    def forward(self, x):
        self.space.resize_(4)  # <- SM501 Resized
        return x


class Resized_mended(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("space", torch.zeros(8))

    def forward(self, x):
        self.space[:4].zero_()
        return x


def grown(x):
    y = x.detach().clone()
    y.resize_(16, 8)  # <- SM501 grown
    return x + y[:4]


def grown_mended(x):
    y = torch.zeros(16, 8)
    y[:4].copy_(x.detach())
    return x + y[:4]


def sparse(x):
    y = x.detach().to_sparse()  # <- SM502 sparse
    return x + y.to_dense()


def sparse_mended(x):
    return x + x.detach()


def sparse_gradient_mended(x):
    return x + F.embedding(x.argmax(1), x.detach(), sparse=False)
