"""SM601-SM607: torch.compile. Compiled models, loss functions and options of the compiler show in what the runner is
given; SM607 is found by `staticmoe.audit.compiled_calls` while iterations run, the others by iterations that run
compiled, see `staticmoe.runner.proof`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from staticmoe.audit.arguments import Arguments
from staticmoe.audit.entry import Entry
from staticmoe.capture.dynamo import is_compiled
from staticmoe.capture.findings import Finding
from staticmoe.capture.holders import plain
from staticmoe.capture.source import Source
from staticmoe.runner.participants import participant_of
from staticmoe.runner.proof import WAYS_OUT

# torch's own recompile_limit.
_LIMIT = 8
_MEND = (
    "pass it as it was before torch.compile: RunnerConfig(compile='blocks') compiles what can be, or compile parts "
    "without layers that take part in the step"
)
_THREE = (
    "Where code must stay that the compiler cannot hold: torch.compiler.disable it, hoist it out of the compiled "
    "function, or make it a custom op, in that order."
)

ENTRIES = (
    Entry(
        "SM601", "error", "a compiled model, or compiled layers of the step",
        "What takes part in the step keeps books in Python, which the compiler would hold frozen, or compile anew in "
        "each step.",
        "Pass the model as it was, and let RunnerConfig(compile='blocks') compile what can be; parts without such "
        "layers may be compiled by hand.",
        "model = torch.compile(model)", "RunnerConfig(compile='blocks')   # and model = Model()",
    ),
    Entry(
        "SM602", "error", "a compiled loss function",
        "As SM601: it calls the model.",
        "Pass the function as it was.",
        "@torch.compile\ndef loss_fn(model, batch):", "def loss_fn(model, batch):",
    ),
    Entry(
        "SM603", "error", "a compiled function that runs uncompiled",
        "torch gives a function up without a word: where a mode or an option forbids it, at modules of its own, at "
        "what it cannot hold, and at the eighth form of one function. Its cache then has no entry, or all of them. The "
        "audit compiles for no device (backend 'eager'), so an error of the backend itself is not seen.",
        "Compile a function of your own that holds the modules. " + _THREE,
        "self.mlp = nn.Sequential(...)\nself.mlp.compile()   # torch leaves Sequential alone",
        "class MLP(nn.Module): ...   # with a forward\nself.mlp = MLP()\nself.mlp.compile()",
    ),
    Entry(
        "SM604", "error", "a compiled function that is compiled anew in each iteration",
        "A Python value that it reads changes each time: an integer attribute of a module, a number in the key of a "
        "cache, a tensor's _version. Steps take as long as compiling does, until torch gives it up; a graph holds "
        "the value of the capture. A float that only enters arithmetic becomes a variable after the first change.",
        "Keep the value in a buffer or in runner.scalars, the weights of a cache as one parameter. " + _THREE,
        "if self._key != (self.temperature,):\n    self._bank = torch.stack(self.weights)",
        "bank = torch.stack(self.weights)   # in each iteration, or one parameter",
    ),
    Entry(
        "SM605", "warning", "an option of the compiler that makes no capture safe",
        "capture_scalar_outputs lets a read of a device value into compiled code, where it waits for the device as "
        "ever; allow_unspec_int_on_nn_module makes an integer an argument, whose value a graph holds; a higher "
        "recompile_limit puts off that torch gives up.",
        "Set it back, and mend what it hides. " + _THREE,
        "torch._dynamo.config.capture_scalar_outputs = True", "n = torch.compiler.disable(count)(x)   # no read inside",
    ),
    Entry(
        "SM606", "error", "flex attention that runs uncompiled",
        "Uncompiled it holds the scores of every query with every key, B x H x S x S values. It is refused before "
        "they are allocated. No capture on a CPU can hold it.",
        "Call torch.compile(flex_attention), made once, from where the compiler can run; on a CPU use "
        "scaled_dot_product_attention.",
        "y = flex_attention(q, k, v)", "attend = torch.compile(flex_attention)   # once\ny = attend(q, k, v)",
    ),
    Entry(
        "SM607", "error", "a compiled function's view of a misaligned argument",
        "An argument that does not begin at a multiple of 16 bytes, as every other layer's slice of one routing tensor "
        "[B, S, L, K] with 6 experts a token, is copied before compiled code runs; the view that comes back is made "
        "anew at the offset that was compiled. With torch 2.13 and dynamic shapes it reads another layer's numbers, "
        "without an error.",
        "Hand it in contiguous, or keep layers apart from the start.",
        "flat = compiled(ids[:, :, layer])", "flat = compiled(ids[:, :, layer].contiguous())",
    ),
)  # fmt: skip


def check(given: Arguments) -> Iterator[Finding]:
    """Compiled modules that may not be, the outermost of each nest, compiled functions, and options of the compiler."""
    for path, module in _refused(given.model):
        yield Finding("SM601", f"{type(module).__name__} is compiled", _MEND, Source(module=path or "(the model)"))
    for what in ("loss_fn", "eval_fn", "token_mask"):
        original = _original(getattr(given, what))
        if original is not None:
            code = getattr(original, "__code__", None)
            source = Source() if code is None else Source(file=code.co_filename, line=code.co_firstlineno)
            yield Finding("SM602", f"{what} is compiled", "pass the function as it was before torch.compile", source)
    for option, value, usual in _options():
        why = f"torch._dynamo.config.{option} is {value}, which does not make a capture safe"
        mend = f"set it to {usual}, and {WAYS_OUT}"
        yield Finding("SM605", why, mend, severity="warning")


def taken_apart(given: Arguments) -> Arguments:
    """The same without what is refused, so that the rest is seen in the same pass; the model is to be put back."""
    while type(given.model).__name__ == "OptimizedModule":
        given = dataclasses.replace(given, model=given.model._orig_mod)
    # One of a nest at a time.
    while refused := list(_refused(given.model)):
        for path, module in refused:
            if getattr(module, "_compiled_call_impl", None) is not None:
                module._compiled_call_impl = None
            else:
                parent, _, name = path.rpartition(".")
                given.model.get_submodule(parent)._modules[name] = module._orig_mod
    functions: dict[str, Any] = {}
    for what in ("loss_fn", "eval_fn", "token_mask"):
        original = _original(getattr(given, what))
        if original is not None:
            functions[what] = original
    return dataclasses.replace(given, **functions)


def _refused(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    found: list[str] = []
    for path, module in model.named_modules():
        if any(not outer or path.startswith(f"{outer}.") for outer in found) or not is_compiled(module):
            continue
        if any(participant_of(part) is not None for part in module.modules()):
            found.append(path)
            yield path, module


def _original(function: Any) -> Any:
    """The function that torch.compile was given, or None."""
    return getattr(plain(function), "_torchdynamo_orig_callable", None)


def _loaded() -> bool:
    return "torch._dynamo" in sys.modules


def _options() -> Iterator[tuple[str, object, object]]:
    """Options that are set: name, value, and what is usual."""
    if not _loaded():
        return
    config = torch._dynamo.config
    for option in ("capture_scalar_outputs", "allow_unspec_int_on_nn_module"):
        if getattr(config, option, False):
            yield option, True, False
    if config.recompile_limit > _LIMIT:
        yield "recompile_limit", config.recompile_limit, _LIMIT
