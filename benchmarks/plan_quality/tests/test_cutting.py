"""The study of cutting: its rows, its jobs, and the records that the page reports."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch

from benchmarks.plan_quality import cutting, fused
from benchmarks.plan_quality.cutting import ROWS, Run

CASES = [(model, row) for model in ROWS for row in ROWS[model]]


@pytest.mark.parametrize(("model", "row"), CASES)
def test_a_row_has_its_matrices(model: str, row: str) -> None:
    assert cutting.groups_of(cutting.build(model), ROWS[model][row])
    wrong = replace(ROWS[model][row], matrices=1)
    with pytest.raises(AssertionError):
        cutting.groups_of(cutting.build(model), wrong)


def test_experts_take_turns_and_weights_count() -> None:
    torch.manual_seed(0)
    mixture = fused.Mixture(cutting.EIGHT_EXPERTS)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 3, 96)
    result = mixture(x)
    assert mixture.balance.abs().max() == pytest.approx(mixture.bias_rate)
    scores = mixture.router(x[0, 0]).sigmoid()
    best = scores.topk(2)
    w1, w2, w3 = (w.unflatten(0, (8, -1)) for w in mixture.experts.parameters())
    expected = sum(
        score
        / best.values.sum()
        * ((torch.nn.functional.silu(w1[i] @ x[0, 0]) * (w3[i] @ x[0, 0])) @ w2[i])
        for score, i in zip(best.values, best.indices, strict=True)
    )
    # Sums of 96 and 384 products in float32, in another order.
    torch.testing.assert_close(result[0, 0], expected, rtol=1e-4, atol=1e-3)


def test_a_diffusion_transformer_begins_at_zero_flow() -> None:
    torch.manual_seed(0)
    batch = next(fused.images(4, 0))
    pixels, noise, _, _ = batch
    assert -1.1 < pixels.min() < -0.9 < 0 < pixels.max() <= 1
    model = cutting.build("diffusion")
    assert model.loss(*batch) == (noise - pixels).square().mean()
    torch.testing.assert_close(batch, next(fused.images(4, 0)))


def test_rates_are_bracketed_and_seeds_take_the_best() -> None:
    records: cutting.Records = {}
    for run in cutting.jobs(records):
        # The best rate is 0.001 of today's rows, else 0.004; half of it in longer runs.
        best = (0.001 if run.row == cutting.TODAY else 0.004) * 250 / min(run.steps, 500)
        records[run] = records.get(run, abs(run.rate - best))
    for model, row in CASES:
        for steps in (250, 2000):
            like = Run(model, row, steps=steps)
            tried = sorted(r.rate for r in records if replace(r, rate=0.0) == like)
            best = cutting.study.best_rate(records, like)
            assert tried[0] < best < tried[-1]
            assert all(
                replace(like, rate=best, seed=seed) in records for seed in range(cutting.SEEDS)
            )


def test_the_report_is_of_the_committed_records() -> None:
    records = cutting.read(cutting.RECORDS)
    assert {(run.model, run.row) for run in records} == {*CASES}
    text = "\n".join(cutting.report(records))
    assert text.count("###") == len(ROWS) * len({run.steps for run in records})
    assert text.count("±") >= len(CASES)


def test_a_run_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = [*islice(fused.images(cutting.IMAGES, 0), 8)]
    monkeypatch.setattr(cutting, "batches", lambda *_: iter(stream))
    losses = [
        cutting.validation_loss(Run("diffusion", row, 0.008, steps=steps), None)
        for row, steps in (("today's", 1), ("today's", 8), ("q, k, v as one", 8))
    ]
    assert losses[1] < losses[0]
    assert losses[2] not in losses[:2]
