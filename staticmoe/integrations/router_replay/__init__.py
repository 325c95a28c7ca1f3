"""Router replay: a forward that takes its experts from a tensor, and one that tells which experts it took.

For reinforcement learning, where training repeats the routing of the rollout engine, and for debugging:

    from staticmoe.integrations.router_replay import check, recording, replaying

    with recording(model) as record:                        # record.ids, record.weights [B,S,L,K]
        model(tokens)

    def loss_fn(model, batch):                              # the same in a plain loop, and in a captured step
        with replaying(model, batch["routed_experts"]):
            return model(batch["tokens"], labels=batch["labels"]).loss

Layers are the `StaticMoE` layers, and the experts of transformers models with `experts_implementation="staticmoe"`, in
module order; dense layers are none. One scope holds one forward. The ids belong to the batch: a captured step reads
those of each batch anew.

What a replayed step computes:
- **Weights** are the current router's scores at the replayed ids, normalised and scaled as the layer does, so that the
  router learns; bias and groups, which act on the choice alone, do not matter. Weights that are handed over are used as
  they are, and the router gets no gradient from the output: freeze it.
- **Capacity** is as ever: replayed assignments are counted, overflow, and are dropped or run again by the policy.
- **Router losses** of `StaticMoE` are as ever: counts, which are replayed, against the current probabilities. Set their
  coefficients to 0 where the policy's loss alone should move the router. With weights handed over there are none. A
  balancing bias follows the replayed counts.
- **Padding**: a token whose K ids are all -1 has no expert in that layer: no row, no capacity, no count.
- **What cannot be replayed** is a token whose ids are not K different experts of the layer: it has no expert in that
  layer either, and is counted in `Replay.refused`, under a runner also in `result.metrics["replay_refused"]` (the mean
  over micro-batches). Nothing can be raised from inside a captured step: call `check` on the host before training.

Activation checkpointing with `use_reentrant=False` recomputes under the ids of its own forward, also where the scope
has ended; other checkpointing is refused in the backward.
"""

from __future__ import annotations

from staticmoe.integrations.router_replay.ids import check
from staticmoe.integrations.router_replay.layers import routing_layers
from staticmoe.integrations.router_replay.record import Recording, recording
from staticmoe.integrations.router_replay.replay import Replay, replaying

__all__ = ["Recording", "Replay", "check", "recording", "replaying", "routing_layers"]
