"""The eye on an iteration: sees every operation, checks where its inputs come from, and may write a tape."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointFunction

from staticmoe.capture import collectives
from staticmoe.capture.attention import is_flex, stand_in, will_be_compiled
from staticmoe.capture.dynamo import CompiledCalls, Observer
from staticmoe.capture.findings import Finding, Findings, audit_error, is_allowed
from staticmoe.capture.host_reads import HostReadGuard, random_state_hooks
from staticmoe.capture.provenance import Provenance, storage_key, tensors_in
from staticmoe.capture.rules import Refusal, refusal
from staticmoe.capture.schemas import mutated, name_of, namespace_of, overwritten, python_implementation
from staticmoe.capture.source import Source, locate
from staticmoe.capture.tape import Entry, Tape, operation, without_history

log = logging.getLogger(__name__)

# Of this package's operations.
_NAMESPACE = __name__.partition(".")[0]
# Between the hooks of the random state and who asks for it.
_HOOK_FRAMES = 4
_MEND_ORIGIN = "make it a parameter, a buffer or part of the batch, or compute it inside the iteration"
_MEND_CACHE = (
    "compute it in every iteration; weights that are used together are best kept as one parameter from the start"
)
_MEND_SLICE = "make it contiguous once, or keep what is used apart, apart from the start"
# What a GPU's widest loads ask for, in bytes.
_ALIGNMENT = 16
_INDICES = (torch.int32, torch.int64)
# Indexed assignment turns a Python number into a tensor without an operation; it is a literal like any other.
_HALF = (torch.bfloat16, torch.float16)
_TAKES_LITERAL = {"index_put_", "_index_put_impl_", "fill_", "copy_"}
_EMPTY = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}


class Recorder(Observer):
    """Observes one iteration; with a tape it records it.

    Args:
        provenance: book of origins, shared by all iterations of one program.
        modules: id(module) -> dotted path, for messages.
        tape: where to write, or None to observe only.
        audit: what to do about what a replay could not repeat: "error" refuses it, "warn" logs it, "off" only notes
            what is written.
        findings: with "error", takes what is wrong, and the iteration goes on so that the rest is seen as well; None
            refuses at once. With "warn", takes what was logged, to log it once.
        holder: names what holds a tensor between iterations, "" where nothing does.
        calls: takes the compiled functions that are called; they run as they were written.
    """

    def __init__(
        self,
        provenance: Provenance,
        modules: Mapping[int, str],
        tape: Tape | None = None,
        *,
        audit: str = "error",
        findings: Findings | None = None,
        holder: Callable[[Tensor], str] = lambda tensor: "",
        calls: CompiledCalls | None = None,
    ) -> None:
        super().__init__()
        self.calls = calls
        self._provenance = provenance
        self._modules = modules
        self._tape = tape
        self._audit = audit
        self._refuses = findings is None
        self._findings = findings if findings is not None else Findings()
        self._holder = holder
        self._unseen_writes = False
        self._quiet = 0
        self._caller: Source | None = None
        # With the memory itself, so that its key cannot come to mean other memory.
        self._lifted: dict[int, tuple[StorageWeakRef, Source]] = {}

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Context of one iteration.

        Raises:
            AuditError: at an operation that a replay could not repeat: at the first, or, where they are collected, at
                one after which the iteration cannot go on.
        """
        self._provenance.begin_iteration()
        self._findings.begin_iteration()
        if self._audit == "off" and self._tape is None:
            with self:
                yield
            return
        hooks = random_state_hooks(self._get_random_state, self._set_random_state, self._seed_inside)
        with hooks, HostReadGuard(self._fault, self._reading), self:
            yield

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Within: one call of the user's that was reported as a whole."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._run_higher(func, args, kwargs)
        if namespace_of(func) == "profiler" or collectives.is_wrapper(func):
            return func(*args, **kwargs)
        if collectives.is_unfinished(types):
            # It waits first, and comes by again as the plain tensor that it wraps.
            return NotImplemented
        implementation = python_implementation(func, args, kwargs)
        if implementation is not None:
            return self._run_implementation(func, implementation, args, kwargs)
        inputs = tensors_in(args, kwargs)
        if self._audit != "off":
            reason = refusal(func, args, kwargs, self._is_literal)
            if reason is not None:
                lasting = reason.ends and self._provenance.outlives(args[0])
                self._fault(reason._replace(why=f"{func} {reason.why}", ends=lasting))
            self._check_origins(func, args, kwargs, inputs)
        before = {storage_key(tensor) for tensor in inputs}
        self._findings.copies.read(before)
        derived = torch.Tag.nondeterministic_seeded in func.tags or self._provenance.is_derived(inputs)
        written = [] if func.is_view else mutated(func, args, kwargs)
        of_weights = self._audit != "off" and self._only_weights(inputs)
        for tensor in written:
            self._provenance.will_write(tensor, derived=derived, of_weights=of_weights)
        result = func(*args, **kwargs)
        self._check_layouts(func, tensors_in(result))
        self._enter(func, args, kwargs, result, before, (derived, of_weights), bool(written))
        return result

    def _run_higher(self, func: HigherOrderOperator, args: Any, kwargs: Any) -> Any:
        """An operation without a schema: flex attention that will be compiled has a stand-in while it is observed."""
        if not is_flex(func):
            raise NotImplementedError(f"{func.name()} is no operation that an iteration under observation can hold")
        if self._tape is None and ("backward" in func.name() or will_be_compiled()):
            with self:
                return stand_in(func, args)
        return func(*args, **kwargs)

    def _run_implementation(self, func: Any, implementation: Any, args: Any, kwargs: Any) -> Any:
        """Record what a custom operation is made of: a replay must not run its Python again.

        On a GPU it may launch kernels that are no torch operations. What its schema says is then taken at its word:
        its results are written, and so are the arguments that it mutates.
        """
        inputs = tensors_in(args, kwargs)
        self._note_slices(func, inputs)
        if not any(tensor.is_cuda for tensor in inputs):
            with self._inside(func), self:
                return implementation(*args, **kwargs)
        derived = self._provenance.is_derived(inputs)
        for tensor in mutated(func, args, kwargs):
            self._provenance.will_write(tensor, derived=derived)
        outer, self._unseen_writes = self._unseen_writes, True
        try:
            with self:
                result = implementation(*args, **kwargs)
        finally:
            self._unseen_writes = outer
        for tensor in tensors_in(result):
            self._provenance.will_write(tensor, derived=derived)
        return result

    @contextlib.contextmanager
    def _inside(self, func: Any) -> Iterator[None]:
        """Within: the implementation of `func`; what one of this package does comes from where that was called."""
        outer = self._caller
        if namespace_of(func) == _NAMESPACE:
            self._caller = self._locate()
        try:
            yield
        finally:
            self._caller = outer

    def _locate(self) -> Source:
        return self._caller or locate(self._modules)

    def _note_slices(self, func: Any, inputs: list[Tensor]) -> None:
        """Integers of which every use makes a copy: not contiguous, or off the boundaries that kernels load from."""
        for tensor in inputs if self._audit != "off" and not self._quiet else ():
            offset = tensor.storage_offset() * tensor.element_size()
            if tensor.dtype in _INDICES and (not tensor.is_contiguous() or offset % _ALIGNMENT):
                layout = f"of shape {tuple(tensor.shape)}, strides {tensor.stride()}, {offset} bytes in"
                why = f"{func} takes integers {layout}, so it works on a copy in each step"
                self._findings.add(Finding("SM504", why, _MEND_SLICE, self._locate(), severity="note"))

    def _check_layouts(self, func: Any, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if tensor.layout != torch.strided:
                why = f"{func} uses a tensor of layout {tensor.layout}"
                self._fault(Refusal("SM502", why, "use a dense one", ends=True))

    def _check_origins(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> None:
        """Every input needs a known origin, save memory that the operation only writes."""
        self._check_layouts(func, inputs)
        only_written = {storage_key(tensor) for tensor in overwritten(func, args, kwargs)}
        lifts, takes_literal = name_of(func) == "lift_fresh", name_of(func) in _TAKES_LITERAL
        for tensor in inputs:
            if lifts and self._provenance.is_unknown(tensor):
                # Python or numpy values on their way into a tensor: the place to name, if an operation reads it.
                weak = StorageWeakRef(tensor.untyped_storage())
                self._lifted[storage_key(tensor)] = weak, self._locate()
            if func.is_view or storage_key(tensor) in only_written:
                continue
            if takes_literal and self._is_literal(tensor):
                continue
            fault = self._provenance.fault(tensor, unseen_writes=self._unseen_writes)
            if fault is not None and not self._quiet and self._findings.first_report(tensor):
                self._report_origin(func, tensor, fault)
            elif fault is None and self._provenance.is_constant(tensor) and self._findings.copies.is_new(tensor):
                self._findings.copies.note(tensor, self._locate())

    def _report_origin(self, func: Any, tensor: Tensor, fault: str) -> None:
        """Tell apart the ways in which a tensor can have come from elsewhere."""
        holder = self._holder(tensor)
        why = f"{func} reads {fault}" + (f" (in {holder})" if holder else "")
        if self._provenance.is_unknown(tensor):
            _, made_at = self._lifted.get(storage_key(tensor), (None, None))
            self._fault(Refusal("SM306" if made_at is None else "SM117", why, _MEND_ORIGIN), source=made_at)
        elif self._provenance.fault(tensor, unseen_writes=True) is None:
            self._fault(Refusal("SM307", why, "write it before it is read, or use torch.zeros"))
        elif not self._comes_from_weights(tensor):
            self._fault(Refusal("SM305", why, _MEND_ORIGIN), holder=holder)
        elif not holder and torch.is_autocast_cache_enabled() and tensor.dtype in _HALF:
            mend = "leave cache_enabled alone, or give RunnerConfig(autocast=...), which switches that cache off"
            self._fault(Refusal("SM206", f"{why}: autocast keeps casts of weights", mend), holder=holder)
        else:
            code = "SM401" if tensor.requires_grad else "SM402"
            cut = "" if tensor.requires_grad else ": it has no gradient either, so its weights would not train"
            self._fault(Refusal(code, why + cut, _MEND_CACHE), holder=holder)

    def _only_weights(self, inputs: list[Tensor]) -> bool:
        """Whether `inputs` hold weights, or what was made of them, and else nothing that changes."""
        others = [tensor for tensor in inputs if not self._comes_from_weights(tensor)]
        return len(others) < len(inputs) and not self._provenance.is_derived(others)

    def _comes_from_weights(self, tensor: Tensor) -> bool:
        return self._findings.is_parameter(tensor) or self._provenance.is_of_weights(tensor)

    def _is_literal(self, tensor: Tensor) -> bool:
        """A Python number that torch made a tensor of without an operation."""
        return tensor.dim() == 0 and tensor.device.type == "cpu" and self._provenance.is_unknown(tensor)

    def _enter(
        self, func: Any, args: Any, kwargs: Any, result: Any, before: set[int], origin: tuple[bool, bool], writes: bool
    ) -> None:
        """Note what the operation made, and of what (derived, of weights); put it on the tape."""
        name = name_of(func)
        results = result if isinstance(result, (tuple, list)) else (result,)
        fresh = [
            (position, tensor)
            for position, tensor in enumerate(results)
            if isinstance(tensor, Tensor) and storage_key(tensor) not in before
        ]
        source = self._locate() if fresh else Source()
        derived, of_weights = origin
        for _, tensor in fresh:
            self._findings.made(tensor)
            written = name not in _EMPTY
            self._provenance.made(tensor, derived=derived, written=written, source=source, of_weights=of_weights)
        if self._tape is None:
            return
        for tensor in tensors_in(args, kwargs):
            if self._provenance.outlives(tensor):
                self._tape.refer(tensor.detach())
        for _, tensor in fresh:
            self._tape.own(tensor, overwritten=name not in _EMPTY)
        if name in _EMPTY or torch.Tag.inplace_view in func.tags or not (fresh or writes):
            return
        recorded = [(position, tensor.detach()) for position, tensor in fresh]
        if collectives.is_collective(func):
            run = functools.partial(collectives.run_again, func, without_history(args), without_history(kwargs))
            self._tape.append(Entry(run, tuple(recorded), str(func)))
            self._tape.has_collectives = True
            return
        self._tape.append(operation(func, without_history(args), without_history(kwargs), recorded))

    def _get_random_state(self, read: Any) -> Tensor:
        if _in_reentrant_checkpoint():
            why = "activation checkpointing with use_reentrant=True runs a backward of its own inside the backward"
            self._fault(Refusal("SM309", why, "pass use_reentrant=False"))
        with _disable_current_modes():
            state = read()
            self._provenance.made(state, derived=True, written=True, source=self._locate())
            if self._tape is not None:
                self._tape.own(state, overwritten=True)
                self._tape.append(Entry(run=read, fresh=((0, state),), name="get_rng_state"))
        return state

    def _set_random_state(self, write: Any, state: Tensor) -> None:
        fault = self._provenance.fault(state)
        if fault is not None and self._findings.first_report(state):
            self._fault(Refusal("SM310", f"set_rng_state reads {fault}", "read the state inside the iteration"))
        with _disable_current_modes():
            write(state)
        if self._tape is not None:
            self._tape.append(Entry(run=lambda: write(state), fresh=(), name="set_rng_state"))

    def _seed_inside(self, seed: Any) -> torch.Generator:
        why = f"manual_seed({seed}) inside the iteration: every replay would draw the same numbers"
        self._fault(Refusal("SM308", why, "seed before it"))
        return torch.default_generator.manual_seed(seed)

    def _fault(self, what: Refusal, *, source: Source | None = None, holder: str = "") -> None:
        """Refuse, collect, log or pass over what a replay could not repeat."""
        if self._audit == "off" or self._quiet:
            return
        finding = Finding(what.code, what.why, what.mend, source if source is not None else self._locate())
        if is_allowed(finding.code, finding.source) or _follows(finding):
            return
        new = self._findings.add_stale(holder, finding) if holder else self._findings.add(finding)
        if self._audit == "warn":
            if new:
                log.warning("%s", finding)
        elif self._refuses or what.ends:
            raise audit_error(self._findings.errors)


def _follows(finding: Finding) -> bool:
    """Whether the forward of an operation of torch's, looked at already, is what a finding in its backward is about."""
    # Nodes of torch's own end with a digit, those of a user's Function do not.
    return finding.code.startswith("SM11") and finding.source.node[-1:].isdigit()


def _in_reentrant_checkpoint() -> bool:
    """Whether torch's reentrant checkpoint is asking for the random state; its other form asks elsewhere."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_HOOK_FRAMES):
        frame = frame.f_back if frame is not None else None
        if frame is not None and frame.f_code is CheckpointFunction.forward.__code__:
            return True
    return False
