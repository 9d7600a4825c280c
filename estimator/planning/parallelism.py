"""Spreads: the possible distributions of one job over a number of processes.

torchtune, DeepSpeed and FSDP2 only shard states. For torchtitan and Megatron, there are also tensor, context,
pipeline and expert parallelism and their products, in the order of the Ultra-Scale Playbook (nanotron/
ultrascale-playbook, "Finding the best training configuration"): as little as fits, tensor parallelism inside
a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from estimator.engines.support import unlaunchable_processes
from estimator.job import Job, divides_heads, divides_sequence, divisors
from estimator.vocabulary import ENGINES, PARALLEL_ENGINES, TASKS, LaunchedSchedule, Sharding

# Limits of the search: no published configuration of Megatron-LM or torchtitan has deeper pipelines or wider
# expert groups (405B: 8 stages; DeepSeek-V3: 16 stages, 64 experts over 8 nodes).
MOST_STAGES = 16
MOST_EXPERT_PARALLEL = 64
# With fewer tokens of a sequence per GPU than its FLOP/s / link bytes per second, ring attention cannot hide
# its exchange (Liu et al. 2023, Ring Attention, arXiv:2310.01889, section 3); A100 with NVLink: 312e12 /
# 300e9
SHORTEST_PIECE = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Degrees of each kind of parallelism of one job."""

    sharding: Sharding
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    virtual_stages: int = 1
    expert: int = 1
    replicate: int = 1

    @property
    def model_parallel(self) -> int:
        """Number of processes that share the same sequences."""
        return self.tensor * self.context * self.pipeline

    @property
    def schedule(self) -> LaunchedSchedule:
        """Schedule of the pipeline."""
        if self.pipeline == 1:
            return "none"
        return "interleaved" if self.virtual_stages > 1 else "1f1b"

    def supersedes(self, other: Spread, nodes: int) -> bool:
        """Return whether ``other`` splits the model further than this spread, which fits.

        Splitting further costs communication or idle stages without a gain. On several nodes only spreads of
        equal tensor parallelism are compared, as more of it may reduce the traffic between nodes.
        """
        if (self.replicate, self.expert) != (other.replicate, other.expert):
            return False
        if nodes > 1 and self.tensor != other.tensor:
            return False
        return self.model_parallel < other.model_parallel


def spreads(job: Job, nodes: int, per_node: int) -> list[Spread]:
    """Return all spreads that divide the global batch, those with the least model parallelism first."""
    world = nodes * per_node
    if job.engine not in PARALLEL_ENGINES:
        if not _reaches(job, world) or unlaunchable_processes(job, world):
            return []
        return [
            Spread(sharding=kind, replicate=copies)
            for kind, copies in product(_shardings(job, world), _replicas(job, nodes, world))
        ]
    candidates = [
        spread
        for tensor, context, pipeline in product(
            _tensor(job, per_node), _context(job, world), _pipeline(job, world)
        )
        if world % (tensor * context * pipeline) == 0
        and _reaches(job, world // (tensor * context * pipeline))
        for spread in _variants(job, nodes, world, tensor, context, pipeline)
    ]
    # Ties: tensor parallelism before pipelines, which idle, before context parallelism
    return sorted(candidates, key=lambda spread: (spread.model_parallel, spread.context, spread.pipeline))


def single_process_sharding(job: Job) -> Sharding:
    """Return the sharding of a single process, which holds all states."""
    return ENGINES[job.engine].shardings[0]


def _variants(job: Job, nodes: int, world: int, tensor: int, context: int, pipeline: int) -> list[Spread]:
    """Return the spreads of these degrees that differ in expert parallelism, replicas and virtual stages."""
    sharing = world // (tensor * pipeline)  # processes per copy of the states
    sharding = ENGINES[job.engine].shardings[min(sharing - 1, 1)]
    replicas = [1]
    if sharding == "fsdp" and nodes > 1 and sharing % nodes == 0 and sharing > nodes:
        replicas.append(nodes)  # HYBRID_SHARD: shard inside a node, replicate over nodes
    stages = [1]
    # Interleaving needs a multiple of the stages as micro batches (Megatron-LM, schedules.py)
    if pipeline > 1 and job.model.layers % (pipeline * 2) == 0:
        stages.append(2)
    return [
        Spread(
            sharding=sharding,
            tensor=tensor,
            context=context,
            pipeline=pipeline,
            virtual_stages=virtual,
            expert=expert,
            replicate=replicate,
        )
        for virtual, expert, replicate in product(stages, _expert(job, world // nodes, sharing), replicas)
        if replicate == 1
        or expert <= world // nodes  # copies within a node do not exchange tokens between nodes
    ]


def _tensor(job: Job, per_node: int) -> list[int]:
    if job.tensor_parallel:
        return [job.tensor_parallel] if per_node % job.tensor_parallel == 0 else []
    return [degree for degree in _powers(per_node) if divides_heads(job.model, degree)]


def _context(job: Job, world: int) -> list[int]:
    if job.context_parallel:
        return [job.context_parallel]
    return [
        degree
        for degree in _powers(world)
        if degree == 1 or (divides_sequence(job.seq_len, degree) and job.seq_len // degree >= SHORTEST_PIECE)
    ]


def _pipeline(job: Job, world: int) -> list[int]:
    if job.pipeline_parallel:
        return [job.pipeline_parallel]
    return [stages for stages in divisors(job.model.layers) if stages <= MOST_STAGES and world % stages == 0]


def _expert(job: Job, per_node: int, sharing: int) -> list[int]:
    """Return the degrees of expert parallelism over data- (and context-) parallel processes.

    None, the largest inside a node, and the largest possible. In between, more processes exchange more tokens
    and gather fewer weights, so one of the ends is best.
    """
    if job.expert_parallel:
        return [job.expert_parallel] if sharing % job.expert_parallel == 0 else []
    if not job.model.experts:
        return [1]
    max_degree = min(sharing, MOST_EXPERT_PARALLEL)
    fitting = [n for n in _powers(max_degree) if sharing % n == 0 and job.model.experts % n == 0]
    within_node = max(n for n in fitting if n <= per_node)
    return sorted({1, within_node, fitting[-1]})


def _powers(largest: int) -> list[int]:
    """Return the powers of two that divide ``largest``."""
    return [2**power for power in range(largest.bit_length()) if largest % 2**power == 0]


def _reaches(job: Job, data_parallel: int) -> bool:
    return job.batch_over(data_parallel) is not None


def _replicas(job: Job, nodes: int, world: int) -> list[int]:
    """Return the numbers of FSDP2 replicas: one, or one per node (HYBRID_SHARD); or as requested.

    One per process is data parallelism without sharding, like DDP.
    """
    if ENGINES[job.engine].sharding_options != "fsdp":
        return [1]
    if job.replicas:
        return [job.replicas] if world % job.replicas == 0 else []
    return [1, nodes] if 1 < nodes < world else [1]


def _shardings(job: Job, world: int) -> tuple[Sharding, ...]:
    """List the shardings to try: the engine's for that many processes, or the one that the job requests.

    Blocks that are compiled at the user's request exclude ZeRO-3.
    """
    supported = ENGINES[job.engine].shardings
    if job.zero_stage is not None:
        return (supported[job.zero_stage],)
    if job.compile:
        supported = tuple(kind for kind in supported if kind != "zero3")
    if ENGINES[job.engine].sharding_options == "zero" and job.offload == "cpu":
        return ("zero2",) if world == 1 else tuple(kind for kind in supported if kind in ("zero2", "zero3"))
    if world == 1 and job.engine == "fsdp2" and not job.adapters and not TASKS[job.task].images:
        return ("none", "fsdp")  # fully_shard keeps no 16-bit copies of all weights
    if world == 1:
        return supported[:1]
    requested: dict[str | None, tuple[Sharding, ...]] = {"full": ("fsdp",), "grad-op": ("shard_grad_op",)}
    return requested.get(job.fsdp_sharding, supported[1:])
