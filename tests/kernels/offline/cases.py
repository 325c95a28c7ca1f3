"""The calls of the launchers that are compiled offline: every kernel, with the tiles of the table.

Tensors are allocated and never touched; only their shapes, strides and dtypes matter.

Dimensions: T tokens, K top_k, E experts, H hidden, I intermediate, R capacity rows, M tiles.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from staticmoe.kernels.tile_table import tile_for
from staticmoe.kernels.tiles import Tile

T, K, E, H, I = 4096, 2, 8, 2048, 1024  # noqa: E741
R, M, PROGRAMS = T * K, 1024, 132
MANY, FEW, FEWEST = 1024.0, 64.0, 16.0

KERNELS = Path(__file__).resolve().parents[3] / "kernels"
HOPPER, OTHERS = (9, 0), ((8, 0), (8, 9), (10, 0))
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call of a launcher.

    Attributes:
        name: of the launcher and its variant.
        launch: makes the call.
        capability: (major, minor) of the GPU.
        dtype: of rows and weights.
        tile: what the launcher is given, if it takes one; a Hopper launcher takes none.
        matrix: whether matrix instructions must be found.
        options: what else `launch` is called with, beside dtype and tile.
    """

    name: str
    launch: Callable[..., None]
    capability: tuple[int, int]
    dtype: torch.dtype
    tile: Tile | None = None
    matrix: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Memory that nobody reads."""
    return torch.empty(shape, dtype=dtype)


def ints(*shape: int) -> Tensor:
    """As `empty`, int32."""
    return torch.empty(shape, dtype=torch.int32)


def floats(*shape: int) -> Tensor:
    """As `empty`, fp32."""
    return torch.empty(shape, dtype=torch.float32)


def kernel(file: str) -> Any:
    """The module of a kernel file."""
    return importlib.import_module(f"staticmoe.kernels.{file}")


def adamw(*, dtype: torch.dtype, tile: None) -> None:
    """Two parameters."""
    p, gradient = ([empty(1 << 20, dtype=dtype) for _ in range(2)] for _ in range(2))
    one, two, step, row = ([floats(*size) for _ in range(2)] for size in ((1 << 20,), (1 << 20,), (), (5,)))
    kernel("adamw").adamw_(p, gradient, one, two, step, row, floats())


def up(
    *, dtype: torch.dtype, tile: Tile, activation: str = "swiglu", bias: bool = False, odd: int = 0, **options: Any
) -> None:
    """Tokens to pre-activation and activation; `odd` makes the widths ones that no tile divides."""
    halves, hidden, inner = 1 if activation == "relu2" else 2, H + odd, I + odd
    gate_up, added = empty(E, halves, inner, hidden, dtype=dtype), empty(E, halves, inner, dtype=dtype)
    x, pre, act = empty(T, hidden, dtype=dtype), empty(R, halves * inner, dtype=dtype), empty(R, inner, dtype=dtype)
    kernel("up").up(
        x, ints(R), gate_up, added if bias else None, pre, act, ints(M, 4), ints(1),
        top_k=K, activation=activation, tile=tile, programs=PROGRAMS, **options,
    )  # fmt: skip


def down(*, dtype: torch.dtype, tile: Tile, bias: bool = False, **options: Any) -> None:
    """Activation to rows of the output."""
    added = empty(E, H, dtype=dtype) if bias else None
    kernel("grouped_gemm").grouped_gemm(
        empty(R, I, dtype=dtype), empty(E, H, I, dtype=dtype), added, empty(R, H, dtype=dtype), ints(M, 4), ints(1),
        transposed=False, saved_rows=False, tile=tile, programs=PROGRAMS, **options,
    )  # fmt: skip


def token_grad(*, dtype: torch.dtype, tile: Tile, halves: int = 2, **options: Any) -> None:
    """Gradient of the pre-activation to rows of the gradient of the tokens."""
    rows, weight = empty(R, halves * I, dtype=dtype), empty(E, halves, I, H, dtype=dtype)
    kernel("grouped_gemm").grouped_gemm(
        rows, weight, None, empty(R, H, dtype=dtype), ints(M, 4), ints(1),
        transposed=True, saved_rows=True, tile=tile, programs=PROGRAMS, **options,
    )  # fmt: skip


def grouped_linear(*, dtype: torch.dtype, tile: Tile, gather: bool, transposed: bool) -> None:
    """The product of `functional.grouped_linear` and that of its backward."""
    rows = empty(T if gather else R, H, dtype=dtype)
    weight = empty(E, H, I, dtype=dtype) if transposed else empty(E, I, H, dtype=dtype)
    kernel("grouped_gemm").grouped_gemm(
        rows, weight, None, empty(R, I, dtype=dtype), ints(M, 4), ints(1),
        transposed=transposed, row_assignment=ints(R) if gather else None, top_k=K if gather else 1,
        saved_rows=False, tile=tile, programs=PROGRAMS,
    )  # fmt: skip


def dact(
    *,
    dtype: torch.dtype,
    tile: Tile | None,
    activation: str = "swiglu",
    odd: int = 0,
    gather: bool = True,
    **options: Any,
) -> None:
    """Gradient of the output to that of the pre-activation, in place; without a tile by the Hopper launcher."""
    halves, hidden, inner = 1 if activation == "relu2" else 2, H + odd, I + odd
    pre, act = empty(R, halves * inner, dtype=dtype), empty(R, inner, dtype=dtype)
    grad, down_weight = empty(T if gather else R, hidden, dtype=dtype), empty(E, hidden, inner, dtype=dtype)
    common = {"top_k": K if gather else None, "activation": activation, "programs": PROGRAMS, **options}
    operands = grad, ints(R), down_weight, pre, floats(T, K), pre, act
    if tile is not None:
        parts = floats(R, kernel("dact").weight_parts(inner, tile))
        kernel("dact").dact(*operands, parts, ints(M, 4), ints(1), tile=tile, **common)
        return
    hopper = kernel("hopper.dact")
    if not hopper.serves(grad, down_weight, pre, activation=activation, rows_per_expert=MANY):
        raise ValueError("the Hopper kernel does not take this")
    hopper.dact(*operands, floats(R, hopper.weight_parts(inner)), ints(M, 4), ints(1), **common)


def reduce_weight_grad(*, dtype: torch.dtype, tile: None, bias: bool) -> None:
    """Parts to the gradient of the routing weights."""
    given = {"grad": empty(T, H, dtype=dtype), "down_bias": empty(E, H, dtype=dtype), "expert_offsets": ints(E + 1)}
    kernel("dact").reduce_weight_grad(floats(R, 4), ints(T, K), floats(T, K), **(given if bias else {}))


def _weight_grad(*operands: Tensor, tile: Tile | None, load: float, **options: Any) -> None:
    """The Triton launcher, or without a tile the Hopper one as it is for a mean load."""
    common = {"top_k": K, "programs": PROGRAMS, **options}
    if tile is not None:
        kernel("weight_grad").weight_grad(*operands, tile=tile, **common)
        return
    hopper = kernel("hopper.weight_grad")
    left, right, *_, out = operands
    if not hopper.serves(left, right, out, gather=options["gather"]):
        raise ValueError("the Hopper kernel does not take this")
    hopper.weight_grad(*operands, pipeline=hopper.pipeline_for(load), **common)


def weight_grad_down(
    *,
    dtype: torch.dtype,
    tile: Tile | None,
    out: torch.dtype,
    accumulate: bool,
    gather: bool = True,
    load: float = MANY,
    **options: Any,
) -> None:
    """Gathered gradient of the output, or its rows, times the weighted activation."""
    _weight_grad(
        empty(T if gather else R, H, dtype=dtype), empty(R, I, dtype=dtype), ints(E + 1), ints(R),
        empty(E, H, I, dtype=out),
        gather="left" if gather else None, saved=None, base_row=None, accumulate=accumulate, tile=tile, load=load,
        **options,
    )  # fmt: skip


def weight_grad_up(
    *,
    dtype: torch.dtype,
    tile: Tile | None,
    out: torch.dtype,
    accumulate: bool,
    gather: bool = True,
    saved: bool = False,
    odd: int = 0,
    load: float = MANY,
    **options: Any,
) -> None:
    """Gradient of the pre-activation times the gathered tokens, or their rows."""
    hidden, inner = H + odd, I + odd
    base = torch.empty((), dtype=torch.int64) if saved else None
    _weight_grad(
        empty(R, 2 * inner, dtype=dtype), empty(T if gather else R, hidden, dtype=dtype), ints(E + 1), ints(R),
        empty(E, 2, inner, hidden, dtype=out),
        gather="right" if gather else None, saved="left" if saved else None, base_row=base, accumulate=accumulate,
        tile=tile, load=load, **options,
    )  # fmt: skip


def tile_schedule(*, dtype: torch.dtype, tile: None, base: bool) -> None:
    """The tiles of one size."""
    kernel("schedule").tile_schedule(
        ints(E + 1), ints(M, 4), ints(1), block_rows=128,
        base_row=torch.empty((), dtype=torch.int64) if base else None,
    )  # fmt: skip


def grouped_sum(*, dtype: torch.dtype, tile: None, gather: bool) -> None:
    """Bias gradients: of the down projection from gathered gradients, of the up projection from saved rows."""
    if gather:
        rows, out, weights = empty(T, H, dtype=dtype), empty(E, H, dtype=dtype), floats(T, K)
        options: dict[str, Any] = {"row_assignment": ints(R), "topk_weights": weights, "top_k": K}
    else:
        rows, out = empty(R, 2 * I, dtype=dtype), floats(E, 2, I)
        options = {"base_row": torch.empty((), dtype=torch.int64), "accumulate": True}
    kernel("grouped_sum").grouped_sum(rows, ints(E + 1), out, **options)


def transpose(*, dtype: torch.dtype, tile: None, parts: int, back: bool) -> None:
    """Weights with their rows side by side into rows, or a gradient back."""
    columns = empty(E, H, parts * I, dtype=dtype).unflatten(2, (I, parts)).permute(0, 3, 2, 1)
    rows = empty(E, parts, I, H, dtype=dtype)
    kernel("transpose").transpose(*((rows, columns) if back else (columns, rows)))


def route(*, dtype: torch.dtype, tile: None, experts: int, grouped: bool) -> None:
    """Choice of experts and its backward; grouped as in DeepSeek-V3."""
    module, logits, top_k = kernel("routing"), empty(T, experts, dtype=dtype), 8
    bias, mask = (floats(experts), torch.empty(T, dtype=torch.bool)) if grouped else (None, None)
    options = {"score_function": "sigmoid" if grouped else "softmax", "norm_topk_prob": True}
    options["routed_scaling_factor"] = 2.5 if grouped else 1.0
    groups = {"n_group": 8, "topk_group": 4} if grouped else {}
    module.route(logits, bias, mask, floats(T, top_k), ints(T, top_k), top_k=top_k, **groups, **options)
    module.route_backward(floats(T, top_k), logits, ints(T, top_k), torch.empty_like(logits), **options)


def weigh(*, dtype: torch.dtype, tile: None, experts: int, grouped: bool) -> None:
    """Weights of given experts: of int64 ids with a mask, summed over all experts by groups; or of int32 ids."""
    ids = torch.empty(T, 8, dtype=torch.int64) if grouped else ints(T, 8)
    kernel("weigh").weigh(
        empty(T, experts, dtype=dtype),
        ids,
        torch.empty(T, dtype=torch.bool) if grouped else None,
        floats(T, 8),
        ints(T, 8),
        score_function="softmax" if grouped else "sigmoid",
        norm_topk_prob=not grouped,
        routed_scaling_factor=2.5,
        n_group=8 if grouped else 1,
    )


def make_plan(*, dtype: torch.dtype, tile: None, capacity: bool, experts: int = E) -> None:
    """Every pass, or those that are left where nothing can overflow."""
    module = kernel("plan")
    rows, limit = (R // 2, R // E) if capacity else (R, None)
    sizes = {"num_experts": experts, "capacity_rows": rows, "expert_capacity": limit}
    scratch = ints(module.scratch_sizes(tokens=T, top_k=K, **sizes).total)
    dooms = {"doomed": floats(), "overflow_dooms": True} if capacity else {}
    written = ints(experts), ints(experts), ints(experts + 1), ints(rows), ints(T, K)
    module.make_plan(ints(T, K), floats(T, K), *written, scratch, **sizes, **dooms)


def combine(*, dtype: torch.dtype, tile: None, weighted: bool) -> None:
    """Rows to tokens."""
    weights = floats(T, K) if weighted else None
    kernel("combine").combine(empty(R, H, dtype=dtype), weights, ints(T, K), empty(T, H, dtype=dtype))


def combine_backward(*, dtype: torch.dtype, tile: None) -> None:
    """Both gradients of the combine as a function of its own."""
    tokens, rows = empty(T, H, dtype=dtype), empty(R, H, dtype=dtype)
    kernel("combine").gather_weighted(tokens, floats(T, K), ints(R), ints(E + 1), rows, top_k=K, programs=PROGRAMS)
    kernel("combine").combine_weight_grad(tokens, rows, ints(T, K), floats(T, K))


def cases() -> list[Case]:
    """Every case, the slow ones first."""
    return [*_products(), *_hopper(), *_small()]


def _products() -> list[Case]:
    """The grouped GEMMs. Everything on Hopper in bf16; one variant each in other dtypes, loads and on other GPUs."""
    same = {"out": BF16, "accumulate": False}
    plain: list[tuple[str, Callable[..., None], dict[str, Any]]] = [
        ("dact", dact, {}),
        ("up", up, {}),
        ("weight_grad_up", weight_grad_up, same),
        ("weight_grad_down", weight_grad_down, same),
        ("token_grad", token_grad, {}),
        ("down", down, {}),
        ("grouped_gemm", grouped_linear, {"gather": True, "transposed": False}),
    ]
    found = []
    for activation in ("geglu", "gpt_oss", "relu2"):
        for name, launch in (("dact", dact), ("up", up)):
            found.append(_product(name, launch, BF16, {"activation": activation}, variant=activation))
    for name, launch, options in plain:
        found.append(_product(name, launch, BF16, options))
        found.append(_product(name, launch, BF16, options, load=FEW, variant="few rows"))
        found.append(_product(name, launch, BF16, options, load=FEWEST, variant="fewest rows"))
        found.append(_product(name, launch, FP32, {**options, "out": FP32} if "out" in options else options))
        found += [_product(name, launch, BF16, options, capability=capability) for capability in OTHERS]
    main_grad = {"out": FP32, "accumulate": True}
    found += [
        _product("up", up, BF16, {"bias": True}, variant="bias"),
        _product("up", up, BF16, {"odd": 8}, variant="odd widths"),
        _product("dact", dact, BF16, {"odd": 8}, variant="odd widths"),
        _product("weight_grad_up", weight_grad_up, BF16, {**same, "odd": 8}, variant="odd widths"),
        _product("up", up, FP16, {}),
        _product("up", up, FP32, {"allow_tf32": True}, variant="tf32"),
        _product("down", down, BF16, {"bias": True}, variant="bias"),
        _product("token_grad", token_grad, BF16, {"halves": 1}, variant="ungated"),
        _product("weight_grad_up", weight_grad_up, BF16, {**main_grad, "saved": True}, variant="main_grad, base row"),
        _product("weight_grad_down", weight_grad_down, BF16, main_grad, variant="main_grad"),
        _product("weight_grad_down", weight_grad_down, BF16, {**main_grad, "accumulate": False}, variant="store fp32"),
    ]
    for gather, transposed in ((False, False), (False, True), (True, True)):
        variant = f"{'gathered' if gather else 'rows'}{', transposed' if transposed else ''}"
        options = {"gather": gather, "transposed": transposed}
        found.append(_product("grouped_gemm", grouped_linear, BF16, options, variant=variant))
    return found


def _product(
    name: str,
    launch: Callable[..., None],
    dtype: torch.dtype,
    options: dict[str, Any],
    *,
    load: float = MANY,
    capability: tuple[int, int] = HOPPER,
    variant: str = "",
) -> Case:
    """A grouped GEMM with the tile of the table; products of fp32 in full precision have no matrix instruction."""
    return Case(
        name=f"{name}, {variant}" if variant else name,
        launch=launch,
        capability=capability,
        dtype=dtype,
        tile=tile_for(name, dtype=dtype, rows_per_expert=load, capability=capability),
        matrix=dtype != FP32 or "allow_tf32" in options,
        options=options,
    )


def _hopper() -> list[Case]:
    """Kernels of `kernels/hopper`, which exist for one GPU: each use with what its load decides, and every variant."""
    store, add = {"out": BF16, "accumulate": False}, {"out": FP32, "accumulate": True}
    calls: list[tuple[str, Callable[..., None], torch.dtype, dict[str, Any]]] = []
    for name, launch in (("weight_grad_up", weight_grad_up), ("weight_grad_down", weight_grad_down)):
        for variant, load in (("", MANY), (", few rows", FEW)):
            calls += [
                (f"{name}, hopper{variant}", launch, BF16, {**store, "load": load}),
                (f"{name}, hopper{variant}, rows", launch, BF16, {**store, "load": load, "gather": False}),
                (f"{name}, hopper{variant}, main_grad", launch, BF16, {**add, "load": load}),
            ]
    calls += [
        ("weight_grad_up, hopper, odd widths", weight_grad_up, BF16, {**store, "odd": 8}),
        ("weight_grad_up, hopper, main_grad, base row", weight_grad_up, FP16, {**add, "saved": True}),
        ("weight_grad_up, hopper, added in 16 bits", weight_grad_up, BF16, {"out": BF16, "accumulate": True}),
        ("weight_grad_down, hopper, added in 16 bits", weight_grad_down, FP16, {"out": FP16, "accumulate": True}),
        ("weight_grad_down, hopper, store fp32", weight_grad_down, BF16, {"out": FP32, "accumulate": False}),
        ("dact, hopper", dact, BF16, {}),
        ("dact, hopper, rows", dact, BF16, {"gather": False}),
        ("dact, hopper, odd widths", dact, BF16, {"odd": 8}),
        ("dact, hopper, rows, odd widths", dact, BF16, {"odd": 8, "gather": False}),
        ("dact, hopper", dact, FP16, {}),
        ("dact, hopper, rows", dact, FP16, {"gather": False}),
        ("dact, hopper, relu2", dact, BF16, {"activation": "relu2"}),
        ("dact, hopper, rows, relu2", dact, BF16, {"activation": "relu2", "gather": False}),
    ]
    return [
        Case(name=name, launch=launch, capability=HOPPER, dtype=dtype, matrix=True, options=options)
        for name, launch, dtype, options in calls
    ]


def _small() -> list[Case]:
    """Kernels without a tile, on every GPU."""
    calls: list[tuple[str, Callable[..., None], torch.dtype, dict[str, Any]]] = [
        ("adamw", adamw, FP32, {}),
        ("adamw", adamw, BF16, {}),
        ("tile_schedule", tile_schedule, BF16, {"base": False}),
        ("tile_schedule, base row", tile_schedule, BF16, {"base": True}),
        ("route", route, FP32, {"experts": 128, "grouped": False}),
        ("route, grouped", route, FP32, {"experts": 256, "grouped": True}),
        ("weigh", weigh, FP32, {"experts": 128, "grouped": False}),
        ("weigh, grouped", weigh, FP32, {"experts": 256, "grouped": True}),
        ("make_plan", make_plan, BF16, {"capacity": False}),
        ("make_plan, capacities", make_plan, BF16, {"capacity": True}),
        ("reduce_weight_grad", reduce_weight_grad, BF16, {"bias": False}),
        ("reduce_weight_grad, bias", reduce_weight_grad, BF16, {"bias": True}),
        ("grouped_sum", grouped_sum, BF16, {"gather": True}),
        ("grouped_sum, main_grad, base row", grouped_sum, BF16, {"gather": False}),
        ("transpose", transpose, BF16, {"parts": 1, "back": False}),
        ("transpose, gate and up alternate", transpose, BF16, {"parts": 2, "back": False}),
        ("transpose, back", transpose, BF16, {"parts": 2, "back": True}),
        ("combine", combine, BF16, {"weighted": True}),
        ("combine, plain sum", combine, BF16, {"weighted": False}),
        ("combine_backward", combine_backward, BF16, {}),
    ]
    large = [
        ("route, 4096 experts", route, FP32, {"experts": 4096, "grouped": False}),
        ("make_plan, 4096 experts", make_plan, BF16, {"capacity": False, "experts": 4096}),
    ]
    return [
        Case(name=name, launch=launch, capability=capability, dtype=dtype, options=options)
        for capability in (HOPPER, *OTHERS)
        for name, launch, dtype, options in (calls + large if capability == HOPPER else calls)
    ]
