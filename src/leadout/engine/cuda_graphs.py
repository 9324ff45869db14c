"""Which batches vLLM's V2 runner decodes in full CUDA graphs, and the capture sizes for more.

A full graph of a decode step exists for so many tokens as there are in a capture size, rounded up
to a multiple of the tokens per request (1 + K).

- vLLM's default sizes end at 512 tokens (1024 on Blackwell): with K = 15 that is 32 requests.
- For a batch, vLLM looks at the graphs of one number of tokens only, the next that any K has. If
  none of these is of the batch's K, the batch runs in piecewise graphs, although a graph with a few
  tokens more would take it. With K = 2 and 3 in one table this happens to every other batch size.
  It never happens if each 1 + K divides the largest and the sizes are multiples of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    if not vllm_config.use_v2_model_runner or vllm_config.model_config.enforce_eager:
        return False
    mode = vllm_config.compilation_config.cudagraph_mode
    return bool(mode.decode_mode().name == "FULL" and mode.separate_routine())


def largest_full_graph(sizes: Sequence[int], drafts: int) -> int:
    """The most requests that decode in a full graph with `drafts` drafts each; 0 for none."""
    if not sizes:
        return 0
    tokens = 1 + drafts
    rounded = (_rounded_up(size, tokens) for size in sizes)
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


def sizes_for(vllm_config: Any, batches: Mapping[int, int]) -> list[int]:
    """Sizes for which all batches up to `batches` (by K) have full graphs, within a step's budget.

    vLLM's own sizes, and more for larger batches; or multiples of the longest 1 + K, if the graphs
    of some K would keep others from theirs.
    """
    longest, requests = 1 + max(batches), vllm_config.scheduler_config.max_num_seqs
    sizes = set(vllm_config.compilation_config.cudagraph_capture_sizes or [])
    budget, largest = vllm_config.scheduler_config.max_num_batched_tokens, max(sizes)
    for k, batch in batches.items():
        needed = {_rounded_up(count * (1 + k), longest) for count in _request_counts(batch)}
        sizes |= {size for size in needed if largest < size <= budget}
    completed = _completed(sizes, batches, requests)
    if completed != sizes:
        step = longest * max(1, 8 // longest)
        multiples = {1 + k for k in batches} | set(range(step, max(sizes) + 1, step))
        completed = min(completed, _completed(multiples, batches, requests), key=len)
    return sorted(completed)


def _completed(sizes: set[int], batches: Mapping[int, int], max_requests: int) -> set[int]:
    while missing := missing_sizes(sizes, batches, max_requests):
        sizes = sizes | missing
    return sizes


def missing_sizes(sizes: Iterable[int], batches: Mapping[int, int], max_requests: int) -> set[int]:
    """Further sizes for batches up to `batches` (by K) that graphs of another K keep from theirs.

    These may keep others from theirs in turn.
    """
    largest = max(sizes)
    captured: dict[int, set[int]] = {}  # by tokens of a graph, the K that it is for
    for size in sizes:
        for k in batches:
            tokens = _rounded_up(size, 1 + k)
            if tokens <= largest and tokens // (1 + k) <= max_requests:
                captured.setdefault(tokens, set()).add(k)
    missing, before = set(), 0
    for tokens, lengths in sorted(captured.items()):
        for k in batches.keys() - lengths:
            last = min(tokens // (1 + k), batches[k]) * (1 + k)
            if last > before:
                missing.add(last)
        before = tokens
    return missing


def flags_for_all_batches(parsed: Any, vllm_config: Any, ladder: Iterable[int]) -> list[str]:
    """Flags for sizes with which each K of a ladder has full graphs for all batches to its last.

    None if vLLM's own sizes are such, or if the user has chosen others.
    """
    if not has_full_decode_graphs(vllm_config) or are_sizes_chosen(parsed):
        return []
    own = sorted(vllm_config.compilation_config.cudagraph_capture_sizes)
    requests = vllm_config.scheduler_config.max_num_seqs
    sizes = sizes_for(vllm_config, {k: min(requests, largest_full_graph(own, k)) for k in ladder})
    return [] if sizes == own else [SIZES_FLAG, *map(str, sizes)]


def _rounded_up(tokens: int, multiple: int) -> int:
    return -(-tokens // multiple) * multiple


def _request_counts(largest: int) -> list[int]:
    """As vLLM spaces them: 1, 2, 4, then steps of 8, and steps of 16 from 256 on."""
    counts = [1, 2, 4, *range(8, 256, 8), *range(256, largest, 16)]
    return [count for count in counts if count < largest] + [largest]


def graph_notes(vllm_config: Any) -> list[str]:
    """Where full graphs end before the largest batch that this server may have in one step."""
    budget = vllm_config.scheduler_config.max_num_batched_tokens
    batches = {k: min(most, budget // (1 + k)) for k, most in draft_lengths(vllm_config).items()}
    return [
        f"full CUDA graphs end at {end} requests with K = {k}; larger batches decode in piecewise "
        f"graphs. {MAX_SIZE_FLAG} {(1 + k) * batch} would cover {batch}, for more memory and a "
        "longer start"
        for k, batch in batches.items()
        if (end := uncovered(vllm_config, {k: batch}).get(k)) is not None
    ]
