"""The reference model: right loss, causal, relative positions, and the same weights for the same seed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from staticmoe.demo.model import DemoLM, LMOutput, ModelConfig, RotaryTable
from staticmoe.errors import ConfigError

CONFIG = ModelConfig.from_depth(2, max_seq_len=16)


def tokens(rows: int = 3, length: int = 16) -> torch.Tensor:
    return torch.randint(256, (rows, length))


def test_the_dial_sets_every_size() -> None:
    assert dataclasses.astuple(CONFIG)[:7] == (2, 64, 2, 8, 2, 64, 16)
    six = ModelConfig.from_depth(6, max_seq_len=8)
    assert (six.hidden_size, six.num_heads, six.num_experts, six.intermediate_size) == (192, 6, 24, 192)


def test_the_loss_is_the_mean_over_counted_labels() -> None:
    model, ids = DemoLM(CONFIG).double(), tokens()
    labels = torch.randint(256, (3, 16))
    labels[1] = -100
    loss, logits = model(ids, labels)
    assert logits.shape == (3, 16, 256) and loss.dtype == torch.float32
    picked = F.log_softmax(logits.float(), dim=-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    assert loss.item() == pytest.approx(-picked[[0, 2]].mean().item(), rel=1e-6)
    without = model(ids)
    assert isinstance(without, LMOutput) and without.loss is None and torch.equal(without.logits, logits)


def test_an_untrained_model_is_near_uniform() -> None:
    ids = tokens(8)
    loss = DemoLM(CONFIG)(ids, tokens(8)).loss
    assert abs(loss.item() - 5.545) < 0.05


def test_a_later_token_changes_no_earlier_logit() -> None:
    model, ids = DemoLM(CONFIG), tokens(1)
    before = model(ids).logits
    ids[0, 9] = (ids[0, 9] + 1) % 256
    after = model(ids).logits
    torch.testing.assert_close(after[0, :9], before[0, :9], rtol=0, atol=1e-5)
    assert (after[0, 9:] - before[0, 9:]).abs().amax(dim=-1).min() > 1e-3


def test_rotation_keeps_lengths_and_scores_depend_on_the_distance_alone() -> None:
    rotary = RotaryTable(8, 32)
    query, key = (torch.randn(8).expand(1, 1, 32, 8) for _ in range(2))
    turned_query, turned_key = rotary(query)[0, 0], rotary(key)[0, 0]
    torch.testing.assert_close(turned_query.norm(dim=-1), query[0, 0].norm(dim=-1))
    scores = turned_query @ turned_key.T
    for distance in (0, 3, 11):
        along = scores.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-5)
    assert (scores[5, 5] - scores[5, 0]).abs() > 1e-3


def test_the_same_seed_gives_the_same_weights_whatever_ran_before() -> None:
    first = DemoLM(CONFIG, seed=7).state_dict()
    torch.randn(1000)
    second, other = DemoLM(CONFIG, seed=7).state_dict(), DemoLM(CONFIG, seed=8).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert [name for name in first if torch.equal(first[name], other[name]) and "norm" not in name] == [
        f"blocks.{layer}.moe.router.balancing_bias" for layer in range(2)
    ]
    # Tables follow from the sizes; a state dict does not carry them.
    assert not [name for name in first if "rotary" in name]


def test_every_parameter_gets_a_gradient() -> None:
    model = DemoLM(CONFIG)
    model(tokens(16), tokens(16)).loss.backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert silent == []


def test_dropout_acts_in_training_alone() -> None:
    model, ids = DemoLM(dataclasses.replace(CONFIG, dropout=0.5)), tokens()
    assert not torch.equal(model(ids).logits, model(ids).logits)
    model.eval()
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 4.* got 66"):
        dataclasses.replace(CONFIG, hidden_size=66)
    with pytest.raises(ConfigError, match="dropout: .* got 1.0"):
        dataclasses.replace(CONFIG, dropout=1.0)
    with pytest.raises(ConfigError, match="depth: expected at least 1; got 0"):
        ModelConfig.from_depth(0, max_seq_len=8)
    with pytest.raises(ValueError, match="max_seq_len = 16.* got 17"):
        DemoLM(CONFIG)(tokens(1, 17))
