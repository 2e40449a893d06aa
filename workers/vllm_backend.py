"""vLLM behind the `GenerationBackend` seam: the one place that knows AsyncLLM's moving API. Written for vLLM 0.32.

Invariants: a request is one sample (never n > 1), answered once, with the logprobs of the distribution that was really
sampled; every token carries the version of the weights that drew it (vLLM's own spans); new weights are verified
before generation is paused, and loaded while no step runs and with every cache cleared, so no token is drawn from new
weights that read old keys and values. An engine that died is a `RunError`.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from configs import Config
from engine.core.errors import RunError, WeightUpdateError
from engine.wire import Canary, Generate, Int32s, Manifest, SampleDone, SampleKey, Span
from workers.generation import Load, first_cause
from workers.shared_weights import expected_shapes, verify
from workers.vllm_weights import BACKEND, EXTENSION

log = logging.getLogger(__name__)

BLOCK_TOKENS = 32
"""KV block, the smallest that CPU attention takes: what the samples of an arm share of a prompt is whole blocks."""
CPU_STEP_TOKENS = 256
"""Tokens of one step on a CPU, some 0.3 s on one core: an update's canaries wait for one step at most."""
CANARY_PRIORITY = -1
"""Before every sample: until the canary passed, samples of the new version are held back."""
IN_PROCESS_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
SHUTDOWN_S = 5.0

_T = TypeVar("_T")


class VllmBackend:
    """A `GenerationBackend` on one AsyncLLM. Make it with `start`, end it with `close`."""

    def __init__(self, llm: AsyncLLM, config: Config) -> None:
        self.llm = llm
        self._config = config
        self._tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(config.model.path)
        self._dtype = str(llm.model_config.dtype).removeprefix("torch.")
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self._num_canaries = 0
        self._early: tuple[list[Canary], asyncio.Future[float]] | None = None

    @classmethod
    async def start(cls, config: Config) -> Self:
        """Load the model of `config` and start vLLM's processes; the weights held are version 0.

        Raises:
            RunError: the model cannot be loaded.
        """
        try:
            llm = AsyncLLM.from_engine_args(engine_args(config))
        except (RuntimeError, ValueError, OSError) as exc:
            raise RunError(f"vLLM cannot start with model {config.model.path}: {exc}") from exc
        backend = cls(llm, config)
        await backend._answer(llm.update_weight_version("0"))
        return backend

    async def until_dead(self) -> None:
        """Wait until vLLM's processes die; returns never otherwise.

        Raises:
            RunError: they died.
        """
        handler = self.llm.output_handler
        if handler is None:
            raise RunError("vLLM takes no output")
        await asyncio.wait([handler])
        raise RunError("vLLM's engine process died; its last lines are in this log")

    def close(self) -> None:
        """End vLLM's processes; blocks up to `SHUTDOWN_S`."""
        self.llm.shutdown(timeout=SHUTDOWN_S)

    async def encode(self, prompts: list[str], chat_template: bool) -> list[Int32s]:
        """Token ids of each prompt, wrapped as a user message where `chat_template`.

        Raises:
            RunError: the model has no chat template.
        """
        if chat_template and self._tokenizer.chat_template is None:
            raise RunError(f"model {self._config.model.path} has no chat template; set model.chat_template = false")
        return await asyncio.to_thread(self._encode, prompts, chat_template)

    def _encode(self, prompts: list[str], chat_template: bool) -> list[Int32s]:
        if not prompts:
            return []
        texts = [self._as_chat(prompt) for prompt in prompts] if chat_template else prompts
        # A template writes its own special tokens.
        encoded = self._tokenizer(texts, add_special_tokens=not chat_template)["input_ids"]
        return [np.asarray(token_ids, dtype=np.int32) for token_ids in encoded]

    def _as_chat(self, prompt: str) -> str:
        message = {"role": "user", "content": prompt}
        return str(self._tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False))

    async def generate(self, request: Generate) -> SampleDone:
        """Draw one sample.

        Raises:
            RunError: vLLM died.
            ValueError: a request that vLLM refuses, e.g. one longer than the context.
        """
        began_at = time.monotonic()
        params = SamplingParams(
            max_tokens=request.params.max_tokens,
            temperature=request.params.temperature,
            top_p=request.params.top_p,
            seed=request.params.seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = tokens_input(request.prompt_token_ids.tolist())
        output = await self._final(self.llm.generate(prompt, params, _request_id(request.key)))
        return self._sample(request.key, output.outputs[0], time.monotonic() - began_at)

    def _sample(self, key: SampleKey, output: CompletionOutput, generation_s: float) -> SampleDone:
        token_ids = np.asarray(output.token_ids, dtype=np.int32)
        logprobs = output.logprobs.logprobs if isinstance(output.logprobs, FlatLogprobs) else []
        if len(logprobs) != len(token_ids):
            raise ValueError(f"vLLM must give a logprob a token, got {len(logprobs)} for {len(token_ids)} tokens")
        reason = output.finish_reason
        if reason not in ("stop", "length", "abort"):
            raise ValueError(f"vLLM must finish by stop, length or abort, got {reason!r}")
        return SampleDone(
            key=key,
            token_ids=token_ids,
            logprobs=np.asarray(logprobs, dtype=np.float32),
            spans=[Span(int(span.version), span.start, span.end) for span in output.weight_versions or []],
            text=str(self._tokenizer.decode(token_ids, skip_special_tokens=True)),
            finish_reason=reason,
            generation_s=generation_s,
        )

    async def abort(self, keys: list[SampleKey]) -> None:
        """End these requests; each `generate` returns with the tokens so far."""
        await self._answer(self.llm.abort([_request_id(key) for key in keys]))

    async def stage(self, manifest: Manifest) -> None:
        """Check new weights against the model and against their own manifest, in a thread.

        Raises:
            WeightUpdateError: a check failed.
        """
        if manifest.mover != "shm":
            raise WeightUpdateError(f"mover must be shm, got {manifest.mover!r}")
        if not manifest.canaries:
            raise WeightUpdateError("an update must bring a canary, got none")
        await asyncio.to_thread(self._verify, manifest)

    def _verify(self, manifest: Manifest) -> None:
        if self._shapes is None:
            self._shapes = expected_shapes(Path(self.llm.model_config.model))
        verify(manifest, self._shapes, self._dtype)

    async def apply(self, manifest: Manifest, load: bool) -> Load:
        """Pause, load what was staged, tag, resume; without `load` only tag.

        Raises:
            WeightUpdateError: the load failed half-way; the weights held are not to be trusted.
            RunError: vLLM died.
        """
        if not load:
            await self._answer(self.llm.update_weight_version(str(manifest.policy_version)))
            return Load(0.0, 0.0)
        tensors = [(spec.name, spec.shape, spec.dtype, spec.offset, spec.num_bytes) for spec in manifest.tensors]
        update = {"location": manifest.location, "num_bytes": manifest.num_bytes, "tensors": tensors}
        # It returns when the step under way has ended: until then tokens are drawn, from then on none.
        await self._answer(self.llm.pause_generation(mode="keep", clear_cache=True))
        paused_at = time.monotonic()
        try:
            await self._answer(self.llm.start_weight_update())
            await self._answer(self.llm.update_weights(WeightTransferUpdateRequest(update_info=update)))
            await self._answer(self.llm.finish_weight_update(str(manifest.policy_version)))
        except RunError:
            raise
        except Exception as exc:
            # Generation stays paused: a step on half-loaded weights would end vLLM or answer nonsense.
            raise WeightUpdateError(f"loading version {manifest.policy_version} failed half-way: {exc}") from exc
        loaded_at = time.monotonic()
        # Asked for while nothing runs, the canaries are in the first step: before it recomputes the cleared caches.
        self._early = (manifest.canaries, asyncio.ensure_future(self._differences(manifest.canaries)))
        await asyncio.sleep(0)
        await self._answer(self.llm.resume_generation())
        return Load(pause_s=time.monotonic() - paused_at, load_s=loaded_at - paused_at)

    async def canary(self, canaries: list[Canary]) -> float:
        """Largest difference of prompt logprobs from the learner's, nats."""
        early, self._early = self._early, None
        if early is not None and early[0] is canaries:
            return await early[1]
        return await self._differences(canaries)

    async def _differences(self, canaries: list[Canary]) -> float:
        try:
            async with asyncio.TaskGroup() as tasks:
                differences = [tasks.create_task(self._difference(canary)) for canary in canaries]
        except* Exception as group:
            raise first_cause(group) from group
        worst = [task.result() for task in differences]
        return float(np.max(worst)) if worst else 0.0  # np.max lets nan through, max() would not

    async def _difference(self, canary: Canary) -> float:
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._num_canaries += 1
        prompt = tokens_input(canary.token_ids.tolist())
        stream = self.llm.generate(prompt, params, f"canary-{self._num_canaries}", priority=CANARY_PRIORITY)
        output = await self._final(stream)
        if not isinstance(output.prompt_logprobs, FlatLogprobs):
            raise WeightUpdateError("vLLM gave no prompt logprobs for a canary")
        # The first position has no logprob and no entry; then one a token.
        own = np.asarray(output.prompt_logprobs.logprobs, dtype=np.float32)
        if own.shape != canary.logprobs.shape:
            raise WeightUpdateError(f"a canary must have {len(own)} logprobs, got {len(canary.logprobs)}")
        return float(np.abs(own - canary.logprobs).max())

    async def _final(self, stream: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
        final: RequestOutput | None = None
        try:
            async for output in stream:
                final = output
        except EngineDeadError as exc:
            raise RunError(f"vLLM's engine process died: {exc}") from exc
        if final is None:
            raise ValueError("vLLM ended a request without an output")
        return final

    async def _answer(self, call: Awaitable[_T]) -> _T:
        try:
            return await call
        except EngineDeadError as exc:
            raise RunError(f"vLLM's engine process died: {exc}") from exc


def engine_args(config: Config) -> AsyncEngineArgs:
    """Arguments of vLLM for a run."""
    is_cpu = current_platform.is_cpu()
    return AsyncEngineArgs(
        model=config.model.path,
        dtype=config.worker.dtype,
        max_model_len=config.model.max_context_tokens,
        # Canaries run beside a full house instead of preempting samples.
        max_num_seqs=config.worker.slots + config.weights.canary_prompts,
        max_num_batched_tokens=max(CPU_STEP_TOKENS, config.model.max_context_tokens) if is_cpu else None,
        kv_cache_memory_bytes=config.worker.kv_cache_bytes,
        # Half a prompt in a step draws a token that vLLM takes back by rewinding the request's generator, which raises
        # for CPU generators and ends the engine (vLLM 0.32, gpu_model_runner._bookkeeping_sync).
        enable_chunked_prefill=False if is_cpu else None,
        block_size=BLOCK_TOKENS,
        enable_prefix_caching=True,
        scheduling_policy="priority",
        logprobs_mode="processed_logprobs",
        enforce_eager=True,
        # One process a worker less than vLLM's default on CPUs: no spinning hand-over between two processes that share
        # a core, and 6 s less to start. The thread count is set before vLLM is imported, which that default is for.
        distributed_executor_backend=IN_PROCESS_EXECUTOR if current_platform.is_cpu() else None,
        disable_log_stats=True,
        seed=config.run.seed,
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        worker_extension_cls=EXTENSION,
    )


def _request_id(key: SampleKey) -> str:
    return f"{key.arm}-{key.index}-{key.retry}"
