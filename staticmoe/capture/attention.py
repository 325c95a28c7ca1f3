"""Flex attention in an iteration: compiled, or refused before its scores are allocated.

Uncompiled, torch computes it from all scores: B x H x S x S values, of which a compiled kernel holds none. Whatever
made the compiler give up (a limit, a mode, another thread), that way leads through one function of torch's: it is asked
here before it runs.

Letters: B batch, H heads of the queries, S tokens, D size of a head.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from staticmoe.capture.dynamo import Observer, compiled_callers
from staticmoe.capture.findings import Finding, is_allowed
from staticmoe.capture.source import locate

_MEND = (
    "call torch.compile(flex_attention), made once, from where the compiler can run; on a CPU use "
    "scaled_dot_product_attention"
)
_OPERATORS = "torch._higher_order_ops.flex_attention"
_DENSE = "sdpa_dense"
# Position of the tensors that the score function reads, in the arguments of the backward.
_BUFFERS = 12
# Scores are computed in fp32 at least.
_SCORE_BYTES = 4

_installing = threading.Lock()
_guarding = threading.local()
_guards: list[_Guard] = []


def score_bytes(query: Tensor, key: Tensor) -> int:
    """Bytes of the scores of [B, H, S, D] queries with keys."""
    batch, heads, rows, _ = query.shape
    return batch * heads * rows * key.shape[-2] * max(query.dtype.itemsize, _SCORE_BYTES)


class _Guard:
    """What becomes of a call: `found` takes a finding, and raises if it is to be refused.

    Attributes:
        stands_in: zeros take the place of the results, and nothing is found.
    """

    def __init__(self, modules: Mapping[int, str], found: Callable[[Finding], None]) -> None:
        self._modules, self._found = modules, found
        self.stands_in = False

    def ask(self, query: Tensor, key: Tensor) -> None:
        """Called before scores are allocated."""
        size = score_bytes(query, key)
        shape = " x ".join(map(str, (*query.shape[:3], key.shape[-2])))
        why = f"flex attention runs uncompiled, and would allocate {size} bytes of scores ({shape})"
        finding = Finding("SM606", why, _MEND, locate(self._modules))
        if not is_allowed(finding.code, finding.source):
            self._found(finding)


@contextlib.contextmanager
def guarded(modules: Mapping[int, str], found: Callable[[Finding], None]) -> Iterator[None]:
    """Within, this thread and the backward passes that it starts report uncompiled flex attention before it runs.

    Args:
        modules: id(module) -> dotted path.
        found: takes the finding.
    """
    guard = _Guard(modules, found)
    before = getattr(_guarding, "guard", None)
    with _installing:
        _guards.append(guard)
        _install()
    _guarding.guard = guard
    try:
        yield
    finally:
        _guarding.guard = before
        with _installing:
            _guards.remove(guard)
            if not _guards:
                _uninstall()


@contextlib.contextmanager
def stood_in() -> Iterator[None]:
    """Within, what is guarded computes no scores: for code that is compiled on trial, by a backend without kernels."""
    guard: _Guard | None = getattr(_guarding, "guard", None)
    if guard is None:
        yield
        return
    guard.stands_in = True
    try:
        yield
    finally:
        guard.stands_in = False


def _kernels(operators: Any) -> Iterator[tuple[Any, dict[Any, Any], Any, Any]]:
    """Operator, table, key and kernel of all that torch runs it by: looked up at each call, or kept from the first."""
    for operator in (operators.flex_attention, operators.flex_attention_backward):
        for table in (operator.py_kernels, operator._dispatch_cache):
            for key, kernel in list(table.items()):
                yield operator, table, key, kernel


def _install() -> None:
    """Have torch's dense kernels ask first, and its trace of a score function go unseen."""
    operators: Any = sys.modules.get(_OPERATORS)
    if operators is None:
        # Nobody has imported flex attention; who does so in the iteration is seen from the next on.
        return
    for operator, table, key, kernel in _kernels(operators):
        if getattr(kernel, "__name__", "").startswith(_DENSE):
            table[key] = _asking(operator, kernel)
    if not hasattr(operators.create_fw_bw_graph, "original"):
        operators.create_fw_bw_graph = _unseen(operators.create_fw_bw_graph)


def _uninstall() -> None:
    operators: Any = sys.modules.get(_OPERATORS)
    if operators is None:
        return
    for _, table, key, kernel in _kernels(operators):
        table[key] = getattr(kernel, "original", kernel)
    trace = operators.create_fw_bw_graph
    operators.create_fw_bw_graph = getattr(trace, "original", trace)


def _asking(operator: Any, dense: Callable[..., Any]) -> Callable[..., Any]:
    def asked(*args: Any, **options: Any) -> Any:
        guard = getattr(_guarding, "guard", None)
        if guard is None and _guards and torch._C._current_graph_task_id() != -1:
            # A thread of autograd's.
            guard = _guards[-1]
        if guard is not None and guard.stands_in:
            return stand_in(operator, args)
        if guard is not None:
            guard.ask(*args[:2])
        return dense(*args, **options)

    asked.original = dense  # type: ignore[attr-defined]
    return asked


def _unseen(trace: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(trace)
    def traced(*args: Any) -> Any:
        modes = _get_current_dispatch_mode_stack()
        observed = any(isinstance(mode, Observer) for mode in modes)
        # A rehearsal's tensors are those that such a trace is made of.
        if observed and not any(isinstance(mode, FakeTensorMode) for mode in modes):
            # For the backward, on memory that nothing has written: no part of the iteration.
            with _disable_current_modes():
                return trace(*args)
        return trace(*args)

    traced.original = trace  # type: ignore[attr-defined]
    return traced


def is_flex(operation: Any) -> bool:
    """Whether it is flex attention or its backward, which have no schema."""
    operators = sys.modules.get(_OPERATORS)
    return operators is not None and operation in (operators.flex_attention, operators.flex_attention_backward)


def stand_in(operation: Any, args: tuple[Any, ...]) -> Any:
    """Zeros in place of the results of flex attention or its backward, for an eye that looks at origins alone."""
    query, key, value = args[:3]
    if operation is sys.modules[_OPERATORS].flex_attention:
        logsumexp = query.new_zeros(query.shape[:3], dtype=torch.float32)
        return query.new_zeros(*query.shape[:3], value.shape[-1]), logsumexp, logsumexp.clone()
    buffers = args[_BUFFERS] if len(args) > _BUFFERS else ()
    grads = (torch.zeros_like(b) if isinstance(b, Tensor) and b.requires_grad else None for b in buffers)
    return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value), tuple(grads)


def will_be_compiled() -> bool:
    """Whether the running call comes from a function that the user compiled, and runs as written for now."""
    return bool(compiled_callers())
