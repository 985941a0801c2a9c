"""What the user chooses, as one frozen dataclass.  Nothing writes into it; derived sizes live elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from common.errors import InvalidValue

Reservation = Literal["max_model_len", "max_tokens"]


@dataclass(frozen=True)
class EngineConfig:
    """The knobs that all stages share.  Names are vLLM's where it has one.

    Attributes:
        kv_bytes: bytes that the KV cache may take (all layers, K and V).
        max_model_len: longest prompt + answer of one request, in tokens.
        max_num_seqs: most sequences in one batch.
        max_num_batched_tokens: most tokens that one forward computes.
        block_size: tokens per KV block (stage 3 on).
        reservation: how much stage 2 sets aside for a request: always `max_model_len`, or its own
            prompt + `max_tokens`.
        kernel: attention kernel of the paged stages.
        policy: who goes first in stage 4 on: "fcfs", or "priority" (the smaller number first).
        watermark: share of the blocks, and at least one, that stays free when a request is let in beside
            others (stage 4 on).
        enforce_eager: never record decode steps to replay them, see `common/graphs.py` (stage 3 on).
        enable_prefix_caching: keep the blocks of ended requests findable (stage 5 on).
        seed: where the generators of requests without a seed of their own start from.
    """

    kv_bytes: int
    max_model_len: int
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    reservation: Reservation = "max_tokens"
    kernel: Literal["auto", "reference", "triton", "cpu"] = "auto"
    policy: Literal["fcfs", "priority"] = "fcfs"
    watermark: float = 0.01
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for field in ("kv_bytes", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidValue(field, value, "an integer of at least 1")
        if self.block_size & (self.block_size - 1):
            raise InvalidValue("block_size", self.block_size, "a power of two")
        if not isinstance(self.watermark, (int, float)) or not 0.0 <= self.watermark < 1.0:
            raise InvalidValue("watermark", self.watermark, "a number of at least 0 and below 1")
        for field in ("enforce_eager", "enable_prefix_caching"):
            if not isinstance(getattr(self, field), bool):
                raise InvalidValue(field, getattr(self, field), "True or False")
        for field, allowed in (
            ("reservation", ("max_model_len", "max_tokens")),
            ("kernel", ("auto", "reference", "triton", "cpu")),
            ("policy", ("fcfs", "priority")),
        ):
            if getattr(self, field) not in allowed:
                raise InvalidValue(field, getattr(self, field), " or ".join(map(repr, allowed)))
