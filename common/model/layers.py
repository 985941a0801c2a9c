"""One transformer block over packed tokens, for every family the decoder serves.

The families differ in little: Qwen2 has a bias on QKV, Llama and Qwen3 may have one on all of attention, and
Qwen3 normalises each query and key head before it is rotated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from common.batch import ForwardBatch
from common.model import cpu_steps
from common.model.config import ModelConfig
from common.model.linear import Linear, make_linear
from common.model.rope import rotate
from common.pages import Pages
from common.protocol import KVBackend

Take = Callable[..., torch.Tensor]
"""`take(name, *shape)` is the checkpoint's tensor of that name, its shape checked, in the dtype it is stored in."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each row to a root mean square of one, then by `weight` (Zhang and Sennrich, 2019).

    In half precision the row is normalised in float32 and rounded before the product with `weight`, as
    Llama's reference does it; in float64 nothing is narrowed.

    Args:
        x: `[..., H]`.
        weight: `[H]`, or anything that broadcasts against `x`.
        eps: added to the mean square.

    Returns:
        As `x`, new memory.
    """
    return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)


def add_rms_norm(
    hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add `delta` to `hidden` in place, then `rms_norm` of the sum.

    Args:
        hidden: `[T, H]`, contiguous.
        delta: `[T, H]`, contiguous, or None for nothing.
        weight: `[H]`.
        eps: added to the mean square.

    Returns:
        `[T, H]`, new memory.
    """
    if cpu_steps.serves(hidden):
        return cpu_steps.add_rms_norm(hidden, delta, weight, eps)
    if delta is not None:
        hidden.add_(delta)
    return rms_norm(hidden, weight, eps)


def silu_product(gate_up: torch.Tensor) -> torch.Tensor:
    """The SiLU of each gate times its value: `[T, 2 * I]`, gates first, contiguous -> `[T, I]`, new memory."""
    if cpu_steps.serves(gate_up):
        return cpu_steps.silu_product(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)  # [T, I] each
    return F.silu(gate).mul_(up)


@dataclass
class Layer:
    """The weights of one block and its forward."""

    index: int
    config: ModelConfig
    attention_norm: torch.Tensor  # [H]
    qkv: Linear  # [T, H] -> [T, (Hq + 2 Hkv) * D]
    qk_norm: torch.Tensor | None  # [Hq + Hkv, D], each head's weight
    output: Linear  # [T, Hq * D] -> [T, H]
    mlp_norm: torch.Tensor  # [H]
    gate_up: Linear  # [T, H] -> [T, 2 * I]
    down: Linear  # [T, I] -> [T, H]

    @classmethod
    def load(cls, config: ModelConfig, index: int, take: Take, dtype: torch.dtype, memory: Pages) -> Layer:
        """Take the block's tensors one after the other; Q, K, V become one matrix, gate and up another."""
        hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        prefix = f"model.layers.{index}."

        def linear(parts: dict[str, int], width: int, has_bias: bool) -> Linear:
            weights = [take(f"{prefix}{name}.weight", rows, width) for name, rows in parts.items()]
            biases = [take(f"{prefix}{name}.bias", rows) for name, rows in parts.items() if has_bias]
            return make_linear(weights, torch.cat(biases).to(dtype) if biases else None, dtype, memory)

        def norm(name: str, size: int) -> torch.Tensor:
            return take(f"{prefix}{name}.weight", size).to(dtype, copy=True)

        attention = {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
        qk_norm = None
        if config.qk_norm:
            q_norm = norm("self_attn.q_norm", head_dim).expand(config.num_heads, -1)
            k_norm = norm("self_attn.k_norm", head_dim).expand(config.num_kv_heads, -1)
            qk_norm = torch.cat((q_norm, k_norm))  # [Hq + Hkv, D]
        return cls(
            index=index,
            config=config,
            attention_norm=norm("input_layernorm", hidden),
            qkv=linear(attention, hidden, config.qkv_bias),
            qk_norm=qk_norm,
            output=linear({"self_attn.o_proj": hidden}, q_size, config.output_bias),
            mlp_norm=norm("post_attention_layernorm", hidden),
            gate_up=linear({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, config.mlp_bias),
            down=linear({"mlp.down_proj": hidden}, inner, config.mlp_bias),
        )

    def attend(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        batch: ForwardBatch,
        kv: KVBackend,
    ) -> torch.Tensor:
        """The attention half, up to its output projection.

        Args:
            hidden: `[T, H]`, the sum of all that earlier blocks found but `delta`, which is added to it.
            delta: `[T, H]`, what the block before found, or None.
            cos: `[T, 1, D]`.
            signed_sin: `[T, 1, D]`.
            batch: whose tokens these are.
            kv: remembers K/V and attends.

        Returns:
            `[T, Hq * D]`.
        """
        config = self.config
        num_q, num_qk = config.num_heads, config.num_heads + config.num_kv_heads
        qkv = self.qkv(add_rms_norm(hidden, delta, self.attention_norm, config.rms_norm_eps))
        heads = qkv.view(qkv.shape[0], -1, config.head_dim)  # [T, Hq + 2 Hkv, D]
        packed = qkv
        if self.qk_norm is not None:
            packed = rms_norm(heads[:, :num_qk], self.qk_norm, config.rms_norm_eps).flatten(1)
        qk = rotate(packed, num_qk, cos, signed_sin)  # [T, Hq + Hkv, D]
        return kv.attend(self.index, qk[:, :num_q], qk[:, num_q:], heads[:, num_qk:], batch)

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of the block, each row for itself.

        Args:
            hidden: `[T, H]`; what attention found is added to it.
            attended: `[T, Hq * D]`.

        Returns:
            `[T, H]`, what the MLP found, not yet added: the next norm does that in the same pass.
        """
        normed = add_rms_norm(hidden, self.output(attended), self.mlp_norm, self.config.rms_norm_eps)
        return self.down(silu_product(self.gate_up(normed)))
