"""Rows of published tables: what is read from their words, and what is left out with a reason."""

import csv
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator.errors import UserError
from estimator.models import PROJECTIONS
from estimator.published import rows, vocabulary
from estimator.published.cells import MEASURED
from estimator.published.vocabulary import UnsupportedRow

CARRIED = Path(rows.__file__).parents[1] / "data" / "measured.csv"
LLAMA_7B = {
    "model": "llama2-7b",
    "n_params": "6738415616",
    "hidden": "4096",
    "layers": "32",
    "heads": "32",
    "kv_heads": "32",
    "ffn": "11008",
    "vocab": "32000",
    "tied": "0",
}
BASE = {
    "id": "x1",
    "source": "a report",
    "method": "full",
    "framework": "torchtitan",
    "gpu": "H100-80GB",
    "n_gpus": "8",
    "fsdp_shard": "8",
    "zero_stage": "3",
    "micro_batch": "1",
    "seq_len": "2048",
    "optimizer": "AdamW",
    "act_ckpt": "full",
    "mem_kind": "reserved",
    "peak_mem_GiB": "40",
    "quality": "A",
    "tps_per_gpu": "5000",
    **LLAMA_7B,
}


def table(folder: Path, *lines: dict[str, str]) -> Path:
    with CARRIED.open(newline="", encoding="utf-8") as file:
        names = next(csv.reader(file))
    path = folder / "table.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows({**BASE, **line} for line in lines)
    return path


def read(folder: Path, **cells: str) -> rows.PublishedRow:
    return rows.read(table(folder, cells))[0]


def test_every_carried_row_of_quality_a_is_read_for_what_was_measured() -> None:
    found = rows.read(CARRIED)
    assert len(found) > 400
    assert [row.id for row in found if row.quality == "A" and row.setup is None] == []
    assert [row.id for row in found if row.quality == "A" and row.gib and row.memory_skip] == []
    assert [row.id for row in found if row.quality == "A" and row.tps_per_gpu and row.throughput_skip] == []


def test_carried_rows_name_where_they_are_from_and_are_there_once() -> None:
    found = rows.read(CARRIED)
    assert all(row.source and row.quality in "AB" for row in found)
    assert len({row.id for row in found}) == len(found)


def test_the_processes_of_every_carried_row_are_its_gpus() -> None:
    wrong = [
        row.id
        for row in rows.read(CARRIED)
        if row.setup is not None and row.n_gpus is not None and row.setup.world_size != row.n_gpus
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("framework", "engine"),
    [
        ("torchtune@52d1b838", "torchtune"),
        ("torchtitan/graph_trainer", "torchtitan"),
        ("torchtitan/SimpleFSDP(aot_eager)", "torchtitan"),
        ("litgpt", "litgpt"),
        ("ms-swift", "transformers"),
        ("swift 2.0 (HF)", "transformers"),
        ("Axolotl", "transformers"),
        ("HF Trainer FSDP1", "transformers"),
        ("HF TRL+PEFT+DeepSpeed", "deepspeed"),
        ("Megatron-DeepSpeed Ulysses", "deepspeed"),
        ("megatron-core/bridge", "megatron"),
        ("composer/llm-foundry FSDP1", "composer"),
        ("FSDP1 (fms-fsdp)", "composer"),
    ],
)
def test_a_framework_is_known_by_the_word_in_its_name(framework: str, engine: str) -> None:
    assert vocabulary.engine_of(framework) == engine


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("full (pure bf16)", ("full", "sft", False, False)),
        ("full-finetuning", ("full", "sft", False, False)),
        ("lora+emb", ("lora", "sft", False, True)),
        ("QLoRA", ("lora", "sft", True, False)),
        ("lora-dora", ("dora", "sft", False, False)),
        ("lora-dpo", ("lora", "dpo", False, False)),
    ],
)
def test_a_method_is_known_in_every_spelling(method: str, expected: tuple[object, ...]) -> None:
    assert vocabulary.method_of(method) == expected


@pytest.mark.parametrize(
    "method",
    [
        *("adapter", "adapter_v2", "ia3", "vera", "oft", "adalora", "ln_tuning", "osf", "lora-fa"),
        *("galore", "full+galore", "longlora", "qlora weights only", "lora (after model init only)"),
    ],
)
def test_a_method_that_nobody_claims_is_left_out_by_name(method: str) -> None:
    with pytest.raises(UnsupportedRow, match="not claimed"):
        vocabulary.method_of(method)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("q,v", {"q_proj", "v_proj"}),
        ("query,value", {"q_proj", "v_proj"}),
        ("q,v (peft default)", {"q_proj", "v_proj"}),
        ("q,k,v(yaml)", {"q_proj", "k_proj", "v_proj"}),
        ("all-linear", set(PROJECTIONS)),
        ("all+output", {*PROJECTIONS, "lm_head"}),
        ("query,key,value,projection,mlp,head", {*PROJECTIONS, "lm_head"}),
        ("c_attn,c_proj,w1,w2", set(PROJECTIONS)),
        ("q_proj k_proj v_proj", {"q_proj", "k_proj", "v_proj"}),
        ("linear_qkv,linear_proj,linear_fc1,linear_fc2", set(PROJECTIONS)),
        ("", set()),
    ],
)
def test_lora_targets_are_known_in_every_spelling(text: str, expected: set[str]) -> None:
    assert set(vocabulary.targets_of(text)) == expected


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("reserved max (incl. eval generation bs4)", "reserved"),
        ("peak active", "active"),
        ("max_memory_allocated", "allocated"),
        ("nvidia-smi/screenshot", "process"),
    ],
)
def test_the_kind_of_memory_is_known_in_every_wording(text: str, kind: str) -> None:
    assert vocabulary.kind_of(text) == kind


@pytest.mark.parametrize("text", ["peak", "unknown(profiled)", "estimated total", "model weights"])
def test_memory_of_an_unknown_kind_is_left_out_with_the_reason(tmp_path: Path, text: str) -> None:
    row = read(tmp_path, mem_kind=text)
    assert row.memory_skip
    assert row.throughput_skip is None


def test_context_parallel_shares_weights_as_well(tmp_path: Path) -> None:
    setup = read(tmp_path, fsdp_shard="2", cp="4", seq_len="65536").setup
    assert setup is not None
    assert (setup.shard, setup.context, setup.world_size, setup.data_parallel) == (8, 4, 8, 2)


def test_fsdp_that_keeps_gathered_weights_is_written_as_stage_2(tmp_path: Path) -> None:
    setup = read(tmp_path, zero_stage="2").setup
    assert setup is not None
    assert setup.sharding == "shard_grad_op"


def test_degrees_that_do_not_make_the_gpus_are_left_out(tmp_path: Path) -> None:
    row = read(tmp_path, fsdp_shard="4")
    assert row.setup is None
    assert row.memory_skip == "fsdp_shard 4 and the other degrees do not multiply to 8 GPUs"


def test_a_global_batch_gives_the_micro_batches_of_a_pipeline(tmp_path: Path) -> None:
    row = read(
        tmp_path,
        framework="megatron-core/bridge",
        optimizer="Adam (distributed opt)",
        n_gpus="16",
        fsdp_shard="",
        zero_stage="",
        tp="2",
        pp="4",
        vpp="2",
        notes="pretrain; GBS=64; FSDP=0",
    )
    assert row.setup is not None
    assert (row.setup.accumulation, row.setup.schedule, row.setup.shard) == (32, "interleaved", 2)
    assert row.setup.sharding == "zero1"


def test_a_model_that_is_in_no_table_is_built_from_the_rows_dimensions(tmp_path: Path) -> None:
    row = read(tmp_path, model="an-own-model")
    assert row.setup is not None
    assert row.setup.model.parameters == 6_738_415_616


def test_the_count_of_parameters_says_whether_the_mlp_has_a_gate(tmp_path: Path) -> None:
    plain = 32 * 2 * 4096 * 16384 + 32 * 4 * 4096 * 4096 + 50368 * 4096
    cells = {"ffn": "16384", "vocab": "50368", "tied": "", "n_params": str(plain)}
    row = read(tmp_path, model="some-plain-7b", **cells)
    assert row.setup is not None
    assert not row.setup.model.gated_mlp
    assert row.setup.model.tied_embeddings
    assert row.setup.model.parameters == pytest.approx(plain, rel=1e-3)


def test_dimensions_that_contradict_the_count_are_left_out(tmp_path: Path) -> None:
    row = read(tmp_path, model="an-own-model", n_params="12000000000")
    assert row.setup is None
    assert "6.74 billion parameters" in str(row.memory_skip)


def test_a_table_whose_unit_may_be_gb_or_gib_is_taken_in_the_middle(tmp_path: Path) -> None:
    assert read(tmp_path, peak_mem_GiB="", gib_min="40", gib_max="44").gib == 42


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("A100-80GB", "A100 SXM 80GB"),
        ("H100-96GB(HBM2e,500W)", "H100 SXM 96GB HBM2e 500W"),
        ("H200", "H200 SXM"),
        ("RTX4090", "RTX 4090"),
        ("A6000", "RTX A6000"),
        ("MI300X", "MI300X"),
        ("NVIDIA L40S", "L40S"),
        ("8xA100-40GB", "A100 SXM 40GB"),
    ],
)
def test_a_gpu_is_known_by_the_name_that_a_table_gives_it(text: str, name: str) -> None:
    found = rows.find_gpu(text)
    assert found is not None
    assert found.name == name


def test_layers_laid_over_gpus_one_after_the_other_are_a_pipeline_without_overlap(tmp_path: Path) -> None:
    cells = {"framework": "ms-swift", "n_gpus": "2", "fsdp_shard": "", "zero_stage": ""}
    row = read(tmp_path, notes="device_map auto over 2 GPUs", **cells)
    assert row.setup is not None
    assert (row.setup.pipeline, row.setup.schedule, row.setup.world_size) == (2, "afab", 2)


def test_torchtitans_batch_is_cut_into_the_pipelines_micro_batches(tmp_path: Path) -> None:
    row = read(tmp_path, n_gpus="64", pp="8", micro_batch="32", notes="Interleaved1F1B")
    assert row.setup is not None
    assert (row.setup.micro_batch_size, row.setup.accumulation) == (4, 8)
    assert (row.setup.schedule, row.setup.virtual_stages) == ("interleaved", 2)


def test_a_vocabulary_padded_by_its_framework_keeps_the_models_shape(tmp_path: Path) -> None:
    cells = {"hidden": "2048", "layers": "18", "heads": "8", "kv_heads": "1", "ffn": "16384", "tied": "1"}
    row = read(tmp_path, model="gemma-2b", vocab="256128", n_params="", **cells)
    assert row.setup is not None
    assert row.setup.model.vocab == 256128
    assert row.setup.model.head_dim == 256


@pytest.mark.parametrize(
    ("compute", "framework", "kind"),
    [
        ("bf16", "torchtitan", "none"),
        ("bf16+fp8(rowwise)", "torchtitan", "rowwise"),
        ("float8", "torchtitan", "tensorwise"),
        ("FP8", "megatron-core/bridge", "te"),
        ("amp_fp8", "composer/llm-foundry", "te"),
        ("MXFP8", "megatron-core/bridge", "mxfp8"),
    ],
)
def test_the_kind_of_8_bit_product_is_read(compute: str, framework: str, kind: str) -> None:
    assert vocabulary.fp8_of(compute, vocabulary.engine_of(framework)) == kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("bnb.nf4", "nf4"),
        ("nf4-dq(bnb, bf16 storage)", "nf4-double"),
        ("nf4(torchao)", "nf4-double"),
        ("bnb int8", "int8"),
        ("", "nf4"),
    ],
)
def test_the_storage_of_a_qlora_base_is_read(text: str, kind: str) -> None:
    assert vocabulary.quantization_of(text, quantised=True) == kind


@pytest.mark.parametrize("text", ["gptq-int4", "awq", "hqq-4bit", "2bit"])
def test_a_storage_that_nobody_claims_is_left_out(text: str) -> None:
    with pytest.raises(UnsupportedRow, match="not claimed"):
        vocabulary.quantization_of(text, quantised=True)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("decoupled_adamw", "adamw"),
        ("Adam (distributed opt)", "adamw"),
        ("AdamW8bit(bnb)", "adamw8bit"),
        ("PagedAdamW(bnb)", "paged-adamw"),
        ("paged_adamw_8bit", "paged-adamw8bit"),
        ("paged_adamw_32bit", "paged-adamw"),
        ("AdamW4bit(torchao)", "adamw4bit"),
        ("Muon+AdamW", "muon"),
    ],
)
def test_an_optimizer_is_known_in_every_spelling(text: str, kind: str) -> None:
    assert vocabulary.optimizer_of(text) == kind


def test_a_gpu_that_the_catalogue_lacks_leaves_the_memory_to_be_scored(tmp_path: Path) -> None:
    row = read(tmp_path, gpu="Z9000")
    assert row.memory_skip is None
    assert row.throughput_skip == "GPU 'Z9000' is not in the catalogue"


def test_a_row_of_lesser_quality_without_checkpointing_is_not_guessed_at(tmp_path: Path) -> None:
    assert read(tmp_path, quality="B", act_ckpt="").memory_skip == "activation checkpointing is not stated"
    assert read(tmp_path, quality="A", act_ckpt="").memory_skip is None


# ---------------------------------------------------------------------------------------------------------
# Files that aren't such a table


def problem(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        rows.read(path)
    assert "\n" not in caught.value.problem
    assert caught.value.advice
    return caught.value.problem


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "missing.csv can't be read" in problem(tmp_path / "missing.csv")


def test_a_folder_is_not_a_table(tmp_path: Path) -> None:
    assert "can't be read" in problem(tmp_path)


def test_a_file_that_is_not_text_is_not_a_table(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(b"\x89PNG\x00\xff\xfe")
    assert "is not a CSV file" in problem(path)


@pytest.mark.parametrize("content", ["", "\n", "a,b\n1,2\n"])
def test_columns_that_lack_are_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(content)
    assert problem(path).startswith("table.csv has no column id, source, model")


def test_a_table_without_rows_is_refused(tmp_path: Path) -> None:
    assert "has no row below its header" in problem(table(tmp_path))


def test_text_where_a_measured_number_is_due_is_named_by_its_cell(tmp_path: Path) -> None:
    path = table(tmp_path, {}, {"peak_mem_GiB": "forty"})
    assert problem(path) == "table.csv, line 3: peak_mem_GiB = 'forty' is not a number of at least 0."


def test_a_negative_measurement_is_refused(tmp_path: Path) -> None:
    assert "tps_per_gpu = '-5' is not a number" in problem(table(tmp_path, {"tps_per_gpu": "-5"}))


def test_a_line_with_too_many_cells_is_named(tmp_path: Path) -> None:
    path = table(tmp_path, {})
    path.write_text(path.read_text() + "x,y\n")
    assert "line 3: it has not as many cells as the header" in problem(path)


def test_text_in_a_degree_leaves_out_its_row_alone(tmp_path: Path) -> None:
    first, second = rows.read(table(tmp_path, {"id": "x1", "tp": "two"}, {"id": "x2"}))
    assert first.memory_skip == "tp = 'two' is not a number"
    assert second.memory_skip is None


COLUMNS = [name for name in BASE if name not in MEASURED] + ["tp", "pp", "vpp", "cp", "ep", "sp", "quant"]
WORDS = ["", "0", "1", "2", "3", "8", "64", "n/a", "none", "full", "qlora", "selective", "fp8", "-1", "1.5"]


@given(st.sampled_from(COLUMNS), st.one_of(st.sampled_from(WORDS), st.text(max_size=20)))
def test_whatever_a_cell_says_its_row_is_read_or_left_out_with_a_reason(column: str, text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        row = read(Path(folder), **{column: text})
    if row.setup is None:
        assert row.memory_skip
        assert row.throughput_skip
