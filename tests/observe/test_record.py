"""A record is of its step, also when it is looked at after the ring has gone round."""

from __future__ import annotations

import torch
from torch import Tensor

from staticmoe.observe.derive import Loads
from staticmoe.observe.record import RecordLayout, RecordRing


def test_counts_that_are_read_late_are_those_of_their_step(device: torch.device) -> None:
    """One slot, three steps; lists, arrays and scalars are made after the last. A layer without counts shifts none."""
    fields = (("a", "routed", (3,)), ("a", "kept", (3,)), ("dense", "other", (2,)), ("b", "routed", (2,)),
              ("b", "kept", (2,)))  # fmt: skip
    ring = RecordRing(RecordLayout(("loss",), fields), 1, device)

    def integer(value: int) -> Tensor:
        return torch.tensor(value, device=device)

    records = []
    for step in range(1, 4):
        for number, (owner, field, _) in enumerate(fields):
            ring.field(owner, field).fill_(10 * step + number)
        counters = [integer(value) for value in (step, 0, 0, 0, 0, step)]
        ring.write(counters, [torch.tensor(0.5 * step, device=device)], torch.tensor([0], device=device))
        ring.copy_out(0)
        if device.type == "cuda":
            torch.cuda.synchronize()
        records.append(ring.read(0))
    for step, record in enumerate(records, start=1):
        first = 10 * step
        assert (record.launch, record.committed, record.scalars) == (step, step, {"loss": 0.5 * step})
        assert record.fields == {
            "a": {"routed": [first] * 3, "kept": [first + 1] * 3},
            "dense": {"other": [first + 2] * 2},
            "b": {"routed": [first + 3] * 2, "kept": [first + 4] * 2},
        }
        loads = Loads.of(record)
        assert (loads.names, loads.sizes) == (("a", "b"), (3, 2))
        assert loads.routed.tolist() == [first] * 3 + [first + 3] * 2
        assert loads.kept.tolist() == [first + 1] * 3 + [first + 4] * 2
    assert records[0].fields != records[1].fields
