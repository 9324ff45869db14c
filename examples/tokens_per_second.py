"""Output tokens per second of a running vLLM server, one request at a time.

    python examples/tokens_per_second.py [--url http://localhost:8000] [--prompts FILE]

Each prompt of examples/prompts.jsonl is answered greedily; a first request is not counted. The
interval is a 95% bootstrap interval over the answers. Accepted tokens are vLLM's own count.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from leadout.stats import bootstrap

PROMPTS = Path(__file__).with_name("prompts.jsonl")
COUNTERS = (
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_accepted_tokens_total",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    prompts = [json.loads(line)["prompt"] for line in arguments.prompts.read_text().splitlines()]
    model = call(f"{arguments.url}/v1/models")["data"][0]["id"]

    def answer(prompt: str) -> tuple[int, float]:
        """Output tokens of an answer, and its seconds."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": arguments.max_tokens,
        }
        began = time.perf_counter()
        usage = call(f"{arguments.url}/v1/chat/completions", body)["usage"]
        return usage["completion_tokens"], time.perf_counter() - began

    answer(prompts[0])
    earlier = counters(arguments.url)
    tokens, seconds = (np.array(column) for column in zip(*map(answer, prompts), strict=True))
    drafts, accepted = (
        now - before for now, before in zip(counters(arguments.url), earlier, strict=True)
    )
    speed = bootstrap(len(tokens), lambda draw: tokens[draw].sum(-1) / seconds[draw].sum(-1))
    print(f"{speed:.1f} tokens per second, {len(prompts)} answers, one at a time")
    if drafts:
        print(f"{1 + accepted / drafts:.2f} tokens per step of the target")


def call(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)


def counters(url: str) -> list[float]:
    """Steps with drafts, and accepted drafts, since the server started."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        text = response.read().decode()
    return [
        sum(map(float, re.findall(rf"^{name}\{{.*\}} (\S+)", text, re.MULTILINE)))
        for name in COUNTERS
    ]


if __name__ == "__main__":
    main()
