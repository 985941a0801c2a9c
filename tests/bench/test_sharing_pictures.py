"""What the pictures of stage 5 show is what the engine's tables and counts say."""

from __future__ import annotations

import torch
from matplotlib.colors import to_rgba
from support.scripted import scripted_config

from common.bench.beam_picture import PROMPT, STEPS, WIDTH, record_beams
from common.bench.sharing_pictures import (
    SYSTEM,
    copy_picture,
    published,
    record_copy,
    record_tree,
    tree_picture,
)
from common.course.pictures import BeamNode, TreeBlock, beam_tree, block_tree
from common.course.pictures.beam_tree import survivors
from common.course.pictures.block_tree import OWN, SHARED, place_blocks
from common.course.pictures.palette import REQUESTS
from common.model.loader import load_model, load_tokenizer
from stage5_prefix_sharing.block_pool import CacheEvent

STAGE = "stage5_prefix_sharing"
CONFIG = scripted_config()


def chain(blocks: list[TreeBlock], last: int) -> list[TreeBlock]:
    """From the beginning of a text to this block."""
    by_number = {block.block: block for block in blocks}
    path = [by_number[last]]
    while path[0].parent is not None:
        path.insert(0, by_number[path[0].parent])
    return path


def test_tree_says_what_the_chats_say():
    """Followed from the beginning, each chat's blocks spell its text; owners are the chats that pass through."""
    blocks, ends = record_tree(STAGE, CONFIG, torch.float32)
    assert set(ends) == {"A", "B", "C"}
    texts = {
        name: " ".join(word for block in chain(blocks, end) for word in block.words)
        for name, end in ends.items()
    }
    assert texts["A"].startswith(f"{SYSTEM} What is the capital of France ? It")
    assert texts["B"].startswith(f"{SYSTEM} What is the capital of Spain ?")
    assert texts["C"].startswith(f"{SYSTEM} Why is the sky blue ? Because")
    passing = [block.block for end in ends.values() for block in chain(blocks, end)]
    assert all(block.owners == passing.count(block.block) for block in blocks)
    assert {block.owners for block in blocks} == {0, 1, 2, 3}
    ended = [block for block in blocks if not block.owners]
    assert " ".join(word for block in ended for word in block.words) == ": Tell me a joke about owls ."
    assert all(len(block.words) < 4 for block in blocks if not block.published)


def test_events_are_replayed():
    """An evicted block is in the tree no more; its number may come back under another name."""
    events = [
        CacheEvent("allocate", 0, 1), CacheEvent("allocate", 1, 1),
        CacheEvent("publish", 0, 1, b"a", b"root"), CacheEvent("publish", 1, 1, b"b", b"a"),
        CacheEvent("share", 0, 2), CacheEvent("release", 1, 0), CacheEvent("evict", 1, 0),
        CacheEvent("allocate", 1, 1), CacheEvent("publish", 1, 1, b"c", b"a"),
    ]  # fmt: skip
    assert published(events) == [(b"a", 0, None, 2), (b"c", 1, 0, 1)]
    assert published(events[:6]) == [(b"a", 0, None, 2), (b"b", 1, 0, 0)]


def test_copy_on_write_step_by_step():
    """Both tables name both blocks; then one has a copy of the second; then they hold different words."""
    computed, about, written = record_copy(STAGE, CONFIG, torch.float32)
    assert computed.tables == {"answer 0": [0, 1], "answer 1": [0, 1]}
    assert computed.owners == {0: 2, 1: 2}
    assert computed.words[1] == ("a", "color", ":")
    [(target, source)] = about.copies.items()
    assert source == 1
    assert about.owners == {0: 2, 1: 1, target: 1}
    assert about.words[target] == about.words[1] == ("a", "color", ":")
    assert {written.words[1][3], written.words[target][3]} == {"red", "green"}
    assert computed.copies == written.copies == {}


def test_tree_is_drawn_as_it_is():
    blocks = [
        TreeBlock(7, None, ("a",) * 4, 2, True), TreeBlock(3, 7, ("b",) * 4, 1, True),
        TreeBlock(5, 7, ("c",), 1, False), TreeBlock(4, 3, ("d",) * 4, 0, True),
    ]  # fmt: skip
    assert place_blocks(blocks) == {7: (0, 0.5), 3: (1, 0.0), 5: (1, 1.0), 4: (2, 0.0)}
    axes = block_tree(blocks, {"X": 5}).axes[0]
    fills = [patch.get_facecolor() for patch in axes.patches if patch.get_fill()]
    assert fills == [to_rgba(SHARED), to_rgba(OWN), to_rgba(OWN), to_rgba("none")]
    assert [patch.get_linestyle() for patch in axes.patches if not patch.get_fill()] == ["-", "-", "--", "-"]
    words = [text.get_text() for text in axes.texts]
    assert {"block 7: 2 owners", "block 3: 1 owner", "block 4: 0 owners", "a a\na a", "X"} <= set(words)


def test_copy_is_drawn_as_it_is():
    """A shared block has a stripe of each owner's colour; a free slot is hatched; the copy has an arrow."""
    figure = copy_picture(STAGE, CONFIG, torch.float32).figure
    blocks = figure.axes[1::2]
    solid = [
        [
            (patch.get_x(), patch.get_facecolor())
            for patch in axes.patches
            if patch.get_fill() and patch.get_hatch() is None
        ]
        for axes in blocks
    ]
    blue, yellow = (to_rgba(color) for color in REQUESTS[:2])
    assert solid == [
        [(0.0, blue), (0.0, yellow), (4.5, blue), (4.5, yellow)],
        [(0.0, blue), (0.0, yellow), (9.0, blue), (4.5, yellow)],
        [(0.0, blue), (0.0, yellow), (9.0, blue), (4.5, yellow)],
    ]
    assert [
        sum(patch.get_hatch() is not None and patch.get_width() > 0 for patch in axes.patches)
        for axes in blocks
    ] == [2, 2, 0]
    assert ["copy of block 1" in [text.get_text() for text in axes.texts] for axes in blocks] == [
        False,
        True,
        False,
    ]


def test_beams_grow_from_the_beams_before_them():
    """A real search of a tiny model: four beams a step, each a child of one of the four before."""
    tokenizer = load_tokenizer("tiny-llama")
    recorded = record_beams(STAGE, load_model("tiny-llama", dtype="float32"), tokenizer)
    steps = [[BeamNode(**beam) for beam in beams] for beams in recorded]
    assert len(steps) == STEPS
    assert [len(beams) for beams in steps] == [WIDTH] * STEPS
    assert {beam.parent for beam in steps[0]} == {0}
    assert all(0 <= beam.parent < WIDTH for beams in steps for beam in beams)
    computed = len(tokenizer.encode(PROMPT)) + STEPS - 1  # the newest token comes with the next forward
    assert {beam.shared + beam.own for beam in steps[-1]} == {-(-computed // 4)}
    assert all(beam.shared >= 1 for beam in steps[-1]), "the prompt's blocks are everybody's"


def test_dropped_branches_are_not_kept():
    """Beam 1 of the first step has a child, and that child has none."""
    node = BeamNode(0, "a", 1, 1)
    steps = [[node, node], [node, BeamNode(1, "b", 1, 1)], [node, node]]
    assert survivors(steps) == [{0}, {0}, {0, 1}]
    axes = beam_tree("P", steps).axes[0]
    solid = [line for line in axes.lines if line.get_linestyle() == "-"]
    assert [tuple(line.get_xdata()) for line in solid] == [(0, 1), (1, 2), (2, 3), (2, 3)]
    assert [text.get_text() for text in axes.texts if "shared" in text.get_text()] == [
        "1 shared + 1 own blocks"
    ] * 2


def test_pictures_say_in_words_what_they_show():
    assert "block 0 holds 'You are a helpful', owners: 3" in tree_picture(STAGE, CONFIG, torch.float32).alt
    assert "answer 0 [0, 1], answer 1 [0, 1]" in copy_picture(STAGE, CONFIG, torch.float32).alt
