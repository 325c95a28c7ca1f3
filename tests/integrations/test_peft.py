"""Low-rank adapters by PEFT, on attention and on the experts themselves, under the runner."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from staticmoe import RunnerConfig, StaticMoERunner
from staticmoe.errors import CaptureError
from staticmoe.integrations import huggingface

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
huggingface.register()

Train = tuple[list[float], dict[str, Tensor]]
UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
WHERE = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "experts": {"target_modules": [], "target_parameters": [UP, DOWN]},
    "one weight": {"target_modules": [], "target_parameters": [DOWN]},
}
# Plain; transposed, interleaved and with biases; transposed; an activation and a norm that are not ours.
FAMILIES = [
    "qwen3_moe", "gpt_oss", "aria_text: transposed", "mixtral with tanh gelu",
    "muse_spark_text: norm after the experts",
]  # fmt: skip


def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    mask = huggingface.causal_mask(batch["attention_mask"])
    return model(**{**batch, "attention_mask": mask}, use_cache=False).loss


def batches(device: torch.device) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(4):
        real = torch.arange(8) < torch.randint(2, 9, (3, 1), generator=generator)
        tokens = torch.randint(3, 64, (3, 8), generator=generator)
        batch = {"input_ids": torch.where(real, tokens, 0), "labels": torch.where(real, tokens, -100)}
        made.append({key: value.to(device) for key, value in {**batch, "attention_mask": real.long()}.items()})
    return made


@pytest.fixture
def adapted(build: Callable[..., Any]) -> Callable[..., Any]:
    """Builds a model with adapters: adapted(where, implementation, family, **options of LoraConfig)."""

    def make(where: str, implementation: str = "staticmoe", family: str = "qwen3_moe", **options: Any) -> Any:
        torch.manual_seed(0)
        config = peft.LoraConfig(**{"r": 4, "init_lora_weights": False, **WHERE[where], **options})
        return peft.get_peft_model(build(family, implementation).train(), config)

    return make


def gradients(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The output of real tokens, and the gradient of each adapter."""
    real = batch["attention_mask"].bool()
    out = model(
        input_ids=batch["input_ids"], attention_mask=huggingface.causal_mask(batch["attention_mask"]), use_cache=False
    )
    out = (out.logits if hasattr(out, "logits") else out.last_hidden_state)[real]
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad((out * direction).sum(), trained.values())
    return {"output": out.detach(), **dict(zip(trained, found, strict=True))}


def train(model: Any, capture: str, between: Callable[[Any], None] = lambda model: None) -> Train:
    """Losses of four steps, and the adapters afterwards; nothing else may have moved."""
    huggingface.prepare(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora" in name for name in trained)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    given = batches(model.device)
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    with StaticMoERunner(
        model, optimizer, example_batch=given[0], loss_fn=loss, token_mask="attention_mask",
        config=RunnerConfig(capture=capture),
    ) as runner:  # fmt: skip
        losses = []
        for batch in given:
            losses.append(float(runner.step(batch).loss))
            runner.synchronize()
            between(model)
    assert {name for name, p in model.named_parameters() if not torch.equal(p, before[name])} == set(trained)
    return losses, {name: p.detach().clone() for name, p in trained.items()}


def assert_same(got: Train, want: Train) -> None:
    assert got[0] == want[0] and len(set(want[0])) == 4
    assert all(torch.equal(got[1][name], want[1][name]) for name in want[1])


@pytest.mark.parametrize("where", WHERE)
def test_adapters_are_captured(where: str, adapted: Callable[..., Any], captured: str) -> None:
    assert_same(train(adapted(where), captured), train(adapted(where), "off"))


def test_checkpointed_layers_with_adapters_of_experts_are_captured(adapted: Callable[..., Any], captured: str) -> None:
    """The recomputed forward finds the same adapters."""
    found = []
    for capture, again in ((captured, True), ("off", True), ("off", False)):
        model = adapted("experts")
        if again:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        found.append(train(model, capture))
    assert_same(found[0], found[1])
    assert_same(found[1], found[2])


@pytest.mark.parametrize("kind", FAMILIES)
def test_output_and_gradients_are_those_of_peft(
    kind: str, adapted: Callable[..., Any], device: torch.device, error: Callable[..., float]
) -> None:
    """PEFT's own way on the eager experts; of both factors, in every layout."""
    batch = batches(device)[0]
    want = gradients(adapted("experts", "eager", kind), batch)
    model = adapted("experts", "staticmoe", kind)
    huggingface.prepare(model)
    got = gradients(model, batch)
    assert got.keys() == want.keys() and sum(".experts" in name for name in got) == 8
    errors = {name: error(got[name], want[name]) for name in want}
    # A root over a few numbers in a norm behind the experts magnifies what is the rounding of fp32.
    assert max(errors.values()) < (1e-4 if "norm" in kind else 1e-5), errors


def test_attention_under_adapters_has_the_gradients_of_the_eager_experts(
    adapted: Callable[..., Any], device: torch.device, error: Callable[..., float]
) -> None:
    got, want = (gradients(adapted("attention", name), batches(device)[0]) for name in ("staticmoe", "eager"))
    assert all(error(got[name], want[name]) < 2e-5 for name in want)


def test_bf16_with_a_rank_that_fills_no_row_is_as_near_to_the_truth_as_peft(
    adapted: Callable[..., Any], device: torch.device, error: Callable[..., float]
) -> None:
    """Factors in fp32 beside weights of 16 bits, as PEFT keeps them; one experts layer, for routing is discrete."""
    found = {}
    for key, implementation, dtype in (
        ("truth", "eager", torch.float64), ("peft", "eager", torch.bfloat16), ("ours", "staticmoe", torch.bfloat16)
    ):  # fmt: skip
        model = adapted("experts", implementation, r=3)
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.bfloat16().to(torch.float32 if "lora" in name else dtype)
            if dtype == torch.float64:
                parameter.data = parameter.data.double()
        if implementation == "staticmoe":
            huggingface.prepare(model)
        experts = next(module for name, module in model.named_modules() if name.endswith("mlp.experts"))
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(40, 32, generator=generator).bfloat16().to(device, dtype)
        ids = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(40)]).to(device)
        weights = torch.rand(40, 2, generator=generator).bfloat16().to(device, dtype)
        trained = {name: p for name, p in experts.named_parameters() if p.requires_grad}
        out = experts(x, ids, weights)
        grads = torch.autograd.grad(out.square().sum(), trained.values())
        found[key] = {"out": out, **dict(zip(trained, grads, strict=True))}
    for name, want in found["truth"].items():
        assert found["ours"][name].dtype == found["peft"][name].dtype
        ours, theirs = error(found["ours"][name], want), error(found["peft"][name], want)
        assert ours < max(1.5 * theirs, 2**-6), (name, ours, theirs)


class Largest(TorchDispatchMode):
    """The elements of the largest float tensor that an operation made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, tensor.numel())
        return result


def test_frozen_weights_cost_nothing_of_their_size(adapted: Callable[..., Any], device: torch.device) -> None:
    """Forward and backward make no tensor as large as a weight, sum and gradient included; PEFT's own way does."""
    batch, found = batches(device)[0], []
    for prepared in (True, False):
        model = adapted("experts")
        if prepared:
            huggingface.prepare(model)
        weight = next(p for name, p in model.named_parameters() if name.endswith("down_proj"))
        with Largest() as largest:
            gradients(model, batch)
        found.append(largest.elements / weight.numel())
    assert found[0] < 1 <= found[1]


def test_names_files_and_merging_are_pefts(adapted: Callable[..., Any], captured: str, tmp_path: Any) -> None:
    """What is saved after captured steps is loaded by PEFT into a model on eager experts, which then agrees."""
    model, plain = adapted("experts"), adapted("experts", "eager")
    keys = set(peft.get_peft_model_state_dict(model))
    train(model, captured)
    state = peft.get_peft_model_state_dict(model)
    assert set(state) == keys == set(peft.get_peft_model_state_dict(plain))
    batch = batches(model.device)[0]
    want = gradients(model, batch)["output"]
    model.save_pretrained(tmp_path)
    peft.set_peft_model_state_dict(plain, peft.load_peft_weights(tmp_path, device=str(model.device)))
    torch.testing.assert_close(gradients(plain, batch)["output"], want, rtol=1e-4, atol=1e-4)
    merged = model.merge_and_unload()
    out = merged(
        input_ids=batch["input_ids"], attention_mask=huggingface.causal_mask(batch["attention_mask"]), use_cache=False
    )
    torch.testing.assert_close(out.logits[batch["attention_mask"].bool()].detach(), want, rtol=1e-4, atol=1e-4)


def change(model: Any, what: str) -> None:
    """Something that PEFT lets a user do to adapters."""
    if what == "another implementation":
        model.get_base_model().set_experts_implementation("eager")
    elif what == "two adapters":
        torch.manual_seed(7)
        model.add_adapter("second", peft.LoraConfig(r=2, init_lora_weights=False, **WHERE["experts"]))
        model.base_model.set_adapter(["default", "second"])
    elif what == "merged":
        model.merge_adapter()
    elif what == "disabled":
        model.base_model.disable_adapter_layers()
    else:
        for module in model.modules():
            if hasattr(module, "set_scale") and hasattr(module, "lora_A"):
                module.set_scale("default", 0.3)


@pytest.mark.parametrize("what", ["another implementation", "two adapters", "merged", "disabled", "scaled"])
def test_what_peft_lets_users_do_holds_after_prepare(
    what: str, adapted: Callable[..., Any], error: Callable[..., float]
) -> None:
    """In a prepared model as in one of PEFT's own; and in a copy, whose adapters are its own."""
    batch, outs = batches(torch.device("cpu"))[0], []
    mask = huggingface.causal_mask(batch["attention_mask"])
    before = []
    for implementation in ("staticmoe", "eager"):
        model = adapted("experts", implementation)
        if implementation == "staticmoe":
            huggingface.prepare(model)
            first, model = model, copy.deepcopy(model)
            for parameter in first.parameters():
                parameter.data.zero_()
        with torch.no_grad():
            before.append(model(input_ids=batch["input_ids"], attention_mask=mask).logits)
            change(model, what)
            outs.append(model(input_ids=batch["input_ids"], attention_mask=mask).logits)
    assert error(before[0], before[1]) < 1e-5 and error(outs[0], outs[1]) < 1e-5
    assert what in ("another implementation", "merged") or error(outs[0], before[0]) > 1e-3


def test_a_scaling_set_between_steps_takes_effect(adapted: Callable[..., Any], captured: str) -> None:
    found = [train(adapted("experts"), c, lambda model: change(model, "scaled")) for c in (captured, "off")]
    assert_same(found[0], found[1])
    assert found[0][0] != train(adapted("experts"), "off")[0]


def test_check_compares_with_the_loop_under_adapters(adapted: Callable[..., Any], device: torch.device) -> None:
    model, batch = adapted("experts"), batches(device)[0]
    huggingface.prepare(model)
    given = {"input_ids": batch["input_ids"], "attention_mask": huggingface.causal_mask(batch["attention_mask"])}
    found = huggingface.check(model, {**given, "use_cache": False})
    assert len(found) == 2 and all(layer.calls == 1 and layer.error < 1e-5 for layer in found.values())


def test_the_selection_bias_beside_adapted_experts_is_found(adapted: Callable[..., Any]) -> None:
    model = adapted("experts", family="deepseek_v3")
    huggingface.prepare(model, balancing_bias_rate=0.125)
    before = {name: t.clone() for name, t in model.named_buffers() if name.endswith("correction_bias")}
    train_bias = dict(model.named_buffers())
    given = batches(torch.device("cpu"))[0]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with StaticMoERunner(
        model, optimizer, example_batch=given, loss_fn=loss, token_mask="attention_mask",
        config=RunnerConfig(capture="emulate"),
    ) as runner:  # fmt: skip
        runner.step(given)
        runner.synchronize()
    assert before and all(not torch.equal(train_bias[name], value) for name, value in before.items())


def test_an_adapted_bias_trains_uncaptured_and_is_refused_in_a_graph(adapted: Callable[..., Any]) -> None:
    """PEFT puts the sum in the parameter's place anew in every forward, which a replay would not do."""
    options = {"family": "gpt_oss", "target_parameters": ["experts.down_proj_bias"]}
    assert len(set(train(adapted("experts", **options), "off")[0])) == 4
    with pytest.raises(CaptureError, match=r"peft.*register_parametrization.*mlp\.experts.*replaces or resizes"):
        train(adapted("experts", **options), "emulate")
