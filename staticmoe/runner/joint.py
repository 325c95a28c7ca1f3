"""How the steps of several ranks become one step: W ranks of N micro-batches do what one rank does with W·N of them.

Each rank weights its losses so that a sum over all of them is the joint loss. The gradients are then added up, and what
else ranks must know of each other travels in one exchange: reasons, scalars and the participants' counts.

Letters: W ranks, N micro-batches, S scalars, F elements of the participants' fields, E elements of one field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from staticmoe.errors import ConfigError
from staticmoe.observe.record import Reason, RecordRing
from staticmoe.parallel.replicas import Replicas
from staticmoe.runner.participants import StepBinding

_Weights = list[float | Tensor]


def loss_weights(batches: Sequence[Any], reduction: str, replicas: Replicas | None) -> tuple[_Weights, _Weights]:
    """Factors of this rank's N losses, and of what is a mean whatever the losses are: metrics and auxiliary losses.

    Raises:
        ConfigError: "tokens", and a batch without labels.
    Graph-safe: yes.
    """
    count = len(batches) * (1 if replicas is None else replicas.size)
    shares: _Weights = [1 / count] * len(batches)
    if reduction != "tokens":
        return ([1.0] * len(batches) if reduction == "sum" else shares), shares
    if not all(isinstance(batch, dict) and "labels" in batch for batch in batches):
        raise ConfigError("loss_reduction='tokens': expected a batch with 'labels' (-100: not counted), got none")
    valid = torch.stack([(batch["labels"] != -100).sum() for batch in batches])
    total = valid.sum() if replicas is None else replicas.gather(valid.sum().reshape(1)).sum()
    weights: _Weights = list((valid / total.clamp(min=1)).unbind())
    return weights, weights


def join_scalars(replicas: Replicas, values: Sequence[Tensor]) -> list[Tensor]:
    """Sums over ranks, in rank order, of 0-dim tensors; fp64. Graph-safe."""
    return list(replicas.gather(_bits(values)).view(torch.float64).sum(0).unbind())


def join_step(
    replicas: Replicas,
    reasons: Tensor,
    values: Sequence[Tensor],
    records: RecordRing,
    bindings: Mapping[str, StepBinding],
) -> list[Tensor]:
    """Exchange what ranks say of a step behind its backward; returns the scalars' sums, fp64.

    Afterwards `reasons` has the bits of all ranks, the bindings' fields are sums over ranks for the commit, and the
    record, whose own fields stay this rank's, has the peaks.

    Shapes:
        reasons int64 0-dim; values S 0-dim tensors.
    Graph-safe: yes.
    """
    rows = replicas.gather(torch.cat([reasons.reshape(1), _bits(values), records.fields]))
    kinds = torch.arange(len(Reason), device=reasons.device)
    reasons.copy_((((rows[:, :1] >> kinds) & 1).amax(0) << kinds).sum())
    fields = rows[:, 1 + len(values) :]
    sums = fields.sum(0)
    for participant, field, shape in records.layout.fields:
        start, end = records.layout.owners[participant][field]
        bindings[participant].fields[field] = sums[start:end].view(shape)
    records.peaks.copy_(_peaks(fields, records))
    return list(rows[:, 1 : 1 + len(values)].contiguous().view(torch.float64).sum(0).unbind())


def _peaks(fields: Tensor, records: RecordRing) -> Tensor:
    """Each participant's largest load of a rank, largest load of an element, and largest loss of a rank: [peaks,3].

    Shapes:
        fields [W,F] int64.
    """
    found = []
    for count, width, parts in records.layout.alike():
        block = fields[:, : count * width].reshape(fields.shape[0], count, width)
        fields = fields[:, count * width :]
        if parts is not None:
            routed, kept = block[..., parts[0]], block[..., parts[1]]
            lost = (routed.sum(-1) - kept.sum(-1)).amax(0)
            found.append(torch.stack([routed.sum(-1).amax(0), routed.amax((0, 2)), lost], 1))
    return torch.cat(found) if found else fields.new_zeros(0, 3)


def _bits(values: Sequence[Tensor]) -> Tensor:
    """fp64 values as int64, to travel beside counts."""
    return torch.stack([value.detach().to(torch.float64) for value in values]).view(torch.int64)
