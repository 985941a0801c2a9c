"""A desk to try the scheduler at: no model and no tensor, each step's tokens count as computed."""

from __future__ import annotations

from common.config import EngineConfig
from common.protocol import FinishReason, Request
from common.sampling_params import SamplingParams
from common.sequence import Sequence
from stage3_paged.block_tables import BlockTables
from stage4_continuous.scheduler import Scheduler


class Desk:
    """A scheduler and the world around it: what was scheduled counts as computed, a token follows."""

    def __init__(self, num_blocks: int = 64, block_size: int = 4, **options: object) -> None:
        settings: dict = {"max_model_len": 10_000, "max_num_seqs": 8, "max_num_batched_tokens": 64} | options
        config = EngineConfig(kv_bytes=num_blocks * block_size, block_size=block_size, **settings)
        self.blocks = BlockTables(config, bytes_per_token=1)
        self.scheduler = Scheduler(config, self.blocks)
        self.steps = 0
        self.max_len = self.blocks.capacity + 1

    def add(self, name: str, prompt: int, answer: int = 4, priority: int = 0) -> Sequence:
        """A request with a prompt and an answer of so many tokens."""
        params = SamplingParams(max_tokens=answer)
        seq = Sequence(Request(name, (1,) * prompt, params, priority=priority))
        self.scheduler.add(seq)
        return seq

    def step(self) -> dict[str, int]:
        """One step: name -> tokens computed."""
        scheduled = self.scheduler.schedule()
        self.steps += 1
        for seq, num_new in scheduled:
            assert num_new >= 1
            assert len(seq.block_table) == self.blocks.num_blocks(seq.num_computed_tokens + num_new)
            seq.num_computed_tokens += num_new
            if seq.num_computed_tokens == len(seq.token_ids):
                seq.token_ids.append(1)
                if seq.num_output_tokens == seq.params.max_tokens or len(seq.token_ids) >= self.max_len:
                    seq.finish_reason = FinishReason.LENGTH
        self.scheduler.release_finished()
        return {seq.request_id: num_new for seq, num_new in scheduled}

    def names(self, sequences: list[Sequence]) -> str:
        """Their names in one word."""
        return "".join(seq.request_id for seq in sequences)
