"""How verified weights in shared memory get into a running vLLM: its one weight-transfer engine of ours.

Invariants: it loads only what was verified before (`workers.shared_weights.verify`): vLLM accepts missing tensors and
nan silently, and dies of a wrong shape. It is called while generation is paused. Loading is by layerwise reload: on a
CPU plain `load_weights` meets repacked matrices and raises half-way.

Imported by vLLM's own worker processes, through `worker_extension_cls`. Written for vLLM 0.32.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from workers.shared_weights import Segment

BACKEND = "adastream-shm"
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
        segment = Segment(update_info.location, update_info.num_bytes)
        # The loaders copy; what they may still refer to keeps the mapping alive until they let go, so no close here.
        self.model.load_weights(_tensors(segment, update_info))  # pyright: ignore[reportCallIssue]  (nn.Module's typing)

    def finish_weight_update(self) -> None:
        """Repack what layerwise reload left to the end."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held between updates."""


def _tensors(segment: Segment, update: ShmUpdate) -> Iterator[tuple[str, torch.Tensor]]:
    # Ordered by layer: a layer is repacked as soon as its last tensor came, and its buffers are freed.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # nothing writes to it
        whole = torch.frombuffer(segment.view(0, update.num_bytes), dtype=torch.uint8)
    for name, shape, dtype, offset, num_bytes in update.tensors:
        yield name, whole[offset : offset + num_bytes].view(getattr(torch, dtype)).view(shape)


class WorkerExtension:
    """Mixed into vLLM's worker class so that this module is imported there."""


WeightTransferEngineFactory.register_engine(BACKEND, ShmWeightTransferEngine)
