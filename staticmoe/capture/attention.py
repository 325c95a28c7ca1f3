"""Flex attention in an iteration: compiled, or refused before its scores are allocated.

Uncompiled, torch computes it from all scores: B x H x S x S values, of which a compiled kernel holds none. Whatever
made the compiler give up (a limit, a mode, another thread), that way leads through one function of torch's: it is asked
here before it runs.

Letters: B batch, H heads of the queries, S tokens, D size of a head.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from staticmoe.capture.dynamo import compiled_callers
from staticmoe.capture.findings import Finding, is_allowed
from staticmoe.capture.source import locate

_MEND = (
    "call torch.compile(flex_attention), made once, from where the compiler can run; on a CPU use "
    "scaled_dot_product_attention"
)
_OPERATORS = "torch._higher_order_ops.flex_attention"
_DENSE = "sdpa_dense"
_UNCOMPILED = "_flex_attention_hop_wrapper"
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
    """What becomes of a call: `found` takes a finding, and raises if it is to be refused."""

    def __init__(self, modules: Mapping[int, str], found: Callable[[Finding], None]) -> None:
        self._modules, self._found = modules, found

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
        _exchange(lambda kernel: _asking(kernel) if getattr(kernel, "__name__", "").startswith(_DENSE) else kernel)
    _guarding.guard = guard
    try:
        yield
    finally:
        _guarding.guard = before
        with _installing:
            _guards.remove(guard)
            if not _guards:
                _exchange(lambda kernel: getattr(kernel, "dense", kernel))


def _exchange(exchanged: Callable[[Any], Any]) -> None:
    """Exchange the kernels of flex attention in torch's tables: looked up at each call, or kept from the first.

    Where nobody has imported it there are none; who does so in the iteration is seen from the next on.
    """
    operators = sys.modules.get(_OPERATORS)
    for operator in (operators.flex_attention, operators.flex_attention_backward) if operators is not None else ():
        for table in (operator.py_kernels, operator._dispatch_cache):
            for key, kernel in list(table.items()):
                table[key] = exchanged(kernel)


def _asking(dense: Callable[..., Any]) -> Callable[..., Any]:
    def asked(query: Tensor, key: Tensor, *others: Any, **options: Any) -> Any:
        guard = getattr(_guarding, "guard", None)
        if guard is None and _guards and torch._C._current_graph_task_id() != -1:
            # A thread of autograd's.
            guard = _guards[-1]
        if guard is not None:
            guard.ask(query, key)
        return dense(query, key, *others, **options)

    asked.dense = dense  # type: ignore[attr-defined]
    return asked


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
    # torch's own way to run it without a compiler is compiled as well, by name.
    return any(getattr(function, "__name__", "") != _UNCOMPILED for function in compiled_callers())
