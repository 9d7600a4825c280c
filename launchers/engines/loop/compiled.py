"""Blocks compiled by torch, with the eager code as fallback."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import config as functorch_config

from estimator.errors import UserError
from launchers.engines.loop.families import blocks

_ATTRIBUTE = "_finetune_compilation"  # of the network


class Compilation:
    """Compiled forward passes of a model's blocks.

    If the compiler fails, the blocks that have not run compiled before run their eager code from then on;
    with ``required``, :class:`UserError` is raised instead. Results of ranks with and without compiled blocks
    agree, because hooks, which contain the collectives, run outside of the compiled code.
    """

    def __init__(self, *, required: bool) -> None:
        self._required = required
        self.fault: str | None = None  # error of the compiler
        # Backward passes are compiled together with the forward passes, whose calls then raise their errors
        if hasattr(functorch_config, "force_non_lazy_backward_lowering"):
            functorch_config.force_non_lazy_backward_lowering = True

    def compiled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward pass that is compiled at its first call."""
        compiled = torch.compile(forward)
        succeeded = False
        eager = False

        @functools.wraps(forward)
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal succeeded, eager
            if eager or (self.fault is not None and not succeeded):
                return forward(*arguments, **options)
            try:
                result = compiled(*arguments, **options)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if succeeded and not isinstance(error, torch._dynamo.exc.TorchDynamoException):
                    raise
                if _is_out_of_memory(error):
                    raise
                result = forward(*arguments, **options)  # raises errors of the model itself
                self._record(error)
                eager = True
            else:
                succeeded = True
            return result

        return call

    def _record(self, error: Exception) -> None:
        cause = getattr(error, "inner_exception", None) or error  # of torch's BackendCompilerFailed
        fault = f"{type(cause).__name__}: {first_line(cause)}"
        if self._required:
            raise UserError(
                f"compile: torch.compile failed with {fault}.",
                "Remove compile from the settings, or set compile: false.",
            ) from error
        self.fault = self.fault or fault


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, shortened to 200 characters."""
    return (str(error).strip().splitlines() or [""])[0][:200]


def _is_out_of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = getattr(error, "inner_exception", None) or error.__cause__
    return False


def compile_blocks(network: Any, *, required: bool) -> None:
    """Compile the forward pass of each block; hooks of the block itself run outside of the compiled code.

    Blocks are equal: code compiled for the first one is reused for the others. ``required``: an error of the
    compiler ends the run.
    """
    compilation = Compilation(required=required)
    for block in blocks(network):
        block.forward = compilation.compiled(block.forward)
    setattr(network, _ATTRIBUTE, compilation)
    network.register_forward_pre_hook(_mark_lengths_dynamic, with_kwargs=True)


def fault_of(network: Any) -> str | None:
    """Return the error of the compiler after which blocks of a network run eager; None if there is none."""
    compilation: Compilation | None = getattr(network, _ATTRIBUTE, None)
    return None if compilation is None else compilation.fault


def _mark_lengths_dynamic(_network: Any, _inputs: Any, keyword_inputs: dict[str, Any]) -> None:
    """Avoid compiling again for each number of documents in a batch (variable-length attention)."""
    if (lengths := keyword_inputs.get("cu_seq_lens_q")) is not None:
        torch._dynamo.maybe_mark_dynamic(lengths, 0)
