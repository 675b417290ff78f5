"""What a GPU's own arithmetic makes of the rounding that everywhere else is interpreted."""

from __future__ import annotations

import pytest
from tests.kernels.triton.quantizers import assert_rounds_as_a_division_does

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
def test_rounds_as_a_division_does(bits: int, device: str) -> None:
    assert_rounds_as_a_division_does(bits, device)
