"""The training setup of a row: parsing of parallelism degrees and batch sizes."""

from pathlib import Path

from estimator.memory.moments import in_flight
from estimator.memory.shape import part_of
from tests.benchmarks.published.measured_tables import read


def test_context_parallel_ranks_share_weights_too(tmp_path: Path) -> None:
    setup = read(tmp_path, fsdp_shard="2", cp="4", seq_len="65536").setup
    assert setup is not None
    assert (setup.shard, setup.context, setup.world_size, setup.data_parallel) == (8, 4, 8, 2)


def test_fsdp_that_keeps_gathered_weights_is_read_as_zero_stage_2(tmp_path: Path) -> None:
    setup = read(tmp_path, zero_stage="2").setup
    assert setup is not None
    assert setup.sharding == "shard_grad_op"


def test_degrees_whose_product_is_not_the_gpu_count_are_skipped(tmp_path: Path) -> None:
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


def test_a_naive_pipeline_has_one_micro_batch_in_flight(tmp_path: Path) -> None:
    cells = {"framework": "ms-swift", "n_gpus": "2", "fsdp_shard": "", "zero_stage": ""}
    row = read(tmp_path, notes="device_map auto over 2 GPUs", **cells)
    assert row.setup is not None
    assert (row.setup.pipeline, row.setup.schedule, row.setup.world_size) == (2, "split", 2)
    assert in_flight(row.setup, part_of(row.setup, "first")) == 1


def test_a_torchtitan_batch_is_divided_into_micro_batches_of_the_pipeline(tmp_path: Path) -> None:
    row = read(tmp_path, n_gpus="64", pp="8", micro_batch="32", notes="Interleaved1F1B")
    assert row.setup is not None
    assert (row.setup.micro_batch_size, row.setup.accumulation) == (4, 8)
    assert (row.setup.schedule, row.setup.virtual_stages) == ("interleaved", 2)


def test_rows_measured_by_this_package_state_how_batches_are_built(tmp_path: Path) -> None:
    packed = read(tmp_path, packing="packed, dense document mask").setup
    varying = read(tmp_path, packing="variable length (short samples), longest rows first").setup
    assert packed is not None
    assert varying is not None
    assert (packed.document_mask, packed.fixed_length, packed.longest_first) == (True, True, False)
    assert (varying.document_mask, varying.fixed_length, varying.longest_first) == (False, False, True)
    assert not varying.longest_once


def test_a_run_on_a_cpu_is_read_as_a_cpu_run(tmp_path: Path) -> None:
    alone = {"framework": "torchtune", "n_gpus": "1", "fsdp_shard": "", "zero_stage": ""}
    setup = read(tmp_path, gpu="CPU", compute_dtype="fp32", **alone).setup
    assert setup is not None
    assert (setup.device, setup.precision) == ("cpu", "fp32")
