"""The fault of torch 2.13 that a view of one layer's ids meets, shown on a CPU, and that replay stays clear of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from staticmoe import StaticMoE
from staticmoe.integrations.router_replay import recording, replay, replaying

CPU = torch.device("cpu")
HAS_FAULT = torch.__version__.startswith("2.13.")


@pytest.mark.parametrize(("top_k", "layers"), [(2, [1, 3]), (6, [1, 3]), (8, []), (1, [1, 2, 3])])
def test_views_are_misread_from_the_second_step_on(script: Callable[[str], Any], top_k: int, layers: list[int]) -> None:
    """Those whose address is no multiple of 16; a copy of its own for each layer is read right."""
    module = script("alias_fault")
    if HAS_FAULT:
        views = module.misread(top_k, module.cloning, CPU, lambda ids, layer: ids[:, :, layer])
        assert views == [[], layers, layers]
    copies = module.misread(top_k, module.cloning, CPU, lambda ids, layer: module.own_slice(ids, layer, torch.int32))
    assert copies == [[], [], []]


@pytest.mark.parametrize("view", [False, True], ids=["own slices", "views in their place"])
@pytest.mark.parametrize("top_k", [1, 2, 6, 8])
def test_replay_through_a_compiled_layer(
    script: Callable[[str], Any], top_k: int, view: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers with a compiled function that hands their ids on; steps of different lengths."""
    module = script("alias_fault")
    torch._dynamo.reset()
    compiled = torch.compile(module.flattened, backend=module.cloning)

    class Compiled(StaticMoE):
        def forward(self, x: Tensor, token_mask: Any = None, routing: Any = None) -> Tensor:
            x, ids = compiled(x, routing[0])
            return super().forward(x, token_mask, (ids, None))

    if view:
        monkeypatch.setattr(replay, "own_slice", lambda ids, layer, dtype: ids[:, :, layer])
    model = nn.Sequential(*[Compiled(16, 8, 8, top_k, norm_topk_prob=top_k > 1) for _ in range(4)])
    wrong = []
    for length in (5, 7, 9):
        ids = torch.rand(2, length, 4, 8).argsort(-1)[..., :top_k].int()
        with replaying(model, ids), recording(model) as record:
            model(torch.randn(2, length, 16, requires_grad=True)).sum().backward()
        wrong.append([layer for layer in range(4) if not torch.equal(record.ids[:, :, layer], ids[:, :, layer])])
    if not view:
        assert wrong == [[], [], []]
    elif HAS_FAULT:
        layers = [layer for layer in range(4) if layer * top_k % 4]
        assert wrong == [[], layers, layers]


def test_the_script_says_what_it_found(
    script: Callable[[str], Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its exit codes."""
    module = script("alias_fault")
    arguments = ["alias_fault", "--device", "cpu", "--backend", "cloning", "--top-k"]
    monkeypatch.setattr("sys.argv", [*arguments, "8"])
    assert module.main() == 0 and "K = 8: views [[], [], []]" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", [*arguments, "6"])
    assert module.main() == (3 if HAS_FAULT else 0)
    monkeypatch.setattr(module, "own_slice", lambda ids, layer, dtype: ids[:, :, layer])
    assert module.main() == (1 if HAS_FAULT else 0)
    monkeypatch.setattr("sys.argv", ["alias_fault", "--device", "cuda"])
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit) as left:
            module.main()
        assert left.value.code == 2
