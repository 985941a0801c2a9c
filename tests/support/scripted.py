"""A model that says exactly what a test wants, through the real cache, batch and sampler.

The first token of a prompt is a marker that chooses the script.  The model learns the marker only by attending
to position 0 through the stage's own KV backend, so a wrong slot or table shows as a wrong text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from common.model.config import ModelConfig

VOCAB = 64
EOS = 2


def scripted_config(**changes: object) -> ModelConfig:
    """One layer, one head of 8, a vocabulary of 64 with end of sequence 2."""
    shape: dict = {
        "architecture": "Scripted",
        "vocab_size": VOCAB,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_layers": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_inv_freq": (1.0,) * 4,
        "eos_token_ids": frozenset({EOS}),
    }
    return ModelConfig(**(shape | changes))


@dataclass
class ScriptedModel:
    """After a prompt of `n` tokens beginning with marker m, says `scripts[m][0]`, `scripts[m][1]`, ...

    `scripts` maps a marker to (prompt length, tokens).  Past the script's end, and for a marker without one,
    it says token 1.  The chosen token's logit is `confidence` above all others.
    """

    scripts: dict[int, tuple[int, list[int]]]
    config: ModelConfig = field(default_factory=scripted_config)
    confidence: float = 50.0
    dtype: torch.dtype = torch.float64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    forwards: list[list[int]] = field(default_factory=list)  # query lengths of each forward

    def forward(self, batch, kv) -> torch.Tensor:
        """See `Model.forward`."""
        self.forwards.append(batch.query_lens)
        ids = batch.input_ids.to(self.dtype)  # [T]
        q = torch.full((batch.num_tokens, 1, 8), 100.0, dtype=self.dtype)  # [T, 1, D]
        # Position 0 outshines every other key by exp(100 * 100 * sqrt(8)): its weight is exactly 1.
        k = (batch.positions == 0).to(self.dtype)[:, None, None].repeat(1, 1, 8) * 100.0  # [T, 1, D]
        v = ids[:, None, None].repeat(1, 1, 8)  # [T, 1, D]
        seen = kv.attend(0, q, k, v, batch)[:, 0]  # [T], the marker of each row's sequence
        logits = torch.zeros(len(batch.logits_rows), self.config.vocab_size, dtype=self.dtype)  # [R, V]
        for row, t in enumerate(batch.logits_rows.tolist()):
            length, tokens = self.scripts.get(round(seen[t].item()), (0, []))
            said = int(batch.positions[t]) + 1 - length
            token = tokens[said] if 0 <= said < len(tokens) else 1
            logits[row, token] = self.confidence
        return logits
