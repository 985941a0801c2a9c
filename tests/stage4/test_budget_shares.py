"""Who is behind a long prompt still gets a token per step, wherever the prompt stands."""

from __future__ import annotations

from desk import Desk


def test_a_prompt_of_better_rank_leaves_a_token_to_everyone_behind():
    """Under "priority" a long prompt that came later runs first, in chunks, and stops nobody's decode."""
    desk = Desk(policy="priority", max_num_seqs=4, max_num_batched_tokens=8)
    desk.add("a", 2, answer=9, priority=5), desk.add("b", 2, answer=9, priority=5)
    assert desk.step() == {"a": 2, "b": 2}
    desk.add("P", 20, answer=1, priority=0)
    shares = [{"P": 6, "a": 1, "b": 1}] * 3 + [{"P": 2, "a": 1, "b": 1}]
    assert [desk.step() for _ in range(4)] == shares
