"""The frame that all stages share: requests, sequences, the model, sampling, text, benchmarks."""

from common.beam_params import BeamSearchParams
from common.sampling_params import SamplingParams

__all__ = ["LLM", "BeamSearchParams", "SamplingParams"]


def __getattr__(name: str) -> object:
    # `LLM` brings the tokenizer stack along; `import common` alone stays light.
    if name == "LLM":
        from common.generate import LLM  # noqa: PLC0415

        return LLM
    raise AttributeError(f"module 'common' has no attribute {name!r}")
