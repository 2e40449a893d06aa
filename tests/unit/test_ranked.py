"""What keeps ranks from becoming a backend is said in one line."""

import socket
import sys

import pytest

from configs import Config
from configs.load import ConfigError
from engine.core.errors import RunError
from learner.placement import Placement
from learner.ranked import backend_type, join

TWO_RANKS = Config.model_validate({"learner": {"backend": "deepspeed", "ranks": 2, "device": "cpu"}})


def test_a_port_that_is_taken_is_said_with_the_launchers_option(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "2"}
        for name, value in places.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(RunError, match=rf"ranks cannot meet at 127\.0\.0\.1:{port}: .*--master_port"):
            join(TWO_RANKS, Placement(0, 2, 0, 2))


def test_a_library_that_is_there_but_broken_is_not_called_missing_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "learner.backends.deepspeed", None)
    with pytest.raises(ConfigError, match=r"adastream\[deepspeed\].*: import of learner.backends.deepspeed halted"):
        backend_type()
