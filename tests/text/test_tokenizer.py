"""The tokenizer wrapper against transformers, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from common.errors import InvalidValue, ModelError
from common.tokenizer import Tokenizer, _byte_alphabet

HELLO = [{"role": "user", "content": "AB"}]


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_encode_equals_transformers(any_tokenizer: Tokenizer, text: str) -> None:
    assert any_tokenizer.encode(text) == any_tokenizer.hf.encode(text)


def test_the_byte_alphabet_is_the_published_one() -> None:
    assert _byte_alphabet() == {char: byte for byte, char in bytes_to_unicode().items()}


@pytest.mark.parametrize("skip", [True, False])
def test_ids_beyond_the_vocabulary_are_no_text(pairs: Tokenizer, skip: bool) -> None:
    """Row B82: a padded id can be drawn from logits that are wider than the vocabulary."""
    ids = pairs.encode("AB")
    assert pairs.decode([len(pairs), *ids, len(pairs) + 57], skip) == "AB"
    assert pairs.convert_ids_to_tokens([len(pairs)]) == [None]


def test_decode_leaves_spaces_alone(byte_level: Tokenizer) -> None:
    """No clean-up: " ," and " n't" stay as the model wrote them."""
    text = "a , b . do n't  c"
    assert byte_level.decode(byte_level.encode(text)) == text


def test_special_ids(pairs: Tokenizer, byte_level: Tokenizer) -> None:
    assert pairs.eos_token_id == 0
    assert byte_level.special_ids == {0, 1, 2}
    tool = byte_level.hf.convert_tokens_to_ids("<tool>")
    assert byte_level.decode([0, tool, 1]) == "<tool>"  # added, but not special


def test_a_saved_truncation_is_not_used(pairs: Tokenizer) -> None:
    backend = Backend.from_str(pairs.hf.backend_tokenizer.to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    again = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert again.encode("ABCDEFG") == pairs.encode("ABCDEFG")


def test_chat_template(pairs: Tokenizer) -> None:
    asked = pairs.apply_chat_template(HELLO)
    assert pairs.decode(asked, skip_special_tokens=False) == "<|start|>user\nAB<|end|>\n<|start|>assistant\n"
    assert asked[0] == 1  # the marker is one special token
    going_on = [*HELLO, {"role": "assistant", "content": "CD"}]
    ids = pairs.apply_chat_template(going_on, add_generation_prompt=False, continue_final_message=True)
    assert pairs.decode(ids, skip_special_tokens=False).endswith("assistant\nCD")


def test_a_chat_template_writes_its_own_special_tokens(pairs: Tokenizer) -> None:
    """A tokenizer that puts one before every text must not put a second one before a conversation."""
    backend = Backend.from_str(pairs.hf.backend_tokenizer.to_str())
    backend.post_processor = TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 1)])
    bos = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=pairs.hf.chat_template))
    assert bos.encode("AB") == [1, *pairs.encode("AB")]
    assert bos.encode("AB", add_special_tokens=False) == pairs.encode("AB")
    assert bos.apply_chat_template(HELLO) == pairs.apply_chat_template(HELLO)


def test_no_chat_template(byte_level: Tokenizer) -> None:
    """Row B85: a plain reason, no made-up format; plain text and a template that is given both work."""
    assert not byte_level.has_chat_template
    with pytest.raises(InvalidValue, match=r"chat_template: got None, .*tokenizer has none") as error:
        byte_level.apply_chat_template(HELLO)
    assert "\n" not in str(error.value)
    assert byte_level.encode("the cat")
    given_ids = byte_level.apply_chat_template(HELLO, chat_template="{{ messages[0].content }}!")
    assert byte_level.decode(given_ids) == "AB!"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ({"role": "user", "content": "x"}, "messages"),
        (["hello"], r"messages\[0\]"),
        ([*HELLO, {"content": "x"}], r"messages\[1\]\.role"),
        ([{"role": 3, "content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user"}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content"),
    ],
)
def test_malformed_messages(pairs: Tokenizer, messages: object, field: str) -> None:
    with pytest.raises(InvalidValue, match=f"^{field}: got"):
        pairs.apply_chat_template(messages)  # type: ignore[arg-type]


@pytest.mark.parametrize("template", ["{{ raise_exception('roles must alternate') }}", "{% if %}"])
def test_what_the_template_refuses(pairs: Tokenizer, template: str) -> None:
    with pytest.raises(InvalidValue, match=r"^messages: got .*(roles must alternate|Expected an expression)"):
        pairs.apply_chat_template(HELLO, chat_template=template)


def test_a_final_message_cannot_be_continued_and_followed(pairs: Tokenizer) -> None:
    with pytest.raises(InvalidValue, match="continue_final_message"):
        pairs.apply_chat_template(HELLO, continue_final_message=True)


def test_bad_words_with_and_without_a_space(byte_level: Tokenizer, pairs: Tokenizer) -> None:
    the, space_the = byte_level.encode("the"), byte_level.encode(" the")
    assert the != space_the
    assert byte_level.bad_words_token_ids(["the", " the"]) == (tuple(the), tuple(space_the))
    assert pairs.bad_words_token_ids([]) == ()
    with pytest.raises(InvalidValue, match="bad_words"):
        Tokenizer.bad_words_token_ids(_empty_tokenizer(), ["x"])


@pytest.mark.parametrize("text", [5, None, ["a"], "\ud800"])
def test_encode_refuses_what_is_no_text(pairs: Tokenizer, text: object) -> None:
    with pytest.raises(InvalidValue, match=r"^text: got"):
        pairs.encode(text)  # type: ignore[arg-type]


def test_from_folder(pairs: Tokenizer, tmp_path: Path) -> None:
    pairs.hf.save_pretrained(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    assert again.encode("ABCDEFG世") == pairs.encode("ABCDEFG世")
    assert again.apply_chat_template(HELLO) == pairs.apply_chat_template(HELLO)
    assert (len(again), again.eos_token_id, again.special_ids) == (len(pairs), 0, pairs.special_ids)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="cannot be loaded") as error:
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{ not json")
    with pytest.raises(ModelError, match="cannot be loaded"):
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(error.value)


def test_a_decoder_whose_text_cannot_be_streamed_is_refused() -> None:
    with pytest.raises(
        ModelError, match="decoder BPEDecoder: not supported, there are ByteLevel, ByteFallback"
    ):
        _empty_tokenizer(decoders.BPEDecoder())


def _empty_tokenizer(decoder: decoders.Decoder | None = None) -> Tokenizer:
    backend = Backend(models.BPE())
    backend.decoder = decoder or decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
