from __future__ import annotations

import types

import pytest
import torch
from torchtitan_ext.learning_rate import resolve, scaling_law_lr

from torchtitan_ext.plugin import models, optimizers


def section(lr: float | None = None, lr_from: str = "scaling_law", **law: float) -> object:
    scaling_law = types.SimpleNamespace(**{"params_b": 0.6, "tokens_b": 12.0, **law})
    return types.SimpleNamespace(lr=lr, lr_from=lr_from, scaling_law=scaling_law)


@pytest.mark.parametrize(
    ("params_b", "tokens_b", "printed"), [(0.76, 15.2, 1.573e-3), (0.6, 12.0, 1.801e-3)]
)
def test_the_law_gives_the_rates_of_the_paper(
    params_b: float, tokens_b: float, printed: float
) -> None:
    # Half a unit of the last printed digit: exact parameter counts (1.572e-3, 1.804e-3) fail.
    assert scaling_law_lr(params_b, tokens_b) == pytest.approx(printed, abs=0.5e-6)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_the_law_names_the_bad_number(bad: float) -> None:
    with pytest.raises(ValueError, match=r"scaling_law\.params_b: found .*expected a number > 0"):
        scaling_law_lr(bad, 12.0)
    with pytest.raises(ValueError, match=r"scaling_law\.tokens_b: found .*expected a number > 0"):
        scaling_law_lr(0.6, bad)


def test_a_rate_beside_the_law_is_an_error_and_not_ignored() -> None:
    with pytest.raises(ValueError, match=r"optimizer\.lr: found 0\.001, .*gives 0\.001801"):
        resolve(section(lr=1e-3))


def test_the_optimizer_gets_the_resolved_rate() -> None:
    # Without `settings.parse`, as when a program makes its own config.
    config = optimizers.OptimizersContainer.Config(
        name="AMO",
        lr_from="scaling_law",
        scaling_law=optimizers.ScalingLaw(params_b=0.76, tokens_b=15.2),
    )
    with torch.device("cpu"):
        model = models.spec(models.Model(name="qwen3", flavor="tiny")).model.build()
    container = config.build(model_parts=[model])
    rates = {group["lr"] for optimizer in container for group in optimizer.param_groups}
    assert rates == {scaling_law_lr(0.76, 15.2)}
