"""torch.compile on fake tensors: tensors saved by the partitioner, and buffers between fused kernels.

AOTAutograd and the min-cut partitioner are the real ones; Inductor does not generate code. It would fuse
element-wise operations and reductions, so only inputs and outputs of matrix products, of attention and of the
graph are buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn.utils.stateless import _reparametrize_module

from estimator.setup import Setup

aten = torch.ops.aten
KERNELS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten.embedding_dense_backward.default,
}


def compile_blocks(setup: Setup, blocks: list[nn.Module], dtype: torch.dtype) -> None:
    """Replace the forward pass of each block by a compiled one, as torchtune and torchtitan do.

    All blocks share the graphs. They are built here, before tracking starts, as building them allocates too.
    """
    first: Any = blocks[0]
    code = first.forward

    def run(weights: dict[str, torch.Tensor], x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        with _reparametrize_module(first, weights):
            result: torch.Tensor = code(x, **options)
            return result

    def forward_of(block: Any) -> Callable[..., torch.Tensor]:
        def forward(x: torch.Tensor, **options: Any) -> torch.Tensor:
            inputs = {name: options[name] for name in ("mask", "input_pos")}
            return graphs[x.requires_grad](_weights(block, None), x, inputs)  # type: ignore[no-any-return]

        return forward

    batch, length, width = setup.sequences, setup.seq_len, setup.model.hidden
    options: dict[str, Any] = {"mask": None, "input_pos": None}
    if setup.document_mask:
        options["mask"] = torch.empty(batch, length, length, dtype=torch.bool)
        options["input_pos"] = torch.empty(batch, length, dtype=torch.long)
    graphs = {}
    for trained in {True, not setup.adapters}:  # under adapters the embeddings are frozen
        x = torch.empty(batch, length, width, dtype=dtype, requires_grad=trained)
        graphs[trained] = _compiled(run)
        graphs[trained](_weights(first, dtype), x, options)
    for block in blocks:
        block.forward = forward_of(block)


def _weights(block: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Return the weights of a block; with ``dtype``, empty tensors of their shapes in the compute type."""
    weights = dict(block.named_parameters())
    if dtype is not None:
        weights = {
            name: nn.Parameter(torch.empty_like(weight, dtype=dtype), requires_grad=weight.requires_grad)
            for name, weight in weights.items()
        }
    return weights | dict(block.named_buffers())


def compile_loss(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    shapes: set[tuple[int, int]],
    dtype: torch.dtype,
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Compile a loss for logits of these shapes, [tokens, vocabulary]."""
    graphs: dict[tuple[int, ...], Any] = {}
    for shape in shapes:
        graphs[shape] = _compiled(function)
        logits = torch.empty(shape, dtype=dtype, requires_grad=True)
        graphs[shape](logits, torch.empty(shape[0], dtype=torch.long))
    return lambda logits, labels: graphs[tuple(logits.shape)](logits, labels)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it runs as graphs with the allocations of compiled code."""
    from torch._inductor.decomposition import select_decomp_table

    aot: Any = aot_function
    return aot(  # type: ignore[no-any-return]
        function,
        fw_compiler=_buffers_only,
        bw_compiler=_buffers_only,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )


def _buffers_only(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
    """Return a replacement of the graph that only allocates each buffer, and frees it after its last use."""
    nodes = list(graph.graph.nodes)
    output = nodes[-1]
    inputs = [node for node in nodes if node.op == "placeholder"]
    written = [node for node in nodes if _is_buffer(node, output)]
    last_use = _last_uses(nodes, set(written))

    def run(*arguments: Any) -> Any:
        values: dict[fx.Node, Any] = dict(zip(inputs, arguments, strict=True))
        for node in written:
            values[node] = torch.utils._pytree.tree_map_only(torch.Tensor, _like, node.meta["val"])
            for dead in last_use.get(node, ()):
                values.pop(dead, None)
        result = fx.node.map_arg(output.args[0], lambda node: _value(node, values))
        return tuple(result) if isinstance(result, (list, tuple)) else result

    run._boxed_call = False  # type: ignore[attr-defined]
    return run


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _is_buffer(node: fx.Node, output: fx.Node) -> bool:
    """Return whether a node is a kernel's result, or an element-wise result read by a kernel or returned."""
    if node.op != "call_function" or _is_view(node) or "val" not in node.meta:
        return False
    if getattr(node.target, "__name__", "") == "getitem":
        return False
    if node.target in KERNELS:
        return True
    return any(user is output or user.target in KERNELS for user in _readers(node))


def _readers(node: fx.Node) -> list[fx.Node]:
    """Return the users of a node and of its views."""
    readers = []
    for user in node.users:
        readers += _readers(user) if _is_view(user) else [user]
    return readers


def _last_uses(nodes: list[fx.Node], written: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Map each buffer to the buffers that are freed after it is written.

    Results of fused operations are not buffers: their readers read the buffers that they are computed from.
    """
    sources: dict[fx.Node, set[fx.Node]] = {}
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        node_sources: set[fx.Node] = set()
        for source in node.all_input_nodes:
            node_sources |= {source} if source in written else sources.get(source, set())
        sources[node] = node_sources
        if node in written or node.op == "output":
            last |= dict.fromkeys(node_sources, node)
    free: dict[fx.Node, list[fx.Node]] = {}
    for node, reader in last.items():
        if reader.op != "output":
            free.setdefault(reader, []).append(node)
    return free


def _value(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """Return the tensor of a node; views share the memory of their base."""
    operator: Any = node.target
    if node in values:
        return values[node]
    arguments = fx.node.map_arg(node.args, lambda source: _value(source, values))
    options = fx.node.map_arg(node.kwargs, lambda source: _value(source, values))
    return operator(*arguments, **options)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
