"""The gradient of the pre-activation on Hopper, in Gluon: `staticmoe.kernels.dact` warp-specialised, for 16 bits.

Two consumers take the tiles in turn: while one derives and stores its tile, the other one has the tensor cores. A
producer brings the operands: token gradients gathered by cp.async, or rows by TMA.

The epilogue is bound by fetching instructions: four warps run straight-line code for 128 elements a thread, once a
tile. With 5000 instructions a consumer it took three times as long as with 3700.

Dimensions: T tokens, K top_k, E experts, H hidden, I intermediate, R capacity rows, S rows of a saved buffer, G halves
of the pre-activation (2: gate and up; 1 where the activation has no gate), M the most row tiles; BM, BN, BK a tile.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from staticmoe.kernels.dact import derive
from staticmoe.kernels.grouped_gemm import tile_position
from staticmoe.kernels.hopper.pipeline import (
    load_rows,
    next_stage,
    plain_descriptor,
    ragged_descriptor,
    stage_before,
    store_rows,
)
from staticmoe.kernels.weight_grad import column_slices

ROWS = 128  # of a tile, and of the schedule that `dact` takes
_COLUMNS, _DEPTH, _STAGES, _SLICES = 128, 64, 4, 4
# Row tiles that take one column tile after the other, for the L2 cache.
_GROUP = 16
# Rows an expert from which tiles of 128 rows waste less than what the 64 of the Triton kernel cost.
_ROWS_FROM = 192
# The others' are bound by fetching instructions: "geglu" 1.14 ms, in Triton 0.57 (results/h200/hopper_kernels.json).
_SHORT_EPILOGUES = ("swiglu", "relu2")
# Elements in 16 bytes.
_ALIGN = gl.constexpr(8)
# Of two consumers and the four warps that a producer takes up, at most 65536 less what the launch cannot give out:
# 128 * (2 * 240 + 24), or with the addresses of gathered rows 128 * (2 * 224 + 56).
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
_GATHERING_CONSUMER_REGISTERS, _GATHERING_PRODUCER_REGISTERS = gl.constexpr(224), gl.constexpr(56)


@gluon.jit
def _place(walk, tile, GROUP: gl.constexpr):
    """Return column tile, expert, first row, rows and saved row of number `tile`."""
    schedule_ptr, row_tiles, column_tiles = walk
    # Without tiles an entry that nobody uses.
    m, n = tile_position(tile, gl.maximum(row_tiles, 1), column_tiles, GROUP)
    entry = schedule_ptr + m * 4
    return n, gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3)


@gluon.jit
def _produce_gathered(
    tokens_ptr, down, assignment_ptr, walk, operands, width, stride,
    TOP_K: gl.constexpr, EVEN: gl.constexpr, STAGES: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Bring the tokens of the rows by 16-byte cp.async, zeros past the tile's rows and past H, and the weights by TMA.

    Indices come ahead, so that no tile waits for them: assignments one tile, entries of the schedule two. Past the
    last tile they are those of the last one.
    """
    VECTOR: gl.constexpr = 8
    layout: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 * VECTOR // BK, BK // VECTOR], [4, 1], [1, 0])
    rows = gl.arange(0, BM, layout=gl.SliceLayout(1, layout))
    depth = gl.expand_dims(gl.arange(0, BK, layout=gl.SliceLayout(0, layout)), 0)
    grad_smem, down_smem, full_bars, empty_bars = operands
    tiles = walk[1] * walk[2]
    programs = gl.num_programs(0)
    last = gl.maximum(tiles - 1, 0)
    n, expert, first, count, _ = _place(walk, gl.minimum(gl.program_id(0), last), GROUP)
    assignment = gl.load(assignment_ptr + first + rows, mask=rows < count, other=0)
    ahead = gl.minimum(gl.program_id(0) + programs, last)
    next_n, next_expert, next_first, next_count, _ = _place(walk, ahead, GROUP)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, programs):
        column = n * BN
        owner = expert
        at = tokens_ptr + (gl.expand_dims((assignment // TOP_K).to(gl.int64) * stride, 1) + depth)
        inside = gl.expand_dims(rows < count, 1)
        n, expert, first, count = next_n, next_expert, next_first, next_count
        assignment = gl.load(assignment_ptr + first + rows, mask=rows < count, other=0)
        ahead = gl.minimum(tile + 2 * programs, last)
        next_n, next_expert, next_first, next_count, _ = _place(walk, ahead, GROUP)
        for k in range(0, width, BK):
            mbarrier.wait(empty_bars.index(stage), phase ^ 1)
            full_bar = full_bars.index(stage)
            mbarrier.expect(full_bar, BK * BN * 2)
            tma.async_copy_global_to_shared(down, [owner, k, column], full_bar, down_smem.index(stage))
            mask = inside if EVEN else inside & (k + depth < width)
            async_copy.async_copy_global_to_shared(grad_smem.index(stage), at + k, mask)
            # Each of the 128 threads arrives once, by the hardware, when its own copies have landed.
            async_copy.mbarrier_arrive(full_bar, increment_count=False)
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _produce_rows(
    grad, down, walk, operands, width,
    STAGES: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Bring both operands by TMA; the entry of the schedule comes one tile ahead."""
    grad_smem, down_smem, full_bars, empty_bars = operands
    tiles = walk[1] * walk[2]
    programs = gl.num_programs(0)
    last = gl.maximum(tiles - 1, 0)
    n, expert, first, count, _ = _place(walk, gl.minimum(gl.program_id(0), last), GROUP)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, programs):
        column = n * BN
        owner = expert
        end = first + count
        left = count
        n, expert, first, count, _ = _place(walk, gl.minimum(tile + programs, last), GROUP)
        for k in range(0, width, BK):
            mbarrier.wait(empty_bars.index(stage), phase ^ 1)
            full_bar = full_bars.index(stage)
            mbarrier.expect(full_bar, (BM + BN) * BK * 2)
            tma.async_copy_global_to_shared(down, [owner, k, column], full_bar, down_smem.index(stage))
            load_rows(grad, end, left, 0, k, full_bar, grad_smem.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _produce(
    grad, down, assignment_ptr, walk, operands, width, stride,
    GATHER: gl.constexpr, TOP_K: gl.constexpr, EVEN: gl.constexpr, STAGES: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Fill the stages in the order of the program's tiles, and run ahead across tiles."""
    if GATHER:
        _produce_gathered(
            grad, down, assignment_ptr, walk, operands, width, stride, TOP_K, EVEN, STAGES, BM, BN, BK, GROUP
        )
    else:
        _produce_rows(grad, down, walk, operands, width, STAGES, BM, BN, BK, GROUP)


@gluon.jit
def _load_pre(pre, buffers, place, WHICH: gl.constexpr, SLICE: gl.constexpr, HALVES: gl.constexpr):
    """Begin to load one slice of a tile's pre-activation for consumer WHICH; zeros past its rows and past I."""
    pre_smem, _, loaded_bars = buffers
    saved, count, column = place
    SLICES: gl.constexpr = pre_smem.shape[0] // HALVES
    BM: gl.constexpr = pre_smem.shape[4]
    WIDTH: gl.constexpr = pre_smem.shape[5]
    loaded_bar = loaded_bars.index(WHICH * SLICES + SLICE)
    mbarrier.expect(loaded_bar, HALVES * BM * WIDTH * 2)
    for half in gl.static_range(HALVES):
        buffer = pre_smem.index(half * SLICES + SLICE)
        load_rows(pre, saved + count, count, half, column + SLICE * WIDTH, loaded_bar, buffer)


@gluon.jit
def _consume(
    assignment_ptr, pre, weight_ptr, d_pre, act_weighted, part_ptr, part_stride, walk, width, operands, buffers,
    turn_bars, WHICH: gl.constexpr, GATHER: gl.constexpr, HALVES: gl.constexpr, ACT: gl.constexpr, SLICES: gl.constexpr,
    STAGES: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Multiply, derive and store the program's tiles of number WHICH, WHICH + 2, ...; see the kernel for the order."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    WIDTH: gl.constexpr = BN // SLICES
    grad_smem, down_smem, full_bars, empty_bars = operands
    pre_smem, act_smem, loaded_bars = buffers
    tiles = walk[1] * walk[2]
    steps = gl.cdiv(width, BK)
    programs = gl.num_programs(0)
    rows = gl.arange(0, BM, layout=gl.SliceLayout(1, layout))
    own = 0
    for tile in range(gl.program_id(0) + WHICH * programs, tiles, 2 * programs):
        n, _, first, count, saved = _place(walk, tile, GROUP)
        more = tile + programs < tiles
        next_n, _, _, next_count, next_saved = _place(walk, gl.minimum(tile + programs, tiles - 1), GROUP)
        inside = rows < count
        assignment = gl.load(assignment_ptr + first + rows, mask=inside, other=0)
        weight = gl.load(weight_ptr + assignment, mask=inside, other=0.0)
        first_step = (2 * own + WHICH) * steps
        stage = first_step % STAGES
        phase = first_step // STAGES & 1
        mbarrier.wait(turn_bars.index(WHICH), (own & 1) ^ (1 - WHICH))
        acc = warpgroup_mma_init(gl.zeros((BM, BN), gl.float32, layout))
        for k in range(0, steps):
            mbarrier.wait(full_bars.index(stage), phase)
            if GATHER:
                # cp.async writes through the generic proxy, wgmma reads through the asynchronous one.
                fence_async_shared()
            a = grad_smem.index(stage).reshape((BM, BK))
            b = down_smem.index(stage).reshape((BK, BN))
            acc = warpgroup_mma(a, b, acc, use_acc=k > 0, is_async=True)
            # One product stays in flight; the one before it has read its stage.
            acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
            mbarrier.arrive(empty_bars.index(stage_before(stage, STAGES)), count=1, pred=k > 0)
            stage, phase = next_stage(stage, phase, STAGES)
        mbarrier.arrive(turn_bars.index(1 - WHICH), count=1)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty_bars.index(stage_before(stage, STAGES)), count=1)
        slices = column_slices(acc, BM, BN, SLICES)
        part_layout: gl.constexpr = gl.SliceLayout(1, slices[0].type.layout)
        weight = gl.convert_layout(weight, part_layout, assert_trivial=True)
        part = gl.zeros((BM,), gl.float32, part_layout)
        for i in gl.static_range(SLICES):
            mbarrier.wait(loaded_bars.index(WHICH * SLICES + i), own & 1)
            gate_smem = pre_smem.index(i).reshape((BM, WIDTH))
            up_smem = pre_smem.index((HALVES - 1) * SLICES + i).reshape((BM, WIDTH))
            gate = gate_smem.load(slices[i].type.layout)
            up = gate
            if HALVES == 2:
                up = up_smem.load(slices[i].type.layout)
            d_gate, d_up, act, products = derive(gate, up, slices[i], weight, HALVES, ACT, pre.dtype)
            part += products
            gate_smem.store(d_gate)
            if HALVES == 2:
                up_smem.store(d_up)
            act_smem.index(i).reshape((BM, WIDTH)).store(act)
            fence_async_shared()
            column = n * BN + i * WIDTH
            for half in gl.static_range(HALVES):
                store_rows(d_pre, saved + count, count, half, column, pre_smem.index(half * SLICES + i))
            store_rows(act_weighted, first + count, count, 0, column, act_smem.index(i))
            if i > 0:
                # All but this slice's stores have read shared memory: the next tile's slice may come in.
                tma.store_wait(HALVES + 1)
                if more:
                    _load_pre(pre, buffers, (next_saved, next_count, next_n * BN), 1 - WHICH, i - 1, HALVES)
        part_rows = gl.arange(0, BM, layout=part_layout)
        gl.store(part_ptr + (first + part_rows).to(gl.int64) * part_stride + n, part, mask=part_rows < count)
        tma.store_wait(0)
        if more:
            _load_pre(pre, buffers, (next_saved, next_count, next_n * BN), 1 - WHICH, SLICES - 1, HALVES)
        own += 1  # noqa: SIM113 (Gluon has no enumerate)


@gluon.jit(do_not_specialize=["width_units", "stride_units", "columns_units", "part_stride"])
def staticmoe_dact_hopper(
    grad,
    assignment_ptr,
    down,
    pre,
    weight_ptr,
    d_pre,
    act_weighted,
    part_ptr,
    schedule_ptr,
    tile_count_ptr,
    width_units,
    stride_units,
    columns_units,
    part_stride,
    HALVES: gl.constexpr,
    TOP_K: gl.constexpr,
    GATHER: gl.constexpr,
    ACT: gl.constexpr,
    EVEN: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    SLICES: gl.constexpr,
    GROUP: gl.constexpr,
):
    """d_pre, weighted activation and parts of the routing weight's gradient, for the rows of the schedule.

    Grid: any number of programs P; program p takes the tiles p, p + P, ... of `tile_count` x ceil(I / BN), in the order
    of `tile_position`: its tiles 0, 1, 2, ... below. A tile owns its rows and BN columns of act_weighted, the same
    columns of every half of d_pre, and one column of the parts. d_pre may be pre: a tile reads what it owns, and a
    slice is stored only when it has arrived.
    `grad`: with GATHER a pointer to the tokens, else a ragged descriptor of rows.
    Unwritten: every row that is in no tile, and what lies past I. Reads no row outside of its segment: the ragged
    descriptors give zeros there, and the gathered copies are masked.
    Deterministic: one consumer sums an element over H in steps of BK, and a part over BN columns slice by slice;
    nothing depends on the grid, on R, or on which consumer it is.

    Who does what. The producer brings the operands of tile 0, then of tile 1 and so on, in steps numbered 0, 1, ...
    through all tiles; step s lies in stage s % STAGES. Consumer w owns the tiles w, w + 2, ...: it multiplies (main
    loop), derives and stores slice by slice (epilogue). While one is in its epilogue, the other one multiplies.

    Barriers, and why no wait is wrong or endless. Phase j of a barrier ends with its j-th completion, from 0. A wait
    for the end of phase j by parity is exact if j - 1 has surely ended and j + 1 surely has not. At an arrival by one
    thread all warps of its group have met (the compiler puts a group barrier in front), so no warp is a round behind.
    - full_bars[stage], count 1 (`expect`) + 128 (cp.async, one a thread) or 1 (TMA), phase j: the operands of the
      stage's j-th step. A consumer waits for step s only when all waits for earlier steps are over: its own in order,
      the other's because of `turn_bars`. So phase j - 1 has ended; phase j + 1 needs the stage freed by this consumer
      after this wait.
    - empty_bars[stage], phase j: the product of the stage's j-th step has ended. The producer waits for phase j - 1
      before it fills the stage for the j-th time (j = 0: the parity that a fresh barrier passes).
    - turn_bars[w]: the other consumer has issued its main loop. Consumer 1 waits for phase j before its j-th tile,
      consumer 0 for phase j - 1 (j = 0: passes); each arrives at the other's once a main loop. Strict alternation, so a
      count is never more than one ahead. This orders the main loops, which the parities of `full_bars` need.
    - loaded_bars[w * SLICES + i], phase j: slice i of the pre-activation of consumer w's j-th tile, which comes to lie
      in the buffers `i` of pre_smem. They serve every tile in turn: waited for, read, overwritten with the gradients,
      stored from. The consumer of tile c begins the load of slice i of tile c + 1 when its own stores from these
      buffers, and from act_smem[i], have read them: a slice later, when of its stores only the HALVES + 1 of slice
      i + 1 may be under way, and for the last slice when none is. Tile 0's loads are begun before the partitions start.
      So whoever has waited for a slice is alone with its buffers until it passes them on. Consumer w waited for phase
      j - 1 itself. Phase j + 1 is begun by the tile after its j-th one, behind that tile's wait for the slice, whose
      load consumer w begins behind this wait.
    Order of progress: main loop c needs the producer, main loop c - 1 and epilogue c - 2 (same warps); slice i of
    epilogue c needs main loop c, slice i - 1 and, of epilogue c - 1, the slices up to i + 1; step s of the producer
    needs the product of step s - STAGES, which needs operands of steps up to s - STAGES + 1 at most (a stage is freed
    one product later; the last of a tile at once). By induction over c, i and s nothing waits in a circle; a store
    needs nothing but time. With tile_count 0 nobody waits for anything.
    Proxies: copies (generic) to product (asynchronous): a fence by the consumer behind the wait. Derived values to TMA
    stores: fence, group barrier, store. Stores to the next TMA load: the thread that committed them waits until they
    have read, and its warp begins the load.
    """
    gl.static_assert(STAGES >= 2)
    row_tiles = gl.load(tile_count_ptr)
    column_tiles = (columns_units * _ALIGN + BN - 1) // BN
    width = width_units * _ALIGN
    # A product with a constant 16 bytes long: only then are gathered rows copied in 16 bytes.
    stride = stride_units * _ALIGN
    WIDTH: gl.constexpr = BN // SLICES
    PRODUCER_WARPS: gl.constexpr = 4 if GATHER else 1
    CONSUMER_REGISTERS: gl.constexpr = _GATHERING_CONSUMER_REGISTERS if GATHER else _CONSUMER_REGISTERS
    PRODUCER_REGISTERS: gl.constexpr = _GATHERING_PRODUCER_REGISTERS if GATHER else _PRODUCER_REGISTERS
    if GATHER:
        rows_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        grad_smem = gl.allocate_shared_memory(down.dtype, [STAGES, BM, BK], rows_layout)
    else:
        grad_smem = gl.allocate_shared_memory(down.dtype, [STAGES, 1, 1, 1, BM, BK], grad.layout)
    down_smem = gl.allocate_shared_memory(down.dtype, [STAGES, 1, BK, BN], down.layout)
    pre_smem = gl.allocate_shared_memory(pre.dtype, [HALVES * SLICES, 1, 1, 1, BM, WIDTH], pre.layout)
    act_smem = gl.allocate_shared_memory(pre.dtype, [SLICES, 1, 1, 1, BM, WIDTH], act_weighted.layout)
    full_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    loaded_bars = gl.allocate_shared_memory(gl.int64, [2 * SLICES, 1], mbarrier.MBarrierLayout())
    turn_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full_bars.index(i), count=1 + 32 * PRODUCER_WARPS if GATHER else 1)
        mbarrier.init(empty_bars.index(i), count=1)
    for i in gl.static_range(2 * SLICES):
        mbarrier.init(loaded_bars.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(turn_bars.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    walk = (schedule_ptr, row_tiles, column_tiles)
    operands = (grad_smem, down_smem, full_bars, empty_bars)
    buffers = (pre_smem, act_smem, loaded_bars)
    if gl.program_id(0) < row_tiles * column_tiles:
        n, _, _, count, saved = _place(walk, gl.program_id(0), GROUP)
        for i in gl.static_range(SLICES):
            _load_pre(pre, buffers, (saved, count, n * BN), 0, i, HALVES)
    gl.warp_specialize([
        (_consume, (assignment_ptr, pre, weight_ptr, d_pre, act_weighted, part_ptr, part_stride, walk, width, operands,
                    buffers, turn_bars, 0, GATHER, HALVES, ACT, SLICES, STAGES, BM, BN, BK, GROUP)),
        (_consume, (assignment_ptr, pre, weight_ptr, d_pre, act_weighted, part_ptr, part_stride, walk, width, operands,
                    buffers, turn_bars, 1, GATHER, HALVES, ACT, SLICES, STAGES, BM, BN, BK, GROUP)),
        (_produce, (grad, down, assignment_ptr, walk, operands, width, stride,
                    GATHER, TOP_K, EVEN, STAGES, BM, BN, BK, GROUP)),
    ], [4, PRODUCER_WARPS], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def weight_parts(intermediate: int) -> int:
    """The columns of `d_weight_parts` that `dact` writes for I = `intermediate`."""
    return triton.cdiv(intermediate, _COLUMNS)


def serves(*tensors: Tensor, activation: str, rows_per_expert: float) -> bool:
    """Whether `dact` takes these and is the faster one: all of 16 bits, as TMA reads them, and a mean load T·K/E."""
    if activation not in _SHORT_EPILOGUES:
        return False
    dtype = tensors[0].dtype
    narrow = dtype in (torch.bfloat16, torch.float16) and all(tensor.dtype == dtype for tensor in tensors)
    return narrow and rows_per_expert >= _ROWS_FROM and all(_readable(tensor) for tensor in tensors)


def _readable(tensor: Tensor) -> bool:
    """Whether every row starts at a multiple of 16 bytes, and has no gaps."""
    whole = tensor.stride(-1) == 1 and all(stride % _ALIGN.value == 0 for stride in tensor.stride()[:-1])
    return whole and tensor.data_ptr() % 16 == 0


def dact(
    grad: Tensor,
    row_assignment: Tensor,
    down: Tensor,
    pre: Tensor,
    topk_weights: Tensor,
    d_pre: Tensor,
    act_weighted: Tensor,
    d_weight_parts: Tensor,
    schedule: Tensor,
    tile_count: Tensor,
    *,
    top_k: int | None,
    activation: str,
    programs: int,
) -> None:
    """As `staticmoe.kernels.dact.dact`, of what `serves` takes, on compute capability 9.0.

    In place costs nothing here: a tile's pre-activation comes and goes through one buffer.

    Shapes: as there, with a schedule for BM = `ROWS` and [R,`weight_parts`] parts.
    Raises:
        ValueError: for parts of another width.
    Graph-safe: yes.
    """
    gather = top_k is not None
    width, columns = down.shape[1:]
    column_tiles = weight_parts(columns)
    if d_weight_parts.shape[1] != column_tiles:
        raise ValueError(f"dact: expected d_weight_parts [R,{column_tiles}], got {tuple(d_weight_parts.shape)}")
    halves, box = pre.shape[1] // columns, [ROWS, _COLUMNS // _SLICES]
    staticmoe_dact_hopper[(min(schedule.shape[0] * column_tiles, programs),)](
        grad if gather else ragged_descriptor(grad, 1, [ROWS, _DEPTH]),
        row_assignment,
        plain_descriptor(down, [1, _DEPTH, _COLUMNS]),
        ragged_descriptor(pre, halves, box),
        topk_weights,
        ragged_descriptor(d_pre, halves, box),
        ragged_descriptor(act_weighted, 1, box),
        d_weight_parts,
        schedule,
        tile_count,
        width // _ALIGN.value,
        grad.stride(0) // _ALIGN.value,
        columns // _ALIGN.value,
        d_weight_parts.stride(0),
        HALVES=halves,
        TOP_K=top_k,
        GATHER=gather,
        ACT=activation,
        EVEN=width % _DEPTH == 0,
        BM=ROWS,
        BN=_COLUMNS,
        BK=_DEPTH,
        STAGES=_STAGES,
        SLICES=_SLICES,
        GROUP=_GROUP,
        num_warps=4,
    )
