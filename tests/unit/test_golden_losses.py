"""Losses of a fixed batch do not drift."""

import json

import pytest

from tests.golden.write_losses import PATH, golden
from tests.support.loss_configs import LOSSES

GOLDEN = json.loads(PATH.read_text())


def test_every_configuration_has_a_golden_loss():
    assert list(GOLDEN) == list(LOSSES)


@pytest.mark.parametrize("name", list(LOSSES))
def test_a_loss_is_what_it_was(name):
    # float64; 1e-9 allows for another order of sums in another torch.
    assert golden(LOSSES[name]) == pytest.approx(GOLDEN[name], rel=1e-9, abs=1e-12)
