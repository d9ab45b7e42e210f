from __future__ import annotations

import pytest

from benchmarks.amo_paper.learning_rate import scaling_law_lr


@pytest.mark.parametrize(
    ("params_b", "tokens_b", "printed"), [(0.76, 15.2, 1.573e-3), (0.6, 12.0, 1.801e-3)]
)
def test_the_law_gives_the_rates_of_the_paper(
    params_b: float, tokens_b: float, printed: float
) -> None:
    # Half a unit of the last printed digit: exact parameter counts (1.572e-3, 1.804e-3) fail.
    assert scaling_law_lr(params_b, tokens_b) == pytest.approx(printed, abs=0.5e-6)
