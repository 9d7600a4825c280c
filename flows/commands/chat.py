"""finetune chat: ask a finished model on the terminal."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from launchers.inference.finished import FinishedModel

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN|FOLDER|NAME]",
        help="Run id or its last digits, folder of a model or adapter, or model name "
        "[default: the newest run]",
    ),
]


def chat(
    model: ModelArgument = None,
    once: Annotated[
        bool, typer.Option("--once", help="Read one message from standard input, print the answer and exit.")
    ] = False,
    with_base: Annotated[
        bool, typer.Option("--with-base", help="Also show the answer of the model before training.")
    ] = False,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="Image for the first message to a vision-language model. Repeat for several images.",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens per answer.")] = 512,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="Sampling temperature; 0 is greedy [default: the model's own]"),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Nucleus sampling: total probability of the sampled tokens [default: the model's own]",
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(min=1, help="Number of most likely tokens to sample from [default: the model's own]"),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(min=0.1, help="Penalty of repeated tokens; 1 is none [default: the model's own]"),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed of each answer.")] = None,
    device: Annotated[
        Literal["auto", "cuda", "cpu"],
        typer.Option(help="Device: auto (GPUs if there are any), cuda or cpu."),
    ] = "auto",
) -> None:
    """Chat with a finished model, with the chat template and end tokens it was trained with."""
    message = _message() if once else None
    finished = find(model)
    finished.spec()  # refuses a model that generates no text, before torch is imported
    from launchers.base.imports import imported_quietly

    with imported_quietly():
        from launchers.inference import conversation, memory, terminal

    images = [conversation.read_image(path) for path in image or ()]
    picked = memory.pick_device(device)
    memory.check_conversation(finished, picked, new_tokens=max_new_tokens, with_base=with_base)
    finished = finished.fetched(vision=bool(images))
    sampling = conversation.Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    with tempfile.TemporaryDirectory(prefix="finetune-chat-") as folder:
        loaded = [conversation.load_finetuned(finished, picked, Path(folder))]
        if with_base:
            loaded.append(conversation.load_base(loaded[0], finished, picked))
        conversations = [
            conversation.Conversation(loaded=each, sampling=sampling, system=system) for each in loaded
        ]
        if images:
            conversations[0].check_sees_images()
        if message is not None:
            terminal.once(conversations, message, images)
        else:
            terminal.talk(conversations, images=images)


def find(name: str | None) -> FinishedModel:
    """Find a finished model by its folder, or through Metaflow by its run or model name."""
    from launchers.inference import finished

    if name is not None and Path(name).expanduser().is_dir():
        return finished.from_folder(Path(name))
    from decorators import finished_models

    return finished_models.find(name)


def _message() -> str:
    from estimator.errors import UserError

    if sys.stdin.isatty():
        raise UserError(
            "--once reads the message from standard input, which is a terminal.",
            'Pipe it: echo "Hello" | finetune chat --once',
        )
    message = sys.stdin.read().strip()
    if not message:
        raise UserError("Standard input has no message.", 'Pipe it: echo "Hello" | finetune chat --once')
    return message
