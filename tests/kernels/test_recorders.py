"""What records decode steps: CPU calls and operators are done again as they were, in memory that stays.

The stand-in for CUDA graphs (`support/tape.py`) is held to the same.
"""

from __future__ import annotations

import gc

import pytest
import torch
from graph_cases import Crowd, decoder, with_graphs
from support.tape import TapeRecorder

from common.errors import InvalidValue
from common.host_graphs import HostRecorder, Pool
from common.model.layers import add_rms_norm, silu_product


@pytest.mark.parametrize("recorder", [TapeRecorder, HostRecorder])
class TestRecorders:
    """The stand-in is as strict as the real thing."""

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_replays_on_new_contents(self, recorder, mode) -> None:
        """In inference mode torch tells of whole operators, without it of those they are made of."""
        with mode():
            x, y = torch.arange(4.0), torch.zeros(4)
            replay = recorder().capture(lambda: y.copy_((x * 2).add_(1).view(2, 2).flatten()))
            assert y.tolist() == [1.0, 3.0, 5.0, 7.0]
            x.fill_(5.0)
            replay()
            assert y.tolist() == [11.0] * 4

    def test_what_python_saw_is_frozen(self, recorder) -> None:
        x, y, number = torch.ones(2), torch.zeros(2), [1.0]
        replay = recorder().capture(lambda: y.copy_(x + number[0]))
        number[0] = 7.0
        replay()
        assert y.tolist() == [2.0, 2.0]

    @pytest.mark.parametrize(
        "read",
        [
            lambda x: x[0].item(),
            lambda x: x.tolist(),
            lambda x: x.numpy(),
            lambda x: bool(x[0] > 0),
            lambda x: torch.tensor([1.0]),
        ],
    )
    @torch.inference_mode()
    def test_refuses_host_reads(self, recorder, read) -> None:
        x = torch.ones(2)
        with pytest.raises(RuntimeError, match="while capturing"):
            recorder().capture(lambda: read(x))


class TestPool:
    """Memory comes back when nobody sees it, and not before."""

    def test_a_view_keeps_its_memory(self) -> None:
        pool = Pool()
        first = pool.take(torch.empty(4, 8))
        view = first[2:, ::2]
        place = first.data_ptr()
        del first
        gc.collect()
        second = pool.take(torch.empty(4, 8))
        assert second.data_ptr() != place
        del view
        gc.collect()
        assert pool.take(torch.empty(4, 8)).data_ptr() == place

    def test_the_smallest_that_fits(self) -> None:
        pool = Pool()
        small, large = pool.take(torch.empty(10)), pool.take(torch.empty(100))
        small_at, large_at = small.data_ptr(), large.data_ptr()
        del small, large
        tensors = [pool.take(torch.empty(n, dtype=torch.bfloat16)) for n in (20, 150, 20)]
        assert [x.data_ptr() for x in tensors[:2]] == [small_at, large_at]
        assert tensors[2].data_ptr() not in (small_at, large_at)
        assert [(x.shape, x.dtype) for x in tensors[:2]] == [
            ((20,), torch.bfloat16),
            ((150,), torch.bfloat16),
        ]

    @torch.inference_mode()
    def test_layers_share_it(self) -> None:
        """Thirty steps need the memory of two, and recordings of smaller batches need none of their own."""
        recorder, weight = HostRecorder(), torch.linspace(0.5, 1.5, 48)
        x, y = torch.randn(64, 48), torch.zeros(64, 48)

        def work(rows: int) -> None:
            hidden = silu_product(torch.cat((x[:rows], x[:rows]), dim=-1))
            for _ in range(30):
                hidden = add_rms_norm(hidden, None, weight, 1e-5)
            y[:rows].copy_(hidden)

        recordings = {rows: recorder.capture(lambda rows=rows: work(rows)) for rows in (64, 8, 3)}
        assert len(recorder.pool.free) == 2
        for rows, recording in recordings.items():
            x.copy_(torch.randn(64, 48))
            work(rows)
            expected = y.clone()
            y[:rows] = 0
            recording()
            assert torch.equal(y, expected)


@torch.inference_mode()
@pytest.mark.parametrize("array", ["slot_mapping", "block_tables"])
def test_what_is_wrong_at_a_replay_is_named(array: str) -> None:
    """Slots and blocks outside the cache are an error with their place, as without a recording."""
    engine = with_graphs("host", "stage3_paged", decoder("host", "llama"))
    graphs, crowd = engine.executor.graphs, Crowd(engine, 3)
    graphs.forward(crowd.batch(3))
    batch = crowd.batch(3)
    getattr(batch, array)[1] = 10**6
    with pytest.raises(InvalidValue, match=rf"{array}\b.*: got .*1000000.*, allowed: 0 to "):
        graphs.forward(batch)
    batch = crowd.batch(3)
    torch.testing.assert_close(graphs.forward(batch), engine.model.forward(batch, crowd.kv), rtol=0, atol=0)
