"""A short decode in vLLM with a drafter, in a process of its own: texts and acceptance counters.

The process reads a request from its standard input and writes the result as its last line:

    python -m leadout.engine.decode < request.json
"""

from __future__ import annotations

import sys

from pydantic import BaseModel, ConfigDict

from leadout.engine.apart import DecodeError, run_apart, say_result
from leadout.engine.generate import Ask, TextEngine

__all__ = ["DecodeError", "DecodeRequest", "DecodeResult", "decode", "decode_apart"]


class DecodeRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    drafter: str | None
    draft_tokens: int  # K
    prompts: list[list[int]]
    max_tokens: int
    max_length: int
    concurrency: int = 16
    dtype: str = "auto"
    temperature: float = 0.0


class DecodeResult(BaseModel):
    """What vLLM's counters say: steps with drafts, drafts that stood, and those by position."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    answers: list[list[int]]
    steps: int
    accepted: int
    accepted_by_position: list[int]

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / max(self.steps, 1)


def decode(request: DecodeRequest) -> DecodeResult:
    """In this process; one engine a process, for the counters are the process's."""
    engine = TextEngine(
        request.target,
        max_length=request.max_length,
        max_requests=request.concurrency,
        dtype=request.dtype,
        drafter=request.drafter,
        draft_tokens=request.draft_tokens,
    )
    asks = [
        Ask(str(number), prompt, request.max_tokens, request.temperature, seed=number)
        for number, prompt in enumerate(request.prompts)
    ]
    answers = engine.answer_all(asks)
    counters = engine.counters()
    return DecodeResult(
        answers=[answer.tokens for answer in answers],
        steps=counters.get("vllm:spec_decode_num_drafts", 0),
        accepted=counters.get("vllm:spec_decode_num_accepted_tokens", 0),
        accepted_by_position=counters.get("vllm:spec_decode_num_accepted_tokens_per_pos", []),
    )


def decode_apart(request: DecodeRequest) -> DecodeResult:
    """In a process of its own."""
    return run_apart(__spec__.name, request, DecodeResult)


if __name__ == "__main__":
    wanted = DecodeRequest.model_validate_json(sys.stdin.read())
    say_result(decode(wanted))
