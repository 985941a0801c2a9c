"""From logits to tokens: `sample` chooses each sequence's next token, `gather_logprobs` scores known ones."""

from common.sampling.logprobs import gather_logprobs
from common.sampling.sampler import sample

__all__ = ["gather_logprobs", "sample"]
