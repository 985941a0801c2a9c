"""The default model's own tokenizer on real text."""

from __future__ import annotations

import pytest

from common.detokenizer import MARK, IncrementalDetokenizer
from common.model.loader import load_tokenizer
from common.tokenizer import Tokenizer

pytestmark = pytest.mark.model135


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return load_tokenizer()


@pytest.mark.parametrize("text", ["🙂", "👩‍👩‍👧", "你好，世界", "Über naïve façade", "नमस्ते", " a  b\n\n\tc"])
def test_characters_of_several_tokens(smollm: Tokenizer, text: str) -> None:
    """Row B107: joined deltas = decode of all ids, and no delta holds a part of a character."""
    ids = smollm.encode(text)
    detokenizer = IncrementalDetokenizer(smollm, smollm.encode("Say: "))
    deltas = [detokenizer.append([i]) for i in ids] + [detokenizer.flush()]
    assert "".join(deltas) == text == smollm.hf.decode(ids)
    assert not any(MARK in delta for delta in deltas)


def test_lone_continuation_bytes(smollm: Tokenizer) -> None:
    """Row B110: 50 of them, then "ok": each is sent at once, the text is the full decode."""
    [byte] = [i for i in range(len(smollm)) if smollm.token_bytes(i) == b"\x85"]
    ids = [byte] * 50 + smollm.encode("ok")
    detokenizer = IncrementalDetokenizer(smollm)
    assert [detokenizer.append([i]) for i in ids] == [MARK] * 50 + ["ok"]
    assert detokenizer.text == smollm.hf.decode(ids)


def test_chat_template(smollm: Tokenizer) -> None:
    """The markers are single special tokens and the assistant's turn is open."""
    ids = smollm.apply_chat_template([{"role": "user", "content": "Hi"}])
    text = smollm.decode(ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert ids.count(smollm.hf.convert_tokens_to_ids("<|im_start|>")) == 3
    assert smollm.eos_token_id == smollm.hf.convert_tokens_to_ids("<|im_end|>") == 2
