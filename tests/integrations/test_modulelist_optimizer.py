"""An optimizer's state over experts in a ModuleList goes on over the bank, and back, as if it had always been there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from staticmoe.errors import ConfigError
from staticmoe.integrations import modulelist
from staticmoe.integrations.modulelist import Names

E, H, I = 4, 12, 8  # noqa: E741
NAMES = Names("w1", "w3", "w2")
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "plain": (torch.optim.SGD, {"lr": 0.1}),
}


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(H, I), nn.Linear(I, H), nn.Linear(H, I)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


def model() -> nn.Module:
    torch.manual_seed(0)
    whole = nn.Module()
    whole.embed = nn.Linear(3, H)
    whole.experts = nn.ModuleList(Expert() for _ in range(E))
    whole.head = nn.Linear(H, 3)
    return whole


def banked(old: nn.Module) -> nn.Module:
    new = copy.deepcopy(old)
    new.experts = modulelist.from_modulelist(new.experts)
    return new


def step(optimizer: torch.optim.Optimizer, parameters: dict[str, Tensor], seed: int, skipped: str = "-") -> None:
    """One update by gradients that are the same numbers for experts and bank."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: parameter.shape for name, parameter in model().named_parameters()}
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    given = drawn if parameters.keys() == drawn.keys() else modulelist.to_banks(drawn, ["experts"])
    for name, parameter in parameters.items():
        parameter.grad = None if name.startswith(skipped) else given[name]
    optimizer.step()


def assert_close(old: nn.Module, new: nn.Module) -> None:
    """To the last bits: torch's loops over elements round otherwise at the end of a tensor than in its middle."""
    torch.testing.assert_close(
        dict(new.state_dict()), modulelist.to_banks(old.state_dict(), ["experts"]), rtol=1e-6, atol=1e-6
    )


def of(owner: nn.Module) -> dict[str, Tensor]:
    return dict(owner.named_parameters())


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_it_goes_on_as_if_it_had_always_been_a_bank(name: str) -> None:
    kind, options = OPTIMIZERS[name]
    old = model()
    optimizer = kind(old.parameters(), **options)
    for seed in range(3):
        step(optimizer, of(old), seed)
    new = banked(old)
    other = kind(new.parameters(), **options)
    state = optimizer.state_dict()
    other.load_state_dict(modulelist.optimizer_to_banks(state, of(old), of(new), ["experts"]))
    # And back: bitwise what it was.
    back = modulelist.optimizer_to_experts(other.state_dict(), of(new), of(old), ["experts"], names=NAMES)
    wanted = copy.deepcopy(optimizer.state_dict())
    assert back["param_groups"] == wanted["param_groups"] and back["state"].keys() == wanted["state"].keys()
    for number, values in wanted["state"].items():
        assert back["state"][number].keys() == values.keys()
        for key, value in values.items():
            assert back["state"][number][key] is value or torch.equal(back["state"][number][key], value), key
    kind(old.parameters(), **options).load_state_dict(back)
    for seed in range(3, 6):
        step(optimizer, of(old), seed)
        step(other, of(new), seed)
    assert_close(old, new)


def test_groups_keep_their_options_and_their_order() -> None:
    old = model()

    def groups(owner: nn.Module) -> list[dict[str, Any]]:
        named = owner.named_parameters()
        experts = [(name, p) for name, p in named if name.startswith("experts")]
        return [
            {"params": [*owner.embed.named_parameters(prefix="embed")], "lr": 0.5},
            {"params": experts, "lr": 0.25, "weight_decay": 0.0},
            {"params": [*owner.head.named_parameters(prefix="head")]},
        ]

    optimizer = torch.optim.AdamW(groups(old), lr=0.1)
    step(optimizer, of(old), 0)
    new = banked(old)
    other = torch.optim.AdamW(groups(new), lr=0.1)
    converted = modulelist.optimizer_to_banks(optimizer.state_dict(), of(old), of(new), ["experts"])
    assert [group["lr"] for group in converted["param_groups"]] == [0.5, 0.25, 0.1]
    wanted = other.state_dict()["param_groups"]
    assert [group["params"] for group in converted["param_groups"]] == [group["params"] for group in wanted]
    names = [sorted(group["param_names"]) for group in converted["param_groups"]]
    assert names == [sorted(group["param_names"]) for group in wanted]
    other.load_state_dict(converted)
    step(optimizer, of(old), 1)
    step(other, of(new), 1)
    assert_close(old, new)


def test_an_expert_that_missed_a_step_is_refused_or_taken_along() -> None:
    """A loop gives an expert without tokens no gradient, so its step count stays behind."""
    old = model()
    optimizer = torch.optim.AdamW(old.parameters())
    step(optimizer, of(old), 0)
    step(optimizer, of(old), 1, skipped="experts.2.")
    new = banked(old)
    state = optimizer.state_dict()
    arguments = (state, of(old), of(new), ["experts"])
    with pytest.raises(ConfigError, match=r"experts\.gate_up_proj: expected one 'step' .* differing_steps=\"largest\""):
        modulelist.optimizer_to_banks(*arguments)
    converted = modulelist.optimizer_to_banks(*arguments, differing_steps="largest")
    number = list(of(new)).index("experts.gate_up_proj")
    assert float(converted["state"][number]["step"]) == 2
    moments = converted["state"][number]["exp_avg"]
    assert torch.equal(moments[2, :I], optimizer.state[old.experts[2].w1.weight]["exp_avg"])
    with pytest.raises(ConfigError, match="'smallest'"):
        modulelist.optimizer_to_banks(*arguments, differing_steps="smallest")


def test_what_would_not_be_honest_is_refused() -> None:
    old = model()
    new = banked(old)
    optimizer = torch.optim.AdamW(old.parameters())
    step(optimizer, of(old), 0, skipped="experts.1.")
    with pytest.raises(
        ConfigError, match=r"a state for each of its parts or for none; got none of experts\.1\.w1\.weight"
    ):
        modulelist.optimizer_to_banks(optimizer.state_dict(), of(old), of(new), ["experts"])
    parted = torch.optim.AdamW([{"params": list(old.parameters())[:5]}, {"params": list(old.parameters())[5:]}])
    with pytest.raises(ConfigError, match="all parts of one bank in one group of the optimizer; got 2"):
        modulelist.optimizer_to_banks(parted.state_dict(), of(old), of(new), ["experts"])
    factored = torch.optim.Adafactor(old.parameters())
    step(factored, of(old), 0)
    with pytest.raises(ConfigError, match="of the parameter's shape .* 'row_var'"):
        modulelist.optimizer_to_banks(factored.state_dict(), of(old), of(new), ["experts"])
    optimizer = torch.optim.AdamW(old.parameters())
    step(optimizer, of(old), 0)
    with pytest.raises(ConfigError, match="expected the 28 of the optimizer, in its order; got 27"):
        fewer = dict(list(of(old).items())[1:])
        modulelist.optimizer_to_banks(optimizer.state_dict(), fewer, of(new), ["experts"])
    with pytest.raises(ConfigError, match="the order of parameters differs"):
        turned = dict(reversed(of(old).items()))
        modulelist.optimizer_to_banks(optimizer.state_dict(), turned, of(new), ["experts"])
    with pytest.raises(ConfigError, match=r"new_parameters: .*embed"):
        fewer = {name: p for name, p in of(new).items() if name != "embed.weight"}
        modulelist.optimizer_to_banks(optimizer.state_dict(), of(old), fewer, ["experts"])


def test_a_state_without_steps_stays_without() -> None:
    old = model()
    new = banked(old)
    optimizer = torch.optim.AdamW(old.parameters())
    converted = modulelist.optimizer_to_banks(optimizer.state_dict(), of(old), of(new), ["experts"])
    assert converted["state"] == {}
    assert converted["param_groups"][0]["params"] == list(range(len(of(new))))
