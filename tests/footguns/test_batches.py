"""O13: a batch that is not the one that was captured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from staticmoe import StaticMoE
from staticmoe.errors import BatchError


class Model(nn.Module):
    """loss = mean over tokens of the last channel of w * (moe(x) + x), masked where there is a mask."""

    def __init__(self):
        super().__init__()
        self.moe = StaticMoE(6, 4, num_experts=3, top_k=2)
        self.w = nn.Parameter(torch.ones(6))

    def forward(self, x, mask=None):
        y = ((self.moe(x) + x) * self.w).sum(-1)
        return y.mean() if mask is None else (y * mask).sum()


@pytest.fixture
def model(way):
    return Model().to(way.device)


def tokens(way, batch, length=8, *, value=None):
    x = torch.randn(batch, length, 6, device=way.device)
    return x if value is None else torch.full_like(x, value)


def sgd(model):
    return torch.optim.SGD([model.w], lr=0.1)


def test_a_short_last_batch_is_refused_with_both_shapes(way, model, wrap):
    """Goes wrong: [1, S] broadcasts into the static buffer, [3, S] leaves the fourth row of the batch before, [8, 4]
    has the right number of elements.

    Instead: drop the last batch, pad and mask it, or declare it: a list of example batches, one graph each.
    """
    runner = wrap(way, model, sgd(model), {"x": tokens(way, 4)})
    for shape in ((3, 8), (1, 8), (4, 1), (4, 7), (5, 8), (8, 4), (32, 1)):
        runner.step({"x": tokens(way, 4)})
        runner.synchronize()
        w = model.w.detach().clone()
        with pytest.raises(BatchError) as caught:
            runner.step({"x": tokens(way, *shape)})
        message = str(caught.value)
        for size in ((4, 8, 6), (*shape, 6)):
            assert str(size) in message or str(list(size)) in message
        assert "x" in message
        # Nothing was trained, and the runner goes on.
        runner.synchronize()
        assert torch.equal(model.w.detach(), w)
        again = tokens(way, 4)
        expected = float(model_loss(model, again, w))
        assert float(runner.step({"x": again}).loss) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def model_loss(model, x, w):
    with torch.no_grad():
        return ((model.moe(x) + x) * w).sum(-1).mean()


def test_a_mask_that_was_not_captured_takes_effect_or_is_refused(way, model, wrap):
    """Goes wrong: an optional field that was None at capture is ignored for ever.

    Instead: capture with a mask of ones.
    """
    runner = wrap(way, model, sgd(model), {"x": tokens(way, 4), "mask": None})
    runner.step({"x": tokens(way, 4), "mask": None})
    mask = torch.zeros(4, 8, device=way.device)
    with pytest.raises(BatchError, match="mask"):
        runner.step({"x": tokens(way, 4), "mask": mask})
    runner.step({"x": tokens(way, 4), "mask": None})


def test_a_mask_that_was_captured_and_is_missing_is_refused(way, model, wrap):
    """Goes wrong: the mask of the batch before is used again.

    Instead: hand in a mask of ones.
    """
    ones = torch.ones(4, 8, device=way.device)
    runner = wrap(way, model, sgd(model), {"x": tokens(way, 4), "mask": ones})
    runner.step({"x": tokens(way, 4), "mask": 0 * ones})
    for batch in ({"x": tokens(way, 4), "mask": None}, {"x": tokens(way, 4)}):
        with pytest.raises(BatchError, match="mask"):
            runner.step(batch)
    x = tokens(way, 4)
    result = runner.step({"x": x, "mask": 0 * ones})
    assert float(result.loss) == 0.0


def test_a_mask_that_changes_is_used(way, wrap):
    """Goes wrong: the mask of the capture stays.

    Instead: nothing to do.
    """
    model = Model().to(way.device)
    ones = torch.ones(4, 8, device=way.device)
    optimizer = torch.optim.SGD([model.w], lr=0.0)
    runner = wrap(way, model, optimizer, {"x": tokens(way, 4), "mask": ones})
    x = tokens(way, 4)
    masks = [ones, 0 * ones, torch.rand_like(ones), ones]
    losses = [runner.step({"x": x, "mask": mask}).loss for mask in masks]
    expected = [float(model(x, mask).detach()) for mask in masks]
    assert [float(loss) for loss in losses] == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_strides_of_the_batch_do_not_matter(way, model, wrap):
    """Goes wrong: a batch that is a view, or not contiguous, is copied by its storage.

    Instead: nothing to do: values are copied by index.
    """
    views = {
        "view": torch.randn(9, 8, 6)[5:],
        "transposed": torch.randn(8, 4, 6).transpose(0, 1),
        "expanded": torch.randn(1, 8, 6).expand(4, 8, 6),
        "channel slice": torch.randn(4, 8, 13)[..., 1:13:2],
    }
    runner = wrap(way, model, torch.optim.SGD([model.w], lr=0.0), {"x": tokens(way, 4)})
    for name, view in views.items():
        x = view.to(way.device)
        expected = float(model(x.contiguous()).detach())
        assert float(runner.step({"x": x}).loss) == pytest.approx(expected, rel=1e-4, abs=1e-5), name


def test_a_model_that_writes_into_its_input_sees_each_batch_once(way, wrap):
    """Goes wrong: `x.mul_()` in forward writes into the static input; self-check, warm-up and the next replay read
    what is left.

    Instead: nothing to do: every replay takes its input from its slot. The caller's own tensor is not written.
    """
    model = Model().to(way.device)

    def loss_fn(model, batch):
        batch["x"].mul_(2.0)
        return model(batch["x"])

    optimizer = torch.optim.SGD([model.w], lr=0.0)
    batches = [tokens(way, 4) for _ in range(4)]
    kept = [x.clone() for x in batches]
    runner = wrap(way, model, optimizer, {"x": batches[0]}, loss_fn=loss_fn)
    losses = [runner.step({"x": x}).loss for x in batches]
    expected = [float(model(2 * x).detach()) for x in kept]
    assert [float(loss) for loss in losses] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert all(torch.equal(one, other) for one, other in zip(batches, kept, strict=True))


def test_nested_structures_keep_their_places(way, model, wrap):
    """Goes wrong: leaves are matched by order, and a dict with its keys in another order swaps two fields.

    Instead: nothing to do: fields are matched by key.
    """

    def loss_fn(model, batch):
        first, (second, third) = batch["pair"]["a"], batch["pair"]["b"]
        return model(batch["x"]) * 0 + 1.0 * first + 10.0 * second + 100.0 * third

    def batch(a, b, c, *, swapped):
        one = {"a": torch.tensor(a), "b": (torch.tensor(b), torch.tensor(c))}
        pair = {key: one[key] for key in (("b", "a") if swapped else ("a", "b"))}
        x = tokens(way, 4)
        found = {"pair": pair, "x": x} if swapped else {"x": x, "pair": pair}
        return torch.utils._pytree.tree_map(lambda leaf: leaf.to(way.device), found)

    optimizer = torch.optim.SGD([model.w], lr=0.0)
    runner = wrap(way, model, optimizer, batch(0.0, 0.0, 0.0, swapped=False), loss_fn=loss_fn)
    losses = [runner.step(batch(1.0, 2.0, 3.0, swapped=swapped)).loss for swapped in (False, True)]
    assert [float(loss) for loss in losses] == [321.0, 321.0]
