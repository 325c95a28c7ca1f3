"""Experts of a ModuleList as a bank and back: values bit for bit, outputs and gradients of the loop, refusals."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from staticmoe import StaticMoERunner, functional
from staticmoe.audit import audit
from staticmoe.errors import ConfigError, ModelError
from staticmoe.integrations import modulelist
from staticmoe.integrations.modulelist import Names
from staticmoe.moe.experts import Experts

T, K, E, H, I = 13, 2, 5, 12, 8  # noqa: E741
ODD = Names("inner", "side", "outer")
ACTIVATIONS = {"swiglu": F.silu, "geglu": F.gelu}


class Expert(nn.Module):
    """down(act(gate(x)) * up(x)) under the names given."""

    def __init__(self, names: Names, *, bias: bool = False, activation: str = "swiglu", width: int = I) -> None:
        super().__init__()
        self.names, self.activation = names, activation
        for name in (names.gate, names.up):
            setattr(self, name, nn.Linear(H, width, bias=bias))
        setattr(self, names.down, nn.Linear(width, H, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name) for name in self.names.linears)
        return down(ACTIVATIONS[self.activation](gate(x)) * up(x))


class Squared(nn.Module):
    """The ungated down(relu(up(x))^2)."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(H, I, bias=False), nn.Linear(I, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.up_proj(x).relu().square())


class Block(nn.Module):
    """Router and experts; the experts in a loop, or as a bank where they are one."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.experts = experts

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(x)
        weights, ids = logits.softmax(-1).topk(K)
        if isinstance(self.experts, Experts):
            plan = functional.make_plan(ids, weights, num_experts=E)
            return self.experts(x, weights, plan), logits
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = (ids == number).nonzero(as_tuple=True)
            y = y.index_add(0, token, weights[token, slot, None] * expert(x[token]))
        return y, logits


MIXTRAL, LLAMA = Names("w1", "w3", "w2"), Names("gate_proj", "up_proj", "down_proj")


def expert_list(names: Names = MIXTRAL, **options: Any) -> nn.ModuleList:
    return nn.ModuleList(Expert(names, **options) for _ in range(E))


def blocks(experts: nn.ModuleList, **options: Any) -> tuple[Block, Block]:
    """The loop, and a copy over a bank."""
    old = Block(experts)
    new = copy.deepcopy(old)
    new.experts = modulelist.from_modulelist(new.experts, **options)
    return old, new


@pytest.mark.parametrize("names", [MIXTRAL, LLAMA, ODD], ids=["mixtral", "llama", "own"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_outputs_and_every_gradient_are_those_of_the_loop(names: Names, bias: bool, activation: str) -> None:
    given = {"names": names} if names is ODD else {}
    old, new = blocks(expert_list(names, bias=bias, activation=activation), activation=activation, **given)
    found = modulelist.check(old, new, torch.randn(T, H), **given)
    tensors = ["gate_up_proj", "down_proj"] + (["gate_up_proj_bias", "down_proj_bias"] if bias else [])
    assert found.gradients.keys() == {"gate.weight", *(f"experts.{name}" for name in tensors)}
    assert 0 < found.worst <= 1e-5
    assert all(parameter.grad is None for block in (old, new) for parameter in block.parameters())


def test_the_ungated_ones_too() -> None:
    old, new = blocks(nn.ModuleList(Squared() for _ in range(E)), activation="relu2")
    assert new.experts.gate_up_proj.shape == (E, I, H)
    assert modulelist.check(old, new, torch.randn(T, H)).worst <= 1e-5
    back = modulelist.to_modulelist(new.experts, like=Squared())
    assert_same(back.state_dict(), old.experts.state_dict())


@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj"])
def test_the_check_bites(part: str) -> None:
    """One element of one expert; or right values and a gradient that goes to another expert."""
    old, new = blocks(expert_list())
    bank = getattr(new.experts, part)
    with torch.no_grad():
        bank[1, 0, 0] += 0.5
    with pytest.raises(ModelError, match="the output by"):
        modulelist.check(old, new, torch.randn(64, H))
    with torch.no_grad():
        bank[1, 0, 0] -= 0.5
    modulelist.check(old, new, torch.randn(64, H), rtol=1e-4)
    bank.register_hook(lambda gradient: gradient.flip(0))
    with pytest.raises(ModelError, match=rf"^new: .* difference in the gradient of experts\.{part} by \S+$"):
        modulelist.check(old, new, torch.randn(64, H), rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_there_and_back_is_bitwise(dtype: torch.dtype, bias: bool) -> None:
    experts = expert_list(bias=bias).to(dtype).eval()
    before = copy.deepcopy(experts.state_dict())
    bank = modulelist.from_modulelist(experts)
    assert bank.gate_up_proj.dtype is dtype and not bank.training
    assert torch.equal(bank.gate_up_proj[3], torch.cat([experts[3].w1.weight, experts[3].w3.weight]))
    assert torch.equal(bank.down_proj[3], experts[3].w2.weight)
    back = modulelist.to_modulelist(bank, like=experts[0])
    assert_same(back.state_dict(), before)
    assert not any(module.training for module in back.modules())
    # Nothing is shared: neither with the bank nor with what it was made of.
    with torch.no_grad():
        for parameter in bank.parameters():
            parameter.zero_()
    assert_same(back.state_dict(), before)
    assert_same(experts.state_dict(), before)


def test_what_trains_and_where_it_lies_stay() -> None:
    experts = expert_list()
    for expert in experts:
        expert.w2.weight.requires_grad_(False)
    bank = modulelist.from_modulelist(experts)
    assert [p.requires_grad for p in (bank.gate_up_proj, bank.down_proj)] == [True, False]
    back = modulelist.to_modulelist(bank, like=experts[0])
    assert [p.requires_grad for p in back[0].parameters()] == [p.requires_grad for p in experts[0].parameters()]
    meta = modulelist.from_modulelist(expert_list().to("meta"))
    assert meta.gate_up_proj.is_meta and meta.gate_up_proj.shape == (E, 2 * I, H)
    # A skeleton without memory is enough to go back.
    with torch.device("meta"):
        skeleton = Expert(MIXTRAL)
    assert_same(modulelist.to_modulelist(bank, like=skeleton).state_dict(), experts.state_dict())


def test_a_whole_layer_trains_like_the_block() -> None:
    old = Block(expert_list())
    layer = modulelist.layer_from(old.experts, old.gate.weight, K, norm_topk_prob=False)
    x = torch.randn(T, H)
    torch.testing.assert_close(layer(x), old(x)[0])
    found = modulelist.check(old, layer, x, renamed={"gate.weight": "router.weight"})
    assert found.worst <= 1e-5 and "router.weight" in found.gradients
    assert layer.router.weight.dtype is torch.float32 and layer.router.weight is not old.gate.weight
    with pytest.raises(ConfigError, match=re.escape(f"expected [E,H] = {(E, H)}; got {(H, E)}")):
        modulelist.layer_from(old.experts, old.gate.weight.T, K)


def test_a_bank_is_what_the_audit_asks_for_and_trains_under_a_runner() -> None:
    class Model(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x).square().mean()

    old = Block(expert_list())
    layer = modulelist.layer_from(old.experts, old.gate.weight, K, norm_topk_prob=False)
    loop = copy.deepcopy(old)
    model, batch = Model(layer), {"x": torch.randn(T, H)}
    arguments = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "example_batch": batch,
        "loss_fn": lambda model, batch: model(batch["x"]),
    }
    assert audit(arguments).findings == ()
    with StaticMoERunner(**arguments) as runner:
        losses = [float(runner.step(batch).loss) for _ in range(4)]
    optimizer, expected = torch.optim.SGD(loop.parameters(), lr=0.1), []
    for _ in range(4):
        optimizer.zero_grad()
        loss = loop(batch["x"])[0].square().mean()
        loss.backward()
        optimizer.step()
        expected.append(float(loss))
    assert losses == pytest.approx(expected, rel=1e-5)
    back = modulelist.to_modulelist(layer.experts, like=old.experts[0]).state_dict()
    torch.testing.assert_close(back, loop.experts.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_state_dicts_are_those_of_the_modules_both_ways(bias: bool) -> None:
    """Of a whole model, two blocks deep, beside dense layers of the same names that are no experts."""

    def model() -> nn.Module:
        whole = nn.Module()
        whole.dense = nn.ModuleList(Expert(MIXTRAL) for _ in range(2))
        whole.layers = nn.ModuleList(Block(expert_list(bias=bias)) for _ in range(2))
        return whole

    old = model().to(torch.bfloat16)
    new = copy.deepcopy(old)
    for block in new.layers:
        block.experts = modulelist.from_modulelist(block.experts)
    paths = modulelist.bank_paths(new)
    assert paths == ["layers.0.experts", "layers.1.experts"]
    converted = modulelist.to_banks(old.state_dict(), paths)
    assert_same(converted, new.state_dict())
    new.load_state_dict(converted)
    assert_same(modulelist.to_experts(new.state_dict(), paths, names=MIXTRAL), old.state_dict())
    old.load_state_dict(modulelist.to_experts(new.state_dict(), paths, names=MIXTRAL))
    meta = modulelist.to_banks({key: value.to("meta") for key, value in old.state_dict().items()}, paths)
    assert {key: (v.shape, v.dtype, v.is_meta) for key, v in meta.items()} == {
        key: (v.shape, v.dtype, True) for key, v in new.state_dict().items()
    }
    # Alone, at the root.
    assert_same(modulelist.to_banks(old.layers[0].experts.state_dict(), [""]), new.layers[0].experts.state_dict())


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert value.dtype is other[key].dtype and torch.equal(value, other[key]), key


def _ragged(experts: nn.ModuleList) -> nn.ModuleList:
    experts[2] = Expert(MIXTRAL, width=I + 1)
    return experts


def _shared(experts: nn.ModuleList) -> nn.ModuleList:
    experts[3].w2.weight = experts[1].w2.weight
    return experts


def _half(experts: nn.ModuleList) -> nn.ModuleList:
    experts[4].to(torch.bfloat16)
    return experts


def _frozen(experts: nn.ModuleList) -> nn.ModuleList:
    experts[1].requires_grad_(False)
    return experts


def _one_bias(experts: nn.ModuleList) -> nn.ModuleList:
    experts[0].w2 = nn.Linear(I, H)
    return experts


def _normed(experts: nn.ModuleList) -> nn.ModuleList:
    experts[0].norm = nn.LayerNorm(H)
    return experts


def _hooked(experts: nn.ModuleList) -> nn.ModuleList:
    experts[0].w1.register_forward_hook(lambda module, inputs, output: 2 * output)
    return experts


def _normalised(experts: nn.ModuleList) -> nn.ModuleList:
    nn.utils.parametrizations.weight_norm(experts[0].w1)
    return experts


def _mixed_training(experts: nn.ModuleList) -> nn.ModuleList:
    for expert in experts:
        expert.w1.weight.requires_grad_(False)
    return experts


REFUSED: dict[str, tuple[Callable[[nn.ModuleList], nn.ModuleList], str]] = {
    "shapes": (_ragged, r"experts\[2\]\.w1\.weight: expected shape .*\[8, 12\].* got .*\[9, 12\]"),
    "shared": (_shared, r"experts\[3\]\.w2\.weight: .* got that of experts\[1\]\.w2\.weight"),
    "dtypes": (_half, r"experts\[4\]\.w1\.weight: expected dtype torch\.float32 .* got torch\.bfloat16"),
    "training": (_frozen, r"experts\[1\]\.w1\.weight: expected requires_grad True .* got False"),
    "one bias": (_one_bias, r"experts\[0\]\.w2: expected biases in all linear layers or in none"),
    "a norm": (_normed, r"experts\[0\]: .* beside \(w1, w3, w2\); got norm\.weight, norm\.bias"),
    "a hook": (_hooked, r"experts\[0\]: expected no hooks.* got some on w1"),
    "a parametrization": (_normalised, r"experts\[0\]\.w1: expected an nn\.Linear with a plain weight"),
    "a half that trains": (_mixed_training, r"expected gate and up to train alike"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_experts_that_do_not_fit_are_refused(case: str) -> None:
    change, message = REFUSED[case]
    experts = change(expert_list())
    names = MIXTRAL if case == "a norm" else None
    with pytest.raises(ModelError, match=message):
        modulelist.from_modulelist(experts, names=names)


def test_other_computations_are_refused_by_their_values() -> None:
    with pytest.raises(ModelError, match=r"experts\[0\]: expected 'swiglu' .* pass activation='geglu'"):
        modulelist.from_modulelist(expert_list(activation="geglu"))
    with pytest.raises(ModelError, match="names= may be in another order"):
        modulelist.from_modulelist(expert_list(), names=Names("w3", "w1", "w2"))

    class Weighted(Expert):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return weight * super().forward(x)

    weighted = nn.ModuleList(Weighted(MIXTRAL) for _ in range(E))
    with pytest.raises(ModelError, match="TypeError.*probe_experts=False"):
        modulelist.from_modulelist(weighted)
    assert modulelist.from_modulelist(weighted, probe_experts=False).down_proj.shape == (E, H, I)
    state = torch.get_rng_state()
    modulelist.from_modulelist(expert_list(), probe_experts=False)
    torch.set_rng_state(state)
    experts = expert_list()
    state = torch.get_rng_state()
    modulelist.from_modulelist(experts)
    assert torch.equal(torch.get_rng_state(), state)


def test_arguments_are_refused_with_what_to_pass() -> None:
    for call, message in (
        (lambda: modulelist.from_modulelist(nn.ModuleList()), "at least one; got none"),
        (lambda: modulelist.from_modulelist(expert_list(), activation="tanh"), "got 'tanh'"),
        (lambda: modulelist.from_modulelist(expert_list(ODD)), r"got \(inner, side, outer\): pass names="),
        (lambda: modulelist.from_modulelist(expert_list(), activation="relu2", names=MIXTRAL), "no gate for 'relu2'"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()
    bank = modulelist.from_modulelist(expert_list())
    with pytest.raises(ModelError, match="like: expected a layer of"):
        modulelist.to_modulelist(bank, like=Expert(MIXTRAL, width=I + 1))
    with pytest.raises(ModelError, match="biases as the bank has"):
        modulelist.to_modulelist(bank, like=Expert(MIXTRAL, bias=True))
    with pytest.raises(ConfigError, match="difference in gate.weight, router.weight: renamed="):
        old = Block(expert_list())
        modulelist.check(old, modulelist.layer_from(old.experts, old.gate.weight, K), torch.randn(T, H))


def test_state_dicts_that_do_not_fit_are_refused() -> None:
    state = {f"moe.{key}": value for key, value in expert_list().state_dict().items()}

    def without(key: str) -> dict[str, Tensor]:
        return {name: value for name, value in state.items() if name != key}

    bank = {"moe.gate_up_proj": torch.zeros(E, 2 * I, H), "moe.down_proj": torch.zeros(E, H, I)}
    to_experts = modulelist.to_experts
    for call, message in (
        (lambda: modulelist.to_banks(state, "moe"), r"pass \['moe'\]"),
        (lambda: modulelist.to_banks(state, []), "at least one"),
        (lambda: modulelist.to_banks(state, ["mlp"]), "mlp.: expected keys 0.<layer>.weight"),
        (lambda: modulelist.to_banks(without("moe.2.w3.weight"), ["moe"]), r"5 experts .* no moe\.2\.w3\.weight"),
        (lambda: modulelist.to_banks({**state, "moe.scale": torch.ones(1)}, ["moe"]), r"got moe\.scale"),
        (lambda: modulelist.to_banks({**state, "moe.0.w4.weight": torch.ones(1)}, ["moe"]), "w4"),
        (lambda: modulelist.to_banks({**state, "moe.1.w2.weight": torch.ones(H, 2)}, ["moe"]), "parts of one shape"),
        (lambda: to_experts(state, ["moe"], names=MIXTRAL), "expected gate_up_proj and down_proj; got moe.0.w1"),
        (lambda: to_experts({**bank, "moe.down_proj": torch.zeros(4, H, I)}, ["moe"], names=MIXTRAL), r"got \(4,"),
        (lambda: to_experts({**bank, "moe.x": torch.zeros(1)}, ["moe"], names=MIXTRAL), "got moe.x"),
        (lambda: to_experts(bank, ["moe"], names=Names(None, "up", "down")), "expected a gate"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()
