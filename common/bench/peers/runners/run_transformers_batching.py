"""transformers' continuous batching: its manager with a thread of its own, paged attention."""

from typing import Any

import torch
from peer_protocol import Request, Serve, Times, main
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

PAGE = 256  # tokens, its own default


def load(job: dict[str, Any]) -> Serve:
    """As many pages as the KV budget holds."""
    torch.set_num_threads(job["threads"])
    dtype = getattr(torch, job["dtype"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype, attn_implementation="sdpa").eval()
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * dtype.itemsize
    manager = model.init_continuous_batching(
        GenerationConfig(do_sample=False, eos_token_id=-1),  # no token has this id
        ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=job["kv_bytes"] // (per_token * PAGE),
            max_batch_tokens=2048,
            max_requests_per_batch=job["max_num_seqs"],
            use_cuda_graph=False,
        ),
    )
    manager.start()

    def serve(requests: list[Request], times: Times) -> None:
        names = {}
        for number, request in enumerate(requests):
            name = manager.add_request(request["prompt"], max_new_tokens=request["output"], streaming=True)
            names[name] = number
        while names:
            output = manager.get_result(timeout=1.0)
            if output is None and not manager.is_running():
                raise RuntimeError("its thread has ended")
            if output is None or output.request_id not in names:
                continue
            if output.error:
                raise RuntimeError(output.error)
            number = names[output.request_id]
            times.add(number, len(output.generated_tokens) - times.tokens[number])
            if output.is_finished():
                del names[output.request_id]

    return serve


if __name__ == "__main__":
    main(load, ["transformers", "torch"])
