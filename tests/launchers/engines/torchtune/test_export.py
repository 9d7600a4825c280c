"""Exports of adapters equal those of the torchtune recipes bit for bit."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest

from estimator.models import hf_config
from launchers.engines.torchtune import config as torchtune_config
from tests.lab import configs
from tests.launchers.engines.loop import runs
from tests.optional import require_torchtune

torch = pytest.importorskip("torch")
require_torchtune()

from safetensors.torch import load_file  # noqa: E402

# 4-bit matrices need multiples of 16384 values for each process
SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
RANK, ALPHA = 4, 12.0
FORMS = {"F32": torch.float32, "BF16": torch.bfloat16}


@pytest.fixture(autouse=True)
def no_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the garbage collection of torchtune after each small file."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


def make_base(folder: Path, family: str, stored: torch.dtype) -> Path:
    """Create a small random model in several files."""
    from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config

    config: Any = {
        "llama": lambda: LlamaConfig(**SHAPE),
        "mistral": lambda: MistralConfig(**SHAPE, sliding_window=None, head_dim=64),
        "qwen2-tied": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    }[family]()
    torch.manual_seed(2)
    AutoModelForCausalLM.from_config(config, dtype=stored).save_pretrained(folder, max_shard_size="1MB")
    return folder


def make_model(base: Path, method: str, dtype: torch.dtype, checkpointer: Any) -> Any:
    """Build the torchtune model with the weights of the base and random adapters, like its recipes."""
    from omegaconf import OmegaConf
    from torchtune import config, training
    from torchtune.modules.peft import get_adapter_params, set_trainable_params

    spec = hf_config.to_spec(json.loads((base / "config.json").read_text()), "test")
    settings = configs.config({"method": method, "lora": {"rank": RANK, "alpha": ALPHA}})
    values = OmegaConf.create(torchtune_config.model_component(spec, settings))
    torch.manual_seed(3)
    with training.set_default_dtype(dtype):
        model = config.instantiate(values)
    set_trainable_params(model, get_adapter_params(model))
    model.load_state_dict(checkpointer.load_checkpoint()[training.MODEL_KEY], strict=False)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def make_checkpointer(base: Path, out: Path) -> Any:
    from torchtune.training import FullModelHFCheckpointer

    from launchers.engines.torchtune.qwen2 import Qwen2Checkpointer

    qwen2 = "qwen2" in (base / "config.json").read_text()
    kind = Qwen2Checkpointer if qwen2 else FullModelHFCheckpointer
    files = torchtune_config.weight_files(base)
    return kind(str(base), files, "QWEN2" if qwen2 else "LLAMA3", str(out))


@pytest.mark.parametrize(
    ("family", "stored", "trained_in", "method"),
    [
        ("llama", "BF16", "F32", "qlora"),
        ("qwen2-tied", "F32", "F32", "lora"),
        pytest.param("llama", "BF16", "BF16", "lora", marks=pytest.mark.slow),
        pytest.param("mistral", "BF16", "BF16", "qlora", marks=pytest.mark.slow),
        pytest.param("qwen2-tied", "F32", "F32", "qlora", marks=pytest.mark.slow),
    ],
)
def test_the_merged_model_and_the_adapter_equal_those_of_torchtune(
    tmp_path: Path, family: str, stored: str, trained_in: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchtune import training
    from torchtune.modules.peft import get_adapter_state_dict, get_merged_lora_ckpt

    from launchers.engines import _merge
    from launchers.engines.torchtune import export

    monkeypatch.setattr(_merge, "BLOCK", 20_000)  # several blocks for each of these small matrices
    base = make_base(tmp_path / "base", family, FORMS[stored])
    assert len(list(base.glob("*.safetensors"))) > 1
    theirs, ours = (make_checkpointer(base, tmp_path / name) for name in ("theirs", "ours"))
    model = make_model(base, method, FORMS[trained_in], theirs)

    modules = ["q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3"]
    config = {"r": RANK, "lora_alpha": ALPHA, "target_modules": modules, "peft_type": "LORA"}
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    parts = {
        training.ADAPTER_KEY: get_adapter_state_dict(model.state_dict()),
        training.MODEL_KEY: get_merged_lora_ckpt(state, rank=RANK, alpha=ALPHA),
        training.ADAPTER_CONFIG: dict(config),
    }
    theirs.save_checkpoint(parts, epoch=0)

    export.save(
        model,
        export.Adapters(rank=RANK, alpha=ALPHA, config=dict(config)),
        ours,
        model_dir=base,
        output_dir=tmp_path / "ours",
        merged=True,
        dtype=FORMS[trained_in],
        device=torch.device("cpu"),
    )
    assert_same(load_folder(tmp_path / "ours" / "model"), load_folder(tmp_path / "theirs" / "epoch_0"))
    adapters = [tmp_path / name / "epoch_0" for name in ("ours", "theirs")]
    assert_same(*(load_file(folder / "adapter_model.safetensors") for folder in adapters))
    one, other = (json.loads((folder / "adapter_config.json").read_text()) for folder in adapters)
    assert one == other


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_merge_a_4_bit_base_with_the_same_quantization_as_torchtune(tmp_path: Path) -> None:
    """Each process holds a shard of every matrix; matrices are quantized before sharding."""
    from torchao.quantization import NF4Tensor
    from torchtune import training
    from torchtune.modules.peft import get_merged_lora_ckpt

    base = make_base(tmp_path / "base", "mistral", torch.bfloat16)
    data = runs.make_data(tmp_path / "data", runs.documents(24), batch=4, steps=2)
    settings = {"method": "qlora", "lora": {"rank": RANK, "alpha": ALPHA}, "optimizer": {"lr": 0.1}}
    options = {"engine": "torchtune", "sharding": "fsdp", "precision": "bf16", "settings": settings}
    job = runs.make_job(tmp_path / "job", base, data, steps=2, **options)
    runs.run(job)

    theirs = make_checkpointer(base, tmp_path / "theirs")
    model = make_model(base, "qlora", torch.bfloat16, theirs)
    model.load_state_dict(torch.load(job.output_dir / "epoch_0" / "adapter_model.pt"), strict=False)
    held = {name: parameter.detach() for name, parameter in model.named_parameters()}
    state = {name: t.to(t.dtype) if isinstance(t, NF4Tensor) else t for name, t in held.items()}
    merged = get_merged_lora_ckpt(state, rank=RANK, alpha=ALPHA)
    theirs.save_checkpoint({training.MODEL_KEY: merged}, epoch=0)
    assert_same(load_folder(job.output_dir / "model"), load_folder(tmp_path / "theirs" / "epoch_0"))


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    files = folder.glob("model*.safetensors")
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def assert_same(tensors: dict[str, torch.Tensor], expected_tensors: dict[str, torch.Tensor]) -> None:
    assert tensors.keys() == expected_tensors.keys()
    for name, tensor in expected_tensors.items():
        assert tensors[name].dtype == tensor.dtype, name
        assert torch.equal(tensors[name], tensor), name


def test_an_adapter_that_does_not_match_the_base_is_refused(tmp_path: Path) -> None:
    from launchers.engines.torchtune import export

    base = make_base(tmp_path / "base", "llama", torch.float32)
    checkpointer = make_checkpointer(base, tmp_path / "out")
    model = make_model(base, "lora", torch.float32, checkpointer)
    index = json.loads((base / "model.safetensors.index.json").read_text())
    index["weight_map"] = {
        name: file for name, file in index["weight_map"].items() if not name.startswith("model.layers.1.")
    }
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(RuntimeError, match=r"layers\.1\.attn\.k_proj\.lora_a\.weight"):
        export.save(
            model,
            export.Adapters(
                rank=RANK,
                alpha=ALPHA,
                config={"r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj"], "peft_type": "LORA"},
            ),
            checkpointer,
            model_dir=base,
            output_dir=tmp_path / "out",
            merged=True,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
