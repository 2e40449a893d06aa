"""The learner's command line: what it leaves to the configuration, and what ends it before torch is imported."""

import subprocess
import sys

import pytest

from configs import load_config
from configs.load import ConfigError
from learner import train
from tests.support.run_process import ROOT


def options_of(path, text="", *arguments):
    """Options and configuration as `main` has them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"[run]\nmax_steps = 1\n{text}")
    options = train._parse(["--config", str(path), *arguments])
    return options, load_config(options.config, options.set)


def completed(path, text="", *arguments):
    options, config = options_of(path, text, *arguments)
    train._complete(options, config)
    return options.connect, options.run_folder


def test_the_configuration_says_where_engine_and_run_are(tmp_path):
    runs = f'folder = "{tmp_path}"\nname = "a"\n'
    server = "[server]\nwire_port = 5555\n"
    assert completed(tmp_path / "a" / "config.toml", server) == ("tcp://127.0.0.1:5555", tmp_path / "a")
    assert completed(tmp_path / "other.toml", runs + server)[1] == tmp_path / "a"
    (tmp_path / "a-2").mkdir()
    assert completed(tmp_path / "other.toml", runs + server)[1] == tmp_path / "a-2"
    assert completed(tmp_path / "other.toml", runs + 'resume = "auto"\n' + server)[1] == tmp_path / "a"


def test_the_command_line_comes_first(tmp_path):
    arguments = ["--connect", "tcp://there:1", "--run-folder", "elsewhere"]
    connect, run_folder = completed(tmp_path / "config.toml", "[server]\nwire_port = 5555\n", *arguments)
    assert (connect, str(run_folder)) == ("tcp://there:1", "elsewhere")


def test_an_engine_at_any_free_port_must_be_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--connect must say .* or server\.wire_port its port; got neither"):
        completed(tmp_path / "config.toml")


def test_a_run_folder_that_cannot_be_made_is_a_usage_error(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    options_of(tmp_path / "config.toml", f'[model]\npath = "{tmp_path / "absent"}"\n')
    arguments = ["--connect", "tcp://127.0.0.1:1", "--config", str(tmp_path / "config.toml")]
    assert train.main([*arguments, "--run-folder", str(tmp_path / "file" / "run")]) == 2
    assert "--run-folder" in capsys.readouterr().err


INTERRUPTED_IMPORT = """
import importlib.abc, importlib.machinery, os, runpy, signal, sys

class Trainer:
    failure = ""
    def __init__(self, *_): pass
    def __enter__(self): return self
    def __exit__(self, *_): pass

class Interrupting(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "learner.trainer" else None
    def exec_module(self, module):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        module.TorchTrainer = Trainer

sys.meta_path.insert(0, Interrupting())
sys.argv = ["learner.train", *sys.argv[1:]]
runpy.run_module("learner.train", run_name="__main__")
"""


def test_an_interrupt_while_torch_is_imported_is_heeded_afterwards(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (model / "model.safetensors").write_text("")
    options_of(tmp_path / "config.toml", f'[server]\nwire_port = 1\n[model]\npath = "{model}"\n')
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, "--config", str(tmp_path / "config.toml")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert "interrupted: waiting for the engine to say stop" in ended.stderr
    assert ended.returncode == train.EXIT_TERMINATED, ended.stderr
    assert "Traceback" not in ended.stderr
