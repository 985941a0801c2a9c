"""How near the frame comes to what this machine can do: one decode forward against the floor under it.

A decode forward must read every weight once, so it can never be faster than its linear layers alone.  That
floor is measured, not computed: each known way to run them on this CPU, the fastest counts.  What the forward
takes beyond it (norms, rotation, activation, Python) is the frame's own doing.  Attention is left out: it
belongs to the stages.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from common.batch import ForwardBatch, Scheduled
from common.model.config import ModelConfig
from common.model.decoder import Decoder
from common.model.linear import MIN_ROWS, can_pack
from common.model.shapes import tensor_shapes
from common.model.tiled_linear import TiledLinear, can_tile
from common.pages import Arena
from common.protocol import KVUsage, Request, Span
from common.sequence import Sequence

ROWS = (1, 4, 16, 64)
READ_BYTES = 256 << 20  # far more than any cache holds
LIMITS = {1: 1.6, 16: 1.35, 64: 1.35}
"""Rows -> how many times the floor a decode forward may take."""


@dataclass(frozen=True)
class Point:
    """One batch size: medians in seconds of runs taken in turn."""

    rows: int
    ways: dict[str, float]  # the linear layers alone, each known way
    forward: float  # the whole decode forward without attention

    @property
    def floor(self) -> float:
        """The fastest way."""
        return min(self.ways.values())

    @property
    def best_way(self) -> str:
        """Its name."""
        return min(self.ways, key=self.ways.__getitem__)

    @property
    def ratio(self) -> float:
        """Forward over floor; 1 would be a frame that costs nothing."""
        return self.forward / self.floor


@dataclass(frozen=True)
class Roofline:
    """What `measure` found."""

    dtype: str
    threads: int
    weight_bytes: int  # read by one forward: all linear layers, the head included
    read_bandwidth: float  # bytes per second
    points: tuple[Point, ...]

    def to_json(self) -> dict[str, Any]:
        """All figures, with the derived ones, in plain types (seconds, bytes)."""
        return {
            "dtype": self.dtype,
            "threads": self.threads,
            "weight_bytes": self.weight_bytes,
            "read_bytes_per_second": self.read_bandwidth,
            "points": [
                {
                    "rows": point.rows,
                    "ways_s": point.ways,
                    "floor_s": point.floor,
                    "best_way": point.best_way,
                    "forward_s": point.forward,
                    "ratio": point.ratio,
                    "limit": LIMITS.get(point.rows),
                    "forward_bytes_per_second": self.weight_bytes / point.forward,
                }
                for point in self.points
            ],
        }

    def to_markdown(self) -> str:
        """A table for people."""
        gigabytes = self.weight_bytes / 1e9
        lines = [
            f"{self.dtype}, {self.threads} threads: this machine reads {self.read_bandwidth / 1e9:.1f} GB/s, "
            f"so {gigabytes:.2f} GB of weights take {gigabytes / self.read_bandwidth * 1e12:.1f} ms.",
            "",
            "| rows | linear layers alone, ms | best way | without attention, ms | ratio | limit | GB/s |",
            "|---:|---:|---|---:|---:|---:|---:|",
        ]
        for point in self.points:
            limit = LIMITS.get(point.rows)
            lines.append(
                f"| {point.rows} | {point.floor * 1e3:.1f} | {point.best_way} | {point.forward * 1e3:.1f} "
                f"| {point.ratio:.2f} | {limit or '-'} | {gigabytes / point.forward:.1f} |"
            )
        return "\n".join(lines)


@torch.inference_mode()
def measure(
    config: ModelConfig, dtype: torch.dtype, rows: Seq[int] = ROWS, rounds: int = 15, seed: int = 0
) -> Roofline:
    """Measure bandwidth, floor and forward on the CPU with random weights.

    Everything that is compared runs in turn, round after round, so that a machine that slows down or is
    shared slows all of it; medians then.

    Args:
        config: shape of the model; needs memory for about three copies of its weights.
        dtype: of weights and activations.
        rows: batch sizes, one token of each sequence.
        rounds: runs of each.
        seed: of the weights.
    """
    weights = _random_weights(config, dtype, seed)
    decoder = Decoder.from_tensors(config, weights.__getitem__, dtype)
    matrices = _fused_matrices(config, weights)
    del weights
    block = torch.ones(READ_BYTES // 4)
    points, reads = [], []
    for count in rows:
        forward = _decode_forward(decoder, count)
        times = _interleaved(
            {**_ways(matrices, count), "forward": forward, "read": lambda: read_all(block)}, rounds
        )
        reads.append(times.pop("read"))
        points.append(Point(count, forward=times.pop("forward"), ways=times))
    return Roofline(
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        weight_bytes=sum(matrix.nbytes for matrix in matrices),
        read_bandwidth=READ_BYTES / median(reads),
        points=tuple(points),
    )


class NoAttention:
    """A KV backend that keeps nothing and answers at once: what a forward costs without it."""

    def __init__(self, answer: torch.Tensor) -> None:
        self.answer = answer  # [T, Hq * D]
        self.max_len = 1 << 30

    def prepare(self, batch: ForwardBatch, scheduled: Scheduled) -> None:
        """Nothing to fill in."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """The same `[T, Hq * D]` every time."""
        return self.answer

    def check_fits(self, request: Request) -> None:
        """Everything fits."""

    def usage(self) -> KVUsage:
        """Nothing is kept."""
        return KVUsage(capacity=0, reserved=0, used=0, bytes_per_token=0)

    def spans(self) -> list[Span]:
        """Nothing is kept."""
        return []


def read_all(block: torch.Tensor) -> torch.Tensor:
    """Read a block of memory with all threads."""
    return block.sum()


def _random_weights(config: ModelConfig, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Small random weights, so that activations neither explode nor become denormal."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=dtype) * shape[-1] ** -0.5
        for name, shape in tensor_shapes(config).items()
    }


def _fused_matrices(config: ModelConfig, weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The matrices `[out, in]` of one forward in order, QKV and gate/up as one, the head last."""
    groups = (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("self_attn.o_proj",),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.down_proj",),
    )
    matrices = [
        torch.cat([weights[f"model.layers.{layer}.{name}.weight"] for name in group])
        for layer in range(config.num_layers)
        for group in groups
    ]
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return [*matrices, weights[head]]


def _ways(matrices: list[torch.Tensor], rows: int) -> dict[str, Callable[[], None]]:
    """Every known way to run the linear layers at this many rows: plain, tiled, packed, packed with rows added."""
    dtype = matrices[0].dtype
    inputs = {width: torch.randn(rows, width).to(dtype) for width in {m.shape[1] for m in matrices}}

    def plain() -> None:
        for matrix in matrices:
            F.linear(inputs[matrix.shape[1]], matrix)

    ways = {"plain": plain}
    if all(can_tile([matrix], matrix.dtype) for matrix in matrices):
        memory = Arena()
        tiled = [TiledLinear([matrix], None, matrix.dtype, memory) for matrix in matrices]

        def in_tiles() -> None:
            for layer, matrix in zip(tiled, matrices, strict=True):
                layer(inputs[matrix.shape[1]])

        ways["tiled"] = in_tiles
    if not can_pack(dtype):
        return ways
    reorder, linear = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise.default

    def packed(layout_rows: int, input_rows: int) -> Callable[[], None]:
        layers = [
            (F.pad(inputs[m.shape[1]], (0, 0, 0, input_rows - rows)), reorder(m, layout_rows))
            for m in matrices
        ]

        def run() -> None:
            for x, weight in layers:
                linear(x, weight, None, "none", [], "")

        return run

    ways["packed"] = packed(max(rows, MIN_ROWS), rows)
    if rows < MIN_ROWS:
        ways["packed for these rows"] = packed(rows, rows)
        ways["packed, padded"] = packed(MIN_ROWS, MIN_ROWS)
    return ways


def _decode_forward(decoder: Decoder, count: int) -> Callable[[], torch.Tensor]:
    """The forward of `count` sequences in mid-answer, one new token each, without attention."""
    scheduled = []
    for index in range(count):
        seq = Sequence(Request(str(index), (0,) * 100))
        seq.num_computed_tokens = 99
        scheduled.append((seq, 1))
    batch = ForwardBatch.pack(scheduled)
    width = decoder.config.num_heads * decoder.config.head_dim
    kv = NoAttention(torch.randn(count, width).to(decoder.dtype))
    return lambda: decoder.forward(batch, kv)


def _interleaved(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each function, all run once per round after two rounds of warming up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(rounds + 2):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if round_ >= 2:
                times[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in times.items()}
