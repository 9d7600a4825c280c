"""The UNet of a diffusion model: its layers, parameters, and activations saved for the backward pass.

The structure is that of diffusers 0.42.1's UNet2DConditionModel with text and time embeddings added
(models/unets/unet_2d_blocks.py, models/transformers/transformer_2d.py, models/attention.py). c are channels,
n positions of a feature map, r the rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

TEXT_TOKENS = 77  # CLIP's length
_LATENT_CHANNELS = 4
_GROUPS = 32  # of a group norm
ADAPTED = ("to_q", "to_k", "to_v", "to_out.0")  # the layers of both attentions of a block that LoRA adapts


@dataclass(frozen=True, slots=True)
class Part:
    """One layer of the UNet."""

    kind: Literal["resnet", "transformer", "down", "up"]
    level: int  # resolution level of its feature map; 0 is the largest
    into: int
    out: int
    layers: int = 0  # blocks of a transformer


@dataclass(frozen=True, slots=True)
class Adapters:
    """Matrices that LoRA adds to every attention of the UNet."""

    rank: int
    in_fp32: bool  # PEFT casts each adapter's input to the adapter's type


@dataclass(frozen=True, kw_only=True, slots=True)
class UNetShape:
    """Shape of one UNet, with the fields of its config.json."""

    channels: tuple[int, ...]
    transformer_layers: tuple[int, ...]  # blocks in each transformer of a level; 0: no transformers
    resnets: int = 2  # residual blocks per level of the encoder; the decoder has one more
    head_dim: int = 64
    text_width: int = 2048  # concatenated outputs of both text encoders
    pooled_width: int = 1280  # pooled output of the second text encoder
    time_width: int = 256  # embedding width of each of the six size and crop values

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> UNetShape:
        """Return the shape in a unet/config.json.

        Raises KeyError, TypeError or ValueError if it is not a UNet like that of Stable Diffusion XL.
        """
        if config["addition_embed_type"] != "text_time" or config["in_channels"] != _LATENT_CHANNELS:
            raise ValueError("it is no UNet of Stable Diffusion XL's kind")
        channels = tuple(config["block_out_channels"])
        heads = config["attention_head_dim"]  # numbers of heads: diffusers' field is misnamed
        layers = config["transformer_layers_per_block"]
        kinds = config["down_block_types"]
        if not len(channels) == len(heads) == len(layers) == len(kinds):
            raise ValueError("its levels have no number of heads and layers each")
        time_width = config["addition_time_embed_dim"]
        return cls(
            channels=channels,
            transformer_layers=tuple(
                count if kind.startswith("CrossAttn") else 0
                for count, kind in zip(layers, kinds, strict=True)
            ),
            resnets=config["layers_per_block"],
            head_dim=channels[-1] // heads[-1],
            text_width=config["cross_attention_dim"],
            pooled_width=config["projection_class_embeddings_input_dim"] - 6 * time_width,
            time_width=time_width,
        )

    @property
    def embedding(self) -> int:
        """Width of the time embedding."""
        return 4 * self.channels[0]

    @property
    def added(self) -> int:
        """Width of the added embeddings: the pooled text and six sizes."""
        return self.pooled_width + 6 * self.time_width

    def parts(self) -> Iterator[Part]:
        """Return the blocks in the order of the forward pass, without the first and last layers."""
        last = len(self.channels) - 1
        channels, skips = self.channels[0], [self.channels[0]]
        for level, out_channels in enumerate(self.channels):
            for _ in range(self.resnets):
                yield from self._pair(level, channels, out_channels)
                channels = out_channels
                skips.append(out_channels)
            if level < last:
                yield Part("down", level, out_channels, out_channels)
                skips.append(out_channels)
        yield from self._pair(last, channels, channels)
        yield Part("resnet", last, channels, channels)
        for level in reversed(range(len(self.channels))):
            out_channels = self.channels[level]
            for _ in range(self.resnets + 1):  # each also reads one feature map of a skip connection
                yield from self._pair(level, channels + skips.pop(), out_channels)
                channels = out_channels
            if level:
                yield Part("up", level - 1, out_channels, out_channels)

    def _pair(self, level: int, in_channels: int, out_channels: int) -> Iterator[Part]:
        yield Part("resnet", level, in_channels, out_channels)
        if self.transformer_layers[level]:
            yield Part("transformer", level, out_channels, out_channels, self.transformer_layers[level])

    def positions(self, width: int, height: int) -> list[int]:
        """Count the positions of each level's feature map; each level halves width and height."""
        counts = []
        for _ in self.channels:
            counts.append(width * height)
            width, height = (width + 1) // 2, (height + 1) // 2
        return counts

    # -----------------------------------------------------------------------------------------------------
    # Parameters

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.outer_parameters + sum(self.part_parameters(part) for part in self.parts())

    @property
    def outer_parameters(self) -> int:
        """Parameters of the first and the last convolution, the last norm, and both embeddings."""
        first = self.channels[0]
        total = conv(_LATENT_CHANNELS, first) + conv(first, _LATENT_CHANNELS) + norm(first)
        for width in (first, self.added):  # time; pooled text and sizes
            total += linear(width, self.embedding) + linear(self.embedding, self.embedding)
        return total

    def part_parameters(self, part: Part) -> int:
        """Count the parameters of a part."""
        if part.kind == "resnet":
            return resnet(part.into, part.out) + linear(self.embedding, part.out)
        if part.kind != "transformer":
            return conv(part.into, part.out)
        return norm(part.out) + 2 * linear(part.out, part.out) + part.layers * self.block_parameters(part.out)

    def block_parameters(self, c: int) -> int:
        """Count the parameters of one transformer block: three norms, two attentions, two layers of GEGLU."""
        attention = 4 * c * c + c + 2 * c * c + 2 * self.text_width * c + c
        return 3 * norm(c) + attention + linear(c, 8 * c) + linear(4 * c, c)

    def lora_parameters(self, rank: int) -> int:
        """Count the weights of adapters on q, k, v and output of both attentions of every block."""
        total = 0
        for part in self.parts():
            c = part.out
            self_attention, cross_attention = 4 * 2 * c, 2 * 2 * c + 2 * (self.text_width + c)
            total += part.layers * rank * (self_attention + cross_attention)
        return total

    @property
    def units(self) -> int:
        """Number of resnets and transformer blocks, the units of FSDP and of checkpointing."""
        return sum(part.layers or part.kind == "resnet" for part in self.parts())

    # -----------------------------------------------------------------------------------------------------
    # Activations

    def saved_bytes(
        self,
        width: int,
        height: int,
        size: int,
        *,
        adapters: Adapters | None = None,
        recomputed: bool = False,
        texts_trained: bool = False,
    ) -> int:
        """Return the bytes that one image's forward pass saves for the backward pass.

        Counted from the feature maps that each layer keeps, with flash attention and weights and activations
        of one type. Equal to a trace of diffusers' UNet under FakeTensorMode (torch 2.13):
        tests/estimator/models/test_unet.py.

        Parameters
        ----------
        width, height:
            Of the latent.
        size:
            Bytes of one element.
        adapters:
            Trained adapters of a frozen UNet; None: the complete UNet is trained.
        recomputed:
            Whether resnets and transformer blocks only save their inputs (activation checkpointing).
        texts_trained:
            Whether the text encoders are trained, so that gradients flow to all layers that read the texts,
            from the time embedding on.
        """
        positions, frozen = self.positions(width, height), adapters is not None
        total = self._saved_outside_blocks(positions[0], size, frozen=frozen)
        if not recomputed and (adapters is None or not adapters.in_fp32 or size == 4):
            total += size * TEXT_TOKENS * self.text_width  # otherwise each adapter has a copy of the text
        if recomputed and frozen:
            total += size * self.embedding  # an argument of every resnet
        input_needs_grad = not frozen or texts_trained  # whether anything before this part is trained
        if texts_trained and recomputed:
            total += size * self.embedding
        elif texts_trained:  # the latents, input of the first resnet, have no gradient
            total += size * (2 * self.embedding - 2 * _GROUPS - 3 * self.channels[0] * positions[0])
        for part in self.parts():
            n = positions[part.level]
            if part.kind == "transformer":
                total += self._saved_by_transformer(
                    part, n, size, adapters=adapters, recomputed=recomputed, input_needs_grad=input_needs_grad
                )
                input_needs_grad = True
            elif part.kind == "resnet" and recomputed:
                total += size * part.into * n
            elif part.kind == "resnet" and input_needs_grad:
                total += size * self._saved_by_resnet(part, n, frozen=frozen)
            elif input_needs_grad:
                total += size * part.into * n
        return total

    def _saved_outside_blocks(self, n: int, size: int, *, frozen: bool) -> int:
        """Return the bytes saved outside of the blocks: by the embeddings and the first and last layers."""
        first = self.channels[0]
        if frozen:
            return size * (3 * first * n + 2 * _GROUPS)
        embeddings = first + 2 * self.embedding + self.added + 2 * self.embedding + self.embedding
        return size * (_LATENT_CHANNELS * n + embeddings + 3 * first * n + 2 * _GROUPS)

    def _saved_by_resnet(self, part: Part, n: int, *, frozen: bool) -> int:
        """Count saved elements: inputs of norms, SiLUs, convolutions; norm statistics; embedding.

        torch also saves the input of a frozen convolution, although the backward pass does not need it.
        """
        return 3 * (part.into + part.out) * n + 2 * 2 * _GROUPS + (0 if frozen else self.embedding)

    def _saved_by_transformer(
        self,
        part: Part,
        n: int,
        size: int,
        *,
        adapters: Adapters | None,
        recomputed: bool,
        input_needs_grad: bool,
    ) -> int:
        c = part.out
        projections = 3 * c * n if adapters is None else c * n * input_needs_grad
        total = size * (projections + 2 * _GROUPS * input_needs_grad)
        if recomputed:
            return total + part.layers * size * c * n
        block = self.block_saves(c, n, size, adapters)
        total += part.layers * block
        return total if input_needs_grad else total - size * c * n - 2 * n * size

    def block_saves(self, c: int, n: int, size: int, adapters: Adapters | None) -> int:
        """Return the bytes that one block of a transformer saves for n positions.

        In full training 28cn elements: three norms' inputs and outputs (6), self-attention's queries, keys,
        values and result (4), cross-attention's queries and result (2), GEGLU's two halves, its GELU, and
        their product (8 + 4 + 4). With adapters the last norm's output and the product are not needed (23cn),
        but the results between the two matrices of each adapter are; each fp32 adapter saves an fp32 input.
        """
        norms, log_sum_exp = (
            3 * 2 * n,
            4 * 2 * (c // self.head_dim) * n,
        )  # of both attentions; log_sum_exp in fp32
        keys = 2 * c * TEXT_TOKENS  # keys and values of the text
        if adapters is None:
            return size * (28 * c * n + norms + keys) + log_sum_exp
        narrow = adapters.rank * (6 * n + 2 * TEXT_TOKENS)
        if adapters.in_fp32 and size < 4:
            inputs = 4 * (6 * c * n + 2 * TEXT_TOKENS * self.text_width + narrow)
            return size * (21 * c * n + norms + keys) + inputs + log_sum_exp
        return size * (23 * c * n + norms + keys + narrow) + log_sum_exp

    def largest_unit_saves(self, width: int, height: int, size: int, adapters: Adapters | None) -> int:
        """Return the bytes saved by the largest resnet or block during its recomputation."""
        positions = self.positions(width, height)
        saved = []
        for part in self.parts():
            n = positions[part.level]
            if part.kind == "transformer":
                saved.append(self.block_saves(part.out, n, size, adapters))
            elif part.kind == "resnet":
                saved.append(size * self._saved_by_resnet(part, n, frozen=adapters is not None))
        return max(saved)


def conv(in_channels: int, out_channels: int, size: int = 3) -> int:
    """Count the parameters of a convolution."""
    return in_channels * out_channels * size * size + out_channels


def linear(in_features: int, out_features: int) -> int:
    """Count the parameters of a linear layer."""
    return conv(in_features, out_features, 1)


def norm(c: int) -> int:
    """Count the parameters of a norm: scales and shifts."""
    return 2 * c


def resnet(in_channels: int, out_channels: int) -> int:
    """Count the parameters of a residual block without its time embedding's layer."""
    shortcut = conv(in_channels, out_channels, 1) if in_channels != out_channels else 0
    return (
        norm(in_channels)
        + conv(in_channels, out_channels)
        + norm(out_channels)
        + conv(out_channels, out_channels)
        + shortcut
    )
