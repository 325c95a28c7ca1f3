"""SM301-SM310: state that is bound anew, results that are kept, tensors of unknown or earlier origin, random state.

Found in and around the observed iterations, save SM302, which shows in model and optimizer as they are given.
"""

from __future__ import annotations

from collections.abc import Iterator

from staticmoe.audit.arguments import Arguments
from staticmoe.audit.entry import Entry
from staticmoe.capture.findings import Finding
from staticmoe.capture.source import Source

ENTRIES = (
    Entry(
        "SM301", "error", "state bound to a new tensor",
        "The name is bound while capturing and never again: every replay starts from the value of then.",
        "Register a buffer and write it in place.",
        "self.mean = self.mean * 0.9 + x.mean()", "self.mean.mul_(0.9).add_(x.mean())   # a registered buffer",
    ),
    Entry(
        "SM302", "error", "parameters that were replaced after the optimizer was built",
        "The optimizer moves tensors that the model no longer has: everything runs and nothing trains.",
        "Build the optimizer last, after load_state_dict(assign=True), to(dtype), pruning or adapters.",
        "optimizer = AdamW(model.parameters())\nmodel.head.weight = nn.Parameter(w)",
        "model.head.weight = nn.Parameter(w)\noptimizer = AdamW(model.parameters())",
    ),
    Entry(
        "SM303", "error", "a result that outlives the iteration",
        "An attribute, a hook or a list keeps a tensor of the graph's memory, which the next replay overwrites; and "
        "the name is bound only while capturing. In a list or dict: a warning, as nothing there is bound anew.",
        "Return it as a metric, or copy it into a buffer in place.",
        "self.last = y", "self.last.copy_(y.detach())   # a registered buffer",
    ),
    Entry(
        "SM304", "note", "a loss or metric that is memory of the model or of the batch",
        "The record holds its value of before the update, and a tensor kept from it changes with the next step.",
        "Nothing, if that is what you want; else compute it, or clone it.",
        "return loss, {'bias': model.bias}", "return loss, {'bias': model.bias.clone()}",
    ),
    Entry(
        "SM305", "error", "a tensor of an earlier iteration",
        "Its memory belongs to that iteration; a replay reads what was there when it was captured.",
        "Copy what must last into a buffer in place, and read that.",
        "y = x + cache['last']\ncache['last'] = y", "y = x + self.last\nself.last.copy_(y.detach())",
    ),
    Entry(
        "SM306", "error", "a tensor of unknown origin",
        "No operation of the iteration made it: another thread, a library, a cache inside torch. A replay reads its "
        "value of now.",
        "Make it a buffer or part of the batch, or compute it in the iteration, in the calling thread.",
        "Thread(target=lambda: out.append(2 * x))", "out.append(2 * x)",
    ),
    Entry(
        "SM307", "error", "memory that is read before it is written",
        "torch.empty holds whatever was there, in a replay what another part of the graph left.",
        "Write it first, or use torch.zeros.",
        "y = torch.empty_like(x) + x", "y = torch.zeros_like(x) + x",
    ),
    Entry(
        "SM308", "error", "manual_seed inside the iteration",
        "Every replay would draw the same numbers.",
        "Seed before the step: each step draws once from torch's default generator.",
        "torch.manual_seed(0)\nx = F.dropout(x)", "x = F.dropout(x)",
    ),
    Entry(
        "SM309", "error", "reentrant activation checkpointing",
        "It runs a backward inside the backward and keeps the random state on the host.",
        "Use the other form, which torch recommends as well.",
        "checkpoint(block, x, use_reentrant=True)", "checkpoint(block, x, use_reentrant=False)",
    ),
    Entry(
        "SM310", "error", "a random state from outside the iteration",
        "Every replay would go on from the state of the capture.",
        "Read the state in the iteration that sets it.",
        "torch.set_rng_state(self.state)", "state = torch.get_rng_state()\n...\ntorch.set_rng_state(state)",
    ),
)  # fmt: skip


def check(given: Arguments) -> Iterator[Finding]:
    """Parameters of the optimizer that the model does not have."""
    known = {id(parameter) for parameter in given.model.parameters()}
    held = [parameter for group in given.optimizer.param_groups for parameter in group["params"]]
    lost = [parameter for parameter in held if id(parameter) not in known]
    if not lost:
        return
    kept = {id(parameter) for parameter in held}
    shapes = [parameter.shape for parameter in lost]
    # What took their places has their shapes and is not in the optimizer.
    new = [name for name, p in given.model.named_parameters() if id(p) not in kept and p.shape in shapes]
    why = f"the optimizer holds {len(lost)} of {len(held)} parameters that the model does not have"
    why += f"; in their places the model has {', '.join(new[:5])}" if new else ""
    module = new[0].rpartition(".")[0] or "(the model)" if new else ""
    mend = "build the optimizer from model.parameters() after the model has its final parameters"
    yield Finding("SM302", why, mend, Source(module=module))
