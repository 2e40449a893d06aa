"""Losses of fixed batches do not drift."""

import json

import pytest

from tests.golden.write_losses import PATH, TEMPERATURES, golden, golden_at
from tests.support.loss_configs import LOSSES

GOLDEN = json.loads(PATH.read_text())


def test_every_configuration_and_temperature_has_a_golden_loss():
    assert list(GOLDEN) == [*LOSSES, *(f"temperature {value:g}" for value in TEMPERATURES)]


@pytest.mark.parametrize("name", list(LOSSES))
def test_a_loss_is_what_it_was(name):
    # float64; 1e-9 allows for another order of sums in another torch.
    assert golden(LOSSES[name]) == pytest.approx(GOLDEN[name], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_loss_at_a_temperature_is_what_it_was(temperature):
    # float32 products; 1e-4 allows for another order of sums in another torch.
    assert golden_at(temperature) == pytest.approx(GOLDEN[f"temperature {temperature:g}"], rel=1e-4)
