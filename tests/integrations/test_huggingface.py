"""transformers models on our experts: equal to their own loop, or refused by name."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from staticmoe import RunnerConfig, StaticMoE, StaticMoERunner
from staticmoe.errors import ConfigError, ModelError
from staticmoe.integrations import huggingface
from staticmoe.integrations.huggingface import registry
from staticmoe.integrations.huggingface.activation import activation_of

transformers = pytest.importorskip("transformers", reason="the Hugging Face door needs transformers >= 5.17")

Run = tuple[Tensor, dict[str, Tensor]]


@pytest.fixture(autouse=True)
def registered() -> None:
    huggingface.register()


def loop(module: Any, *args: Tensor) -> Tensor:
    """The experts' own loop, whatever implementation is set."""
    return inspect.unwrap(type(module).forward)(module, *args)


def operands(module: Any, dtype: torch.dtype, ids: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, ids and weights for an experts module of 6 experts; no id is 5, so that one expert is idle."""
    device = module.down_proj.device
    x = torch.randn(11, 32).to(device, dtype).requires_grad_()
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(11)]) if ids is None else ids
    return x, ids.to(device), torch.rand(11, 2).to(device, dtype).requires_grad_()


def gradients(out: Tensor, module: nn.Module, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    named = {"out": out, "x": x, "weights": weights, **dict(module.named_parameters())}
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    found = torch.autograd.grad(out, list(named.values())[1:], upstream)
    return {"out": out.detach(), **dict(zip(list(named)[1:], found, strict=True))}


@pytest.mark.usefixtures("device")
def test_a_model_equals_its_own_loop(
    family: str, build: Callable[..., Any], step: Callable[..., Run], error: Callable[[Tensor, Tensor], float]
) -> None:
    """Output and every gradient in fp32, and each experts layer was entered exactly once."""
    model = build(family)
    want, want_grads = step(model)
    assert not any(huggingface.calls(model).values())
    model.set_experts_implementation("staticmoe")
    got, grads = step(model)
    calls = huggingface.calls(model)
    assert calls and set(calls.values()) == {1}
    assert error(got, want) < 1e-5
    assert grads.keys() == want_grads.keys() and any("experts" in name for name in grads)
    errors = {name: error(grads[name], want_grads[name]) for name in grads}
    assert {name: value for name, value in errors.items() if not value < 1e-5} == {}


@pytest.mark.usefixtures("device")
def test_bf16_is_as_near_to_the_truth_as_the_loop(
    family: str,
    build: Callable[..., Any],
    layers: Callable[..., dict[str, Any]],
    error: Callable[[Tensor, Tensor], float],
) -> None:
    """Per experts module, because a rounding in a router sends a token elsewhere."""
    module = next(iter(layers(build(family, "staticmoe").to(torch.bfloat16)).values()))
    x, ids, weights = operands(module, torch.bfloat16)
    got = gradients(module(x, ids, weights), module, x, weights)
    own = gradients(loop(module, x, ids, weights), module, x, weights)
    module.double()
    x, weights = (t.detach().double().requires_grad_() for t in (x, weights))
    truth = gradients(loop(module, x, ids, weights), module, x, weights)
    for name, want in truth.items():
        assert got[name].dtype == torch.bfloat16
        assert error(got[name], want) < max(1.5 * error(own[name], want), 2**-6), name


def test_the_activation_is_recognised(
    family: str,
    build: Callable[..., Any],
    layers: Callable[..., dict[str, Any]],
    recognised: Callable[[str], str | None],
) -> None:
    found = {activation_of(module) for module in layers(build(family)).values()}
    assert found == {recognised(family)}


@pytest.mark.usefixtures("device")
def test_an_idle_expert_gets_an_exactly_zero_gradient(
    family: str, build: Callable[..., Any], layers: Callable[..., dict[str, Any]]
) -> None:
    module = next(iter(layers(build(family, "staticmoe")).values()))
    x, ids, weights = operands(module, torch.float32)
    grads = gradients(module(x, ids, weights), module, x, weights)
    own = [name for name, parameter in module.named_parameters() if parameter.shape[0] == 6]
    assert len(own) >= 2 and all(not grads[name][5].any() and grads[name][:5].any() for name in own)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "gpt_oss with another limit", "mixtral with tanh gelu"])
@pytest.mark.parametrize("nobody", [-1, 6, 1000])
@pytest.mark.usefixtures("device")
def test_an_id_outside_is_an_assignment_without_expert(
    name: str,
    nobody: int,
    build: Callable[..., Any],
    layers: Callable[..., dict[str, Any]],
    error: Callable[[Tensor, Tensor], float],
) -> None:
    module = next(iter(layers(build(name, "staticmoe")).values()))
    x, ids, weights = operands(module, torch.float32)
    absent = (torch.rand(11, 2) < 0.4).to(x.device)
    absent[3] = True
    got = gradients(module(x, torch.where(absent, nobody, ids), weights), module, x, weights)
    want = gradients(loop(module, x, ids, weights * ~absent), module, x, weights)
    assert all(error(got[name], want[name]) < 1e-5 for name in want)
    assert not got["weights"][absent].any() and not got["out"][3].any() and not got["x"][3].any()


def test_a_changed_number_of_the_activation_is_seen(
    build: Callable[..., Any], layers: Callable[..., dict[str, Any]], error: Callable[[Tensor, Tensor], float]
) -> None:
    """The recognised activation is not kept beyond the numbers that it was recognised with."""
    module = next(iter(layers(build("gpt_oss", "staticmoe")).values()))
    arguments = operands(module, torch.float32)
    module(*arguments)
    module.limit = 0.25
    assert error(module(*arguments), loop(module, *arguments)) < 1e-5
    module.limit = 7.0
    assert activation_of(module) == "gpt_oss"


class Scaled(nn.Module):
    """silu of a scaled gate."""

    scale: float

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(x * self.scale)


def straight_through(x: Tensor) -> Tensor:
    """The values of silu, the slope of 1."""
    return nn.functional.silu(x).detach() + x - x.detach()


def test_the_activation_is_told_by_value_and_slope(
    build: Callable[..., Any], layers: Callable[..., dict[str, Any]]
) -> None:
    module = next(iter(layers(build("mixtral")).values()))
    module.act_fn = Scaled()
    assert activation_of(module) == "swiglu"
    module.act_fn.scale = 1.001
    assert activation_of(module) is None
    del module.act_fn
    for function, expected in [
        (nn.functional.silu, "swiglu"),
        (nn.functional.gelu, "geglu"),
        (straight_through, None),
        (nn.PReLU(init=0.0), None),
        (lambda x: nn.functional.silu(x).clamp(max=1e6), None),
    ]:
        module.act_fn = function
        assert activation_of(module) == expected
        del module.act_fn


def test_a_layout_that_the_flags_deny_is_not_recognised(
    build: Callable[..., Any], layers: Callable[..., dict[str, Any]]
) -> None:
    """Interleaved columns under a flag that says side by side: the values tell."""
    module = next(iter(layers(build("gpt_oss")).values()))
    module.is_concatenated = True
    assert activation_of(module) is None


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "mixtral with tanh gelu"])
@pytest.mark.usefixtures("device")
def test_autocast(
    name: str, build: Callable[..., Any], step: Callable[..., Run], error: Callable[[Tensor, Tensor], float]
) -> None:
    model = build(name, num_hidden_layers=1)
    want, want_grads = step(model)
    model.set_experts_implementation("staticmoe")
    with torch.autocast(model.device.type, torch.bfloat16):
        got, grads = step(model)
    assert all(grad.dtype == torch.float32 for grad in grads.values())
    assert error(got, want) < 0.05 and error(got, want) > 1e-5
    experts = [n for n in grads if ".experts." in n]
    assert experts and all(error(grads[n], want_grads[n]) < 0.1 for n in experts)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "muse_spark_text: norm after the experts"])
@pytest.mark.usefixtures("device")
def test_gradient_checkpointing(
    name: str, build: Callable[..., Any], step: Callable[..., Run], error: Callable[[Tensor, Tensor], float]
) -> None:
    model = build(name, "staticmoe")
    want, want_grads = step(model)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    got, grads = step(model)
    assert torch.equal(got, want) and all(torch.equal(grads[n], want_grads[n]) for n in want_grads)
    assert set(huggingface.calls(model).values()) == {3}


@pytest.mark.usefixtures("device")
def test_frozen_parameters_get_nothing(build: Callable[..., Any], step: Callable[..., Run]) -> None:
    model = build("gpt_oss", "staticmoe")
    _, want = step(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts.down_proj" in name and "bias" not in name)
    _, grads = step(model)
    assert len(grads) == 2 and all(torch.equal(grads[name], want[name]) for name in grads)


def test_the_copy_of_alternating_columns_is_not_kept(
    build: Callable[..., Any], layers: Callable[..., dict[str, Any]]
) -> None:
    """What is saved of a weight's size is the parameter itself."""
    module = next(iter(layers(build("gpt_oss", "staticmoe")).values()))
    arguments = operands(module, torch.float32)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        module(*arguments)
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    weights = [t for t in saved if t.dim() == 3]
    assert len(weights) == 2 and all(t.untyped_storage().data_ptr() in own for t in weights)


def test_switching_back_and_forth(build: Callable[..., Any], step: Callable[..., Run]) -> None:
    model = build("qwen3_moe")
    parameters = {name: id(p) for name, p in model.named_parameters()}
    outs = []
    for implementation in ("eager", "staticmoe", "grouped_mm", "staticmoe", "eager"):
        model.set_experts_implementation(implementation)
        assert model.get_experts_implementation()[""] == implementation
        outs.append(step(model)[0])
    assert torch.equal(outs[0], outs[4]) and torch.equal(outs[1], outs[3])
    assert set(huggingface.calls(model).values()) == {2}
    assert {name: id(p) for name, p in model.named_parameters()} == parameters


def test_saved_and_loaded(build: Callable[..., Any], step: Callable[..., Run], tmp_path: Any) -> None:
    model = build("mixtral", "staticmoe")
    want, _ = step(model)
    names = set(model.state_dict())
    model.save_pretrained(tmp_path)
    assert "staticmoe" not in (tmp_path / "config.json").read_text()
    loaded = (
        type(model).from_pretrained(tmp_path, experts_implementation="staticmoe", attn_implementation="eager").eval()
    )
    assert set(loaded.state_dict()) == names == set(model.state_dict())
    assert torch.equal(step(loaded)[0], want) and set(huggingface.calls(loaded).values()) == {1}


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_generate(name: str, build: Callable[..., Any]) -> None:
    """Prompts, then one token at a time, with a cache and without gradient."""
    model = build(name)
    prompt = torch.randint(3, 64, (2, 5))
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "do_sample": False}
    want = model.generate(prompt, **options)
    model.set_experts_implementation("staticmoe")
    assert torch.equal(model.generate(prompt, **options), want)
    assert min(huggingface.calls(model).values()) >= 6


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "mixtral with tanh gelu"])
def test_compiled_in_one_graph(
    name: str,
    build: Callable[..., Any],
    layers: Callable[..., dict[str, Any]],
    error: Callable[[Tensor, Tensor], float],
) -> None:
    """From the first call on: what is looked up about the activation is a constant to the compiler."""
    module = next(iter(layers(build(name, "staticmoe")).values()))
    x, ids, weights = operands(module, torch.float32)

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return module(x, ids, weights) * 2

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    got = gradients(compiled(x, ids, weights), module, x, weights)
    want = gradients(loop(module, x, ids, weights) * 2, module, x, weights)
    assert all(error(got[name], want[name]) < 1e-5 for name in want)


class Beside(nn.Module):
    """A model of transformers and one layer of ours, which the runner asks for."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.layer = model, StaticMoE(32, 16, num_experts=4, top_k=2)
        # A ready mask: transformers makes one after a look at the positions, which waits for the device.
        self.register_buffer("mask", torch.full((9, 9), -1e9).triu(1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = self.mask[None, None].expand(len(tokens), 1, -1, -1)
        hidden = self.model.model(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state
        return self.model.lm_head(hidden + self.layer(hidden))


def next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"][:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_captured_steps_are_the_uncaptured_ones(
    name: str, build: Callable[..., Any], captured: str, device: torch.device
) -> None:
    """Other tokens go to other experts in each step, and the model's Python runs no more."""
    batches = [{"tokens": torch.randint(3, 64, (2, 10)).to(device)} for _ in range(4)]
    found = []
    for capture in (captured, "off"):
        torch.manual_seed(0)
        model = Beside(build(name, "staticmoe", num_hidden_layers=1)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = RunnerConfig(capture=capture)
        with StaticMoERunner(model, optimizer, example_batch=batches[0], loss_fn=next_token_loss, config=config) as run:
            losses = [float(run.step(batch).loss) for batch in batches]
        found.append((losses, model.state_dict()))
    (losses, state), (want_losses, want_state) = found
    assert losses == want_losses and len(set(losses)) == 4
    assert all(torch.equal(state[key], want_state[key]) for key in want_state)


def test_no_tokens_at_all(build: Callable[..., Any], layers: Callable[..., dict[str, Any]]) -> None:
    module = next(iter(layers(build("mixtral", "staticmoe")).values()))
    out = module(torch.empty(0, 32), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))
    assert out.shape == (0, 32)


@pytest.mark.usefixtures("device")
def test_the_function_asks_the_host_nothing(
    family: str, build: Callable[..., Any], layers: Callable[..., dict[str, Any]], dispatched: type[Any]
) -> None:
    """Forward and backward, from the first call on: what is looked up about the activation is of the CPU alone."""
    module = next(iter(layers(build(family, "staticmoe")).values()))
    x, ids, weights = operands(module, torch.float32)
    with dispatched() as mode:
        gradients(module(x, ids, weights), module, x, weights)
    assert "make_plan" in mode.names and not mode.asking
    with dispatched() as mode:
        loop(module, x, ids, weights)
    assert "nonzero" in mode.names


def test_registering_twice_changes_nothing() -> None:
    huggingface.register()
    huggingface.register()
    functions = transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS
    assert functions["staticmoe"] is huggingface.experts_forward
    assert [name for name in functions if name == huggingface.NAME] == ["staticmoe"]


@contextlib.contextmanager
def instead(monkeypatch: pytest.MonkeyPatch, **modules: Any) -> Iterator[None]:
    """Stand-ins for what `register` imports, by the last part of the name; None: not installed."""

    def imported(name: str) -> Any:
        if (found := modules.get(name.rsplit(".", 1)[-1], SimpleNamespace(__version__="5.24.0"))) is None:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(registry.importlib, "import_module", imported)
        yield


class Registry(dict[str, Any]):
    """A registry as transformers has it."""

    def register(self, name: str, function: Any) -> None:
        self[name] = function


def shipped(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> None:
    """What the shipped functions take."""


def other(self: Any, routing: Any, hidden_states: Any) -> None:
    """What another version might take."""


class Deaf(Registry):
    def register(self, name: str, function: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"transformers": None}, "expected an installed package"),
        ({"transformers": SimpleNamespace(__version__="5.16.2")}, "expected 5.17 or newer; got 5.16.2"),
        ({"transformers": SimpleNamespace(__version__="4.57.1")}, "expected 5.17 or newer; got 4.57.1"),
        ({"transformers": SimpleNamespace(__version__="main")}, "expected 5.17 or newer; got main"),
        ({"moe": None}, "expected a registry"),
        ({"moe": SimpleNamespace()}, "expected a registry"),
        ({"moe": SimpleNamespace(ALL_EXPERTS_FUNCTIONS=Registry())}, "grouped_mm"),
        ({"moe": SimpleNamespace(ALL_EXPERTS_FUNCTIONS={"grouped_mm": shipped})}, "expected a registry"),
        (
            {"moe": SimpleNamespace(ALL_EXPERTS_FUNCTIONS=Registry(grouped_mm=other))},
            r"of \(self, hidden_states, top_k_index, top_k_weights\); got \(self, routing, hidden_states\)",
        ),
        (
            {"moe": SimpleNamespace(ALL_EXPERTS_FUNCTIONS=Registry(grouped_mm=shipped, staticmoe=other))},
            '"staticmoe" to be free; got',
        ),
        ({"moe": SimpleNamespace(ALL_EXPERTS_FUNCTIONS=Deaf(grouped_mm=shipped))}, "after register"),
    ],
)
def test_what_cannot_be_registered_is_refused(
    modules: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with instead(monkeypatch, **modules), pytest.raises(ConfigError, match=message):
        huggingface.register()


def test_the_stand_ins_are_registered_where_they_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = Registry(grouped_mm=shipped)
    with instead(monkeypatch, moe=SimpleNamespace(ALL_EXPERTS_FUNCTIONS=functions)):
        huggingface.register()
    assert functions["staticmoe"] is huggingface.experts_forward


BATCH = {"input_ids": torch.arange(3, 13)[None], "use_cache": False}


def test_check_counts_and_compares_each_layer(build: Callable[..., Any]) -> None:
    model = build("deepseek_v3", "staticmoe", num_hidden_layers=3).train()
    state = torch.get_rng_state()
    found = huggingface.check(model, BATCH)
    assert list(found) == ["model.layers.1.mlp.experts", "model.layers.2.mlp.experts"]
    assert all(layer.calls == 1 and 0 < layer.error < 1e-5 for layer in found.values())
    assert all(module.training for module in model.modules()) and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("kind", "experts"),
    [("llama4_text", "Llama4TextExperts"), ("dbrx", "DbrxExperts"), ("jetmoe", "JetMoeParallelExperts")],
)
def test_a_family_that_never_asks_is_refused_by_name(kind: str, experts: str) -> None:
    """O24: transformers accepts and stores the setting, and nothing happens."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "d_model": 32, "n_heads": 4, "n_layers": 1, "num_hidden_layers": 1}
    config = transformers.AutoConfig.for_model(
        kind, **sizes, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24, intermediate_size_mlp=24,
        pad_token_id=0, num_local_experts=4, kv_channels=8, interleave_moe_layer_step=1, head_dim=8,
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4}, ffn_config={"ffn_hidden_size": 24, "moe_num_experts": 4},
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="staticmoe")
    assert model.config._experts_implementation == "staticmoe"
    with pytest.raises(
        ModelError, match=rf"{type(model).__name__}: expected experts that ask .* got {experts} at .* ignores"
    ):
        huggingface.check(model, BATCH)


def test_a_dense_model_is_refused() -> None:
    config = transformers.AutoConfig.for_model(
        "qwen3", vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="staticmoe")
    with pytest.raises(ModelError, match="Qwen3ForCausalLM: .* got none"):
        huggingface.check(model, BATCH)


def test_another_implementation_is_refused(build: Callable[..., Any]) -> None:
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.experts: 'eager'.*set_experts_implementation"):
        huggingface.check(build("mixtral"), BATCH)


def test_a_layer_that_is_not_entered_is_named(build: Callable[..., Any], layers: Callable[..., dict[str, Any]]) -> None:
    model = build("mixtral", "staticmoe")
    name, module = list(layers(model).items())[1]
    module.forward = lambda hidden_states, *_: hidden_states
    with pytest.raises(ModelError, match=f"got none in {name}"):
        huggingface.check(model, BATCH)


def test_a_layer_that_differs_from_its_loop_is_named(
    build: Callable[..., Any], layers: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class whose loop does more than its flags say."""
    model = build("mixtral", "staticmoe")
    kind = type(next(iter(layers(model).values())))
    own = inspect.unwrap(kind.forward)
    monkeypatch.setattr(kind.forward, "__wrapped__", lambda self, *args: own(self, *args) * 1.01)
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.experts: 9\.9e-03 over 1e-04.*and report the family"):
        huggingface.check(model, BATCH)


def placed(parameter: Tensor) -> Any:
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    return DTensor.from_local(parameter.detach(), init_device_mesh("cpu", (1,)), [Replicate()])


@pytest.fixture
def one_process() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def wrapped(parameter: Tensor) -> Any:
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(parameter.detach(), parameter.detach())


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (placed, r"down_proj: expected a whole tensor; got a DTensor .*FSDP2"),
        (wrapped, r"down_proj: expected a plain .*got TwoTensor of torch.float32, which looks quantised"),
        (lambda p: p.detach().to(torch.int8), r"down_proj: expected a plain float32.*got Parameter of torch.int8"),
        (lambda p: p.detach().to(torch.float8_e4m3fn), r"got Parameter of torch.float8_e4m3fn"),
        (lambda p: p.detach().to("meta"), r"down_proj: expected a tensor with memory; got one on the meta device"),
        (lambda p: p.detach().flatten(), r"expected gate_up_proj and down_proj with 3 dimensions.*\(4608,\)"),
        (lambda p: p.detach()[:, :-1], r"expected down_proj of \(6, 32, 24\)"),
    ],
)
def test_parameters_that_cannot_work_are_refused(
    change: Callable[[Tensor], Tensor],
    message: str,
    build: Callable[..., Any],
    layers: Callable[..., dict[str, Any]],
) -> None:
    module = next(iter(layers(build("mixtral", "staticmoe")).values()))
    arguments = operands(module, torch.float32)
    module.down_proj = nn.Parameter(change(module.down_proj), requires_grad=False)
    with pytest.raises(ModelError, match=message):
        module(*arguments)


def test_a_missing_parameter_is_refused(build: Callable[..., Any], layers: Callable[..., dict[str, Any]]) -> None:
    module = next(iter(layers(build("mixtral", "staticmoe")).values()))
    arguments = operands(module, torch.float32)
    module.down_proj = None
    with pytest.raises(ModelError, match=r"MixtralExperts.down_proj: expected a tensor; got None"):
        module(*arguments)
