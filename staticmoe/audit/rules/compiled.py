"""SM601, SM602: compiled models and loss functions, which show in what the runner is given."""

from __future__ import annotations

from collections.abc import Iterator

from staticmoe.audit.arguments import Arguments
from staticmoe.audit.entry import Entry
from staticmoe.capture.findings import Finding
from staticmoe.capture.holders import plain
from staticmoe.capture.source import Source

_MEND = "pass the model as it was before torch.compile; do not compile inside of what the runner captures"

ENTRIES = (
    Entry(
        "SM601", "error", "a compiled module",
        "Inductor's kernels are no operations that the emulated capture could record, and a recompile, a graph break "
        "or a fallback inside an iteration changes what a graph holds. capture_scalar_outputs, "
        "allow_unspec_int_on_nn_module and a higher recompile_limit do not make a capture safe.",
        "Pass the module as it was. Where compiled code must stay: torch.compiler.disable it, hoist the break out of "
        "the iteration, or make it a custom op, in that order.",
        "model = torch.compile(model)", "model = Model()",
    ),
    Entry(
        "SM602", "error", "a compiled loss function",
        "As SM601.",
        "Pass the function as it was.",
        "@torch.compile\ndef loss_fn(model, batch):", "def loss_fn(model, batch):",
    ),
)  # fmt: skip


def is_compiled(module: object) -> bool:
    """Whether torch.compile wrapped `module`, or its compile() was called."""
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def check(given: Arguments) -> Iterator[Finding]:
    """Compiled modules, the outermost of each nest, and compiled functions."""
    found: list[str] = []
    for path, module in given.model.named_modules():
        inside = any(not outer or path.startswith(f"{outer}.") for outer in found)
        if is_compiled(module) and not inside:
            found.append(path)
            why = f"{type(module).__name__} is compiled"
            yield Finding("SM601", why, _MEND, Source(module=path or "(the model)"))
    for what in ("loss_fn", "eval_fn", "token_mask"):
        function = plain(getattr(given, what))
        original = getattr(function, "_torchdynamo_orig_callable", None)
        if original is not None:
            code = getattr(original, "__code__", None)
            source = Source() if code is None else Source(file=code.co_filename, line=code.co_firstlineno)
            yield Finding("SM602", f"{what} is compiled", "pass the function as it was before torch.compile", source)
