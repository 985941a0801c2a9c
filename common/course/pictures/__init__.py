"""Pictures of what the engines did, drawn from recorded events (`common.bench.record`) and nothing else.

Each function returns a matplotlib `Figure`; `to_svg` and `to_png` make files of it.
"""

from common.course.pictures.bars import memory_bars, throughput_bars
from common.course.pictures.beam_tree import BeamNode, beam_tree
from common.course.pictures.block_tree import TreeBlock, block_tree
from common.course.pictures.blocks import block_table, kv_growth
from common.course.pictures.copy_on_write import Moment, copy_on_write
from common.course.pictures.curves import budget_curve
from common.course.pictures.export import to_png, to_svg
from common.course.pictures.reservations import Piece, Slab, reservations
from common.course.pictures.serving import latency_curves
from common.course.pictures.steps import roofline, step_parts, token_time_curve
from common.course.pictures.timeline import memory_map, slot_timeline

__all__ = [
    "BeamNode",
    "Moment",
    "Piece",
    "Slab",
    "TreeBlock",
    "beam_tree",
    "block_table",
    "block_tree",
    "budget_curve",
    "copy_on_write",
    "kv_growth",
    "latency_curves",
    "memory_bars",
    "memory_map",
    "reservations",
    "roofline",
    "slot_timeline",
    "step_parts",
    "throughput_bars",
    "to_png",
    "to_svg",
    "token_time_curve",
]
