"""SM401, SM402: what was computed from weights once and is used in every iteration.

Found by the recorder of `staticmoe.capture`: a read of what an earlier iteration computed from parameters alone.
"""

from __future__ import annotations

from staticmoe.audit.entry import Entry

ENTRIES = (
    Entry(
        "SM401", "error", "a bank of weights that is kept from iteration to iteration",
        "Stacked or cast once and kept behind a cache, the bank goes on holding the first weights: a replay never "
        "looks at the cache's key, be it a version counter or a flag.",
        "Keep the weights of all experts as one parameter [E, out, in] from the start, as StaticMoE does, and let the "
        "modules hold views; or stack in every iteration.",
        "if self._bank is None:\n    self._bank = torch.stack([e.weight for e in self.experts])",
        "# once, in the constructor\nself.bank = nn.Parameter(torch.stack([e.weight for e in experts]))",
    ),
    Entry(
        "SM402", "error", "a bank of weights that was kept without a gradient",
        "As SM401; and what was made under no_grad, or detached, gives the weights no gradient: a step that uses it "
        "does not train them.",
        "As SM401; never share a bank between evaluation and training.",
        "with torch.no_grad():\n    self._bank = torch.stack([e.weight for e in self.experts])",
        "# once, in the constructor\nself.bank = nn.Parameter(torch.stack([e.weight for e in experts]))",
    ),
)  # fmt: skip
