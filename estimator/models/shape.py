"""Shape of one transformer: layers, widths and traits, validated on creation."""

from __future__ import annotations

from dataclasses import dataclass

from estimator.errors import UserError
from estimator.models import untried
from estimator.models.architectures import FAMILIES, Norm, QkNorm, Recurrence, family_of
from estimator.models.vision import VisionShape

_AT_LEAST_1 = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_seq_len")
_AT_LEAST_0 = (
    "experts",
    "experts_per_token",
    "shared_ffn",
    "dense_layers",
    "dense_ffn",
    "sliding_layers",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_layers",
    "index_heads",
    "index_head_dim",
    "heavy_layers",
    "compress_rate",
    "heavy_compress_rate",
    "o_groups",
    "o_lora_rank",
    "residual_streams",
    "sinkhorn_iterations",
    "position_embeddings",
    "token_types",
    "recurrent_layers",
    "recurrent_heads",
    "recurrent_head_dim",
    "recurrent_groups",
    "recurrent_state",
    "conv_kernel",
    "mlp_layers",
    "global_head_dim",
    "global_kv_heads",
    "reused_kv_layers",
    "reused_kv_sliding",
    "reused_kv_ffn",
    "layer_embedding",
    "layer_vocab",
)
_MOST_NORMS = 8  # Gemma 4 with experts and per-layer embeddings
_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Shape of one transformer, from config.json or the model table. The defaults are those of a dense Llama.

    A model of the table or of a config.json gets its family's traits (norms, biases...) from
    ``estimator.models.architectures.FAMILIES``; otherwise they must be set.
    """

    name: str
    family: str  # Hugging Face's `model_type`
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int  # of queries and keys
    ffn: int  # width of the MLP, or of one expert
    vocab: int
    tied_embeddings: bool
    max_seq_len: int
    hf_id: str | None = None
    causal: bool = True  # False: an encoder such as BERT
    sees_images: bool = False  # the shape is that of the language part of a larger model
    vision: VisionShape | None = None  # vision tower; None: none, or unknown shape
    quantized_weights: str = ""  # the published files' quant_method ("mxfp4", "fp8"); blank: none
    own_code: bool = False  # transformers has no class for it; its code is stored with the weights
    norm: Norm = "rms"
    norm_bias: bool = False
    norms_per_layer: int = 2  # norms of the hidden size in one block
    qk_norm: QkNorm = ""
    gated_mlp: bool = True
    hidden_act: str = "silu"  # the MLP's activation, by transformers' name
    parallel_residual: bool = False  # attention and MLP read the same input
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.0
    head_bias: bool = False
    attention_sinks: bool = False
    pooler: bool = False
    position_embeddings: int = 0  # learned positions; 0: rotary or ALiBi
    token_types: int = 0
    # mixture of experts
    experts: int = 0
    experts_per_token: int = 0
    shared_ffn: int = 0  # total width of the experts that every token passes through, in one block
    dense_layers: int = 0  # blocks without experts, in a model that has experts
    dense_ffn: int = 0  # their width
    router_bias: bool = False
    shared_expert_gate: bool = False
    # multi-head latent attention, if kv_lora_rank is above 0
    q_lora_rank: int = 0  # 0: queries are not compressed
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0  # 0: as head_dim
    # sparse attention (arXiv:2512.02556): an indexer, which is not trained, selects the tokens to attend to
    index_layers: int = 0  # blocks with an indexer; others use the selection of the previous block
    index_heads: int = 0
    index_head_dim: int = 0
    # compressed attention (DeepSeek V4): every block attends to a window, most also to compressed tokens, of
    # which blocks with an indexer select some
    heavy_layers: int = 0  # blocks that attend to all compressed tokens
    compress_rate: int = 0  # tokens that a block with an indexer compresses to one
    heavy_compress_rate: int = 0  # the same of blocks that attend to all compressed tokens
    o_groups: int = 0  # groups of heads, each with its first output projection
    o_lora_rank: int = 0  # width of a group between both output projections
    # hyper-connections: several residual streams, mixed around attention and MLP
    residual_streams: int = 0  # 0: one, without mixing
    sinkhorn_iterations: int = 0  # normalizations of the mixing matrix
    # blocks with a recurrence (linear attention, state space, short convolution) in place of attention
    recurrence: Recurrence = ""
    recurrent_layers: int = 0
    recurrent_heads: int = 0  # value heads of gated delta rule, heads of Mamba 2
    recurrent_head_dim: int = 0
    recurrent_groups: int = 0  # key heads of gated delta rule, groups of Mamba 2
    recurrent_state: int = 0  # key head size of gated delta rule, state size of Mamba 2
    conv_kernel: int = 0
    gated_attention: bool = False  # the query projection also produces a gate of the result
    one_part_blocks: bool = False  # a block is only attention, recurrence or MLP
    mlp_layers: int = 0  # blocks with an MLP or experts; 0: all
    # attention of two kinds: blocks without the window may have other heads than those with it
    global_head_dim: int = 0  # 0: as head_dim
    global_kv_heads: int = 0  # 0: as kv_heads
    global_keys_are_values: bool = False  # without the window one projection makes keys and values
    reused_kv_layers: int = 0  # last blocks, which attend to keys and values of earlier ones
    reused_kv_sliding: int = 0  # number of ``reused_kv_layers`` with the window
    reused_kv_ffn: int = 0  # MLP width of these blocks; 0: as ffn
    layer_embedding: int = 0  # width of the per-layer token embeddings; 0: none
    layer_vocab: int = 0  # rows of these embeddings
    head_gates: bool = False  # one gate for each head scales attention's result
    router_scales: bool = False
    # positions
    rope_theta: float = 10_000.0
    rope_scaling_type: str | None = None  # "llama3", "linear", "yarn"...
    rope_scaling_factor: float | None = None
    rope_low_freq_factor: float | None = None
    rope_high_freq_factor: float | None = None
    rope_original_max_seq_len: int | None = None
    partial_rotary_factor: float = 1.0  # share of each head's width that is rotated, as config.json says
    norm_eps: float = 1e-5
    sliding_window: int | None = None  # previous tokens that a token attends to, or Llama 4's chunk
    sliding_layers: int = 0  # blocks with the window; others attend to all tokens
    gated: bool = False  # Hugging Face asks for a token
    license: str = ""  # of the weights, by its Hub identifier; blank: unknown
    license_source: str = ""
    published_parameters: int | None = None
    published_active_parameters: int | None = None  # as rounded by the publisher
    source: str = ""

    def __post_init__(self) -> None:
        if not (self.own_code or self.family in FAMILIES or untried.is_untried(self.family)):
            raise UserError(
                f"Model {self.name}: model_type {self.family!r} is not supported.",
                f"Supported are {', '.join(FAMILIES)}.",
            )
        self._check_numbers()
        self._check_attention()
        self._check_experts()
        self._check_recurrence()
        self._check_kinds()

    def _check_numbers(self) -> None:
        for names, least, rule in ((_AT_LEAST_1, 1, "above 0"), (_AT_LEAST_0, 0, "of at least 0")):
            for field in names:
                value = getattr(self, field)
                if not isinstance(value, int) or isinstance(value, bool) or value < least:
                    raise self._wrong(f"{field} = {value!r} must be a whole number {rule}")
        if not 1 <= self.norms_per_layer <= _MOST_NORMS:
            raise self._wrong(
                f"norms_per_layer = {self.norms_per_layer!r} must be between 1 and {_MOST_NORMS}"
            )
        windowed = self.sliding_layers or self.compressed_attention
        if bool(self.sliding_window) != bool(windowed) or self.sliding_layers > self.layers:
            raise self._wrong(
                f"sliding_window = {self.sliding_window!r} does not go with sliding_layers = "
                f"{self.sliding_layers} of {self.layers} layers",
                "Without a window give neither; with one, between 1 and all layers use it.",
            )

    def _check_attention(self) -> None:
        if self.heads % self.kv_heads:
            raise self._wrong(
                f"{self.heads} attention heads are not divisible by {self.kv_heads} key/value heads",
                "num_attention_heads must be a multiple of num_key_value_heads.",
            )
        if not family_of(self.family).free_head_dim and self.q_dim != self.hidden:
            raise self._wrong(
                f"{self.heads} heads * {self.head_dim} = {self.q_dim}, but its hidden size is {self.hidden}",
                f"In a {self.family} model heads * head_dim must be the hidden size.",
            )
        latent_dims = {name: getattr(self, name) for name in _LATENT}
        if self.compressed_attention:
            self._check_compression()
            return
        if not self.latent_attention:
            unexpected = [name for name in ("q_lora_rank", *_LATENT[:2]) if getattr(self, name)]
            if unexpected:
                raise self._wrong(f"{unexpected[0]} = {getattr(self, unexpected[0])} needs a kv_lora_rank")
            return
        for name, value in latent_dims.items():
            if not value:
                raise self._wrong(f"kv_lora_rank = {self.kv_lora_rank} needs {name}, which is 0")
        if self.head_dim != self.qk_nope_head_dim + self.qk_rope_head_dim:
            raise self._wrong(
                f"head_dim = {self.head_dim} must be qk_nope_head_dim + qk_rope_head_dim = "
                f"{self.qk_nope_head_dim + self.qk_rope_head_dim}"
            )

    def _check_compression(self) -> None:
        if self.sliding_layers + self.compressed_layers != self.layers:
            raise self._wrong(
                f"sliding_layers = {self.sliding_layers}, index_layers = {self.index_layers} and "
                f"heavy_layers = {self.heavy_layers} are not its {self.layers} layers"
            )
        for name, needed in (
            ("q_lora_rank", True),
            ("o_lora_rank", True),
            ("residual_streams", True),
            ("compress_rate", self.index_layers),
            ("heavy_compress_rate", self.heavy_layers),
        ):
            if needed and not getattr(self, name):
                raise self._wrong(f"o_groups = {self.o_groups} needs {name}, which is 0")
        if self.q_dim % self.o_groups:
            raise self._wrong(f"o_groups = {self.o_groups} does not divide the query width {self.q_dim}")

    def _check_kinds(self) -> None:
        if self.heads % (self.global_kv_heads or self.kv_heads):
            raise self._wrong(
                f"{self.heads} attention heads are not divisible by {self.global_kv_heads} key/value heads "
                "of blocks without the window"
            )
        reused, sliding = self.reused_kv_layers, self.reused_kv_sliding
        if not sliding <= reused < self.layers or sliding > self.sliding_layers:
            raise self._wrong(
                f"reused_kv_layers = {reused} with reused_kv_sliding = {sliding} does not go with "
                f"{self.layers} layers, {self.sliding_layers} of them with a window"
            )
        if bool(self.layer_embedding) != bool(self.layer_vocab):
            raise self._wrong(
                f"layer_embedding = {self.layer_embedding} does not go with layer_vocab = {self.layer_vocab}"
            )

    def _check_experts(self) -> None:
        active, experts = self.experts_per_token, self.experts
        if active > experts or bool(experts) != bool(active):
            raise self._wrong(
                f"experts_per_token = {active} does not go with experts = {experts}",
                "A dense model has 0 of both; with experts, each token uses between 1 and all of them.",
            )
        if not experts and (self.shared_ffn or self.dense_layers):
            raise self._wrong("shared_ffn and dense_layers are for models with experts, and it has none")
        if self.dense_layers > self.mlp_blocks:
            raise self._wrong(f"dense_layers = {self.dense_layers} are more than its {self.layers} layers")

    def _check_recurrence(self) -> None:
        if bool(self.recurrence) < bool(self.recurrent_layers):
            raise self._wrong(f"recurrent_layers = {self.recurrent_layers}, and {self.family} has none")
        if self.recurrence in ("gated-delta", "mamba2") and self.recurrent_layers:
            for name in ("recurrent_heads", "recurrent_head_dim", "recurrent_groups", "recurrent_state"):
                if not getattr(self, name):
                    raise self._wrong(f"recurrent_layers = {self.recurrent_layers} needs {name}, which is 0")
        if self.attention_layers < 0 or self.mlp_layers > self.layers:
            raise self._wrong(
                f"recurrent_layers = {self.recurrent_layers} and mlp_layers = {self.mlp_layers} are more "
                f"than its {self.layers} layers"
            )
        if self.sliding_layers > self.attention_layers:
            raise self._wrong(f"sliding_layers = {self.sliding_layers} are more than its attention layers")

    def _wrong(self, problem: str, advice: str = "") -> UserError:
        return UserError(f"Model {self.name}: {problem}.", advice)

    # -----------------------------------------------------------------------------------------------------
    # Kinds of blocks

    @property
    def mlp_blocks(self) -> int:
        """Blocks that have an MLP or experts."""
        return self.mlp_layers or self.layers

    @property
    def expert_layers(self) -> int:
        """Blocks that have experts."""
        return self.mlp_blocks - self.dense_layers if self.experts else 0

    @property
    def attention_layers(self) -> int:
        """Blocks that have attention."""
        return self.layers - self.recurrent_layers - (self.mlp_layers if self.one_part_blocks else 0)

    # -----------------------------------------------------------------------------------------------------
    # Widths

    @property
    def latent_attention(self) -> bool:
        """Whether this is DeepSeek's multi-head latent attention (MLA)."""
        return self.kv_lora_rank > 0

    @property
    def compressed_attention(self) -> bool:
        """Whether this is DeepSeek V4's attention: a window, and compressed tokens in most blocks."""
        return self.o_groups > 0

    @property
    def compressed_layers(self) -> int:
        """Blocks that attend to compressed tokens."""
        return self.index_layers + self.heavy_layers if self.compressed_attention else 0

    @property
    def compressed_tokens(self) -> float:
        """Compressed tokens that an attention block has for each token; the mean over all blocks."""
        if not self.compressed_layers:
            return 0.0
        sparse = self.index_layers / self.compress_rate if self.index_layers else 0.0
        heavy = self.heavy_layers / self.heavy_compress_rate if self.heavy_layers else 0.0
        return (sparse + heavy) / self.layers

    @property
    def q_dim(self) -> int:
        """Width of all query heads together; equals ``hidden`` in most models.

        This and the following widths are means over all attention blocks.
        """
        return self._mean(self.heads * self.head_dim, self.heads * self.wide_head_dim)

    @property
    def kv_dim(self) -> int:
        """Width of all key heads together, as attention uses them."""
        return self._mean(self.kv_heads * self.head_dim, self.wide_kv_heads * self.wide_head_dim)

    @property
    def v_dim(self) -> int:
        """Width of all value heads together, as attention uses them; differs from ``kv_dim`` in MLA."""
        return self.kv_heads * self.v_head_dim if self.v_head_dim else self.kv_dim

    @property
    def attention_out_dim(self) -> int:
        """Width of the attention result, the input of the output projection."""
        return self.heads * self.v_head_dim if self.v_head_dim else self.q_dim

    @property
    def wide_head_dim(self) -> int:
        """Head size of attention blocks without the window."""
        return self.global_head_dim or self.head_dim

    @property
    def wide_kv_heads(self) -> int:
        """Key/value heads of attention blocks without the window."""
        return self.global_kv_heads or self.kv_heads

    @property
    def mean_ffn(self) -> int:
        """Width of the MLP, or of one expert; the mean over all blocks."""
        wider = self.reused_kv_layers * (self.reused_kv_ffn - self.ffn) if self.reused_kv_ffn else 0
        return self.ffn + wider // self.layers

    def _mean(self, sliding: int, full: int) -> int:
        """Mean of a width over attention blocks with and without the window."""
        if sliding == full or not self.attention_layers:
            return sliding
        count = self.attention_layers - self.sliding_layers
        return (self.sliding_layers * sliding + count * full) // self.attention_layers
