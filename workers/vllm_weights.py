"""How verified weights in shared memory get into a running vLLM: weight-transfer engines of ours.

Two of them. `ShmWeightTransferEngine` loads into the model itself, so all of its calls come while generation is paused.
`BufferedWeightTransferEngine` (CPUs) takes the weights while generation goes on, in a thread of its own, and only
`finish_weight_update` needs the pause: it exchanges the two sets.

Invariants: only what was verified before is loaded (`workers.shared_weights.verify`): vLLM accepts missing tensors and
nan silently, and dies of a wrong shape. Loading is by layerwise reload: on a CPU plain `load_weights` meets repacked
matrices and raises half-way.

Imported by vLLM's own worker processes, through `worker_extension_cls`. Written for vLLM 0.32.
"""

import json
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from workers.shared_weights import Segment
from workers.vllm_twin import Twin

IN_PLACE, BUFFERED = "adastream-shm", "adastream-shm-buffered"
EXTENSION = "workers.vllm_weights.WorkerExtension"


@dataclass
class ShmInit(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class ShmUpdate(WeightTransferUpdateInfo):
    """Which segment, and which tensors in it. Plain lists: it travels through vLLM's own messages."""

    location: str
    num_bytes: int
    tensors: list[tuple[str, list[int], str, int, int]]
    """(name, shape, dtype, offset, bytes)."""
    policy_version: int
    notice: str
    """Path of a pipe's writing end: the buffered engine writes a line `[policy_version, error]` there when done."""


class ShmWeightTransferEngine(WeightTransferEngine[ShmInit, ShmUpdate]):
    """Loads one whole set of weights out of a shared-memory segment."""

    init_info_cls = ShmInit
    update_info_cls = ShmUpdate
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: ShmInit) -> None:
        """Nothing to connect to."""

    def start_weight_update(self) -> None:
        """Give every layer its checkpoint form back."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ShmUpdate) -> None:
        """Load every tensor of the segment."""
        _load(self.model, update_info)

    def finish_weight_update(self) -> None:
        """Repack what layerwise reload left to the end."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held between updates."""


class BufferedWeightTransferEngine(ShmWeightTransferEngine):
    """Loads into a twin of the model; generation stands still only while the two are exchanged."""

    _twin: Twin | None = None
    _thread: threading.Thread | None = None
    _failure: Exception | None = None

    def start_weight_update(self) -> None:
        """The model keeps its form."""

    def receive_weights(self, update_info: ShmUpdate) -> None:
        """Begin to load; the end is told on `update_info.notice`, since vLLM can answer a call at once only."""
        self._wait()
        self._thread = threading.Thread(target=self._fill, args=(update_info,), name="weights", daemon=True)
        self._thread.start()

    def _fill(self, update: ShmUpdate) -> None:
        torch.set_num_threads(1)  # of this thread alone: the step's threads keep their cores
        try:
            with torch.no_grad():
                self._twin = self._twin or Twin(self.model)
                initialize_layerwise_reload(self._twin.model)
                _load(self._twin.model, update)
                finalize_layerwise_reload(self._twin.model, self.model_config)
        except Exception as exc:  # noqa: BLE001  (a thread's end: kept for whoever waits, and told)
            self._failure = exc
        error = f"{type(self._failure).__name__}: {self._failure}" if self._failure else ""
        with Path(update.notice).open("wb") as notice:
            notice.write(json.dumps([update.policy_version, error]).encode() + b"\n")

    def finish_weight_update(self) -> None:
        """Exchange the sets; waits for the loading thread."""
        self._wait()
        if self._failure or self._twin is None:
            raise RuntimeError(f"no weights to exchange: {self._failure!r}")
        self._twin.exchange()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()


def _load(model: torch.nn.Module, update: ShmUpdate) -> None:
    segment = Segment(update.location, update.num_bytes)
    # The loaders copy; what they may still refer to keeps the mapping alive until they let go, so no close here.
    model.load_weights(_tensors(segment, update))  # pyright: ignore[reportCallIssue]  (nn.Module's typing)


def _tensors(segment: Segment, update: ShmUpdate) -> Iterator[tuple[str, torch.Tensor]]:
    # Ordered by layer: a layer is repacked as soon as its last tensor came, and its buffers are freed.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # nothing writes to it
        whole = torch.frombuffer(segment.view(0, update.num_bytes), dtype=torch.uint8)
    for name, shape, dtype, offset, num_bytes in update.tensors:
        yield name, whole[offset : offset + num_bytes].view(getattr(torch, dtype)).view(shape)


class WorkerExtension:
    """Mixed into vLLM's worker class so that this module is imported there."""


WeightTransferEngineFactory.register_engine(IN_PLACE, ShmWeightTransferEngine)
WeightTransferEngineFactory.register_engine(BUFFERED, BufferedWeightTransferEngine)
