"""Decode steps as graphs: what never changes from step to step is said once.

A forward is 18 launches per layer, some 550 for SmolLM2-135M, and each costs the host several microseconds
however little there is to do.  In a decode step that is very little: a layer's weights are 7 MB in bfloat16,
which a large GPU reads in two microseconds.  So it waits for Python most of the time.  A captured graph is the
list of those launches, arguments and all; one call starts it whole.  On a CPU the list is our own
(`host_graphs.py`), and it saves a quarter of the step of a lone sequence.

What makes it possible: a decode step does the same launches every time.  Same number of rows, one query token
each, same weights, same K/V arrays; only contents differ.  So contents go into buffers that stay where they
are, and a graph reads from there:

    three sequences, bucket 4      input_ids    17 902  61   0     the fourth row stands for no token:
                                   seq_lens    412  38 109   0     it attends to nothing, so its output is zero,
                                   slots      9811 406 733  -1     it stores nothing, and its logits are cut off

On a GPU one graph per batch size would be many, so sizes are rounded up to buckets; a CPU would compute the
added rows, and records quickly, so there every size has its own.  A graph is captured when its bucket is first
needed, and that step takes longer than others: on a GPU several times, on a CPU twice.  Memory: the buffers (the
largest is the logits', most sequences x V), and the scratch space of one forward, which all graphs share since
only one runs at a time.

Graphs are not used for a batch with a prompt or a chunk of one (its shape seldom comes again, and it has
much to do), for a batch above the largest bucket (likewise), for one whose sequences read a prefix together
(stage 5, where that saves more than the launches cost), with `enforce_eager`, with the kernel "reference", which
loops on the host over lengths that a graph would freeze, or with Triton's interpreter.

vLLM captures decode steps as CUDA graphs (`v1/worker/gpu_model_runner.py`, and its option `enforce_eager`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from common.batch import ForwardBatch, staged
from common.config import EngineConfig
from common.host_graphs import HostRecorder
from common.protocol import KVBackend, Model

LARGEST_BUCKET = 256
"""Above this many sequences a step has enough to do to hide its launches."""

PADDING = {"input_ids": 0, "positions": 0, "seq_lens": 0, "slot_mapping": -1}
"""What a row that stands for no token holds."""

Replay = Callable[[], None]
"""Do the captured work once more, on what its buffers hold now."""


class Recorder(Protocol):
    """Whoever can record work on a device."""

    def capture(self, work: Callable[[], None]) -> Replay:
        """Do the work, and record what it starts.  It may be run twice for that, so it must be safe to do so."""
        ...


class CudaRecorder:
    """`torch.cuda.CUDAGraph`, all graphs in one memory pool.

    They may share it in whatever order they are replayed: one runs at a time, and each leaves its result in a
    buffer outside of the pool.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Replay:
        """Warm up, then record; see `Recorder.capture`.

        The warm-up does what may not happen while recording: it compiles kernels and sets up libraries.
        """
        with torch.cuda.device(self.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                work()
        return graph.replay


def decode_graphs(model: Model, kv: KVBackend, config: EngineConfig) -> DecodeGraphs | None:
    """Graphs for a model and its KV backend, or None where they are not used (see the head of this file)."""
    if config.enforce_eager or config.kernel == "reference":
        return None
    if model.device.type == "cuda":
        return DecodeGraphs(model, kv, config, CudaRecorder(model.device), bucket_sizes(config.max_num_seqs))
    if config.kernel == "triton":
        return None
    return DecodeGraphs(model, kv, config, HostRecorder(), all_sizes(config.max_num_seqs))


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4 and the multiples of 8 up to the most sequences of a batch, which is a bucket too."""
    largest = min(max_num_seqs, LARGEST_BUCKET)
    return sorted({size for size in (1, 2, 4, *range(8, largest, 8)) if size < largest} | {largest})


def all_sizes(max_num_seqs: int) -> list[int]:
    """Every size a bucket of its own: on a CPU a row that stands for no token costs as much as one that does."""
    return list(range(1, min(max_num_seqs, LARGEST_BUCKET) + 1))


class DecodeGraphs:
    """The buffers of a decode step, and a captured graph per bucket that computes on them.

    Args:
        model: its forward may not wait for the device, nor branch on what is there.
        kv: nor may its `attend`.  It takes rows of slot -1 and context 0 for rows that stand for no token.
        config: sizes the buffers.
        recorder: captures.
        buckets: sizes of batches that get a graph, ascending.
    """

    def __init__(
        self, model: Model, kv: KVBackend, config: EngineConfig, recorder: Recorder, buckets: list[int]
    ) -> None:
        self.model = model
        self.kv = kv
        self.recorder = recorder
        self.buckets = buckets
        rows, device = self.buckets[-1], model.device
        max_blocks = -(-config.max_model_len // config.block_size)
        self.inputs = ForwardBatch(
            input_ids=torch.zeros(rows, dtype=torch.int64, device=device),
            positions=torch.zeros(rows, dtype=torch.int64, device=device),
            query_start=torch.arange(rows + 1, dtype=torch.int32, device=device),  # one token each, always
            seq_lens=torch.zeros(rows, dtype=torch.int32, device=device),
            logits_rows=torch.arange(rows, device=device),  # and one row of logits each
            query_lens=[1] * rows,
            context_lens=[],  # a kernel that loops over them fails instead of freezing them
            slot_mapping=torch.full((rows,), -1, dtype=torch.int64, device=device),
            block_tables=torch.zeros((rows, max_blocks), dtype=torch.int32, device=device),
        )
        self.logits = torch.empty((rows, model.config.vocab_size), dtype=model.dtype, device=device)
        self.replays: dict[int, Replay] = {}

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether this is a decode step: one token and one row of logits per sequence, within the buckets.

        Not one with an attention plan: its launches are this batch's own.
        """
        num_seqs = batch.num_seqs
        all_decode = batch.query_lens == [1] * num_seqs and len(batch.logits_rows) == num_seqs
        return all_decode and num_seqs <= self.buckets[-1] and batch.attention_plan is None

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """What `Model.forward` gives for a batch that `takes` has accepted, still on the host.

        Returns:
            `[B, V]`, a view of the logits' buffer: the next forward overwrites it.
        """
        bucket = next(size for size in self.buckets if size >= batch.num_seqs)
        self._fill(batch, bucket)
        if bucket in self.replays:
            self.replays[bucket]()
        else:
            rows = self._first_rows(bucket)
            self.replays[bucket] = self.recorder.capture(lambda: self._step(rows))
        return self.logits[: batch.num_seqs]  # [B, V]

    def _fill(self, batch: ForwardBatch, bucket: int) -> None:
        """Copy a batch into the buffers, and let the rest of the bucket stand for no tokens.

        Whatever else earlier batches left there is never read: a row's context says where its table ends.
        """
        device = self.model.device
        for name, empty in PADDING.items():
            array = getattr(batch, name)  # [B]
            if bucket > batch.num_seqs:
                array = F.pad(array, (0, bucket - batch.num_seqs), value=empty)  # [bucket]
            getattr(self.inputs, name)[:bucket].copy_(staged(array, device), non_blocking=True)
        tables = batch.block_tables  # [B, most blocks of this batch]
        target = self.inputs.block_tables[: tables.shape[0], : tables.shape[1]]
        target.copy_(staged(tables, device), non_blocking=True)

    def _first_rows(self, bucket: int) -> ForwardBatch:
        """The head of the buffers as a batch of its own; the tables keep their full width, and so the grid."""
        inputs = self.inputs
        return ForwardBatch(
            input_ids=inputs.input_ids[:bucket],
            positions=inputs.positions[:bucket],
            query_start=inputs.query_start[: bucket + 1],
            seq_lens=inputs.seq_lens[:bucket],
            logits_rows=inputs.logits_rows[:bucket],
            query_lens=inputs.query_lens[:bucket],
            context_lens=[],
            slot_mapping=inputs.slot_mapping[:bucket],
            block_tables=inputs.block_tables[:bucket],
        )

    def _step(self, rows: ForwardBatch) -> None:
        """The work that is captured.  Run twice on the same contents, it stores and gives the same."""
        self.logits[: rows.num_seqs].copy_(self.model.forward(rows, self.kv))
