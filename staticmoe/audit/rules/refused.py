"""SM701-SM705, SM901: what the runner refuses before it runs anything, and iterations that end in an error."""

from __future__ import annotations

from collections.abc import Mapping

from staticmoe.audit.entry import Entry
from staticmoe.capture.findings import Finding, source_of_error
from staticmoe.capture.source import Source
from staticmoe.errors import BatchError, CaptureError, ConfigError, ModelError, OptimizerError, StaticMoEError

ENTRIES = (
    Entry(
        "SM701", "error", "a model that cannot be wrapped",
        "Wrapped, empty, on several devices, without a layer that takes part, or with parameters that get no gradient.",
        "As the message says.",
        "StaticMoERunner(DistributedDataParallel(model), ...)", "StaticMoERunner(model, ...)",
    ),
    Entry(
        "SM702", "error", "an optimizer that cannot step inside a graph",
        "Its step asks the host, or is not known. The rest is looked at with a plain SGD in its place.",
        "Use one that the message names, or capture_scope='forward_backward', where any optimizer steps outside.",
        "torch.optim.LBFGS(model.parameters())", "staticmoe.optim.AdamW(model.parameters())",
    ),
    Entry(
        "SM703", "error", "an example batch that cannot be staged",
        "Only tensors, numbers and None have a place in static inputs.",
        "Take texts and objects out of the batch.",
        "{'ids': ids, 'text': 'hello'}", "{'ids': ids}",
    ),
    Entry(
        "SM704", "error", "options that cannot work",
        "Two of them, or one and the device, exclude each other.",
        "As the message says.",
        "RunnerConfig(capture='cuda')   # and a model on the CPU", "RunnerConfig(capture='auto')",
    ),
    Entry(
        "SM705", "error", "another refusal of the runner",
        "See the message.",
        "As the message says.",
        "StaticMoERunner(model, ...)   # while another runner holds it", "first.close()\nStaticMoERunner(model, ...)",
    ),
    Entry(
        "SM901", "error", "the iteration raised an error",
        "Nothing behind it was looked at.",
        "Run the loss function once by hand; where other findings come first, mend those.",
        "y = x @ w   # of other shapes", "y = x @ w.T",
    ),
)  # fmt: skip

_CODES = {ModelError: "SM701", OptimizerError: "SM702", BatchError: "SM703", ConfigError: "SM704"}


def finding_of(error: Exception, modules: Mapping[int, str]) -> Finding:
    """A refusal of ours, or an error of the user's code, as a finding; `modules` maps id(module) to its path."""
    if not isinstance(error, StaticMoEError):
        why = f"{type(error).__name__}: {error}; nothing behind it was looked at"
        return Finding("SM901", why, "run the loss function once by hand", source_of_error(error, modules))
    if isinstance(error, CaptureError) and "use_reentrant=True" in str(error):
        return Finding("SM309", str(error), "pass use_reentrant=False", Source())
    # What is expected, what came and the mend are one sentence in our errors, parted by the first semicolon.
    why, _, mend = str(error).partition("; ")
    return Finding(_CODES.get(type(error), "SM705"), why, mend or "see the message", Source())
