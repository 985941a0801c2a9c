"""OpenVINO GenAI's continuous batching, with its prefix cache on."""

import subprocess
import sys
from typing import Any

import openvino_genai as ov
from peer_protocol import Request, Serve, Times, main

GIB = 1 << 30


def load(job: dict[str, Any]) -> Serve:
    """Weights as they are stored (16 bits, or 8 if asked for), computed in the job's dtype."""
    scheduler = ov.SchedulerConfig()
    scheduler.cache_size = max(1, job["kv_bytes"] // GIB)
    scheduler.max_num_seqs = job["max_num_seqs"]
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = True
    scheduler.dynamic_split_fuse = True
    precision = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}[job["dtype"]]
    properties = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": job["threads"],
    }
    engine = ov.ContinuousBatchingPipeline(job["model"], scheduler, "CPU", properties)

    def serve(requests: list[Request], times: Times) -> None:
        handles = {}
        for number, request in enumerate(requests):
            config = ov.GenerationConfig(max_new_tokens=request["output"], ignore_eos=True, do_sample=False)
            handles[number] = engine.add_request(number, _tensor(request["prompt"]), config)
        while engine.has_non_finished_requests():
            engine.step()
            for number, handle in handles.items():
                while handle.can_read():
                    for output in handle.read().values():
                        times.add(number, len(output.generated_ids))

    return serve


def _tensor(ids: list[int]) -> Any:
    import numpy as np  # noqa: PLC0415
    import openvino  # noqa: PLC0415

    return openvino.Tensor(np.array([ids], dtype=np.int64))  # [1, T]


def convert(model: str, folder: str, weights: str) -> None:
    """Export a model folder with optimum-intel; `weights` is fp32, fp16 or int8."""
    command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", model]
    command += ["--task", "text-generation-with-past", "--weight-format", weights, folder]
    subprocess.run(command, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        convert(*sys.argv[1:])
    else:
        main(load, ["openvino-genai", "openvino"])
