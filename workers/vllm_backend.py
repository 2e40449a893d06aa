"""vLLM behind the `GenerationBackend` seam: the one place that knows AsyncLLM's moving API. Written for vLLM 0.32.

Invariants: a request is one sample (never n > 1), answered once, with the logprobs of the distribution that was really
sampled; every token carries the version of the weights that drew it (vLLM's own spans); new weights are verified
before they touch vLLM, and take over while no step runs and with every cache cleared, so no token is drawn from new
weights that read old keys and values. An engine that died is a `RunError`.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Self

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from configs import Config
from engine.core.errors import RunError, WeightUpdateError, first_cause
from engine.wire import Canary, Generate, Int32s, Manifest, SampleDone, SampleKey, Span
from workers.generation import Load
from workers.shared_weights import expected_shapes, verify
from workers.vllm_update import WeightLoader, answer
from workers.vllm_weights import BUFFERED, EXTENSION, IN_PLACE

log = logging.getLogger(__name__)

BLOCK_TOKENS = 32
"""KV block, the smallest that CPU attention takes: what the samples of an arm share of a prompt is whole blocks."""
CPU_STEP_TOKENS = 256
"""Tokens of one step on a CPU, some 0.3 s on one core: an update's canaries wait for one step at most."""
CANARY_PRIORITY = -1
"""Before every sample: until the canary passed, samples of the new version are held back."""
IN_PROCESS_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
SHUTDOWN_S = 5.0


class VllmBackend:
    """A `GenerationBackend` on one AsyncLLM. Make it with `start`, end it with `close`."""

    def __init__(self, llm: AsyncLLM, config: Config) -> None:
        self.llm = llm
        self._config = config
        self._tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(config.model.path)
        self._dtype = str(llm.model_config.dtype).removeprefix("torch.")
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self._loader = WeightLoader(llm, _is_buffered(config))
        self._num_canaries = 0

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
        await answer(llm.update_weight_version("0"))
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
        self._loader.close()
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
        if token_ids.size and not output.weight_versions:
            raise ValueError(f"vLLM must say which weights gave each token, got {output.weight_versions!r}")
        reason = output.finish_reason
        if reason not in ("stop", "length", "abort"):
            raise ValueError(f"vLLM must finish by stop, length or abort, got {reason!r}")
        return SampleDone(
            key=key,
            token_ids=token_ids,
            logprobs=np.asarray(logprobs, dtype=np.float32),
            spans=[Span(int(span.version), span.start, span.end) for span in output.weight_versions or ()],
            text=str(self._tokenizer.decode(token_ids, skip_special_tokens=True)),
            finish_reason=reason,
            generation_s=generation_s,
        )

    async def abort(self, keys: list[SampleKey]) -> None:
        """End these requests; each `generate` returns with the tokens so far."""
        await answer(self.llm.abort([_request_id(key) for key in keys]))

    async def stage(self, manifest: Manifest) -> None:
        """Check new weights against the model and against their own manifest, then take them in.

        Raises:
            WeightUpdateError: a check failed.
        """
        if manifest.mover != "shm":
            raise WeightUpdateError(f"mover must be shm, got {manifest.mover!r}")
        if not manifest.canaries:
            raise WeightUpdateError("an update must bring a canary, got none")
        await asyncio.to_thread(self._verify, manifest)
        await self._loader.stage(manifest)

    def _verify(self, manifest: Manifest) -> None:
        if self._shapes is None:
            self._shapes = expected_shapes(Path(self.llm.model_config.model))
        verify(manifest, self._shapes, self._dtype)

    async def apply(self, manifest: Manifest, load: bool) -> Load:
        """Pause, let the staged weights take over, tag, resume, ask the canaries; without `load` only tag and ask.

        Raises:
            WeightUpdateError: the load failed half-way; the weights held are not to be trusted.
            RunError: vLLM died.
        """
        if not load:
            await answer(self.llm.update_weight_version(str(manifest.policy_version)))
            return Load(0.0, 0.0, await self._differences(manifest.canaries))
        paused_at = time.monotonic()
        # It returns when the step under way has ended.
        await answer(self.llm.pause_generation(mode="keep", clear_cache=True))
        stopped_at = time.monotonic()
        # If this fails generation stays paused: a step on half-loaded weights would end vLLM or answer nonsense.
        await self._loader.load(manifest)
        load_s = time.monotonic() - stopped_at
        resumed_at, canary_max_nats = await self._resume(manifest.canaries)
        return Load(resumed_at - paused_at, load_s, canary_max_nats)

    async def _resume(self, canaries: list[Canary]) -> tuple[float, float]:
        """When generation went on, and the canaries' difference."""
        try:
            async with asyncio.TaskGroup() as tasks:
                # Asked for while nothing runs, they are in the first step: before it recomputes the cleared caches.
                difference = tasks.create_task(self._differences(canaries))
                await asyncio.sleep(0)
                await answer(self.llm.resume_generation())
                resumed_at = time.monotonic()
        except* Exception as group:
            raise first_cause(group) from group
        return resumed_at, difference.result()

    async def _differences(self, canaries: list[Canary]) -> float:
        """Largest difference of prompt logprobs from the learner's, nats."""
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
        distributed_executor_backend=IN_PROCESS_EXECUTOR if is_cpu else None,
        disable_log_stats=True,
        seed=config.run.seed,
        weight_transfer_config=WeightTransferConfig(backend=BUFFERED if _is_buffered(config) else IN_PLACE),
        worker_extension_cls=EXTENSION,
    )


def _is_buffered(config: Config) -> bool:
    return config.weights.buffered and current_platform.is_cpu()


def _request_id(key: SampleKey) -> str:
    return f"{key.arm}-{key.index}-{key.retry}"
