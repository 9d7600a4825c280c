"""Ladders: layouts of a job on a number of processes, each kind with its micro batch sizes in order."""

from __future__ import annotations

from dataclasses import dataclass

from estimator.job import Job
from estimator.plan import Layout
from estimator.planning.parallelism import Spread, spreads
from estimator.vocabulary import Device, LaunchedPrecision

LARGEST_MICRO_BATCH = 64
# Pipelines use small micro batches, as more of them idle less; Megatron-LM's examples have 1 or 2
LARGEST_PIPELINE_MICRO_BATCH = 4


@dataclass(frozen=True, slots=True, eq=False)  # each is built once, so identity serves as key
class Ladder:
    """One spread on a number of nodes, with or without checkpointing; its rungs are micro batch sizes."""

    nodes: int
    processes: int
    spread: Spread
    checkpointing: bool


class Ladders:
    """Layouts of one job in one precision, cached."""

    def __init__(self, job: Job, precision: LaunchedPrecision, device: Device) -> None:
        self.job, self.precision, self.device = job, precision, device
        self._made: dict[tuple[int, int], list[Ladder]] = {}
        self._sizes: dict[Ladder, list[int]] = {}
        self._layouts: dict[tuple[Ladder, int], Layout] = {}

    def of(self, nodes: int, processes: int) -> list[Ladder]:
        """Return the ladders on this many processes: without checkpointing and with least sharding first."""
        key = (nodes, processes)
        if key not in self._made:
            checkpointing_setting = self.job.activation_checkpointing
            all_spreads = [
                way
                for way in spreads(self.job, nodes, processes)
                if nodes * processes > 1
                or way.sharding != "fsdp"
                or self.precision in ("bf16-mixed", "fp16-mixed")
            ]
            ladders = (
                Ladder(nodes, processes, spread, checkpointing)
                for checkpointing in (
                    (False, True) if checkpointing_setting is None else (checkpointing_setting,)
                )
                for spread in all_spreads
            )
            self._made[key] = [ladder for ladder in ladders if self.sizes(ladder)]
        return self._made[key]

    def rung(self, ladder: Ladder, step: int = 0) -> Layout:
        """Return the layout of one rung: step 0 has the smallest micro batch."""
        key = (ladder, step)
        if key not in self._layouts:
            size, sequences = self.sizes(ladder)[step], self._each(ladder)
            self._layouts[key] = self.layout(
                ladder.nodes, ladder.processes, ladder.spread, ladder.checkpointing, size, sequences // size
            )
        return self._layouts[key]

    def sizes(self, ladder: Ladder) -> list[int]:
        """Return the micro batch sizes of a ladder, ascending; empty if none divides the global batch."""
        if ladder not in self._sizes:
            sequences, spread = self._each(ladder), ladder.spread
            if self.job.micro_batch_size:
                sizes = [self.job.micro_batch_size]
            else:
                max_size = LARGEST_MICRO_BATCH if spread.pipeline == 1 else LARGEST_PIPELINE_MICRO_BATCH
                sizes = [size for size in range(1, min(sequences, max_size) + 1) if sequences % size == 0]
            if self.job.optimizer_in_backward:  # excludes accumulation
                sizes = [size for size in sizes if size == sequences]
            if spread.virtual_stages > 1:  # interleaving needs complete rounds
                sizes = [size for size in sizes if sequences // size % spread.pipeline == 0]
            self._sizes[ladder] = sizes
        return self._sizes[ladder]

    def _each(self, ladder: Ladder) -> int:
        """Return the sequences per step and data-parallel process."""
        data_parallel = ladder.nodes * ladder.processes // ladder.spread.model_parallel
        return (self.job.batch_over(data_parallel) or 0) // data_parallel

    def layout(
        self,
        nodes: int,
        processes: int,
        spread: Spread,
        checkpointing: bool,
        micro_batch_size: int,
        passes: int,
    ) -> Layout:
        """Return the layout of a spread with this micro batch and ``passes`` forward passes per step."""
        return Layout(
            device=self.device,
            nodes=nodes,
            processes_per_node=processes,
            sharding=spread.sharding,
            micro_batch_size=micro_batch_size,
            accumulation=passes,
            seq_len=self.job.seq_len,
            activation_checkpointing=checkpointing,
            precision=self.precision,
            optimizer=self.job.optimizer,
            offload=self.job.offload,
            tensor_parallel=spread.tensor,
            context_parallel=spread.context,
            pipeline_parallel=spread.pipeline,
            virtual_stages=spread.virtual_stages,
            schedule=spread.schedule,
            expert_parallel=spread.expert,
            replicate=spread.replicate,
            optimizer_in_backward=self.job.optimizer_in_backward,
            recompute=self.job.recompute or "full",
            recompute_every=self.job.recompute_every or 1,
        )
