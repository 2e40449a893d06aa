"""The order of calls by which new weights get into vLLM; the other end is `workers.vllm_weights`.

Invariants: with a buffered engine everything but the exchange happens while generation goes on; with one in place
everything happens in the pause. A failed update leaves vLLM with weights that are not to be trusted only if it failed
inside `load`. One update at a time.
"""

import asyncio
import json
import os
from collections.abc import Awaitable
from typing import TypeVar

from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from engine.core.errors import RunError, WeightUpdateError
from engine.wire import Manifest

_T = TypeVar("_T")


async def answer(call: Awaitable[_T]) -> _T:
    """What vLLM answers.

    Raises:
        RunError: vLLM died.
    """
    try:
        return await call
    except EngineDeadError as exc:
        raise RunError(f"vLLM's engine process died: {exc}") from exc


class WeightLoader:
    """Brings staged weights into one AsyncLLM. Close it when done."""

    def __init__(self, llm: AsyncLLM, is_buffered: bool) -> None:
        self._llm = llm
        self._is_buffered = is_buffered
        self._has_started = False
        self._notices: asyncio.StreamReader | None = None
        self._read_end, self._write_end = os.pipe()

    def close(self) -> None:
        """Close the pipe; its reading end belongs to the loop once it was read."""
        os.close(self._write_end)
        if self._notices is None:
            os.close(self._read_end)

    async def stage(self, manifest: Manifest) -> None:
        """Take the weights in while generation goes on, where the engine can.

        Raises:
            WeightUpdateError: vLLM cannot load them; the weights in use are untouched.
            RunError: vLLM died.
        """
        if not self._is_buffered:
            return
        reader = await self._reader()
        if not self._has_started:
            await answer(self._llm.start_weight_update())
            self._has_started = True
        await self._send(manifest)
        # Ends by the engine's deadline for staging; if vLLM dies, by the worker's end.
        while True:
            version, error = json.loads(await reader.readline())
            if version == manifest.policy_version:
                break
        if error:
            raise WeightUpdateError(f"vLLM cannot load version {manifest.policy_version}: {error}")

    async def load(self, manifest: Manifest) -> None:
        """Make the staged weights the ones that draw; called while vLLM is paused.

        Raises:
            WeightUpdateError: it failed half-way.
            RunError: vLLM died.
        """
        try:
            if not self._is_buffered:
                await answer(self._llm.start_weight_update())
                await self._send(manifest)
            await answer(self._llm.finish_weight_update(str(manifest.policy_version)))
            if self._is_buffered:
                # For the next version already: while vLLM generates each call waits for a step to end.
                await answer(self._llm.start_weight_update())
        except RunError:
            raise
        except Exception as exc:
            raise WeightUpdateError(f"loading version {manifest.policy_version} failed half-way: {exc}") from exc

    async def _send(self, manifest: Manifest) -> None:
        update = {
            "location": manifest.location,
            "num_bytes": manifest.num_bytes,
            "tensors": [(spec.name, spec.shape, spec.dtype, spec.offset, spec.num_bytes) for spec in manifest.tensors],
            "policy_version": manifest.policy_version,
            "notice": f"/proc/{os.getpid()}/fd/{self._write_end}",
        }
        await answer(self._llm.update_weights(WeightTransferUpdateRequest(update_info=update)))

    async def _reader(self) -> asyncio.StreamReader:
        """What vLLM's process says; opened once, and open for writing here too, so it never ends."""
        if self._notices is None:
            self._notices = asyncio.StreamReader()
            protocol = asyncio.StreamReaderProtocol(self._notices)
            pipe = os.fdopen(self._read_end, "rb", buffering=0)
            await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
        return self._notices
