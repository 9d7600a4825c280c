"""Files added to an exported model: chat template, generation config with end tokens, README."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from estimator.vocabulary import METHODS, TASKS
from launchers import engines
from launchers.dataset.asking import ANSWER, QUESTION, PromptFormat
from launchers.engines import _pipeline_layout
from launchers.gang.job import TrainJob
from launchers.results import gguf
from launchers.run_config import RunConfig

PAGE = "README.md"
HEADING = "## Usage"
_GGUF_HEADING = "## GGUF, for llama.cpp"
_TEMPLATE_FILE, _TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
_GENERATION = "generation_config.json"


def collect(job: TrainJob, destination: Path) -> None:
    """Export the engine's result to ``destination``, with chat template, generation config and README."""
    engines.get(job.plan.engine).collect(job, destination)
    folder, settings = engines.result_of(destination), job.settings
    if TASKS[settings.task].images:
        (folder / PAGE).write_text(_image_page(job))
        return
    prompt_format = PromptFormat.read(job.data_dir)
    if prompt_format.chats:
        _write_template(folder, prompt_format.template)
    if settings.task != "reward" and (job.model_dir / "config.json").is_file():
        _write_generation_config(folder, job.model_dir, prompt_format)
    page = _page(job, prompt_format)
    if command := gguf.command(folder, job.model_dir, job.base_model):
        page += f"\n{_GGUF_HEADING}\n\n    {command}\n"
    (folder / PAGE).write_text(page)


def gguf_command(folder: Path) -> str | None:
    """Read the GGUF conversion command from the README of a model or adapter; None if it has none."""
    page = folder / PAGE
    _, _, command = (page.read_text() if page.is_file() else "").partition(f"{_GGUF_HEADING}\n\n    ")
    return command.split("\n")[0].replace("this/folder", shlex.quote(str(folder))) or None


def _write_template(folder: Path, template: str) -> None:
    """Write the chat template to the file that transformers reads it from.

    That is chat_template.jinja if it exists, else tokenizer_config.json.
    """
    path = folder / _TOKENIZER_CONFIG
    config = json.loads(path.read_text()) if path.is_file() else {}
    if (folder / _TEMPLATE_FILE).is_file():
        (folder / _TEMPLATE_FILE).write_text(template)
        config.pop("chat_template", None)
    else:
        config["chat_template"] = template
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _write_generation_config(folder: Path, model_dir: Path, prompt_format: PromptFormat) -> None:
    """Write the base model's generation config with the end token of training added to ``eos_token_id``."""
    path = folder / _GENERATION
    values = json.loads((model_dir / "config.json").read_text())
    if (model_dir / _GENERATION).is_file():
        config = json.loads((model_dir / _GENERATION).read_text())
    else:
        config = {name: values[name] for name in ("bos_token_id", "eos_token_id") if name in values}
    end_ids = config.get("eos_token_id", values.get("eos_token_id"))
    end_list = [end for end in (end_ids if isinstance(end_ids, list) else [end_ids]) if isinstance(end, int)]
    config["eos_token_id"] = list(
        dict.fromkeys(end for end in (*end_list, prompt_format.end_id) if end is not None)
    )
    config.setdefault("pad_token_id", prompt_format.pad_id)
    path.write_text(json.dumps(config, indent=2) + "\n")


def _image_page(job: TrainJob) -> str:
    """Build the README of an image model, with code that generates an image."""
    kind, base = "StableDiffusionXLPipeline", job.base_model
    loading = [f'pipeline = {kind}.from_pretrained("this/folder")']
    if not job.settings.merges(job.plan.method):
        loading = [
            f'pipeline = {kind}.from_pretrained("{base}")',
            f'pipeline.load_lora_weights("this/folder", weight_name="{_pipeline_layout.LORA}")',
        ]
    side = job.settings.images.side
    lines = [
        f"from diffusers import {kind}",
        "",
        *loading,
        f'image = pipeline("a caption", width={side}, height={side}).images[0]',
        'image.save("image.png")',
    ]
    return "\n".join([HEADING, "", *(f"    {line}".rstrip() for line in lines), ""])


def _page(job: TrainJob, prompt_format: PromptFormat) -> str:
    """Build the README of a language or reward model, with code that queries it."""
    loading = _loading(job.settings, job.plan.method, job.base_model)
    if job.settings.task == "reward":
        chat = [QUESTION.as_template(), ANSWER.as_template()]
        lines = [
            f"chat = {chat!r}",
            'inputs = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)',
            "print(model(**inputs).logits[0, 0].item())  # higher is better",
        ]
    elif prompt_format.chats:
        chat = [QUESTION.as_template()]
        lines = [
            f"chat = {chat!r}",
            "inputs = tokenizer.apply_chat_template(",
            '    chat, add_generation_prompt=True, return_tensors="pt", return_dict=True',
            ")",
            'answer = model.generate(**inputs, max_new_tokens=64)[0, inputs["input_ids"].shape[1] :]',
            "print(tokenizer.decode(answer, skip_special_tokens=True))",
        ]
    else:
        lines = [
            'inputs = tokenizer("The beginning of a text", return_tensors="pt")',
            "text = model.generate(**inputs, max_new_tokens=64)[0]",
            "print(tokenizer.decode(text, skip_special_tokens=True))",
        ]
    code = "\n".join(f"    {line}".rstrip() for line in (*loading, "", *lines))
    page = f"{HEADING}\n\n{code}\n"
    if prompt_format.rendered:
        quoted = "\n".join(f"    {line}" for line in prompt_format.rendered.split("\n"))
        page += f"\nA conversation as rendered by the template for training:\n\n{quoted}\n"
    return page


def _loading(settings: RunConfig, method: str, base: str) -> list[str]:
    """Return lines of Python code that load tokenizer and model; an unmerged adapter with its base."""
    kind = "AutoModelForSequenceClassification" if settings.task == "reward" else "AutoModelForCausalLM"
    tokenizer = 'tokenizer = AutoTokenizer.from_pretrained("this/folder")'
    if settings.merges(method):
        return [
            f"from transformers import {kind}, AutoTokenizer",
            "",
            tokenizer,
            f'model = {kind}.from_pretrained("this/folder")',
        ]
    if method == "adapter-v2":
        return [
            "from launchers.engines.loop import adapter_v2  # of metaflow-finetune",
            "from transformers import AutoTokenizer",
            "",
            tokenizer,
            f'model = adapter_v2.load("{base}", "this/folder")',
        ]
    names, options, extra_lines = [kind, "AutoTokenizer"], "", []
    if settings.task == "reward":
        options = ", num_labels=1"
        extra_lines = ["base.config.pad_token_id = tokenizer.pad_token_id"]
    if settings.new_tokens:
        extra_lines.append("base.resize_token_embeddings(max(len(tokenizer), base.config.vocab_size))")
    quantized = []
    if METHODS[method].quantized:
        names, options = [*names, "BitsAndBytesConfig"], f"{options}, quantization_config=nf4"
        double = settings.lora.quantization == "nf4-double"
        quantized = [
            "nf4 = BitsAndBytesConfig(",
            f'    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant={double}',
            ")",
        ]
    return [
        "from peft import PeftModel",
        f"from transformers import {', '.join(names)}",
        "",
        tokenizer,
        *quantized,
        f'base = {kind}.from_pretrained("{base}"{options})',
        *extra_lines,
        'model = PeftModel.from_pretrained(base, "this/folder")  # not merged into its base',
    ]
