"""Blocks that ask for a device value, or for a size by value. `x` is [4, 8]; the fault is on the marked line."""

from __future__ import annotations

import numpy
import torch
import torch.nn.functional as F
from torch import nn


def item(x):
    return x * x.sum().item()  # <- SM101 item


def item_mended(x):
    return x * x.sum()


def tolist(x):
    return x * x.sum(1).tolist()[0]  # <- SM102 tolist


def tolist_mended(x):
    return x * x.sum(1)[0]


def cpu(x):
    return x * x.sum().cpu()  # <- SM103 cpu


def cpu_mended(x):
    return x * x.sum()


def to_numpy(x):
    return x * float(x.detach().numpy().max())  # <- SM104 to_numpy


def to_numpy_mended(x):
    return x * x.detach().max()


def printing(x):
    shown = f"{x.mean():.3f}"  # <- SM105 printing
    return x * len(shown)


def printing_mended(x):
    shown = f"{x.shape}"
    return x * len(shown)


def representation(x):
    return x * min(len(repr(x)), 1)  # <- SM105 representation


def representation_mended(x):
    return x * min(len(repr(x.dtype)), 1)


def branch(x):
    if x.sum() > 0:  # <- SM106 branch
        return 2 * x
    return x


def branch_mended(x):
    return torch.where(x.sum() > 0, 2 * x, x)


def assertion(x):
    assert not x.isnan().any()  # <- SM106 assertion
    return x


def assertion_mended(x):
    return x.nan_to_num()


def membership(x):
    return x * (0.0 in x)  # <- SM106 membership


def membership_mended(x):
    return x * (x == 0).any()


def number(x):
    return x / float(x.abs().max())  # <- SM107 number


def number_mended(x):
    return x / x.abs().max()


def bound(x):
    n = x.argmax(1).max() * 0 + 2
    return sum((x * i for i in range(n)), x)  # <- SM108 bound


def bound_mended(x):
    return sum((x * i for i in range(2)), x)


def comparison(x):
    return x * 2 if torch.equal(x, x + 1) else x  # <- SM109 comparison


def comparison_mended(x):
    return torch.where((x == x + 1).all(), x * 2, x)


def closeness(x):
    return x * 2 if torch.allclose(x, x + 1) else x  # <- SM109 closeness


def closeness_mended(x):
    return torch.where((x - x - 1).abs().max() < 1e-8, x * 2, x)


def nonzero(x):
    return x * torch.nonzero(x).sum()  # <- SM110 nonzero


def nonzero_mended(x):
    return x * (x != 0).sum()


def where_alone(x):
    return x * torch.where(x > 0)[0].sum()  # <- SM110 where_alone


def where_alone_mended(x):
    return x * torch.where(x > 0, x, 0.0).sum()


def selected(x):
    return x * torch.masked_select(x, x > 0).sum()  # <- SM111 selected


def selected_mended(x):
    return x * torch.where(x > 0, x, 0.0).sum()


def mask_index(x):
    return x * x[x > 0].sum()  # <- SM112 mask_index


def mask_index_mended(x):
    y = x.clone()
    y[x <= 0] = 0.0
    return x * y.sum()


class MaskedWeights(nn.Module):
    """Its backward stores through the mask again, which is no second fault."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        y = self.inner(x)
        return x * y[y > 0].sum()  # <- SM112 MaskedWeights


class MaskedWeights_mended(MaskedWeights):
    def forward(self, x):
        y = self.inner(x)
        return x * torch.where(y > 0, y, 0.0).sum()


def mask_store(x):
    y = x.clone()
    y[x > 0] = x[0, 0]  # <- SM112 mask_store
    return y


def mask_store_mended(x):
    return torch.where(x > 0, x[0, 0], x)


def unique(x):
    return x * torch.unique(x.argmax(1)).sum()  # <- SM113 unique


def unique_mended(x):
    s = x.argmax(1).sort().values
    return x * (s[1:] != s[:-1]).sum()


def bincount(x):
    return x * torch.bincount(x.argmax(1), minlength=8)  # <- SM114 bincount


def bincount_mended(x):
    ids = x.argmax(1)
    return x * ids.new_zeros(8).scatter_add_(0, ids, torch.ones_like(ids))


def repeated(x):
    return x * x[0].repeat_interleave(x.argmax(0)).sum()  # <- SM115 repeated


def repeated_mended(x):
    counts = torch.ones_like(x[0], dtype=torch.int64)
    return x * x[0].repeat_interleave(counts, output_size=8).sum()


def by_size(x):
    length = torch.arange(4, device=x.device).sum()
    return x * torch.combinations(x[0], 2).sum() * length  # <- SM111 by_size


def by_size_mended(x):
    length = torch.arange(4, device=x.device).sum()
    return x * torch.outer(x[0], x[0]).triu(1).sum() * length


def classes(x):
    return x + F.one_hot(x.argmax(1) * 0 + 7)  # <- SM118 classes


def classes_mended(x):
    return x + F.one_hot(x.argmax(1) * 0 + 7, num_classes=8)


def host_tensor(x):
    return x * torch.tensor([1.0] * 8)  # <- SM117 host_tensor


def host_tensor_mended(x):
    return x * torch.ones(8)


def host_tensor_above(x):
    factors = torch.tensor([1.0] * 8)  # <- SM117 host_tensor_above
    y = x.detach()
    return y * factors + factors.sum()


def host_tensor_above_mended(x):
    factors = torch.ones(8)
    y = x.detach()
    return y * factors + factors.sum()


def host_array(x):
    return x * torch.from_numpy(numpy.ones(8, dtype=numpy.float32))  # <- SM117 host_array


def host_array_mended(x):
    return x * torch.full((8,), 1.0)


def made_on_host(x):
    rates = 1.0 / 2.0 ** torch.arange(0, 8, dtype=torch.float32)
    return x * rates.to(device=x.device, dtype=x.dtype)  # <- SM119 made_on_host


def made_on_host_mended(x):
    rates = 1.0 / 2.0 ** torch.arange(0, 8, dtype=torch.float32, device=x.device)
    return x * rates.to(device=x.device, dtype=x.dtype)


def made_on_host_like(x):
    return x + torch.zeros(4, 8).to(x)  # <- SM119 made_on_host_like


def made_on_host_like_mended(x):
    # A cast, and a move that stays on the host.
    torch.zeros(4, 8).to(torch.int64).to("cpu")
    with torch.device(x.device):
        return x + torch.zeros(4, 8).to(x)
