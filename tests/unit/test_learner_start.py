"""What a learner lacks is said in one line with exit code 2, before it asks for an engine."""

import sys

import pytest
import torch

from engine.core.errors import PeerLost
from learner import train
from tests.support.learner_inputs import tiny_llama

CONFIG = """
[run]
max_steps = 9
[model]
path = "{folder}"
max_context_tokens = 64
[sampling]
max_tokens = 32
[learner]
threads = 1
"""


@pytest.fixture(scope="module")
def config_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    tiny_llama().save_pretrained(folder / "model")
    path = folder / "config.toml"
    path.write_text(CONFIG.format(folder=folder / "model"))
    return path


@pytest.fixture
def start(config_path, monkeypatch, capfd):
    """Starts a learner whose engine is lost when it asks; its exit code and what it said."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "1")

    async def connect(*_):
        raise PeerLost("asked for the engine")

    monkeypatch.setattr(train.ZmqLink, "connect", connect)

    def run(*overrides):
        choices = [word for override in overrides for word in ("--set", override)]
        folder = str(config_path.parent / "run")
        code = train.main(
            ["--connect", "tcp://127.0.0.1:9", "--config", str(config_path), "--run-folder", folder, *choices]
        )
        said = capfd.readouterr().err
        assert "Traceback" not in said
        return code, said

    return run


def test_a_reference_that_is_not_there(start):
    code, said = start("loss.kl.weight=0.1", "loss.kl.reference=/absent")
    assert code == 2
    assert "loss.kl.reference /absent does not exist" in said


def test_a_device_that_is_not_there(start, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, said = start("learner.device=cuda")
    assert code == 2
    assert "learner.device is cuda" in said


@pytest.mark.parametrize(
    ("package", "override", "key"),
    [("deepspeed", "learner.backend=deepspeed", "learner.backend"), ("peft", "lora.rank=2", "lora.rank")],
)
def test_a_package_that_is_not_installed(start, monkeypatch, package, override, key):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    code, said = start(override)
    assert code == 2
    assert key in said
    assert f'pip install "adastream[{"lora" if package == "peft" else package}]"' in said


def test_a_learner_that_lacks_nothing_asks_for_the_engine(start):
    code, said = start()
    assert code == 3
    assert said.endswith("asked for the engine\n")
