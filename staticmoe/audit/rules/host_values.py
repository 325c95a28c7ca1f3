"""SM201-SM207: Python values that a replay holds frozen.

SM201 to SM206 are found around and in the observed iterations; SM207 shows in the optimizer as it is given.
"""

from __future__ import annotations

from collections.abc import Iterator

from staticmoe.audit.arguments import Arguments
from staticmoe.audit.entry import Entry
from staticmoe.capture.findings import Finding
from staticmoe.capture.source import Source

_FROZEN = "Python runs while capturing and never again: a replay goes on with the number of then."
_UNSEEN = " Not seen: values that nothing here names, such as time.time(), files, or objects inside objects."
_MEND_STEP = "keep the count in a tensor: optimizer.state[p]['step'] = torch.tensor(float(n))"

ENTRIES = (
    Entry(
        "SM201", "error", "a number in a module attribute that the iteration changes", _FROZEN + _UNSEEN,
        "Count in a buffer in place, or set the number from outside by runner.scalars.",
        "self.calls += 1\ny = x / self.calls", "self.calls.add_(1)   # a registered buffer\ny = x / self.calls",
    ),
    Entry(
        "SM202", "error", "a variable that the iteration changes", _FROZEN + _UNSEEN,
        "Hand the number in with the batch or by runner.scalars.",
        "def loss_fn(model, batch):\n    global warmup\n    warmup *= 0.9\n    return warmup * model(batch)",
        "def loss_fn(model, batch):\n    return runner.scalars['warmup'] * model(batch)",
    ),
    Entry(
        "SM203", "error", "a number in a container that the iteration changes", _FROZEN + _UNSEEN,
        "As for an attribute: a buffer in place, or runner.scalars.",
        "self.options['seen'] += len(x)", "self.seen.add_(len(x))",
    ),
    Entry(
        "SM204", "error", "a number drawn from random",
        "The replay repeats the number of the capture. A generator of your own, random.Random(0), is not seen here; "
        "the self-check is likely to find it. time.time() and its like cannot be seen at all.",
        "Draw on the device, or outside, and hand the number in.",
        "if random.random() < 0.5:\n    x = x.flip(0)",
        "x = torch.where(torch.rand((), device=x.device) < 0.5, x.flip(0), x)",
    ),
    Entry(
        "SM205", "error", "a number drawn from numpy.random",
        "As SM204. A numpy Generator of your own, default_rng(0), is not seen.",
        "Draw on the device, or outside, and hand the number in.",
        "noise = np.random.rand()", "noise = torch.rand((), device=x.device)",
    ),
    Entry(
        "SM206", "error", "a weight's cast that autocast kept",
        "Inside one autocast region torch casts a weight once and keeps the copy; a region that spans iterations hands "
        "every replay the copy of the first weights.",
        "Let RunnerConfig(autocast=...) do it, or do not switch the cache on in the loss function.",
        "with torch.autocast('cuda', torch.bfloat16, cache_enabled=True):", "RunnerConfig(autocast=torch.bfloat16)",
    ),
    Entry(
        "SM207", "error", "an optimizer that counts its steps in Python",
        "A bias correction by a Python number stands still in a replay.",
        "Keep the count in a tensor; optimizers of torch do so since 1.12, checkpoints of before may not.",
        "optimizer.state[p]['step'] = 100", "optimizer.state[p]['step'] = torch.tensor(100.0)",
    ),
)  # fmt: skip


def check(given: Arguments) -> Iterator[Finding]:
    """Step counts of the optimizer's state that are Python numbers."""
    names = {id(parameter): name for name, parameter in given.model.named_parameters()}
    for parameter, state in given.optimizer.state.items():
        for key, value in state.items() if isinstance(state, dict) else ():
            if type(value) in (int, float):
                name = names.get(id(parameter), "a parameter")
                why = f"the optimizer keeps '{key}' of {name} as the Python number {value}"
                # One line for all of them: they come from one loader.
                yield Finding("SM207", why, _MEND_STEP, Source(module=name.rpartition(".")[0] or "(the model)"))
                return
