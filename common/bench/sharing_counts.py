"""What sharing saves, counted by stage 5's own scheduler and allocator without a model.

* **Conversations**: how much of the prompts is found in the cache, against all that could be found.
* **Parallel samples**: how many blocks the `n` answers of a request share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from common.batch import Scheduled
from common.bench.capacity import count_memory
from common.bench.conversations import Turns, chat_talks
from common.bench.job import Job
from common.bench.replay import Replay
from common.bench.scripted import CountingExecutor, ShapeOnly
from common.bench.workloads import TraceRequest
from common.model.config import ModelConfig
from common.protocol import Engine, Executor, SampledToken
from common.stages import find_stage

CHAT_CONTEXT = 4096  # the longest of the conversations has 3,109 tokens
PLACES, TOKENS = 1 << 12, 1 << 20  # per batch and per forward: no limit
SLOTS = 1 << 20  # memory for all that is ever computed

PAPER_SAMPLES = {"alpaca": {2: "6.09", 4: "8.53", 6: "9.79"}, "sharegpt-paper": {2: "16.2", 6: "30.5"}}
"""Memory saved by sharing, in percent: the PagedAttention paper's Fig. 15 (ShareGPT: its least and greatest)."""

OnStep = Callable[[str], None]


class BlockMeter:
    """An executor that counts, forward by forward, the blocks that tables name and those that are held.

    Attributes:
        named: blocks that all tables name, summed over forwards: what memory would hold without sharing.
        held: blocks that somebody holds, likewise.
    """

    def __init__(self, inner: Executor, engine: Engine) -> None:
        self.inner, self.engine = inner, engine
        self.named = self.held = 0

    def execute(self, scheduled: Scheduled) -> list[SampledToken | None]:
        """See `Executor.execute`."""
        self.named += sum(len(seq.block_table) for seq in self.engine.sequences())
        self.held += self.engine.kv.usage().reserved // self.engine.config.block_size
        return self.inner.execute(scheduled)

    @property
    def saved(self) -> float:
        """Share of the blocks that need not be held."""
        return 1 - self.held / self.named if self.named else 0.0


def chat_hits(
    job: Job, budgets: Iterable[int], config: ModelConfig, dtype: torch.dtype, on_step: OnStep
) -> dict[str, Any]:
    """Real conversations, sixteen at a time, in KV memories of several sizes (tokens).

    Returns:
        `ideal`: hit rate of a cache that forgets nothing, in blocks, and `ideal_by_token`, without blocks;
        `by_budget`: budget (as text) -> hit rate, evictions, preemptions, tokens computed.
    """
    per_token = config.kv_bytes_per_token(dtype)
    talks = replace(job, workload="chat", max_model_len=CHAT_CONTEXT, kernel="reference")
    conversations = chat_talks(talks.num_requests or 0, talks.seed).conversations
    shown = [(len(item.prompt_token_ids), item.output_len) for item in talks.trace(config.vocab_size)]
    by_budget = {}
    for budget in budgets:
        on_step(f"conversations, {budget:,} tokens")
        figures = count_memory(replace(talks, kv_bytes=budget * per_token), config, dtype)
        counters = figures["counters"]
        cache = counters["cache"]
        by_budget[str(budget)] = {
            "hit_rate": cache["hits"] / cache["queries"],
            "evictions": cache["evictions"],
            "preemptions": counters["preemptions"],
            "tokens_computed": counters["tokens_computed"],
        }
    return {
        "requests": len(shown),
        "prompt_tokens": sum(prompt for prompt, _ in shown),
        "ideal": ideal_hit_rate(conversations, len(shown), job.block_size),
        "ideal_by_token": ideal_hit_rate(conversations, len(shown), 1),
        "by_budget": by_budget,
    }


def ideal_hit_rate(conversations: Iterable[Turns], num_requests: int, block_size: int) -> float:
    """What a cache without bounds finds, from the counts alone: of every turn, the turn before.

    Of a prompt of p tokens and an answer of a, p + a - 1 were computed (an answer's last token, its end, never
    is), and they open the next prompt.  What fills whole blocks of them can be found.
    """
    asked = found = 0
    turns = ((known, turn) for talk in conversations for known, turn in _before(talk))
    for (known, (new, _)), _ in zip(turns, range(num_requests), strict=False):
        asked += known + new
        found += known // block_size * block_size
    return found / asked


def _before(turns: Turns) -> Iterable[tuple[int, tuple[int, int]]]:
    """Each turn with the number of tokens that were computed before it."""
    known = 0
    for new, answer in turns:
        yield known, (new, answer)
        known += new + answer - 1


def sample_savings(
    job: Job, workloads: Iterable[str], widths: Iterable[int], config: ModelConfig, dtype: torch.dtype,
    on_step: OnStep,
) -> dict[str, Any]:  # fmt: skip
    """Block saving of `n` parallel answers: counted, and by the closed form.

    Returns:
        Workload -> `shared` (s), and `by_n`: n -> `saved`, `closed_form`.
    """
    found: dict[str, Any] = {}
    for workload in workloads:
        ample = replace(job, workload=workload, kv_bytes=SLOTS * config.kv_bytes_per_token(dtype),
                        max_num_seqs=PLACES, max_num_batched_tokens=TOKENS, kernel="reference")  # fmt: skip
        trace = ample.trace(config.vocab_size)
        s = shared_share(trace, job.block_size)
        by_n = {}
        for n in widths:
            on_step(f"{n} answers each, {workload}")
            saved = count_savings(ample, trace, n, config, dtype)
            by_n[str(n)] = {"saved": saved, "closed_form": s * (1 - 1 / n)}
        found[workload] = {"shared": s, "by_n": by_n}
    return found


def count_savings(
    job: Job, trace: list[TraceRequest], n: int, config: ModelConfig, dtype: torch.dtype
) -> float:
    """Share of the blocks that `n` answers to each request save, over all forwards."""
    engine = find_stage(job.stage)[1].resolve()(ShapeOnly(config, dtype), job.engine_config())
    replay = Replay(trace, config, n)
    meter = BlockMeter(replay.script(CountingExecutor()), engine)
    engine.executor = meter
    for request in replay.first:
        engine.add_request(request)
    while engine.has_unfinished():
        engine.step()
    return meter.saved


def shared_share(trace: Iterable[TraceRequest], block_size: int) -> float:
    """s: the prompts' full blocks, which can be shared for good, as a share of all blocks, over time.

    At its forward t = 0, 1, ... a sequence of prompt p holds the blocks of p + t tokens.
    """
    full = total = 0
    for item in trace:
        prompt = len(item.prompt_token_ids)
        full += prompt // block_size * item.output_len
        total += sum(-(-(prompt + t) // block_size) for t in range(item.output_len))
    return full / total
