"""A transformer's shape, and the linear layers and parameter counts derived from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from estimator.errors import UserError
from estimator.models import parameters
from estimator.models.architectures import MLP_PROJECTIONS, family_of
from estimator.models.shape import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec(ModelShape):
    """One transformer: its shape (:class:`~estimator.models.shape.ModelShape`) and its parameters."""

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Generic name of each linear layer of a block -> (out, in); of one expert for the MLP.

        The names are Llama's in every family, and DeepSeek's for its latent attention.
        """
        mixers = parameters.attention_shapes(self) | parameters.recurrent_shapes(self)
        return mixers | parameters.mlp_shapes(self, self.ffn)

    @property
    def projections(self) -> tuple[str, ...]:
        """Generic names of all linear layers of a block."""
        return tuple(self.linear_shapes)

    @property
    def all_linear(self) -> tuple[str, ...]:
        """Generic names of the layers that ``lora.targets: all-linear`` adapts.

        Experts are not linear layers in transformers 5: MLP projections are excluded if a model has only
        experts, or if PEFT cannot adapt its dense MLPs (``Family.mlp_names_are_experts``).
        """
        has_dense_mlp = (self.shared_ffn or self.dense_layers) and not family_of(
            self.family
        ).mlp_names_are_experts
        if not self.experts or has_dense_mlp:
            return self.projections
        return tuple(parameters.attention_shapes(self) | parameters.recurrent_shapes(self))

    # -----------------------------------------------------------------------------------------------------
    # Parameters

    @property
    def linear_parameters(self) -> int:
        """Weights of the linear layers of all blocks, which QLoRA stores in 4 bits."""
        return parameters.linears(self)

    @property
    def layer_parameters(self) -> int:
        """All parameters of one block; with experts, if some blocks have them."""
        return parameters.layer(self)

    @property
    def dense_layer_parameters(self) -> int:
        """All parameters of a block without experts."""
        return parameters.dense_layer(self)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embeddings, and of the output head if it is a separate matrix."""
        return parameters.embeddings(self) + parameters.head(self)

    @property
    def parameters(self) -> int:
        """All parameters; tied embeddings count once."""
        return parameters.model(self)

    @property
    def stored_parameters(self) -> int:
        """Parameters in the model's files."""
        return self.parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses, including embeddings; in a dense model all parameters."""
        return self.parameters - parameters.unused_experts(self)

    def lora_parameters(
        self, rank: int, targets: Iterable[str], *, family_code: bool = False, magnitudes: bool = False
    ) -> int:
        """Count the adapter weights: two matrices, (rank, in) and (out, rank), for each target of each block.

        A target is a generic name (``q_proj``...) or that of a fused matrix of the family (``qkv_proj`` of
        Phi-3). Each expert has separate adapters. Raises UserError for a target that the model does not have.

        ``family_code``: adapters of PEFT on modules of transformers 5, in which fused matrices have one
        adapter and experts none. ``magnitudes`` adds those of DoRA, one per output.
        """
        groups = self._groups(targets, joined=family_code)
        if family_code and family_of(self.family).mlp_names_are_experts:
            groups = [group for group in groups if group[0] not in MLP_PROJECTIONS]
        count = sum(parameters.lora(self, rank, group, experts=not family_code) for group in groups)
        if magnitudes:
            count += sum(parameters.magnitudes(self, group, experts=not family_code) for group in groups)
        return count

    def check_lora_targets(self, targets: Iterable[str]) -> None:
        """Raise UserError for a target that the model does not have."""
        self._groups(targets, joined=False)

    def _groups(self, targets: Iterable[str], *, joined: bool) -> list[tuple[str, ...]]:
        """Return the matrices that ``targets`` name, each as the projections fused into it."""
        shapes, family_linears = self.linear_shapes, family_of(self.family).linears
        fused = {name: group for groups in family_linears.values() for group in groups for name in group}
        module_groups: dict[tuple[str, ...], None] = {}
        for target in targets:
            if target not in shapes and target not in family_linears:
                names = dict.fromkeys([*shapes, *family_linears])
                raise UserError(
                    f"LoRA target {target!r} is not a linear layer of {self.name}.",
                    f"Its linear layers are {', '.join(names)}.",
                )
            default_group = fused.get(target, (target,)) if joined else (target,)
            module_groups |= dict.fromkeys(family_linears.get(target, (default_group,)))
        return list(module_groups)

    def describe_length(self, seq_len: int) -> str:
        """Format the length of a sequence."""
        return f"{seq_len:,} tokens"

    def with_tokens(self, count: int) -> ModelSpec:
        """Return this model with rows for ``count`` more tokens in embedding and head."""
        if not count:
            return self
        return replace(
            self, vocab=self.vocab + count, published_parameters=None, published_active_parameters=None
        )
