"""SM110-SM116: results whose size depends on values. Found by the recorder of `staticmoe.capture`."""

from __future__ import annotations

from staticmoe.audit.entry import Entry

_SIZE = "The host must learn the size before the next operation can be launched; a graph holds one size for ever."

ENTRIES = (
    Entry(
        "SM110", "error", "nonzero, argwhere, where(mask)", _SIZE,
        "Keep the mask and choose by torch.where(mask, a, b); or bound the count by nonzero_static(size=n).",
        "rows = mask.nonzero()\ny = x[rows]", "y = torch.where(mask[:, None], x, 0)",
    ),
    Entry(
        "SM111", "error", "masked_select", _SIZE, "Keep the shape and put a neutral value where the mask is false.",
        "s = x.masked_select(mask).sum()", "s = torch.where(mask, x, 0).sum()",
    ),
    Entry(
        "SM112", "error", "a boolean mask as an index", _SIZE + " Storing one Python number through a mask is fine.",
        "Keep the shape: torch.where, masked_fill, or a weighted mean.",
        "loss = losses[labels != -100].mean()",
        "valid = labels != -100\nloss = torch.where(valid, losses, 0).sum() / valid.sum().clamp(min=1)",
    ),
    Entry(
        "SM113", "error", "unique, unique_consecutive", _SIZE, "Sort, and mark where neighbours differ.",
        "n = len(torch.unique(ids))",
        "s = ids.sort().values\nn = 1 + (s[1:] != s[:-1]).sum()",
    ),
    Entry(
        "SM114", "error", "bincount", _SIZE, "Count into a tensor of a constant size.",
        "n = torch.bincount(ids, minlength=8)",
        "n = ids.new_zeros(8).scatter_add_(0, ids, torch.ones_like(ids))",
    ),
    Entry(
        "SM115", "error", "repeat_interleave without output_size", _SIZE,
        "Say how long the result is, which is a constant where the total is one.",
        "y = x.repeat_interleave(counts, dim=0)", "y = x.repeat_interleave(counts, dim=0, output_size=TOTAL)",
    ),
    Entry(
        "SM116", "error", "another result whose size depends on values", _SIZE,
        "Use a form of constant size and a mask.",
        "y = op(x)", "y = op_of_constant_size(x, size=n)",
    ),
)  # fmt: skip
