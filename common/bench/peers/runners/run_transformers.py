"""transformers' `generate`: requests in static batches of `batch`, in the order in which they came."""

from typing import Any

import torch
from peer_protocol import Request, Serve, Times, main
from transformers import AutoModelForCausalLM, StoppingCriteria


class OnStep(StoppingCriteria):
    """Counts a token for every request of the batch that still wants one; the rest of the row is thrown away."""

    def __init__(self, first: int, batch: list[Request], times: Times) -> None:
        self.first, self.batch, self.times = first, batch, times

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Never stops."""
        for row, request in enumerate(self.batch):
            number = self.first + row
            self.times.add(number, int(self.times.tokens[number] < request["output"]))
        return torch.zeros(len(input_ids), dtype=torch.bool)


def load(job: dict[str, Any]) -> Serve:
    """The model as it comes: scaled dot product attention, no compilation."""
    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"])).eval()
    model.generation_config.eos_token_id = None  # no token ends an answer
    size = job["batch"]

    def serve(requests: list[Request], times: Times) -> None:
        for first in range(0, len(requests), size):
            batch = requests[first : first + size]
            longest = max(len(request["prompt"]) for request in batch)
            ids = torch.zeros(len(batch), longest, dtype=torch.long)  # [B, T], padded on the left
            mask = torch.zeros_like(ids)
            for row, request in enumerate(batch):
                ids[row, -len(request["prompt"]) :] = torch.tensor(request["prompt"])
                mask[row, -len(request["prompt"]) :] = 1
            model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max(request["output"] for request in batch),
                pad_token_id=0,
                stopping_criteria=[OnStep(first, batch, times)],
            )

    return serve


if __name__ == "__main__":
    main(load, ["transformers", "torch"])
