"""Parameter counts of one process, by part of the model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from estimator.models import DiffusionSpec, ModelSpec, parameters
from estimator.setup import Setup


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers of parameters of one complete model by part; derived from ``ModelSpec`` only."""

    layers: int
    dense_layers: int  # blocks with an MLP and no experts
    bare_layers: int  # blocks without an MLP
    attention: int  # attention and norms of one block
    attention_linear: int  # linear layers of ``attention``
    shared_mlp: int  # a block's shared experts and router
    shared_mlp_linear: int
    mlp: int  # the MLP of one dense block, with biases
    mlp_linear: int
    experts: int  # all experts of one block
    experts_linear: int
    largest_linear: int  # elements of the largest matrix of a block
    embedding: int  # tokens, positions, token types
    head: int  # 0 if tied to the embedding
    norm: int  # the last norm and BERT's pooler
    linear_shapes: dict[str, tuple[int, int]]
    adapters: dict[tuple[object, ...], int]  # cache of adapter_parameters


_SHAPES: dict[int, tuple[ModelSpec, Shape]] = {}  # by identity: hashing a ModelSpec takes longer than this


def shape_of(model: ModelSpec) -> Shape:
    """Return the model's counts, cached per model object."""
    counted = _SHAPES.get(id(model))
    if counted is None:
        if len(_SHAPES) > 1000:
            _SHAPES.clear()
        counted = (model, _count(model))
        _SHAPES[id(model)] = counted
    return counted[1]


def _count(m: ModelSpec) -> Shape:
    if isinstance(m, DiffusionSpec):
        return _count_units(m)
    shared = parameters.mlp(m, m.shared_ffn) if m.shared_ffn else 0
    router = parameters.router(m) if m.experts else 0
    mlp_width = m.ffn if not m.experts else (m.dense_ffn or m.ffn)
    dense_block = m.dense_layer_parameters if m.experts else m.layer_parameters
    mlp = parameters.mlp(m, mlp_width)
    return Shape(
        layers=m.layers,
        dense_layers=m.mlp_blocks - m.expert_layers,
        bare_layers=m.layers - m.mlp_blocks,
        attention=dense_block - mlp,
        attention_linear=(parameters.mixer_weights(m) + parameters.wider_mlps(m)) // m.layers,
        shared_mlp=shared + router,
        shared_mlp_linear=parameters.mlp_weights(m, m.shared_ffn) if m.shared_ffn else 0,
        mlp=mlp,
        mlp_linear=parameters.mlp_weights(m, mlp_width),
        experts=m.experts * parameters.mlp(m, m.ffn),
        experts_linear=m.experts * parameters.mlp_weights(m, m.ffn),
        largest_linear=max(
            out_features * in_features for out_features, in_features in m.linear_shapes.values()
        ),
        embedding=parameters.embeddings(m),
        head=parameters.head(m),
        norm=m.parameters - _blocks(m, dense_block - mlp) - parameters.embeddings(m) - parameters.head(m),
        linear_shapes=m.linear_shapes,
        adapters={},
    )


def _count_units(m: DiffusionSpec) -> Shape:
    """Return a UNet's counts, its residual blocks and transformers' blocks as layers of one mean size."""
    inner = m.layers * m.layer_parameters
    return Shape(
        layers=m.layers,
        dense_layers=m.layers,
        bare_layers=0,
        attention=m.layer_parameters,
        attention_linear=m.layer_parameters,
        shared_mlp=0,
        shared_mlp_linear=0,
        mlp=0,
        mlp_linear=0,
        experts=0,
        experts_linear=0,
        largest_linear=max(
            out_features * in_features for out_features, in_features in m.linear_shapes.values()
        ),
        embedding=0,
        head=0,
        norm=m.parameters - inner,
        linear_shapes=m.linear_shapes,
        adapters={},
    )


def _blocks(m: ModelSpec, attention: int) -> int:
    """Count the parameters of all blocks; ``attention``: those of each block without its MLP."""
    dense = (m.dense_layer_parameters if m.experts else m.layer_parameters) - attention
    routed = m.expert_layers * (m.layer_parameters - attention)
    return m.layers * attention + (m.mlp_blocks - m.expert_layers) * dense + routed


def adapter_parameters(setup: Setup) -> int:
    """Return ``Setup.adapter_parameters``, cached by model, rank and targets."""
    counts = shape_of(setup.model).adapters
    family_code = setup.runs_loop
    prompts = (setup.llama_adapter, setup.engine) if setup.prompts else ()
    key = (setup.lora_rank, setup.lora_targets, setup.method, setup.lora_experts, family_code, prompts)
    count = counts.get(key)
    if count is None:
        count = counts[key] = setup.adapter_parameters
    return count


@dataclass(frozen=True, slots=True)
class Part:
    """One pipeline rank's part of the model, before data parallel sharding.

    Counts are of parameters; tensor and expert parallelism are divided out.
    """

    layers: int
    block: int  # the largest block
    block_linear: int
    blocks: int  # all blocks of the stage
    blocks_linear: int
    experts: int  # part of ``blocks`` in experts
    expert_ways: int  # processes over which data parallel sharding can divide this rank's experts
    embedding: int
    head: int  # the output head's weights, tied or not
    untied_head: int  # ``head`` if it is a separate matrix on this stage, otherwise 0
    norm: int
    first: bool
    last: bool

    @property
    def parameters(self) -> int:
        """All parameters of the part."""
        return self.blocks + self.embedding + self.untied_head + self.norm


def stages(setup: Setup) -> tuple[str, ...]:
    """Return the pipeline stages that can hold the peak: "first" and "last", or "only" without a pipeline."""
    return ("only",) if setup.pipeline == 1 else ("first", "last")


@lru_cache(maxsize=16)
def part_of(setup: Setup, stage: str) -> Part:
    """Return the part of the model that one rank of a stage ("only", "first", "last") holds.

    Tensor parallel divides every matrix, the vocabulary too; norms stay whole (Shoeybi et al. 2019,
    arXiv:1909.08053, section 3). Expert parallel divides the experts. Blocks are spread evenly over stages.
    """
    shape, t = shape_of(setup.model), setup.tensor
    first, last = stage in ("only", "first"), stage in ("only", "last")
    layers = -(-shape.layers // setup.pipeline)
    dense = min(shape.dense_layers, layers) if first else max(shape.dense_layers - shape.layers + layers, 0)
    ranks = setup.shard * setup.replicate * t  # that share this stage's layers
    expert_share = min(t * setup.expert, ranks)
    attention = shape.attention - shape.attention_linear + -(-shape.attention_linear // t)
    dense_mlp = -(-shape.mlp // t)
    experts = -(-shape.experts // expert_share)
    shared_mlp = shape.shared_mlp - shape.shared_mlp_linear + -(-shape.shared_mlp_linear // t)
    expert_layers = max(layers - dense - -(-shape.bare_layers // setup.pipeline), 0)
    block = attention + max(dense_mlp if dense else 0, experts + shared_mlp if expert_layers else 0)
    linear = -(-shape.attention_linear // t)
    blocks_linear = layers * linear + dense * -(-shape.mlp_linear // t)
    routed_linear = -(-shape.experts_linear // expert_share) + -(-shape.shared_mlp_linear // t)
    blocks_linear += expert_layers * routed_linear
    block_linear = linear + max(
        -(-shape.mlp_linear // t) if dense else 0, routed_linear if expert_layers else 0
    )
    has_head = last and setup.model.causal and setup.task != "reward"
    head_weights = shape.head
    # Tied embeddings are two matrices nevertheless: litgpt never ties them, a pipeline cannot
    if setup.model.tied_embeddings and (setup.engine == "litgpt" or stage == "last"):
        head_weights += setup.model.vocab * setup.model.hidden
    return Part(
        layers=layers,
        block=block,
        block_linear=block_linear,
        blocks=layers * attention + dense * dense_mlp + expert_layers * (experts + shared_mlp),
        blocks_linear=blocks_linear,
        experts=expert_layers * experts,
        expert_ways=max(setup.shard * t // expert_share, 1),
        embedding=-(-shape.embedding // t) if first else 0,
        head=-(-setup.model.vocab * setup.model.hidden // t) if has_head else 0,
        untied_head=-(-head_weights // t) if has_head else 0,
        norm=shape.norm if last else 0,
        first=first,
        last=last,
    )
