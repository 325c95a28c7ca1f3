"""Faults in what the runner is given, which need no iteration and have no line; and errors of the user's own."""

from __future__ import annotations

import torch
from torch import nn

# Name -> code and module path.
WITHOUT_LINE = {
    "replaced": ("SM302", "block"),
    "counted_in_python": ("SM207", "(the model)"),
    "compiled_model": ("SM601", "(the model)"),
    "two_devices": ("SM701", ""),
    "closure_optimizer": ("SM702", ""),
    "text_in_the_batch": ("SM703", ""),
    "mask_that_is_none": ("SM704", ""),
}


def replaced(build):
    given = build(nn.Linear(8, 8))
    given["model"].block.weight = nn.Parameter(torch.eye(8))
    return given


def replaced_mended(build):
    given = build(nn.Linear(8, 8))
    with torch.no_grad():
        given["model"].block.weight.copy_(torch.eye(8))
    return given


def counted_in_python(build):
    given = build()
    optimizer, scale = given["optimizer"], given["model"].scale
    moments = {name: torch.zeros_like(scale) for name in ("exp_avg", "exp_avg_sq")}
    optimizer.state[scale] = {"step": 3, **moments}
    return given


def counted_in_python_mended(build):
    given = counted_in_python(build)
    state = given["optimizer"].state[given["model"].scale]
    state["step"] = torch.tensor(float(state["step"]))
    return given


def compiled_model(build):
    given = build(nn.Linear(8, 8))
    given["model"].compile(backend="eager")
    return given


def compiled_model_mended(build):
    return build(nn.Linear(8, 8))


def two_devices(build):
    return build(nn.Linear(8, 8, device="meta"))


def two_devices_mended(build):
    return build(nn.Linear(8, 8, device="cpu"))


def closure_optimizer(build):
    given = build()
    return {**given, "optimizer": torch.optim.LBFGS(given["model"].parameters())}


def closure_optimizer_mended(build):
    given = build()
    return {**given, "optimizer": torch.optim.SGD(given["model"].parameters(), lr=0.1)}


def text_in_the_batch(build):
    given = build()
    return {**given, "example_batch": {**given["example_batch"], "text": "hello"}}


def text_in_the_batch_mended(build):
    given = build()
    return {**given, "example_batch": {**given["example_batch"], "text": None}}


def mask_that_is_none(build):
    return {**build(), "token_mask": "attention_mask"}


def mask_that_is_none_mended(build):
    given = build()
    given["example_batch"]["attention_mask"] = torch.ones(4, dtype=torch.int64)
    return {**given, "token_mask": "attention_mask"}


def broken(x):
    return x @ torch.ones(3, 3)  # <- SM901 broken


def broken_mended(x):
    return x @ torch.ones(8, 8)


def compiled_loss(build):
    @torch.compile(backend="eager")  # <- SM602 compiled_loss
    def loss_fn(model, batch):
        return model(**batch)

    return {**build(), "loss_fn": loss_fn}


def compiled_loss_mended(build):
    return {**build(), "loss_fn": lambda model, batch: model(**batch)}


@torch.compile(backend="eager")
def _with_a_break(x):
    for _ in range(2):
        torch._dynamo.graph_break()
        x = 2 * x
    return x


def given_up(x):
    return _with_a_break(x)  # <- SM603 given_up


@torch.compile(backend="eager")
def _whole(x):
    for _ in range(2):
        x = 2 * x
    return x


def given_up_mended(x):
    return _whole(x)


def compiled_evaluation(build):
    @torch.compile(backend="eager")  # <- SM602 compiled_evaluation
    def eval_fn(model, batch):
        return model(**batch)

    return {**build(), "eval_fn": eval_fn}


def compiled_evaluation_mended(build):
    return {**build(), "eval_fn": lambda model, batch: model(**batch)}
