"""Sampler of answers with vLLM, in this process: all prompts of a shard at once, batched by its scheduler.

Uses only vLLM's offline interface (``vllm.LLM``). Each prompt has its own seed, from which those of its
answers follow, so results depend on the order of the prompts only through the rounding of sums.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from estimator.errors import UserError
from estimator.memory.generation import kv_cache_bytes
from estimator.models import ModelSpec, hf_files
from launchers.dataset import render
from launchers.dataset.prompts import Prompt
from launchers.models import causal
from launchers.rejection import answers as rows
from launchers.rejection.answers import Answers, BatchLimit, Ends
from launchers.settings import Settings

# Set before the import of vLLM: reproducible sampling in this process, and no usage statistics
_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
CPU_BLOCK = 128  # tokens per block of the KV cache (vLLM 0.32, platforms/cpu.py)
_WITHOUT = "Remove --rejection-generator to sample with transformers."


class VllmSampler:
    """Samples answers from a complete model.

    Parameters
    ----------
    device:
        cuda or cpu; must match vLLM's build.
    gpus:
        GPUs that share one copy of the model (tensor parallelism).
    memory_bytes:
        Memory that the plan grants this process on each GPU; None: vLLM's default share.
    longest:
        Tokens of the longest prompt.
    """

    def __init__(
        self,
        model_dir: Path,
        settings: Settings,
        *,
        device: str,
        limit: BatchLimit,
        gpus: int,
        memory_bytes: int | None,
        longest: int,
    ) -> None:
        vllm = _import(device)
        config = causal.configuration(model_dir)
        tokenizer = render.load_tokenizer(model_dir, settings)
        self._settings, self._tokenizer = settings, tokenizer
        self._max_prompt = rows.max_prompt_tokens(config, settings)
        generation = _generation_config(model_dir, config)
        self._ends = Ends.of(generation, tokenizer)
        self._sampling_params = vllm.SamplingParams
        self._penalties = penalties_of(generation)
        options = engine_options(
            hf_files.read_directory(model_dir, settings.model),
            settings,
            limit,
            device=device,
            gpus=gpus,
            share=None if memory_bytes is None else memory_bytes / _bytes_of_a_gpu(device, memory_bytes),
            longest=min(longest, self._max_prompt),
        )
        try:
            self._engine = vllm.LLM(model=str(model_dir), **options)
        except ValueError as error:  # vLLM's checks: unsupported model, insufficient memory
            reason = " ".join(str(error).split())
            raise UserError(f"vLLM does not support {settings.model}: {reason}", _WITHOUT) from None

    def answers(self, prompts: Sequence[Prompt]) -> list[Answers]:
        """Sample answers to each prompt, in the order of the prompts."""
        texts = [prompt.text for prompt in prompts]
        ids_of = self._tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
        # Long prompts are truncated at the beginning, as the question is usually at the end
        inputs = [{"prompt_token_ids": ids[-self._max_prompt :]} for ids in ids_of]
        sampling = [
            self._sampling_params(**self._penalties | sampling_options(self._settings, prompt, self._ends))
            for prompt in prompts
        ]
        outputs = self._engine.generate(inputs, sampling, use_tqdm=False)
        return [
            Answers(
                index=prompt.index,
                answers=tuple(self._ends.answer(list(completion.token_ids)) for completion in output.outputs),
            )
            for prompt, output in zip(prompts, outputs, strict=True)
        ]


def engine_options(
    spec: ModelSpec,
    settings: Settings,
    limit: BatchLimit,
    *,
    device: str,
    gpus: int,
    share: float | None,
    longest: int,
) -> dict[str, Any]:
    """Build the options of ``vllm.LLM``; ``share``: of a GPU's memory, ``longest``: prompt tokens."""
    row = longest + settings.rejection.max_new_tokens
    options: dict[str, Any] = {
        "dtype": "bfloat16" if device == "cuda" else "float32",
        "seed": settings.seed,
        "max_model_len": row,
        "max_num_seqs": max(limit.sequences, settings.rejection.answers),
        "generation_config": "vllm",  # sampling options are passed with each prompt
        "skip_tokenizer_init": True,  # input and output are tokens
        "enable_prefix_caching": True,  # the answers to one prompt share its keys and values
    }
    if device == "cpu":
        # Limited to the plan's batch, in full blocks; the default is 92 % of the machine's memory
        tokens = max(limit.tokens, row) + limit.sequences * CPU_BLOCK
        options["kv_cache_memory_bytes"] = tokens * kv_cache_bytes(spec, 1, 1, bytes_each=4)
        options["enforce_eager"] = True  # otherwise a compiler is needed at run time
        return options
    options["tensor_parallel_size"] = max(gpus, 1)
    if share is not None:
        options["gpu_memory_utilization"] = round(share, 4)
    return options


def sampling_options(settings: Settings, prompt: Prompt, ends: Ends) -> dict[str, Any]:
    """Build the options of ``vllm.SamplingParams`` for one prompt."""
    rejection = settings.rejection
    return {
        "n": rejection.answers,
        "temperature": rejection.temperature,
        "top_p": rejection.top_p,
        "max_tokens": rejection.max_new_tokens,
        "seed": rows.seed_of(settings.seed, prompt.index),
        "stop_token_ids": sorted(ends.ids),
        "detokenize": False,
    }


def penalties_of(generation_config: Any) -> dict[str, float]:
    """Return the generation config's options that transformers' ``generate`` applies as well."""
    options = {name: getattr(generation_config, name, None) for name in ("repetition_penalty", "min_p")}
    return {name: value for name, value in options.items() if value is not None}


def _import(device: str) -> Any:
    """Import vLLM; UserError if it is missing, or built for other devices."""
    os.environ.update(_ENVIRONMENT)
    try:
        import vllm
        from vllm.platforms import current_platform
    except ImportError as error:
        raise UserError(
            f"rejection.generator vllm: it cannot be imported here: {error}.",
            "Reinstall it (docs/rejection.md#vllm).",
        ) from None
    build_device = current_platform.device_type or "no device of this machine"
    if build_device != device:
        raise UserError(
            f"rejection.generator vllm: vLLM is built for {build_device}, and this runs on {device}.",
            _WITHOUT,
        )
    return vllm


def _bytes_of_a_gpu(device: str, otherwise: int) -> int:
    """Return the memory of the first GPU in bytes."""
    if device != "cuda":
        return otherwise
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory)


def _generation_config(model_dir: Path, config: Any) -> Any:
    from transformers import GenerationConfig

    if (model_dir / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(model_dir)
    return GenerationConfig.from_model_config(config)
