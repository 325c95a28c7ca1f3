"""SM101-SM109, SM117-SM119: a device value that Python asks for, or a host value on its way to the device.

Found by the recorder of `staticmoe.capture`; here they are explained.
"""

from __future__ import annotations

from staticmoe.audit.entry import Entry

_WAITS = (
    "The host waits for the device; in a CUDA graph that is an error, and in a replay the value is that of capture."
)

ENTRIES = (
    Entry(
        "SM101", "error", "Tensor.item()", _WAITS,
        "Compute with the tensor; hand a number from outside in by runner.scalars.",
        "scale = x.abs().max().item()\ny = x / scale", "scale = x.abs().max()\ny = x / scale",
    ),
    Entry(
        "SM102", "error", "Tensor.tolist()", _WAITS,
        "Index, split or sum on the device; return what you only want to look at as a metric.",
        "first = x.sum(1).tolist()[0]", "first = x.sum(1)[0]",
    ),
    Entry(
        "SM103", "error", "Tensor.cpu()", _WAITS,
        "Leave it on the device; return what you only want to look at as a metric.",
        "stats.append(loss.cpu())", "return loss, {'stat': stat}",
    ),
    Entry(
        "SM104", "error", "a conversion to numpy", _WAITS,
        "Write it in torch; numpy belongs before the step, in the loader.",
        "m = np.median(x.detach().numpy())", "m = x.median()",
    ),
    Entry(
        "SM105", "error", "printing or formatting a tensor", _WAITS,
        "Return it as a metric and print the result of the step.",
        "print(f'{loss:.3f}')", "return loss, {'shown': shown}   # then print(result.metrics['shown'])",
    ),
    Entry(
        "SM106", "error", "a Python branch on a tensor", _WAITS + " One branch is recorded, and taken for ever.",
        "Choose on the device.",
        "if x.sum() > 0:\n    x = 2 * x", "x = torch.where(x.sum() > 0, 2 * x, x)",
    ),
    Entry(
        "SM107", "error", "int(tensor), float(tensor)", _WAITS,
        "Leave it a tensor: arithmetic of tensors of no dimension broadcasts as numbers do.",
        "y = x * float(w.norm())", "y = x * w.norm()",
    ),
    Entry(
        "SM108", "error", "a tensor as a Python index or bound", _WAITS,
        "Index by the tensor itself, or loop to a constant bound and mask.",
        "for i in range(lengths.max()):\n    y = y + f(i)",
        "for i in range(MAX_LENGTH):\n    y = y + torch.where(i < lengths, f(i), 0)",
    ),
    Entry(
        "SM109", "error", "torch.equal, torch.allclose", _WAITS,
        "Compare element by element and choose on the device.",
        "if torch.equal(a, b):\n    y = 2 * y", "y = torch.where((a == b).all(), 2 * y, y)",
    ),
    Entry(
        "SM117", "error", "a tensor made of host values",
        "torch.tensor, torch.as_tensor, new_tensor and from_numpy copy from memory that no graph holds: the replay "
        "reads the value of the capture, or copies from memory that is gone.",
        "Make a constant a buffer; make it in the iteration by torch.full, zeros or arange; hand what changes in by "
        "the batch or runner.scalars.",
        "y = x * torch.tensor([1.0, 2.0])",
        "self.register_buffer('factors', torch.tensor([1.0, 2.0]))\ny = x * self.factors",
    ),
    Entry(
        "SM118", "error", "one_hot without num_classes", _WAITS + " It needs the largest value for its shape.",
        "Say how many classes there are.",
        "F.one_hot(ids)", "F.one_hot(ids, num_classes=8)",
    ),
    Entry(
        "SM119", "error", "a tensor made on the host, moved to the device",
        "A GPU refuses such a copy in a capture. On a CPU there is none: told by a factory without device=, and by "
        ".to(x.device), .to(x), .cuda() of what it made.",
        "Make it on the device, or once, as a buffer. In somebody else's module: `with torch.device(x.device):` around "
        "the call.",
        "steps = torch.arange(8).to(x.device)", "steps = torch.arange(8, device=x.device)",
    ),
)  # fmt: skip
