"""The learner as a real process over real sockets; the test plays the engine."""

import asyncio
import contextlib
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.transport.base import PeerGone, PeerJoined, Received
from engine.transport.zmq import ZmqHub
from engine.wire import Heartbeat
from learner.trainer import CANARY_TEXTS
from tests.support.learner_inputs import tiny_llama

ROOT = Path(__file__).resolve().parents[2]
SHARED_MEMORY = Path("/dev/shm")
DEADLINE_S = 60.0


def save_model_with_tokenizer(folder: Path) -> None:
    """The tiny Llama of `learner_inputs` with a tokenizer that knows the canaries' words."""
    tiny_llama(dtype=torch.bfloat16, attention="eager").save_pretrained(folder)
    words = sorted({word for text in CANARY_TEXTS for word in text.split()})
    vocabulary = {"<unk>": 0} | {word: number for number, word in enumerate(words[:90], start=1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)


class Engine:
    """A hub and one learner process."""

    def __init__(self, tmp_path: Path, model_path: Path, *overrides: str) -> None:
        self.folder = tmp_path
        self.model_path = model_path
        self.overrides = overrides
        self.errors = tmp_path / "learner.log"

    async def __aenter__(self) -> "Engine":
        self.hub = await ZmqHub.bind("127.0.0.1", 0)
        await self.start()
        return self

    async def start(self) -> None:
        config = self.folder / "config.toml"
        config.write_text(
            f'[run]\nmax_steps = 9\n[model]\npath = "{self.model_path}"\nmax_context_tokens = 64\n'
            "[sampling]\nmax_tokens = 32\n[optimizer]\nlr = 1e-2\n"
            "[learner]\ngroups_per_step = 4\nmicro_batch_tokens = 64\nthreads = 1\nidle_deadline_s = 60.0\n"
            "max_first_mismatch_nats = 20.0\n"  # the groups' logprobs are made up
        )
        choices = [word for override in ("checkpoint.keep=1", *self.overrides) for word in ("--set", override)]
        with self.errors.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-W", "error::UserWarning", "-m", "learner.train",
                "--connect", self.hub.address, "--config", str(config),
                "--run-folder", str(self.folder / "run"), *choices,
                cwd=ROOT, stderr=log,
            )  # fmt: skip

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        await self.hub.close()

    async def next(self, kind):
        """The learner's next message that is no heartbeat; it must be a `kind`."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                event = await self.hub.receive()
                match event:
                    case PeerJoined() | PeerGone() | Received(message=Heartbeat()):
                        assert not (isinstance(event, PeerGone) and kind is not PeerGone), self.errors.read_text()
                        if kind is PeerGone and isinstance(event, PeerGone):
                            return event
                    case Received(message=message) if isinstance(message, kind):
                        return message
                    case _:
                        raise AssertionError(event)

    async def send(self, message) -> None:
        await self.hub.send("learner", message)

    async def exit_code(self) -> int:
        async with asyncio.timeout(DEADLINE_S):
            return await self.process.wait()

    def segments(self) -> list[Path]:
        return list(SHARED_MEMORY.glob(f"adastream-{self.process.pid}-*"))
