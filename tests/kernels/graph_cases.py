"""Where and with what `test_graphs.py` tries decode steps as graphs: engines with and without, and a crowd for them.

On the host it is the real thing.  For CUDA graphs, without a GPU, `support/tape.py` stands in, and the reference
kernel, taught to pass over rows that stand for no token, for the Triton kernel; in the interpreter's session it is
the Triton kernel itself.  With a GPU that is real too.
"""

from __future__ import annotations

import random

import pytest
import torch
from support.engines import build
from support.interpreter import INTERPRETED, needs_gpu
from support.tape import TapeRecorder

from common.batch import ForwardBatch
from common.graphs import DecodeGraphs, bucket_sizes
from common.model.config import ModelConfig
from common.model.decoder import Decoder
from common.model.zoo import tiny_config, tiny_weights
from common.protocol import Engine, Request
from common.sampling_params import SamplingParams
from common.sequence import Sequence
from stage3_paged.kernels import reference

PLACES = {
    "host": ("cpu", torch.float32, "cpu", 0.0),
    "cpu": ("cpu", torch.float64, "reference", 1e-12),
    "interpreter": ("cpu", torch.float16, "triton", 3e-2),
    "gpu": ("cuda", torch.float32, "triton", 1e-4),
}
"""Device, dtype, kernel, and how far logits of about 1 may part: a product of more rows rounds differently."""

place = pytest.mark.parametrize(
    "place", ["interpreter"] if INTERPRETED else ["host", "cpu", pytest.param("gpu", marks=needs_gpu)]
)
FAMILIES = {"llama": {}, "mistral": {"sliding_window": 5}, "qwen2": {}, "qwen3": {"num_key_value_heads": 1}}


class PassesOver:
    """`reference` for decodes whose rows may stand for no token (slot -1, context 0)."""

    gather = staticmethod(reference.gather)

    @staticmethod
    def store_kv(k, v, k_cache, v_cache, slots):
        kept = slots >= 0
        reference.store_kv(k[kept], v[kept], k_cache, v_cache, slots[kept])

    @staticmethod
    def paged_attention(q, k_cache, v_cache, tables, query_start, seq_lens, scale, **rest):
        if rest["context_lens"]:
            return reference.paged_attention(
                q, k_cache, v_cache, tables, query_start, seq_lens, scale, **rest
            )
        live, out = seq_lens > 0, torch.zeros(q.shape, dtype=q.dtype)
        starts = query_start[: int(live.sum()) + 1]
        out[live] = reference.paged_attention(
            q[live], k_cache, v_cache, tables[live], starts, seq_lens[live], scale, rest["window"]
        )
        return out


def decoder(place: str, family: str) -> Decoder:
    """A tiny model where the test runs."""
    device, dtype = PLACES[place][:2]
    config = ModelConfig.from_hf(tiny_config(family, **FAMILIES[family]))
    return Decoder.from_tensors(config, tiny_weights(config).__getitem__, dtype, device)


def with_graphs(place: str, stage: str, model: Decoder, **options: object) -> Engine:
    """A stage's engine that captures its decode steps."""
    engine = build(stage, model, kernel=PLACES[place][2], **options)
    if place in ("host", "gpu"):
        assert engine.executor.graphs is not None
        return engine
    assert engine.executor.graphs is None, "no GPU was there"
    recorder = TapeRecorder()
    kernel = PassesOver if place == "cpu" else engine.kv.kernel
    engine.kv.kernel = recorder.launched(kernel)
    buckets = bucket_sizes(engine.config.max_num_seqs)
    engine.executor.graphs = DecodeGraphs(model, engine.kv, engine.config, recorder, buckets)
    return engine


def plain(place: str, stage: str, model: Decoder, **options: object) -> Engine:
    """The same without."""
    engine = build(stage, model, kernel=PLACES[place][2], enforce_eager=True, **options)
    assert engine.executor.graphs is None
    return engine


class Crowd:
    """Sequences of random lengths in a paged cache with random K/V, NaN wherever nobody has written."""

    def __init__(self, engine: Engine, size: int, seed: int = 0) -> None:
        self.kv, self.rng = engine.kv, random.Random(seed)
        self.seqs = [Sequence(Request(str(i), (1,), SamplingParams())) for i in range(size)]
        for seq in self.seqs:
            length = self.rng.randint(1, 40)
            seq.token_ids = [self.rng.randrange(300) for _ in range(length)]
            seq.num_computed_tokens = length - 1
            self.kv.blocks.allocate(seq, length)
        self.rng.shuffle(self.seqs)
        generator = torch.Generator().manual_seed(seed)
        for cache in self.caches:
            cache.copy_(torch.randn(cache.shape, generator=generator))

    @property
    def caches(self) -> list[torch.Tensor]:
        return [cache for layer in self.kv.layers for cache in layer]

    def batch(self, count: int) -> ForwardBatch:
        """The next token of some of them, on the host."""
        scheduled = [(seq, 1) for seq in self.rng.sample(self.seqs, count)]
        for seq, _ in scheduled:
            assert self.kv.blocks.allocate(seq, len(seq.token_ids)) is not None
        batch = ForwardBatch.pack(scheduled)
        self.kv.prepare(batch, scheduled)
        for seq, _ in scheduled:
            seq.num_computed_tokens += 1
            seq.token_ids.append(self.rng.randrange(300))
        return batch
