"""Load on a running server through vLLM's own generator, the one behind `vllm bench serve`.

Importing it takes ten seconds and it prints a lot, so it lives in a process of its own that takes
one request a line and answers with one line, for as long as its input lasts:

    python -m leadout.engine.load_test < requests.jsonl
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from leadout.errors import LeadoutError


class LoadError(LeadoutError):
    """A load that cannot be counted: requests failed, or the generator itself did."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LoadRequest(_Record):
    """So many chat requests from a file of prompts, at most `concurrency` at a time, greedy."""

    url: str
    prompts: Path  # JSONL, one {"prompt": ...} a line, taken in order
    requests: int
    concurrency: int
    output_tokens: int  # of every request: the end-of-text token is ignored


class Drafting(_Record):
    """The server's counters of speculation over the load. Steps without a draft are not in them."""

    drafts: int  # blocks, one for each request and step
    draft_tokens: int
    accepted: int
    by_position: list[float]  # share of blocks whose draft at this position stood

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / self.drafts


class LoadResult(_Record):
    """What the generator measured; times in seconds, lists by request."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    tokens_per_second: float  # output tokens
    ttfts: list[float]  # until the first token
    tpots: list[float]  # for each token after the first
    itl_median: float  # between two pieces of a stream, which hold several tokens with drafts
    itl_p99: float
    drafting: Drafting | None


class Answer(_Record):
    """What comes back for a request: a result, or why there is none."""

    result: LoadResult | None = None
    error: str | None = None


def generator_flags(request: LoadRequest) -> list[str]:
    """The same in the flags of `vllm bench serve`; model and tokenizer are the server's."""
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


def run_load(request: LoadRequest) -> LoadResult:
    """In this process, which imports vLLM's generator for it."""
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    return result_of(main(parser.parse_args(generator_flags(request))), request)


def result_of(raw: Mapping[str, Any], request: LoadRequest) -> LoadResult:
    """The generator's own result, refused unless every request wrote all its tokens."""
    if raw["failed"] or raw["completed"] != request.requests:
        reasons = [text.strip().splitlines()[-1] for text in raw["errors"] if text.strip()]
        raise LoadError(
            f"found {raw['completed']} of {request.requests} requests answered, wanted all; first "
            f"error: {reasons[0] if reasons else 'none told'}. See the server's log; a prompt that "
            "is too long needs a larger --max-model-len."
        )
    written = set(raw["output_lens"])
    if written != {request.output_tokens}:
        raise LoadError(
            f"found answers of {min(written)} to {max(written)} tokens, wanted "
            f"{request.output_tokens} each; give the servers a larger --max-model-len"
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


def main() -> None:
    """Answer requests until there are no more; what the generator prints goes to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        try:
            answer = Answer(result=run_load(LoadRequest.model_validate_json(line)))
        except (Exception, SystemExit) as problem:  # argparse exits
            answer = Answer(error=str(problem) or type(problem).__name__)
        answers.write(answer.model_dump_json() + "\n")
        answers.flush()


if __name__ == "__main__":
    main()

# vLLM's load generator in a process that is started once and used for many loads.

LOG_TAIL_LINES = 20


class LoadGenerator:
    """`with LoadGenerator(log) as generator:` then `generator.run(request)`, any number of times.

    It reads requests from a pipe that we hold, so it ends with us, however we end.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        # One thread: it must not take cores from the servers that it measures.
        quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "leadout.engine.load_test"],
                env={**os.environ, **quiet},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # a Ctrl-C is ours to handle
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate()

    def run(self, request: LoadRequest) -> LoadResult:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(request.model_dump_json() + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise LoadError(f"vLLM's load generator ended\n{self._log_tail()}")
        answer = Answer.model_validate_json(line)
        if answer.result is None:
            raise LoadError(answer.error)
        return answer.result

    def _log_tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join([f"last lines of {self._log}:", *lines[-LOG_TAIL_LINES:]])
