"""A GGUF file's tokenizer as the files that transformers reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from common.errors import ModelError


def save_tokenizer(path: Path, metadata: Mapping[str, Any], context_length: int, folder: Path) -> None:
    """Let transformers rebuild the tokenizer, with its chat template, and save it.

    Raises:
        ModelError: the file's vocabulary is of a kind that transformers cannot rebuild.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    except (ValueError, LookupError, TypeError, OSError) as error:
        raise ModelError(f"{path}: its tokenizer cannot be read ({error})") from error
    if metadata.get("tokenizer.ggml.pre") == "smollm":
        # transformers knows no split of this name and takes GPT-2's.  SmolLM's cuts out every digit first,
        # which changes what the spaces in front of a number become.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    tokenizer.model_max_length = context_length
    tokenizer.save_pretrained(folder)
