"""The decoder: packed tokens in, logits out.  The one model file, the same in every stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from common.batch import ForwardBatch
from common.errors import ModelError
from common.model.config import ModelConfig
from common.model.layers import Layer, Take, add_rms_norm
from common.model.linear import Linear, PlainLinear, make_linear
from common.model.rope import cos_and_signed_sin
from common.pages import Arena, Pages
from common.protocol import KVBackend


@dataclass
class Decoder:
    """A Llama, Mistral, Qwen2 or Qwen3 (`protocol.Model`).

    Attributes:
        config: its shape.
        dtype: of weights, activations and logits.
        device: of all of them.
        embedding: `[V, H]`, in the dtype in which it was stored; rows are cast when they are looked up.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    embedding: torch.Tensor
    layers: list[Layer]
    norm: torch.Tensor  # [H]
    head: Linear  # [R, H] -> [R, V]
    cos: torch.Tensor  # [positions, 1, D]
    signed_sin: torch.Tensor  # [positions, 1, D], see `rope.rotate`

    @classmethod
    def from_tensors(
        cls,
        config: ModelConfig,
        get: Callable[[str], torch.Tensor],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> Decoder:
        """Build a decoder from a checkpoint that is read as it goes.

        Each tensor is asked for once, and its plain copy dropped once it is packed.  The head comes first: it
        is the largest, so its plain and its packed copy lie side by side while nothing else is there.

        Args:
            config: the decoder's shape.
            get: name in a transformers checkpoint -> tensor, of any float dtype.
            dtype: to compute in.
            device: to compute on.

        Raises:
            ModelError: a tensor has another shape than `config` says, or `get` does not have it.
        """
        device = torch.device(device)

        def take(name: str, *shape: int) -> torch.Tensor:
            return _checked(name, get(name).detach(), shape).to(device)

        memory = Arena()
        embedding, head = _load_ends(config, take, dtype, memory)
        positions = torch.arange(config.max_position_embeddings, device=device)  # [positions]
        inv_freq = torch.tensor(config.rope_inv_freq, dtype=torch.float32, device=device)  # [D / 2]
        cos, signed_sin = cos_and_signed_sin(positions, inv_freq, config.rope_scale, dtype)
        return cls(
            config=config,
            dtype=dtype,
            device=device,
            embedding=embedding,
            layers=[Layer.load(config, index, take, dtype, memory) for index in range(config.num_layers)],
            norm=take("model.norm.weight", config.hidden_size).to(dtype, copy=True),
            head=head,
            cos=cos,
            signed_sin=signed_sin,
        )

    def forward(self, batch: ForwardBatch, kv: KVBackend) -> torch.Tensor:
        """Logits of the rows that the batch asks for.

        Args:
            batch: T packed tokens.
            kv: remembers K/V and attends.

        Returns:
            `[R, V]` in the model's dtype, row r for `batch.logits_rows[r]`.
        """
        hidden = F.embedding(batch.input_ids, self.embedding).to(self.dtype)  # [T, H]
        cos, sin = self.cos[batch.positions], self.signed_sin[batch.positions]  # [T, 1, D] each
        delta = None  # [T, H], what the block before found, not yet added to hidden
        for layer in self.layers:
            attended = layer.attend(hidden, delta, cos, sin, batch, kv)  # [T, Hq * D]
            if layer is self.layers[-1] and batch.logits_rows.shape[0] != batch.num_tokens:
                # From here on rows no longer meet, so those without a wanted logit need not go on.
                hidden = hidden[batch.logits_rows]  # [R, H]
                attended = attended[batch.logits_rows]  # [R, Hq * D]
            delta = layer.finish(hidden, attended)
        return self.head(add_rms_norm(hidden, delta, self.norm, self.config.rms_norm_eps))  # [R, V]


def _checked(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor, if it has that shape."""
    if tensor.shape != shape:
        raise ModelError(f"{name}: got shape {list(tensor.shape)}, allowed: {list(shape)}")
    return tensor


def _load_ends(
    config: ModelConfig, take: Take, dtype: torch.dtype, memory: Pages
) -> tuple[torch.Tensor, Linear]:
    """The embedding table `[V, H]` and the head.

    A stored table of a narrower dtype stays as it is (it may be a mapped file): widening a looked-up row is
    exact, and a float32 run needs no second float32 table beside its packed head.
    """
    shape = config.vocab_size, config.hidden_size
    if not config.tie_word_embeddings:
        head = make_linear([take("lm_head.weight", *shape)], None, dtype, memory)
        embedding = take("model.embed_tokens.weight", *shape)
    else:
        embedding = take("model.embed_tokens.weight", *shape)
        head = make_linear([embedding], None, dtype, memory)
        if isinstance(head, PlainLinear):
            return head.weight, head  # tied in memory as well
    if embedding.element_size() > dtype.itemsize:
        embedding = embedding.to(dtype)
    return embedding, head
