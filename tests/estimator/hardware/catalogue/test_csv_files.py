"""A user's own hardware table: rows that override, rows that add, and every mistake in one clear line."""

import contextlib
import csv
from datetime import date
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from estimator import hardware
from estimator.errors import UserError
from estimator.hardware.catalogue import most_driver_bytes
from estimator.hardware.catalogue.columns import GPU, INSTANCE
from estimator.plan import GIB, MIB


def refused(file: Path, text: str | bytes) -> UserError:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        hardware.catalogue(file)
    assert "\n" not in caught.value.problem
    assert str(file) in caught.value.problem
    return caught.value


def test_a_row_overrides_only_the_cells_that_it_fills(own: Path) -> None:
    own.write_text("gpu,mem_bw_GBps,bf16_TFLOPS_dense,notes\nRTX A5000,,111,measured here\n")
    made, table = hardware.catalogue(own).gpu("RTX A5000"), hardware.gpu("RTX A5000")
    assert made.peak_flops("bf16") == 111e12
    assert table.peak_flops("bf16") is None
    assert (made.bandwidth_gbps, made.usable_bytes, made.dtypes) == (768, table.usable_bytes, table.dtypes)
    assert made.notes == "measured here"
    assert str(own) in made.source


def test_a_user_defined_size_discards_the_driver_size_of_the_table(own: Path) -> None:
    own.write_text("gpu,vram_reported_MiB\nRTX 6000 Ada,49140\n")  # without ECC
    made = hardware.catalogue(own).gpu("RTX 6000 Ada")
    assert made.driver_bytes is None
    assert made.usable_bytes == 49140 * MIB - most_driver_bytes(49140 * MIB)
    own.write_text("gpu,vram_reported_MiB,vram_cuda_GiB\nRTX 6000 Ada,49140,47.4\n")
    assert hardware.catalogue(own).gpu("RTX 6000 Ada").usable_bytes == pytest.approx(47.4 * GIB, abs=1)


def test_a_gpu_can_be_overridden_by_name_or_alias(own: Path) -> None:
    own.write_text("gpu,vram_reported_MiB\nNVIDIA GeForce RTX 4090,24564\n")
    catalogue = hardware.catalogue(own)
    assert catalogue.gpu("4090").vram_bytes == 24564 * MIB
    assert len(catalogue.gpus) == len(hardware.gpus())


def test_one_file_may_define_a_gpu_and_a_machine_with_it(own: Path) -> None:
    own.write_text(
        "kind,gpu,vendor,vram_GB,aliases,bf16_TFLOPS_dense,cloud,instance_type,gpu_count,ram_GiB,on_demand_usd_h\n"
        "instance,R200,,,,,onprem,dgx-7,4,1024,0\n"
        "gpu,R200,nvidia,288,NVIDIA R200,2500,,,,,\n"
    )
    catalogue = hardware.catalogue(own)
    gpu, machine = catalogue.gpu("NVIDIA R200"), catalogue.instance("dgx-7")
    assert (gpu.vram_bytes, gpu.vram_reported, gpu.architecture) == (288 * 10**9, False, None)
    assert gpu.bf16  # it has a rate in it
    assert (machine.cloud, machine.gpu, machine.gpu_count) == ("onprem", "R200", 4)
    assert (machine.ram_bytes, machine.vcpu, machine.usd_per_hour) == (1024 * GIB, None, 0)
    assert machine.price_source == str(own)
    assert catalogue.clouds()[-1] == "onprem"


def test_a_user_defined_price_discards_the_date_of_the_table(own: Path) -> None:
    own.write_text(
        "instance_type,on_demand_usd_h,price_date\np5.48xlarge,31.5,\np4d.24xlarge,20,2026-07-30\n"
    )
    catalogue = hardware.catalogue(own)
    assert catalogue.instance("p5.48xlarge").usd_per_hour == 31.5
    assert catalogue.instance("p5.48xlarge").price_date is None
    assert (catalogue.instance("p5.48xlarge").price_source, catalogue.instance("p5.48xlarge").vcpu) == (
        str(own),
        192,
    )
    assert catalogue.instance("p4d.24xlarge").price_age_days(date(2026, 8, 2)) == 3


def test_the_option_overrides_files_of_the_environment_variable(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first.csv", tmp_path / "second.csv"
    first.write_text("instance_type,spot_usd_h\ng5.xlarge,0.1\ng6.xlarge,0.1\np5.48xlarge,9\n")
    second.write_text("instance_type,spot_usd_h\ng5.xlarge,0.2\ng6.xlarge,0.2\n")
    own.write_text("instance_type,spot_usd_h\ng5.xlarge,0.3\n")
    monkeypatch.setenv("FINETUNE_HARDWARE", f"{first}:{second}")
    prices = [item.spot_usd_per_hour for item in map(hardware.instance, ("p5.48xlarge", "g6.xlarge"))]
    assert prices == [9, 0.2]
    assert hardware.catalogue(own).instance("g5.xlarge").spot_usd_per_hour == 0.3
    with hardware.using(hardware.catalogue(own)):
        assert hardware.instance("g5.xlarge").spot_usd_per_hour == 0.3
    assert hardware.instance("g5.xlarge").spot_usd_per_hour == 0.2


@pytest.mark.parametrize(
    ("header", "row", "says", "advises"),
    [
        ("gpu,vram_GiB", "L4,22.35", "line 1, column vram_GiB: wrong unit: the table has vram_GB", "vram_GB"),
        ("gpu,Vram_gb", "L4,24", "column Vram_gb: unknown column", "vram_GB"),
        ("gpu,vram_GB,vram_GB", "L4,24,24", "column vram_GB: duplicate column", ""),
        (
            "gpu,vram_GB",
            "H100 SXM,80000",
            "line 2, column vram_GB: '80000' is not possible",
            "looks like MiB",
        ),
        ("gpu,vram_GB", "H100 SXM,lots", "line 2, column vram_GB: 'lots' is not a number", "number only"),
        ("gpu,vram_GB", "H100 SXM,nan", "'nan' is not a number", ""),
        ("gpu,vram_reported_MiB", "H100 SXM,80", "column vram_reported_MiB: '80' is not possible", "GiB"),
        ("gpu,vram_reported_MiB", "H100 SXM,40960", "40.0 GiB, which contradicts vram_GB = 80", ""),
        ("gpu,mem_bw_GBps", "H100 SXM,3.35", "'3.35' is not possible", "looks like TB/s"),
        ("gpu,compute_capability", "H100 SXM,sm_90", "'sm_90' is not a compute capability", "9.0"),
        ("gpu,tensor_dtypes", "H100 SXM,bf16 fp7", "is not known: fp7", "fp8"),
        ("gpu,vendor", "H100 SXM,nvidea", "'nvidea' is not known", "nvidia"),
        ("gpu,aliases", "L4,H100", "has 'H100', which is H100 SXM", ""),
        ("gpu,mem_bw_GBps", "H10O SXM,3350", "column vendor: is missing, which a new GPU needs", "H100 SXM"),
        ("gpu,vram_GB", ",80", "line 2, column gpu: is missing", ""),
        ("gpu,vram_GB", "L4,24,5", "line 2: it has 3 values for 2 columns", "quotes"),
        ("gpu,vram_GB", "L4,24\nL4,24", "line 3, column gpu: 'L4' duplicates line 2", ""),
        ("instance_type,on_demand_usd_h", "p5.48xlarge,-1", "'-1' is not possible", "negative"),
        ("instance_type,on_demand_usd_h", "p5.48xlarge,39628", "'39628' is not possible", "month"),
        ("instance_type,gpu_count", "p5.48xlarge,8.5", "'8.5' is not a whole number", ""),
        ("instance_type,price_date", "p5.48xlarge,20.7.2026", "'20.7.2026' is not a date", "YYYY-MM-DD"),
        ("instance_type,price_date", "p5.48xlarge,2999-01-01", "is in the future", ""),
        ("instance_type,gpu", "p5.48xlarge,H300", "column gpu: 'H300' is an unknown GPU", "H200"),
        ("instance_type,cloud", "p5.48xlarge,gcp", "is wrong: p5.48xlarge is of AWS", ""),
        ("instance_type,on_demand_usd_h", "p5.49xlarge,1", "column cloud: is missing", "p5.48xlarge"),
        ("kind,gpu,vram_GB", "card,L4,24", "column kind: 'card' is not known", "gpu or instance"),
        ("kind,gpu,vram_GB", ",L4,24", "column kind: is missing", ""),
        ("kind,gpu,instance_type,vram_GB", "instance,L4,g6.xlarge,24", "not a column of instance rows", ""),
    ],
)
def test_an_invalid_cell_is_reported_with_file_line_column_value_and_rule(
    own: Path, header: str, row: str, says: str, advises: str
) -> None:
    error = refused(own, f"{header}\n{row}\n")
    assert says in error.problem
    assert advises in error.advice


def test_files_that_are_not_tables_are_refused(own: Path) -> None:
    assert "there are no column names" in refused(own, "").problem
    assert "not separated by commas" in refused(own, "gpu;vram_GB\nL4;24\n").problem
    assert "not a CSV file in UTF-8" in refused(own, "gpu,notes\nL4,Gerät\n".encode("latin-1")).problem
    assert "not a CSV file" in refused(own, b'gpu,notes\nL4,"a\n').problem
    own.unlink()
    with pytest.raises(UserError, match=r"my-hardware\.csv cannot be read: No such file"):
        hardware.catalogue(own)
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        hardware.catalogue(own.parent)


CELLS = st.one_of(
    st.sampled_from(
        ["L4", "H100", "p5.48xlarge", "x;y", "1/6", "16 or 32", "-1", "1e999", "nan", "aws", "nvidia"]
    ),
    st.sampled_from(
        ["gpu", "instance", "2026-07-20", "8", "80", "81920", "989", "bf16 fp16", "9.0", "", "?", ";"]
    ),
    st.text(max_size=6),
)


@given(
    header=st.lists(st.sampled_from(["kind", *GPU, *INSTANCE]), min_size=1, max_size=8, unique=True),
    rows=st.lists(st.lists(CELLS, min_size=1, max_size=8), max_size=3),
)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_is_read_or_refused_with_a_user_error(
    own: Path, header: list[str], rows: list[list[str]]
) -> None:
    with own.open("w", newline="", encoding="utf-8", errors="replace") as file:
        csv.writer(file).writerows([header, *rows])
    with contextlib.suppress(UserError):  # the fuzz tests read damaged tables, and check their errors
        assert hardware.catalogue(own).gpus


def test_a_file_from_a_spreadsheet_is_read(own: Path) -> None:
    own.write_bytes("\ufeffgpu,notes\r\n L4 , mine\r\n,\r\n".encode())
    assert hardware.catalogue(own).gpu("L4").notes == "mine"


def test_every_cell_of_the_shipped_tables_satisfies_the_rules_for_user_files() -> None:
    from estimator.hardware.catalogue.csv_files import read_rows

    gpus, machines = (read_rows(hardware.DATA / name) for name in ("gpus.csv", "instances.csv"))
    assert (len(gpus), len(machines)) == (len(hardware.gpus()), len(hardware.instances()))
    assert {name for row in gpus for name in row.cells} == GPU.keys()
    assert {name for row in machines for name in row.cells} == INSTANCE.keys()
