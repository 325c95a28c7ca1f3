"""State that is bound anew, results that are kept, tensors from elsewhere, random state."""

from __future__ import annotations

import threading

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Decayed(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(8)

    def forward(self, x):
        self.mean = self.mean * 0.9 + x.mean(0)  # <- SM301 Decayed
        return x - self.mean


class Decayed_mended(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.mean(0))
        return x - self.mean


class ReboundBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        self.total = self.total + 1  # <- SM301 ReboundBuffer
        return x * self.total


class ReboundBuffer_mended(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        self.total += 1
        return x * self.total


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = None

    def forward(self, x):
        self.last = x * 2  # <- SM303 Kept
        return x


class Kept_mended(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(4, 8))

    def forward(self, x):
        self.last.copy_(x * 2)
        return x


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outputs = nn.Linear(8, 8), []
        self.inner.register_forward_hook(self._keep)

    def _keep(self, module, inputs, output):
        self.outputs.append(output)  # <- SM303 Hooked

    def forward(self, x):
        return self.inner(x)


class Hooked_mended(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("output", torch.zeros(4, 8))
        self.inner.register_forward_hook(self._keep)

    def _keep(self, module, inputs, output):
        self.output.copy_(output.detach())

    def forward(self, x):
        return self.inner(x)


def aliased(build):
    def loss_fn(model, batch):
        return model(**batch), {"scale": model.scale}  # <- SM304 aliased

    return {**build(), "loss_fn": loss_fn}


def aliased_mended(build):
    return {**build(), "loss_fn": lambda model, batch: (model(**batch), {"scale": model.scale.clone()})}


class Memory(nn.Module):
    """Keeps what it computed from the first batch."""

    def __init__(self):
        super().__init__()
        self.first = None

    def forward(self, x):
        if self.first is None:
            self.first = x.detach() * 2
        return x + self.first  # <- SM305 Memory


class Memory_mended(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("past", torch.zeros(4, 8))

    def forward(self, x):
        y = x + self.past
        self.past.copy_(x.detach() * 2)
        return y


def threaded(x):
    made = []
    thread = threading.Thread(target=lambda: made.append(x.detach() * 2))
    thread.start()
    thread.join()
    return x + made[0]  # <- SM306 threaded


def threaded_mended(x):
    return x + x.detach() * 2


class ThreadedFactor(nn.Module):
    """Its backward reads the tensor again, which is no second fault."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        made = []
        thread = threading.Thread(target=lambda: made.append(x.detach() * 2))
        thread.start()
        thread.join()
        y = self.inner(x) * made[0]  # <- SM306 ThreadedFactor
        return y + made[0]


class ThreadedFactor_mended(ThreadedFactor):
    def forward(self, x):
        made = x.detach() * 2
        return self.inner(x) * made + made


def unwritten(x):
    return x + torch.empty_like(x)  # <- SM307 unwritten


def unwritten_mended(x):
    return x + torch.empty_like(x).copy_(x.detach())


def seeded(x):
    torch.manual_seed(3)  # <- SM308 seeded
    return F.dropout(x, 0.5)


def seeded_mended(x):
    return F.dropout(x, 0.5)


class Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return checkpoint(self.second, self.first(x), use_reentrant=True)  # <- SM309 Reentrant


class Reentrant_mended(Reentrant):
    def forward(self, x):
        return checkpoint(self.second, self.first(x), use_reentrant=False)


class Restored(nn.Module):
    def __init__(self):
        super().__init__()
        self.state = [None]

    def forward(self, x):
        if self.state[0] is None:
            self.state[0] = torch.get_rng_state()
        torch.set_rng_state(self.state[0])  # <- SM310 Restored
        return F.dropout(x, 0.5)


class Restored_mended(nn.Module):
    def forward(self, x):
        state = torch.get_rng_state()
        y = F.dropout(x, 0.5)
        torch.set_rng_state(state)
        return y + F.dropout(x, 0.5)
