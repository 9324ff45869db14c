"""Load tests of a running server with vLLM's own generator, the one behind `vllm bench serve`.

Importing the generator takes ten seconds and it prints a lot, so `LoadGenerator` keeps it in a
child process that runs one load after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leadout.engine.child_process import Child, EngineError, Message, Report, answer_requests


class LoadRequest(Message):
    """Greedy chat requests with the first prompts of a file, at most `concurrency` at a time."""

    url: str
    prompts: Path  # JSONL, one {"prompt": ...} per line, used in order
    requests: int
    concurrency: int
    output_tokens: int  # of every request: the end-of-text token is ignored


class Drafting(Message):
    """The server's speculation counters over the load; steps without drafts do not count."""

    drafts: int  # blocks, one per request and step
    draft_tokens: int
    accepted: int
    by_position: list[float]  # share of blocks whose draft at this position was accepted

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / self.drafts


class LoadResult(Message):
    """What the generator measured; times in seconds, lists by request."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    tokens_per_second: float  # output tokens
    ttfts: list[float]  # time to first token
    tpots: list[float]  # time per output token after the first
    itl_median: float  # between two chunks of a stream, which hold several tokens with drafts
    itl_p99: float
    drafting: Drafting | None


class LoadGenerator(Child):
    """`with LoadGenerator(log) as generator:`, then any number of `generator.run(request)`."""

    def __init__(self, log: Path) -> None:
        # One thread: it must not take cores from the servers that it measures.
        super().__init__(
            __spec__.name, log, {"VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"}
        )

    def run(self, request: LoadRequest) -> LoadResult:
        return self.call(request, LoadResult)


def generator_flags(request: LoadRequest) -> list[str]:
    """The request as flags of `vllm bench serve`; model and tokenizer are the server's."""
    return [
        *("--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
        *("--base-url", request.url),
        *("--dataset-name", "custom", "--dataset-path", str(request.prompts)),
        *("--num-prompts", str(request.requests)),
        *("--max-concurrency", str(request.concurrency)),
        *("--custom-output-len", str(request.output_tokens)),
        *("--temperature", "0", "--ignore-eos"),
        # The server applies the chat template; the file's order is the order of the requests.
        *("--skip-chat-template", "--disable-shuffle", "--no-oversample"),
        *("--save-detailed", "--disable-tqdm"),
    ]


def result_of(raw: Mapping[str, Any], request: LoadRequest) -> LoadResult:
    """The generator's own result, refused unless every request wrote all its tokens."""
    if raw["failed"] or raw["completed"] != request.requests:
        reasons = [text.strip().splitlines()[-1] for text in raw["errors"] if text.strip()]
        raise EngineError(
            f"Only {raw['completed']} of {request.requests} requests succeeded; first error: "
            f"{reasons[0] if reasons else 'none reported'}. See the server's log; if a prompt is "
            "too long, increase --max-model-len."
        )
    written = set(raw["output_lens"])
    if written != {request.output_tokens}:
        raise EngineError(
            f"Responses have {min(written)} to {max(written)} tokens, expected "
            f"{request.output_tokens} each. Increase --max-model-len of the servers."
        )
    after_first = request.output_tokens - 1
    return LoadResult(
        requests=raw["completed"],
        prompt_tokens=raw["total_input_tokens"],
        output_tokens=raw["total_output_tokens"],
        seconds=raw["duration"],
        tokens_per_second=raw["output_throughput"],
        ttfts=raw["ttfts"],
        tpots=[
            (whole - first) / after_first
            for whole, first in zip(raw["latencies"], raw["ttfts"], strict=True)
        ],
        itl_median=raw["median_itl_ms"] / 1000,
        itl_p99=raw["p99_itl_ms"] / 1000,
        drafting=_drafting(raw),
    )


def _drafting(raw: Mapping[str, Any]) -> Drafting | None:
    if "spec_decode_num_drafts" not in raw:
        return None
    return Drafting(
        drafts=raw["spec_decode_num_drafts"],
        draft_tokens=raw["spec_decode_draft_tokens"],
        accepted=raw["spec_decode_accepted_tokens"],
        by_position=raw["spec_decode_per_position_acceptance_rates"],
    )


def _run_load(request: LoadRequest, _report: Report) -> LoadResult:
    from vllm.benchmarks.serve import add_cli_args, main

    from leadout.engine.vllm_adapter import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    try:
        raw = main(parser.parse_args(generator_flags(request)))
    except (Exception, SystemExit) as problem:  # argparse exits; the next load may still work
        raise EngineError(str(problem) or type(problem).__name__) from problem
    return result_of(raw, request)


if __name__ == "__main__":
    answer_requests(LoadRequest, _run_load)
