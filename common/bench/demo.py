"""`sixstage demo`: the same real chats through every stage, under one KV budget, side by side."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from common.bench.demo_prompts import PROMPTS
from common.bench.demo_report import demo_report
from common.bench.environment import environment, peak_memory_bytes
from common.bench.harness import new_console, pick_stages, progress, run_stage
from common.bench.metrics import summarise
from common.bench.parting import find_partings
from common.bench.record import Run
from common.bench.report import human_bytes, publish
from common.bench.report_events import events
from common.config import EngineConfig
from common.errors import InvalidValue
from common.model.loader import load_model, load_tokenizer
from common.protocol import Model, Request, StepOutput
from common.sampling_params import SamplingParams
from common.tokenizer import Tokenizer

DEFAULT_KV_BYTES = 24 << 20
MAX_TOKENS = 64
QUICK_PROMPTS, QUICK_MAX_TOKENS = 6, 24
MAX_MODEL_LEN = 512


def run(
    stages: Iterable[str | int] | None = None,
    model: str = "smollm2-135m",
    dtype: str = "float32",
    kv_bytes: int = DEFAULT_KV_BYTES,
    max_num_seqs: int = 16,
    kernel: Literal["auto", "reference", "triton", "cpu"] = "auto",
    json: str | Path | None = None,
    quick: bool = False,
    out: str | Path = "reports",
) -> dict[str, Any]:
    """Serve the demo's chats with each stage in turn; print and save the comparison.

    The model is loaded once and every stage gets a fresh engine over it.  Answers are greedy.  In float32
    all stages must give the same tokens; in half precision a near tie may part them, and the report says
    where and by what gap.

    Args:
        stages: names or numbers; None takes all in the registry.
        model: see `common.model.loader.resolve`; it needs a chat template.
        dtype: to compute in.
        kv_bytes: KV memory of each stage.
        max_num_seqs: places in a batch.
        kernel: attention kernel of the paged stages.
        json: write all figures to this file as well.
        quick: fewer prompts, shorter answers.
        out: folder for `demo.html`, `demo.md` and `demo.json`.

    Returns:
        What the JSON holds: environment, figures and events per stage, answers, whether they are identical, partings.

    Raises:
        SixstageError: a value or the model cannot be used, a file cannot be written.
    """
    names, console = pick_stages(stages), new_console()
    with console.status(f"loading {model} in {dtype}"):
        loaded, tokenizer = load_model(model, dtype=dtype), load_tokenizer(model)
    prompts, max_tokens = (PROMPTS[:QUICK_PROMPTS], QUICK_MAX_TOKENS) if quick else (PROMPTS, MAX_TOKENS)
    requests = make_requests(prompts, max_tokens, tokenizer, model)
    context = min(MAX_MODEL_LEN, loaded.config.max_position_embeddings)
    config = EngineConfig(kv_bytes, context, max_num_seqs=max_num_seqs, kernel=kernel)
    budget = human_bytes(kv_bytes)
    console.print(f"{len(prompts)} chats, answers of at most {max_tokens} tokens, {budget} of KV memory")
    runs = _run_all(names, loaded, config, requests, console)
    answers = {
        name: [recorded.token_ids[r.request_id, 0] for r in requests] for name, recorded in runs.items()
    }
    partings = find_partings(answers, loaded, config, requests)
    results = {
        "environment": environment(
            model=model, dtype=str(loaded.dtype).removeprefix("torch."), kernel=kernel, kv_bytes=kv_bytes,
            max_num_seqs=max_num_seqs, max_tokens=max_tokens, peak_memory_bytes=peak_memory_bytes(),
        ),
        "stages": {name: summarise(recorded) for name, recorded in runs.items()},
        "events": {name: events(recorded) for name, recorded in runs.items()},
        "identical": not partings,
        "partings": partings,
        "chats": [
            {"prompt": prompt, "answer": tokenizer.decode(tokens), "tokens": tokens}
            for prompt, tokens in zip(prompts, answers[names[0]], strict=True)
        ],
    }  # fmt: skip
    report = demo_report(results, runs)
    publish(report, console, out, "demo", json)
    return results


def make_requests(prompts: Iterable[str], max_tokens: int, tokenizer: Tokenizer, model: str) -> list[Request]:
    """The chats as greedy requests "0", "1", ...

    Raises:
        InvalidValue: the model has no chat template.
    """
    if not tokenizer.has_chat_template:
        raise InvalidValue("model", model, "a model with a chat template")
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return [
        Request(
            str(number), tuple(tokenizer.apply_chat_template([{"role": "user", "content": text}])), params
        )
        for number, text in enumerate(prompts)
    ]


def _run_all(
    names: list[str], model: Model, config: EngineConfig, requests: list[Request], console: Console
) -> dict[str, Run]:
    """One recorded run per stage, with a bar for each."""
    runs = {}
    with progress(console) as bars:
        for name in names:
            bar = bars.add_task(name, total=len(requests), note="")
            tokens = 0

            def on_step(outputs: list[StepOutput], bar: Any = bar) -> None:
                nonlocal tokens
                tokens += sum(len(output.new_token_ids) for output in outputs)
                ended = sum(output.finish_reason is not None for output in outputs)
                bars.update(bar, advance=ended, note=f"{tokens} tokens")

            runs[name] = run_stage(name, model, config, requests, on_step=on_step)
            bars.update(bar, note=f"{tokens / runs[name].seconds:.1f} tok/s")
    return runs
