"""O14, O18: other threads that allocate, train or capture while an iteration is captured."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import nn

from staticmoe.errors import CaptureError, StaticMoEError


@contextlib.contextmanager
def busy_thread(work):
    """Run `work` in a loop in another thread; raise here what it raised there."""
    stop, failures, rounds = threading.Event(), [], []

    def loop():
        try:
            while not stop.is_set():
                work()
                rounds.append(1)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield rounds
    finally:
        stop.set()
        thread.join()
    assert failures == [] and rounds


def test_another_thread_may_allocate_and_train_while_we_capture(captured_way, probe, probe_batch, wrap, poison):
    """Goes wrong: a loader's allocation, copy, backward or look at the random state in another thread ends the capture,
    or lands on the tape and is replayed into that thread's tensors.

    Instead: nothing to do.
    """
    other = nn.Linear(8, 8)
    inputs = torch.randn(16, 8)

    def work():
        torch.empty(1 << 20).fill_(1.0)
        # As activation checkpointing does.
        torch.get_rng_state()
        other.zero_grad()
        other(inputs).square().sum().backward()
        with torch.no_grad():
            other.weight.sub_(other.weight.grad, alpha=1e-6)

    with busy_thread(work):
        for _ in range(4):
            model = probe(captured_way)
            optimizer = torch.optim.SGD([model.b], lr=0.1)
            runner = wrap(captured_way, model, optimizer, probe_batch(captured_way, 1))
            losses = [runner.step(probe_batch(captured_way, 1)).loss for _ in range(4)]
            assert [float(loss) for loss in losses] == pytest.approx([1.0, 0.9, 0.8, 0.7])
            runner.close()
    # No replay writes into what the other thread made.
    weight = other.weight.detach().clone()
    model = probe(captured_way)
    runner = wrap(captured_way, model, torch.optim.SGD([model.b], lr=0.1), probe_batch(captured_way, 1))
    for _ in range(3):
        runner.step(probe_batch(captured_way, 1))
        poison(captured_way.device)
    runner.synchronize()
    assert torch.equal(other.weight, weight) and float(model.b) == pytest.approx(0.7)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory and side-stream copies need a CUDA device")
def test_another_thread_may_pin_memory_while_we_capture(captured_way, probe, probe_batch, wrap):
    """Goes wrong: a pinned allocation or event query in a loader thread kills the capture and poisons that thread.

    Instead: nothing to do: capture in thread-local error mode.
    """

    def work():
        torch.empty(1 << 20).pin_memory().to(captured_way.device, non_blocking=True)

    with busy_thread(work):
        for _ in range(20):
            model = probe(captured_way)
            optimizer = torch.optim.SGD([model.b], lr=0.1)
            wrap(captured_way, model, optimizer, probe_batch(captured_way, 1)).close()


def test_a_value_of_another_thread_is_refused(captured_way, probe, probe_batch, wrap):
    """Goes wrong: an op that forward runs in a thread of its own is on no tape and no captured stream: every replay
    reads what it was at capture.

    Instead: run it in the calling thread.
    """
    model = probe(captured_way)

    def loss_fn(model, batch):
        found = []
        thread = threading.Thread(target=lambda: found.append(batch["s"] * 2))
        thread.start()
        thread.join()
        return model(**batch) * 0 + found[0] * model.b

    optimizer = torch.optim.SGD([model.b], lr=0.0)
    with pytest.raises(CaptureError):
        wrap(captured_way, model, optimizer, probe_batch(captured_way, 1), loss_fn=loss_fn)


RANDOM = [(room, name) for room in (torch, torch.random) for name in ("manual_seed", "get_rng_state", "set_rng_state")]


def random_functions():
    return [getattr(room, name) for room, name in RANDOM]


@pytest.fixture
def before():
    """Functions of torch that a capture may replace for its time; put back, so that a fault stays in its test."""
    functions = random_functions()
    yield functions
    for (room, name), function in zip(RANDOM, functions, strict=True):
        setattr(room, name, function)


def test_two_threads_train_two_models(way, probe, probe_batch, wrap, before):
    """Goes wrong: state of a module or a class, so that two captures at once mix their tapes, losses or seeds.

    Instead: one runner in one thread; two threads give the right numbers or a clear error.
    """
    found, lock = {}, threading.Barrier(2)

    def train(name, scale):
        lock.wait()
        try:
            model = probe(way)
            optimizer = torch.optim.SGD([model.b], lr=0.1)
            runner = wrap(way, model, optimizer, probe_batch(way, scale))
            losses = [runner.step(probe_batch(way, scale)).loss for _ in range(6)]
            found[name] = [float(loss) for loss in losses]
        except StaticMoEError as error:
            found[name] = error
        except BaseException as error:
            found[name] = AssertionError(repr(error))

    threads = [threading.Thread(target=train, args=(name, scale)) for name, scale in (("one", 1.0), ("two", 2.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    right = {"one": [1 - 0.1 * call for call in range(6)], "two": [2 - 0.4 * call for call in range(6)]}
    assert any(isinstance(value, list) for value in found.values())
    for name, value in found.items():
        assert isinstance(value, StaticMoEError) or value == pytest.approx(right[name], abs=1e-6), value
    assert random_functions() == before, "a capture left its own functions in torch"
