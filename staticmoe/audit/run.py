"""Runs an audit: checks what is given, observes iterations without capturing any, and leaves everything as it was."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import numpy
import torch
from torch.optim import SGD

from staticmoe.audit.aliases import Looking
from staticmoe.audit.arguments import Arguments
from staticmoe.audit.compiled_calls import UNWATCHED, ReturnedViews
from staticmoe.audit.findings import Report
from staticmoe.audit.rules import compiled, host_values, state
from staticmoe.audit.rules.refused import finding_of
from staticmoe.capture.findings import Finding, is_allowed
from staticmoe.capture.source import Source
from staticmoe.config import RunnerConfig
from staticmoe.errors import OptimizerError
from staticmoe.runner.assembly import Assembly
from staticmoe.runner.batch_shape import BatchShape, split_micro_batches
from staticmoe.runner.rehearsal import Untouched

_CHECKS = (host_values.check, state.check, compiled.check)
# The second one sees what the first has left behind, the third what changes from one to the next.
_ITERATIONS = 2
_NEVER_LOOKED_AT = (
    "the capture and the replay themselves, and the self-check between them",
    "values that nothing names: time.time(), files, objects inside objects (recheck_every finds them in the run)",
)


def audit(arguments: Mapping[str, Any] | Arguments, *, caller: FrameType | None = None) -> Report:
    """Look at what `StaticMoERunner` would be given.

    Parameters, buffers, gradients, optimizer state, module attributes and random states are afterwards as before.

    Args:
        arguments: the runner's, by name.
        caller: frame of the user's that a finding may name; frames outside of it are nobody's.

    Raises:
        ConfigError: not the runner's arguments.
    """
    start = time.perf_counter()
    given = arguments if isinstance(arguments, Arguments) else Arguments.of(arguments)
    not_looked_at = list(_NEVER_LOOKED_AT)
    findings: list[Finding] = []
    if given.usable:
        findings += [finding for check in _CHECKS for finding in check(given)]
    views = ReturnedViews(given)
    watching = views.watch() if "torch._dynamo" in sys.modules else contextlib.nullcontext(True)
    with _left_as_it_is(given), watching as watched:
        given = compiled.taken_apart(given) if given.usable else given
        findings += _observe(given, not_looked_at, {finding.code for finding in findings})
    findings += views.findings
    if not watched:
        not_looked_at.append(UNWATCHED)
    outside = _outer_frames(caller)
    placed = [_placed(finding, outside) for finding in findings]
    shown = [finding for finding in placed if not is_allowed(finding.code, finding.source)]
    return Report.of(shown, not_looked_at, time.perf_counter() - start)


def _observe(given: Arguments, not_looked_at: list[str], known: set[str]) -> list[Finding]:
    """What iterations show, and what the runner refuses."""
    if "SM207" in known:
        given, known = _with_stand_in(given, not_looked_at), known - {"SM207"}
    config = given.config if given.config is not None else RunnerConfig()
    # Under "off" nothing is replayed, and nothing would be found.
    if config.compile != "off":
        not_looked_at.append(f"what compile={config.compile!r} makes of the model: it was run as it is")
    config = dataclasses.replace(config, capture="auto", audit="error", self_check=False, run_dir=None, compile="off")
    try:
        examples = given.example_batch if type(given.example_batch) is list else [given.example_batch]
        micro = config.gradient_accumulation_steps
        shapes = [BatchShape(split_micro_batches(example, micro)[0]) for example in examples]
        assembly = _assemble(given, shapes, config)
    except OptimizerError as error:
        findings = [] if "SM302" in known else [finding_of(error, given.paths)]
        if not given.usable or not any(parameter.requires_grad for parameter in given.model.parameters()):
            return findings
        return findings + _observe(_with_stand_in(given, not_looked_at), not_looked_at, set())
    except Exception as error:
        return [finding_of(error, given.paths)]
    try:
        return _inspect(assembly, shapes, given, not_looked_at)
    finally:
        assembly.release()


def _with_stand_in(given: Arguments, not_looked_at: list[str]) -> Arguments:
    """The same with an optimizer that surely can step, so that the rest is seen in the same pass."""
    not_looked_at.append("the optimizer's own step: a plain SGD stood in for it")
    held = {id(parameter) for group in given.optimizer.param_groups for parameter in group["params"]}
    trained = [parameter for parameter in given.model.parameters() if parameter.requires_grad]
    kept = [parameter for parameter in trained if id(parameter) in held]
    # What replaced the optimizer's parameters should have been in it.
    trained = kept if len(kept) == len(held) and kept else trained
    return dataclasses.replace(given, optimizer=SGD(trained, lr=0.0))


def _assemble(given: Arguments, shapes: list[BatchShape], config: RunnerConfig) -> Assembly:
    return Assembly(
        given.model, given.optimizer, shapes, given.loss_fn, given.eval_fn, given.token_mask, given.scalars, config,
        flush=lambda: None,
    )  # fmt: skip


def _inspect(assembly: Assembly, shapes: list[BatchShape], given: Arguments, not_looked_at: list[str]) -> list[Finding]:
    findings: list[Finding] = []
    runs = [(shape, True) for shape in shapes]
    if given.eval_fn is not None:
        # Training once more: an evaluation may have left it something.
        runs += [(shapes[0], False), (shapes[0], True)]
    else:
        not_looked_at.append("evaluation: pass eval_fn to have it looked at")
    if assembly.device.type == "cpu":
        not_looked_at.append("what only a GPU shows: streams, events, kernels that are no torch operations")
    for shape, training in runs:
        looking = Looking(given.model, given.optimizer)
        try:
            findings += assembly.inspect(shape, training=training, iterations=_ITERATIONS, look=looking.at)
        except Exception as error:
            findings.append(finding_of(error, given.paths))
        findings += looking.findings
    return findings


def _outer_frames(caller: FrameType | None) -> set[tuple[str, int]]:
    """File and line of every frame that was there before the audit, up to the user's own."""
    frame, found = sys._getframe(2), set()
    while frame is not None and frame is not caller:
        found.add((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    while frame is not None and caller is not None:
        frame = frame.f_back  # type: ignore[assignment]
        if frame is not None:
            found.add((frame.f_code.co_filename, frame.f_lineno))
    return found


def _placed(finding: Finding, outside: set[tuple[str, int]]) -> Finding:
    """Without a place that is none of the user's: where the audit was called from."""
    source = finding.source
    if (source.file, source.line) not in outside:
        return finding
    return dataclasses.replace(finding, source=Source(module=source.module, node=source.node))


@contextlib.contextmanager
def _left_as_it_is(given: Arguments) -> Iterator[None]:
    """Afterwards attributes, gradients, optimizer state and random states are as before."""
    modules = list(given.model.modules()) if given.usable else []
    functions: list[Callable[..., Any]] = [f for f in (given.loss_fn, given.eval_fn, given.token_mask) if callable(f)]
    untouched = Untouched(modules, functions)
    gradients = [(parameter, parameter.grad) for module in modules for parameter in module.parameters(recurse=False)]
    optimizer = given.optimizer if given.usable else None
    states = {parameter: dict(held) for parameter, held in optimizer.state.items()} if optimizer is not None else {}
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    drawn = random.getstate(), numpy.random.get_state(legacy=False), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(drawn[0])
        numpy.random.set_state(drawn[1])
        torch.set_rng_state(drawn[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        untouched.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        if optimizer is not None:
            for parameter in list(optimizer.state):
                if parameter in states:
                    optimizer.state[parameter].clear()
                    optimizer.state[parameter].update(states[parameter])
                else:
                    del optimizer.state[parameter]
