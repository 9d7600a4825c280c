"""Model shapes: the table of known models, and shapes read from a Hugging Face config.json.

To add a model, add a row to ``data/models.csv``. To add an architecture, add it to ``FAMILIES`` and
count its parameters in :class:`ModelSpec`.
"""

from __future__ import annotations

import csv
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from estimator.errors import UserError

TABLE = Path(__file__).with_name("data") / "models.csv"
FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3")  # Hugging Face's `model_type`
ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
PROJECTIONS = ATTENTION_PROJECTIONS + MLP_PROJECTIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """The shape of one decoder-only transformer with RMSNorm, rotary positions and a gated MLP."""

    name: str
    family: str  # Hugging Face's `model_type`
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # width of the MLP; of one expert where there are experts
    vocab: int
    tied_embeddings: bool
    max_seq_len: int
    hf_id: str | None = None
    qkv_bias: bool = False
    experts: int = 0
    experts_per_token: int = 0
    rope_theta: float = 10_000.0
    rope_scaling_type: str | None = None  # "llama3", "linear", "yarn"...
    rope_scaling_factor: float | None = None
    rope_low_freq_factor: float | None = None
    rope_high_freq_factor: float | None = None
    rope_original_max_seq_len: int | None = None
    norm_eps: float = 1e-5
    sliding_window: int | None = None
    gated: bool = False  # Hugging Face asks for a token
    published_parameters: int | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise UserError(
                f"Model {self.name}: model_type {self.family!r} is not supported.",
                f"Supported are {', '.join(FAMILIES)}.",
            )
        for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_seq_len"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"Model {self.name}: {field} = {value!r} must be a whole number above 0.")
        if self.heads % self.kv_heads:
            raise UserError(
                f"Model {self.name}: {self.heads} attention heads can't be shared by "
                f"{self.kv_heads} key/value heads.",
                "num_attention_heads must be a multiple of num_key_value_heads.",
            )
        if not 0 <= self.experts_per_token <= self.experts or bool(self.experts) != bool(
            self.experts_per_token
        ):
            raise UserError(
                f"Model {self.name}: experts_per_token = {self.experts_per_token} does not go with "
                f"experts = {self.experts}.",
                "A dense model has 0 of both; with experts, each token uses between 1 and all of them.",
            )

    @property
    def q_dim(self) -> int:
        """Width of all query heads together; equals ``hidden`` in most models."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qk_norm(self) -> bool:
        """Qwen 3 normalises each head's queries and keys (transformers, modeling_qwen3.py)."""
        return self.family == "qwen3"

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Hugging Face name of each linear layer of a block -> (out, in); of one expert for the MLP."""
        return {
            "q_proj": (self.q_dim, self.hidden),
            "k_proj": (self.kv_dim, self.hidden),
            "v_proj": (self.kv_dim, self.hidden),
            "o_proj": (self.hidden, self.q_dim),
            "gate_proj": (self.ffn, self.hidden),
            "up_proj": (self.ffn, self.hidden),
            "down_proj": (self.hidden, self.ffn),
        }

    @property
    def attention_linear_parameters(self) -> int:
        """Weights of one block's attention projections."""
        return 2 * self.hidden * (self.q_dim + self.kv_dim)

    @property
    def mlp_linear_parameters(self) -> int:
        """Weights of one block's MLP, all experts."""
        return 3 * self.hidden * self.ffn * max(self.experts, 1)

    @property
    def linear_parameters(self) -> int:
        """Weights of the blocks' linear layers: what QLoRA stores in 4 bits."""
        return self.layers * (self.attention_linear_parameters + self.mlp_linear_parameters)

    @property
    def layer_parameters(self) -> int:
        """All parameters of one block."""
        bias = self.q_dim + 2 * self.kv_dim if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        router = self.hidden * self.experts
        return self.attention_linear_parameters + self.mlp_linear_parameters + bias + norms + router

    @property
    def embedding_parameters(self) -> int:
        """Token embeddings, and the output head where it is a matrix of its own."""
        return self.vocab * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.embedding_parameters + self.hidden

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes through; all of them in a dense model."""
        idle = max(self.experts, 1) - max(self.experts_per_token, 1)
        return self.parameters - self.layers * 3 * self.hidden * self.ffn * idle

    def lora_parameters(self, rank: int, targets: Iterable[str]) -> int:
        """Adapter weights: two matrices, (rank, in) and (out, rank), for each target of each block."""
        shapes, total = self.linear_shapes, 0
        for target in targets:
            if target not in shapes:
                raise UserError(
                    f"LoRA target {target!r} is not a linear layer of {self.name}.",
                    f"Its linear layers are {', '.join(shapes)}.",
                )
            copies = max(self.experts, 1) if target in MLP_PROJECTIONS else 1
            total += copies * rank * sum(shapes[target])
        return self.layers * total

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], name: str) -> ModelSpec:
        """A shape from the contents of a Hugging Face ``config.json``.

        Raises :class:`UserError`, naming field and value, for an architecture that is not supported, a
        missing field, or values that contradict each other.
        """
        reader = _ConfigReader(config, name)
        family = reader.text("model_type")
        if family not in FAMILIES:
            raise UserError(
                f"Model {name}: config.json has model_type {family!r}, which is not supported.",
                f"Supported are {', '.join(FAMILIES)}.",
            )
        for flag in ("attention_bias", "mlp_bias"):
            if config.get(flag):
                raise UserError(f"Model {name}: config.json has {flag} = true, which is not supported.")
        if config.get("quantization_config"):
            raise UserError(
                f"Model {name}: its weights are already quantised (quantization_config in config.json).",
                "Start from the unquantised model; --method qlora quantises it on loading.",
            )
        hidden, heads = reader.whole("hidden_size"), reader.whole("num_attention_heads")
        if config.get("head_dim") is None and hidden % heads:
            raise UserError(
                f"Model {name}: config.json has hidden_size {hidden}, "
                f"which {heads} attention heads don't divide, and no head_dim."
            )
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type"))
        window = config.get("sliding_window")
        if config.get("use_sliding_window") is False:
            window = None
        return cls(
            name=name,
            family=family,
            layers=reader.whole("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=reader.whole("num_key_value_heads", heads),
            head_dim=reader.whole("head_dim", hidden // heads if heads else 0),
            ffn=reader.whole("intermediate_size"),
            vocab=reader.whole("vocab_size"),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            experts=reader.whole("num_local_experts") if family == "mixtral" else 0,
            experts_per_token=reader.whole("num_experts_per_tok") if family == "mixtral" else 0,
            max_seq_len=reader.whole("max_position_embeddings"),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            rope_scaling_type=None if rope_type in (None, "default") else str(rope_type),
            rope_scaling_factor=_optional_float(rope.get("factor")),
            rope_low_freq_factor=_optional_float(rope.get("low_freq_factor")),
            rope_high_freq_factor=_optional_float(rope.get("high_freq_factor")),
            rope_original_max_seq_len=rope.get("original_max_position_embeddings"),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            sliding_window=window,
            source=f"config.json of {name}",
        )


class _ConfigReader:
    """Typed reads of a config.json whose errors name the field and its value."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config, self.name = config, name

    def text(self, field: str) -> str:
        value = self.config.get(field)
        if not isinstance(value, str):
            raise self._error(field, value, "a name")
        return value

    def whole(self, field: str, default: int | None = None) -> int:
        value = self.config.get(field)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._error(field, value, "a whole number above 0")
        return value

    def _error(self, field: str, value: object, rule: str) -> UserError:
        if field not in self.config:
            return UserError(f"Model {self.name}: config.json has no {field}.", f"It must be {rule}.")
        return UserError(f"Model {self.name}: config.json has {field} = {value!r}; it must be {rule}.")


def find(name: str) -> ModelSpec:
    """The model of that name, alias or Hugging Face id; raises UserError with the nearest names."""
    rows = _table()
    model = rows.get(_normal(name))
    if model is None:
        near = difflib.get_close_matches(_normal(name), rows, n=3, cutoff=0.5)
        offered = dict.fromkeys(rows[key].name for key in near)
        raise UserError(
            f"There is no model {name!r} in the model table.",
            (f"Did you mean {', '.join(offered)}? " if offered else "")
            + "A Hugging Face id or a local directory works too.",
        )
    return model


def names() -> list[str]:
    """The table's names, in its order."""
    return list(dict.fromkeys(model.name for model in _table().values()))


def _normal(name: str) -> str:
    return name.strip().lower().replace("_", "-")


@lru_cache(maxsize=1)
def _table() -> dict[str, ModelSpec]:
    rows: dict[str, ModelSpec] = {}
    with TABLE.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            model = _from_row(row)
            for key in (model.name, row["hf_id"], *row["aliases"].split()):
                if key and rows.setdefault(_normal(key), model) is not model:
                    raise ValueError(f"{TABLE.name}: {key} names two models")
    return rows


def _from_row(row: Mapping[str, str]) -> ModelSpec:
    return ModelSpec(
        name=row["name"],
        hf_id=row["hf_id"] or None,
        family=row["family"],
        layers=int(row["layers"]),
        hidden=int(row["hidden"]),
        heads=int(row["heads"]),
        kv_heads=int(row["kv_heads"]),
        head_dim=int(row["head_dim"]),
        ffn=int(row["ffn"]),
        vocab=int(row["vocab"]),
        tied_embeddings=row["tied_embeddings"] == "1",
        qkv_bias=row["qkv_bias"] == "1",
        experts=int(row["experts"] or 0),
        experts_per_token=int(row["experts_per_token"] or 0),
        max_seq_len=int(row["max_seq_len"]),
        rope_theta=float(row["rope_theta"]),
        rope_scaling_type=row["rope_scaling_type"] or None,
        rope_scaling_factor=_optional_float(row["rope_scaling_factor"]),
        rope_low_freq_factor=_optional_float(row["rope_low_freq_factor"]),
        rope_high_freq_factor=_optional_float(row["rope_high_freq_factor"]),
        rope_original_max_seq_len=_optional_int(row["rope_original_max_seq_len"]),
        norm_eps=float(row["norm_eps"]),
        sliding_window=_optional_int(row["sliding_window"]),
        gated=row["gated"] == "1",
        published_parameters=_optional_int(row["published_parameters"]),
        source=row["source"],
    )


def _optional_float(value: Any) -> float | None:
    return None if value in (None, "") else float(value)


def _optional_int(value: str) -> int | None:
    return int(value) if value else None
