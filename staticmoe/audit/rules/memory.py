"""SM501-SM504: memory and operations that a replay cannot follow. Found by the recorder of `staticmoe.capture`."""

from __future__ import annotations

from staticmoe.audit.entry import Entry

ENTRIES = (
    Entry(
        "SM501", "error", "memory that is replaced or resized",
        "A graph writes to the addresses of the capture; x.data = y and resize_ leave it behind. Where it happens to "
        "something that outlives the iteration, the audit stops there.",
        "Allocate the final size once and copy in place.",
        "self.buffer.resize_(n)", "self.buffer[:n].copy_(x)   # allocated at its largest size",
    ),
    Entry(
        "SM502", "error", "a sparse tensor",
        "How many values it holds is a value of the device. The audit stops there.",
        "Use a dense tensor and a mask, or gather and scatter by indices of constant count.",
        "y = a.to_sparse() @ x", "y = a @ x",
    ),
    Entry(
        "SM503", "error", "a barrier, or on the CPU a message to one rank",
        "At a barrier the host waits, which no replay does. A replay on the CPU waits for each message where it "
        "stands: two ranks that first send and then receive would wait for each other.",
        "Leave a barrier out: a collective waits for its data anyhow. Exchange by a collective of all ranks.",
        "dist.isend(x, 1)", "dist.all_to_all_single(y, x)",
    ),
    Entry(
        "SM504", "note", "a strided slice of integers handed to a custom operation",
        "As of one routing tensor for all layers. Kernels want it contiguous and at a multiple of 16 bytes, so a copy "
        "is made in every step; and compiled code on the way may return another slice (SM603).",
        "Keep layers apart from the start, or make the slices contiguous once.",
        "self.moe(x, routing=(ids[:, :, layer], weights))",
        "self.moe(x, routing=(ids[layer], weights))   # [L, B, S, K]",
    ),
)  # fmt: skip
