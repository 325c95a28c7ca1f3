"""SM401-SM404: what was computed from weights once and is used in every iteration.

Found by the recorder of `staticmoe.capture`: a read of what an earlier iteration computed from parameters alone; a read
of what was there before the first and holds weights; a read of a parameter's version counter.
"""

from __future__ import annotations

from staticmoe.audit.entry import Entry

ENTRIES = (
    Entry(
        "SM401", "error", "a bank of weights that is kept from iteration to iteration",
        "Stacked or cast once and kept behind a cache, the bank goes on holding the first weights: a replay never "
        "looks at the cache's key, be it a version counter or a flag.",
        "Keep the weights of all experts as one parameter [E, out, in] from the start: "
        "staticmoe.integrations.modulelist builds it from a ModuleList, turns its state dicts into those of the bank "
        "and back, and checks that every gradient is the same. Or stack in every iteration.",
        "if self._bank is None:\n    self._bank = torch.stack([e.w1.weight for e in self.experts])",
        "# once, where the model is built\n"
        "from staticmoe.integrations.modulelist import from_modulelist\n"
        "block.experts = from_modulelist(block.experts)",
    ),
    Entry(
        "SM402", "error", "a bank of weights that was kept without a gradient",
        "As SM401; and what was made under no_grad, or detached, gives the weights no gradient: a step that uses it "
        "does not train them.",
        "As SM401; never share a bank between evaluation and training.",
        "with torch.no_grad():\n    self._bank = torch.stack([e.weight for e in self.experts])",
        "# once, in the constructor\nself.bank = nn.Parameter(torch.stack([e.weight for e in experts]))",
    ),
    Entry(
        "SM403", "error", "a copy of weights from before the first iteration",
        "An uncaptured step has left it behind a cache: to a graph it is a constant, and every replay goes on with the "
        "weights of then. Known by its history, or by values that a parameter still has; a warning where only the "
        "values say so and the parameter is read as well. Not seen: a copy that many steps have left behind, one of "
        "which a parameter is not a whole block, or one that is a registered buffer.",
        "As SM401; a frozen copy that is meant belongs into a buffer.",
        "model(batch)   # stacks self._bank\nrunner = StaticMoERunner(model, ...)",
        "# once, in the constructor\nself.bank = nn.Parameter(torch.stack([e.weight for e in experts]))",
    ),
    Entry(
        "SM404", "error", "a parameter's version counter, read in the iteration",
        "As the key of a cache: a replay runs no Python, so it never looks at the counter, and what it writes is not "
        "counted. The cache then holds weights of an earlier step, or of no step at all.",
        "As SM401.",
        "key = tuple(e.weight._version for e in self.experts)",
        "bank = torch.stack([e.weight for e in self.experts])   # in every iteration",
    ),
)  # fmt: skip
