"""The checks of a self-test: each judges what was observed on a server, and returns one row."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from leadout.check.parity import LOGITS, MIN_EQUAL_SHARE, Reference
from leadout.checkpoints import load_drafter
from leadout.engine.capture_store import segment_paths
from leadout.engine.inspection import DraftStep, WorkerFacts
from leadout.evaluate.target_weights import TargetFiles, load_target_weights
from leadout.selftest.result import Check, failed, not_applicable, passed
from leadout.shards import read_shard
from leadout.stats import paired_ratio

DRAFT_CLASS, ASYNC, GRAPHS = "draft class", "async scheduling", "full CUDA graphs"
DRAFTS, SWAP, CAPTURE, METRICS = "drafts", "swap", "capture", "metrics"
OVERHEAD = "overhead of "

LEADOUT_CLASS = "leadout.engine.draft_model.LeadoutDFlashForCausalLM"
# Names in `/metrics`, by the part that provides them.
METRIC_NAMES = {
    "draft class": ("leadout:acceptance_length", "leadout:acceptance_rate"),
    "live": ("leadout:draft_length", "leadout:skipped_drafts", "leadout:copied_drafts"),
    "capture": ("leadout:captured_requests_total",),
}
MAX_LOST_GRAPHS = 0.05  # of the steps
MIN_DRAFTS = 8  # fewer prove nothing
MAX_OVERHEAD = 0.05
# An interval that reaches below this does not tell whether a part is slow.
MIN_CERTAIN_RATIO = 0.90

# A row of the table that vLLM logs with --cudagraph-metrics: tokens, padded tokens, paddings, the
# kind of graph, and the number of steps.
_GRAPH_ROW = re.compile(r"\|\s*\d+\s*\|\s*\d+\s*\|\s*\d+\s*\|\s*(\w+)\s*\|\s*(\d+)\s*\|")


EXPECTED = {
    DRAFT_CLASS: "Leadout's class on every worker",
    ASYNC: "on where vLLM has it on",
    GRAPHS: f"with --live at most {MAX_LOST_GRAPHS:.0%} fewer steps than stock vLLM",
    DRAFTS: f"at least {MIN_EQUAL_SHARE:.0%} equal to the reference's",
    SWAP: "to another version and back under load, with the drafts of each version",
    CAPTURE: "every finished request on the disk",
    METRICS: "Leadout's names in /metrics",
}


def expected_of(name: str) -> str:
    return EXPECTED.get(name, f"at least {1 - MAX_OVERHEAD:.2f} times the speed of stock vLLM")


def check_draft_class(workers: Sequence[WorkerFacts]) -> Check:
    found = sorted({str(each.draft_class) for each in workers})
    if found == [LEADOUT_CLASS]:
        return passed(DRAFT_CLASS, expected_of(DRAFT_CLASS), f"on {len(workers)} of {len(workers)}")
    return failed(
        DRAFT_CLASS,
        expected_of(DRAFT_CLASS),
        ", ".join(found) or "no worker answered",
        "Look for a line of Leadout in the server's log: a vLLM that is not supported, a "
        "VLLM_PLUGINS without leadout or LEADOUT_PLUGIN=0 leave vLLM's own class in use.",
    )


def check_async(workers: Sequence[WorkerFacts], in_stock: bool) -> Check:
    """`in_stock`: what vLLM resolves for these flags without Leadout."""
    if not in_stock:
        reason = "vLLM itself has it off with these flags on this platform"
        return not_applicable(ASYNC, expected_of(ASYNC), reason)
    if workers and all(each.config.async_scheduling for each in workers):
        return passed(ASYNC, expected_of(ASYNC), "on")
    return failed(
        ASYNC,
        expected_of(ASYNC),
        "off",
        "vLLM has it on with these flags, so that something of Leadout's switches it off: report "
        "this result.",
    )


def graph_steps(log: str) -> dict[str, int]:
    """Steps by the kind of graph that they ran in, from the log of a server."""
    found: Counter[str] = Counter()
    for mode, count in _GRAPH_ROW.findall(log):
        found[mode] += int(count)
    return dict(found)


def check_graphs(mode: str, stock: Mapping[str, int] | None, live: Mapping[str, int]) -> Check:
    """`mode` is vLLM's resolved cudagraph_mode; the others are steps by kind of graph."""
    if "FULL" not in mode:
        reason = f"vLLM has resolved cudagraph_mode {mode}, which has no full graphs"
        return not_applicable(GRAPHS, expected_of(GRAPHS), reason)
    if not stock or not live:
        which = "with Leadout" if stock else "stock"
        reason = f"the log of the {which} server has no statistics of CUDA graphs"
        return not_applicable(GRAPHS, expected_of(GRAPHS), reason)
    shares = [each.get("FULL", 0) / sum(each.values()) for each in (stock, live)]
    measured = f"{shares[1]:.0%} of the steps with --live, {shares[0]:.0%} in stock vLLM"
    numbers = {"stock": shares[0], "live": shares[1]}
    if shares[1] >= shares[0] - MAX_LOST_GRAPHS:
        return passed(GRAPHS, expected_of(GRAPHS), measured, **numbers)
    return failed(
        GRAPHS,
        expected_of(GRAPHS),
        measured,
        "Serve with --tuned instead of --live, and report this result.",
        **numbers,
    )


@dataclass(frozen=True, slots=True)
class EqualDrafts:
    equal: int
    drafts: int

    @property
    def share(self) -> float:
        return self.equal / max(self.drafts, 1)

    @property
    def is_enough(self) -> bool:
        return self.drafts >= MIN_DRAFTS

    def __str__(self) -> str:
        return f"{self.equal} of {self.drafts} drafts equal"


def compare_drafts(
    texts: Sequence[Sequence[DraftStep]], drafter: Path, target: Path, dtype: str
) -> EqualDrafts:
    """The engine's drafts, one list of steps for each text, against those of the reference.

    The reference gets the target's states from the engine, so that only the drafter is compared,
    and a target of any size needs no more than its embedding and its head.
    """
    precision: torch.dtype = getattr(torch, dtype)
    model = load_drafter(drafter, precision)
    weights = load_target_weights(TargetFiles(target), precision, torch.device("cpu"))
    equal = drafts = 0
    for steps in texts:
        if not steps:
            continue
        length = max(int(step.positions[-1]) for step in steps) + 1
        states = torch.zeros(length, steps[0].states.shape[1], dtype=precision)
        is_known = torch.zeros(length, dtype=torch.bool)
        for step in steps:
            states[step.positions] = step.states.to(precision)
            is_known[step.positions] = True
        reference = Reference(model, weights, states)
        for step in steps:
            anchor, count = int(step.positions[-1]) + 1, len(step.drafts)
            if not count or not bool(is_known[:anchor].all()):  # a prefix came from the cache
                continue
            logits = reference.block(anchor, int(step.anchor), count)[LOGITS]
            own = model.to_target_ids(logits.argmax(dim=-1))
            equal += int((own == step.drafts).sum())
            drafts += count
    return EqualDrafts(equal, drafts)


def check_drafts(found: EqualDrafts) -> Check:
    numbers = {"equal": found.equal, "drafts": found.drafts}
    if not found.is_enough:
        return failed(
            DRAFTS,
            expected_of(DRAFTS),
            f"only {found.drafts} drafts were recorded",
            "Look for errors in the server's log, and report this result.",
            **numbers,
        )
    if found.share >= MIN_EQUAL_SHARE:
        return passed(DRAFTS, expected_of(DRAFTS), str(found), **numbers)
    return failed(
        DRAFTS,
        expected_of(DRAFTS),
        str(found),
        "Run `leadout check TARGET DRAFTER` to find the first tensor that differs, and report both "
        "results.",
        **numbers,
    )


@dataclass(frozen=True, slots=True)
class SwapSeen:
    """One swap under load, as seen from outside."""

    version: int  # that was asked for
    served: int  # that the server then named
    fingerprint: str
    expected_fingerprint: str
    pause_seconds: float
    tokens_after: int  # that the load received after the swap
    drafts: EqualDrafts  # against the reference of the version that was asked for


def check_swap(swaps: Sequence[SwapSeen]) -> Check:
    problems = [text for each in swaps if (text := _swap_problem(each)) is not None]
    if len(swaps) < 2:
        problems.append(f"{len(swaps)} of 2 swaps were made")
    numbers = {
        f"pause_seconds_{place}": each.pause_seconds for place, each in enumerate(swaps, start=1)
    }
    if problems:
        return failed(
            SWAP,
            expected_of(SWAP),
            "; ".join(problems),
            "Do not serve with --registry on this machine, and report this result.",
            **numbers,
        )
    pauses = " and ".join(f"{1000 * each.pause_seconds:.1f}" for each in swaps)
    shares = " and ".join(f"{each.drafts.share:.0%}" for each in swaps)
    measured = f"pauses of {pauses} ms; {shares} of the drafts equal"
    return passed(SWAP, expected_of(SWAP), measured, **numbers)


def _swap_problem(seen: SwapSeen) -> str | None:
    if seen.served != seen.version or seen.fingerprint != seen.expected_fingerprint:
        return f"the server names version {seen.served} after a swap to {seen.version}"
    if not seen.tokens_after:
        return f"no request got a token after the swap to {seen.version}"
    if not seen.drafts.is_enough or seen.drafts.share < MIN_EQUAL_SHARE:
        return f"after the swap to {seen.version}, {seen.drafts} to its reference"
    return None


def check_capture(folder: Path, requests: Collection[tuple[int, int]]) -> Check:
    """`requests`: tokens of the prompt and of the response of each request that must be there."""
    paths = segment_paths(folder) if folder.is_dir() else []
    samples = [sample for path in paths for _, sample in read_shard(path)]
    left = Counter(requests) - Counter(
        (len(sample.prompt), len(sample.response)) for sample in samples
    )
    missing = left.total()
    numbers = {"captured": len(samples), "missing": missing}
    if not missing:
        measured = f"{len(samples)} requests, none missing"
        return passed(CAPTURE, expected_of(CAPTURE), measured, **numbers)
    return failed(
        CAPTURE,
        expected_of(CAPTURE),
        f"{missing} of {len(requests)} requests are missing",
        "Look for `capture` in the server's log, and for leadout:capture_dropped_requests in its "
        "/metrics.",
        **numbers,
    )


def check_metrics(text: str, parts: Collection[str]) -> Check:
    """`text` is that of `/metrics`; `parts` are those that the server has switched on."""
    names = [name for part, names in METRIC_NAMES.items() if part in parts for name in names]
    present = {re.split(r"[{ ]", line, maxsplit=1)[0] for line in text.splitlines()}
    missing = [name for name in names if name not in present]
    if not missing:
        return passed(METRICS, expected_of(METRICS), f"{len(names)} of {len(names)} names")
    return failed(
        METRICS,
        expected_of(METRICS),
        f"missing: {', '.join(missing)}",
        "Check that VLLM_PLUGINS, if it is set, names leadout, and look for `metrics` in the "
        "server's log.",
    )


def no_common_metrics(api_servers: int) -> Check:
    reason = f"with {api_servers} API servers /metrics has vLLM's own counters only"
    return not_applicable(METRICS, expected_of(METRICS), reason)


def check_overhead(part: str, ratios: Sequence[float]) -> Check:
    """`ratios`: tokens per second over those of stock vLLM, by window."""
    name = OVERHEAD + part
    ratio = paired_ratio([ratios])
    if ratio.low is None or ratio.high is None:
        reason = f"{len(ratios)} windows are too few for an interval"
        return not_applicable(name, expected_of(name), reason, ratio=ratio.value)
    numbers = {"ratio": ratio.value, "low": ratio.low, "high": ratio.high}
    measured = f"{ratio} times its speed"
    if ratio.high < 1 - MAX_OVERHEAD:
        return failed(
            name,
            expected_of(name),
            measured,
            "Repeat the test on an otherwise idle machine. If the result stays, measure more with "
            "`leadout bench`, and report this result.",
            **numbers,
        )
    if ratio.low < MIN_CERTAIN_RATIO:
        reason = f"{measured}, an interval too wide to tell"
        return not_applicable(name, expected_of(name), reason, **numbers)
    return passed(name, expected_of(name), measured, **numbers)
