"""Up to how many requests vLLM's V2 runner decodes in full CUDA graphs, and the flags for more.

A full graph of a decode step exists for so many tokens as there are in a capture size, rounded up
to a multiple of the tokens per request (1 + K). vLLM's default sizes end at 512 tokens (1024 on
Blackwell): with K = 15 that is 32 requests. Steps of more requests run in piecewise graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from leadout.control.tuned_file import Range

SIZES_FLAG, MAX_SIZE_FLAG = "--cudagraph-capture-sizes", "--max-cudagraph-capture-size"


def draft_lengths(vllm_config: Any) -> dict[int, int]:
    """The largest batch at which each K is verified; without a table, max_num_seqs."""
    sequences = vllm_config.scheduler_config.max_num_seqs
    speculation = vllm_config.speculative_config
    table = speculation.num_speculative_tokens_per_batch_size
    if not table:
        return {speculation.num_speculative_tokens: sequences}
    return largest_batches(table, sequences)


def largest_batches(table: Iterable[Range], max_batch: int) -> dict[int, int]:
    """By K: the largest batch in which the table verifies so many drafts, at most `max_batch`."""
    found: dict[int, int] = {}
    for first, last, k in table:
        if first <= max_batch:
            found[k] = max(found.get(k, 0), min(last, max_batch))
    return found


def has_full_decode_graphs(vllm_config: Any) -> bool:
    mode = vllm_config.compilation_config.cudagraph_mode
    return bool(
        vllm_config.use_v2_model_runner
        and not vllm_config.model_config.enforce_eager
        and mode.decode_mode().name == "FULL"
        and mode.separate_routine()
    )


def largest_full_graph(sizes: Sequence[int], drafts: int) -> int:
    """The most requests that decode in a full graph with `drafts` drafts each; 0 for none."""
    if not sizes:
        return 0
    tokens = 1 + drafts
    rounded = (-(-size // tokens) * tokens for size in sizes)
    return max((each // tokens for each in rounded if each <= max(sizes)), default=0)


def are_sizes_chosen(parsed: Any) -> bool:
    """Whether the user's flags, as vLLM parses them, set what is captured."""
    names = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
    compilation = parsed.compilation_config
    stated = compilation if isinstance(compilation, dict) else vars(compilation or object)
    return any(getattr(parsed, name) or stated.get(name) for name in names)


def uncovered(vllm_config: Any, batches: dict[int, int]) -> dict[int, int]:
    """By K: the requests at which full graphs end, where `batches` (by K) has more."""
    if not has_full_decode_graphs(vllm_config):
        return {}
    sizes = vllm_config.compilation_config.cudagraph_capture_sizes or []
    ends = {k: largest_full_graph(sizes, k) for k in batches}
    return {k: ends[k] for k, batch in batches.items() if ends[k] < batch}


def sizes_for(vllm_config: Any, batches: dict[int, int]) -> list[int]:
    """vLLM's capture sizes and those that `batches` (by K) need, within a step's token budget.

    A graph runs a smaller batch padded, so that not each number of requests needs its own.
    """
    sizes = set(vllm_config.compilation_config.cudagraph_capture_sizes or [])
    budget = vllm_config.scheduler_config.max_num_batched_tokens
    for k, batch in batches.items():
        needed = {requests * (1 + k) for requests in _request_counts(batch)}
        sizes |= {size for size in needed if size <= budget}
    return sorted(sizes)


def _request_counts(largest: int) -> list[int]:
    """As vLLM spaces them: 1, 2, 4, then steps of 8, and steps of 16 from 256 on."""
    counts = [1, 2, 4, *range(8, 256, 8), *range(256, largest, 16)]
    return [count for count in counts if count < largest] + [largest]


def graph_notes(vllm_config: Any) -> list[str]:
    """Where full graphs end before the largest batch that this server may have."""
    return [
        f"full CUDA graphs end at {end} requests with K = {k}; larger batches decode in piecewise "
        f"graphs. {MAX_SIZE_FLAG} {(1 + k) * batch} would cover {batch}, for more memory and a "
        "longer start"
        for k, batch in draft_lengths(vllm_config).items()
        if (end := uncovered(vllm_config, {k: batch}).get(k)) is not None
    ]
