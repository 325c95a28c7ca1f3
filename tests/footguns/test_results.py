"""O4, O37: what is logged belongs to another step, another window, or the evaluation."""

from __future__ import annotations

import json

import pytest
import torch


def test_every_result_keeps_its_own_values(every_way, probe, probe_batch, wrap):
    """Goes wrong: returned tensors are static outputs of the graph, so a list of losses reads [5, 5, 5, 5, 5].

    Instead: keep the results and read them whenever you like.
    """
    model = probe(every_way)

    def loss_fn(model, batch):
        return model(**batch), {"double": 2 * batch["s"]}

    batch = probe_batch(every_way, 1)
    runner = wrap(every_way, model, torch.optim.SGD([model.b], lr=0.0), batch, loss_fn=loss_fn)
    results = [runner.step(probe_batch(every_way, s)) for s in (1, 2, 3, 4, 5)]
    assert [float(result.loss) for result in results] == [1, 2, 3, 4, 5]
    assert [float(result.metrics["double"]) for result in results] == [2, 4, 6, 8, 10]
    assert [float(result.grad_norm) for result in results] == [1, 2, 3, 4, 5]
    # Read again, later, in any order, and after the runner is gone.
    runner.step(probe_batch(every_way, 9))
    runner.close()
    assert [float(result.loss) for result in reversed(results)] == [5, 4, 3, 2, 1]


def test_counts_belong_to_their_step(every_way, routed_model, routed_tokens, wrap):
    """Goes wrong: the host reads counts before they are copied, or a mix of two steps; a test whose batches all have
    the same counts never sees it.

    Instead: nothing to do; reading waits for that step.
    """
    model = routed_model(every_way)
    counts = [[16, 16, 16, 16], [64, 0, 0, 0], [0, 0, 0, 64], [1, 62, 1, 0], [0, 32, 0, 32]]
    batches = [
        {"x": routed_tokens(every_way, [expert for expert, n in enumerate(row) for _ in range(n)])} for row in counts
    ]
    runner = wrap(every_way, model, torch.optim.SGD([model.scale], lr=0.0), batches[0])
    results = [runner.step(batches[i]) for i in (0, 1, 2, 3, 4, 1, 2)]
    assert [result.moe["moe"].routed for result in results] == [counts[i] for i in (0, 1, 2, 3, 4, 1, 2)]
    assert all(result.moe["moe"].dropped == [0, 0, 0, 0] and result.moe.drop_rate == 0.0 for result in results)
    # Every expert puts out its number plus one, in six channels, with a routing weight of 1.
    expected = [6 * sum((expert + 1) * n for expert, n in enumerate(counts[i])) for i in (0, 1, 2, 3, 4, 1, 2)]
    assert [float(result.loss) for result in results] == pytest.approx(expected, rel=1e-5)


def test_aux_loss_is_the_one_of_its_step_and_evaluation_leaks_into_none(way, routed_model, wrap, reference):
    """Goes wrong: the logged aux loss is the one of the capture, a running sum, or holds a part of the last evaluation.

    Instead: `result.metrics["aux_loss"]`, before its coefficient; the user's loss is apart from it.
    """
    model = routed_model(way, router_aux_loss_coef=0.5)
    with torch.no_grad():
        model.moe.router.weight.normal_()
    batches = [{"x": torch.randn(16, 6, device=way.device)} for _ in range(5)]
    expected = [reference(model.moe, batch["x"], top_k=1) for batch in batches]
    runner = wrap(way, model, torch.optim.SGD([model.scale], lr=0.0), batches[0])
    results = []
    for batch in batches:
        results.append(runner.step(batch))
        runner.evaluate(batches[2])
    aux = [float(result.metrics["aux_loss"]) for result in results]
    assert aux == pytest.approx([float(one.aux_loss) for one in expected], abs=1e-5)
    assert len({round(value, 4) for value in aux}) == 5
    assert [float(result.loss) for result in results] == pytest.approx(
        [float(one.output.sum()) for one in expected], rel=1e-4, abs=1e-4
    )


def test_replayed_and_not_replayed_log_the_same(captured_way, routed_model, wrap):
    """Goes wrong: the metric of the graph differs from the one of the plain run, so two curves cannot be compared.

    Instead: nothing to do; both ways are bitwise the same.
    """
    logged = []
    for capture in (captured_way.capture, "off"):
        torch.manual_seed(3)
        model = routed_model(captured_way, router_aux_loss_coef=0.5, router_z_loss_coef=0.25)
        with torch.no_grad():
            model.moe.router.weight.normal_()
        batches = [{"x": torch.randn(16, 6, device=captured_way.device)} for _ in range(5)]
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
        runner = wrap(captured_way, model, optimizer, batches[0], capture=capture)
        results = [runner.step(batch) for batch in batches]
        names = ("aux_loss", "z_loss")
        logged.append([[float(r.loss), float(r.grad_norm), *(float(r.metrics[n]) for n in names)] for r in results])
        runner.synchronize()
        logged[-1].append([float(parameter.sum()) for parameter in model.parameters()])
    assert logged[0] == logged[1]
    assert len({row[0] for row in logged[0][:5]}) == 5


def test_the_run_folder_has_one_line_for_each_step(way, probe, probe_batch, wrap, tmp_path):
    """Goes wrong: the log has the last step twice and the one before never, or ends before the run did.

    Instead: `runner.flush()`, or close the runner.
    """
    model = probe(way)
    runner = wrap(way, model, torch.optim.SGD([model.b], lr=0.0), probe_batch(way, 1), run_dir=tmp_path)
    results = [runner.step(probe_batch(way, s)) for s in (1, 2, 3)]
    runner.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rows = [line for line in lines if line["kind"] == "train"]
    assert [(row["step"], row["train/loss"]) for row in rows] == [(r.step, float(r.loss)) for r in results]
