"""Fill the tables of the documentation with the numbers of committed results.

    python docs/build/fill_docs.py

The text between `<!-- results: NAME -->` and `<!-- end -->` of a page is generated here. A test
generates it again and compares, so that no table can differ from the results.
"""

import re
from collections.abc import Callable
from pathlib import Path

import evidence_tables
import gpu_tables
import learn_tables
import quickstart_output
import qwen_tables
import reliability_tables
import result_tables
import scale_tables
import speed_tables
import train_tables
import worth_tables
from result_tables import ROOT

DOCS = ROOT / "docs"
BLOCK = re.compile(r"(<!-- results: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

BLOCKS: dict[str, Callable[[], str]] = {
    "evidence": evidence_tables.evidence,
    "learn-picture": evidence_tables.learn_picture,
    "step-costs": result_tables.step_costs,
    "break-even": result_tables.break_even,
    "tuned-table": result_tables.tuned_table,
    "bench-aa": result_tables.bench_aa,
    "bench-means": result_tables.bench_means,
    "bench-method": result_tables.bench_method,
    "bench-sets": result_tables.bench_sets,
    "bench-rounds": result_tables.bench_rounds,
    "live-before": result_tables.live_before,
    "tune-and-bench": speed_tables.tune_and_bench,
    "profile": result_tables.profile,
    "overhead": result_tables.overhead,
    "acceptance-sets": result_tables.acceptance_sets,
    "lossless": result_tables.lossless,
    "faults": result_tables.faults,
    "fault-rows": result_tables.fault_rows,
    "check-faults": result_tables.check_faults,
    "training": result_tables.training,
    "ablations": train_tables.ablations,
    "proxies": train_tables.proxies,
    "proxies-settings": train_tables.proxies_settings,
    "proxies-reading": train_tables.proxies_reading,
    "text-limit": train_tables.text_limit,
    "text-limit-reading": train_tables.text_limit_reading,
    "first-weights": train_tables.first_weights,
    "expected-lengths": train_tables.expected_lengths,
    "against-speculators": train_tables.against_speculators,
    "against-speculators-one-seed": train_tables.against_speculators_one_seed,
    "control": result_tables.control,
    "live": result_tables.live,
    "prompt-lookup": result_tables.prompt_lookup,
    "live-useless": result_tables.live_useless,
    "reliability": reliability_tables.classes,
    "reliability-commands": reliability_tables.commands,
    "learn-gate": learn_tables.gate,
    "learn-states": learn_tables.states,
    "learn-states-compared": learn_tables.states_compared,
    "learn-states-cost": learn_tables.states_cost,
    "learn-drift": learn_tables.drift,
    "learn-gate-cycles": learn_tables.gate_cycles,
    "learn-gate-power": learn_tables.gate_power,
    "swaps": learn_tables.swaps,
    "swap-size": learn_tables.swap_size,
    "chaos-run": learn_tables.chaos_run,
    "chaos": learn_tables.chaos,
    "adversary": learn_tables.adversary,
    "capture": learn_tables.capture,
    "bytes-per-token": scale_tables.bytes_per_token,
    "seconds-per-million": scale_tables.seconds_per_million,
    "large-drafter": scale_tables.large_drafter,
    "training-sizes": scale_tables.training_sizes,
    "training-layouts": scale_tables.training_layouts,
    "fleet": scale_tables.fleet,
    "worth-devices": worth_tables.devices,
    "worth-targets": worth_tables.targets,
    "worth-acceptance": worth_tables.acceptance,
    "worth-break-even": worth_tables.break_even,
    "worth-speed-up": worth_tables.speed_up,
    "worth-measured": worth_tables.measured,
    "gpu-plain": gpu_tables.plain,
    "gpu-differences": gpu_tables.differences,
    "gpu-gaps": gpu_tables.gaps,
    "gpu-dispatch": gpu_tables.dispatch,
    "qwen-bench": qwen_tables.bench,
    "qwen-bench-rounds": qwen_tables.bench_rounds,
    "qwen-profile": qwen_tables.profile,
    "qwen-selection": qwen_tables.selection,
    "qwen-lengths": qwen_tables.lengths,
    "qwen-tuned": qwen_tables.tuned,
    "qwen-acceptance": qwen_tables.acceptance,
    "qwen-training": qwen_tables.training,
    "qwen-plan": qwen_tables.plan,
    "quickstart-check": quickstart_output.check,
    "quickstart-tune": quickstart_output.tune,
    "quickstart-bench": quickstart_output.bench,
    "quickstart-plan": quickstart_output.plan,
    "quickstart-serve": quickstart_output.serve,
    "quickstart-times": quickstart_output.times,
}


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def filled(path: Path, text: str) -> str:
    """The text of a page with its generated parts; `{root}` in links leads to the repository."""
    root = "../" * (len(path.relative_to(ROOT).parts) - 1)

    def block(found: re.Match[str]) -> str:
        return f"{found[1]}\n{BLOCKS[found[2]]().replace('{root}', root)}\n\n{found[3]}"

    return BLOCK.sub(block, text)


def main() -> None:
    for path in pages():
        before = path.read_text()
        after = filled(path, before)
        if after != before:
            path.write_text(after)
            print(f"filled {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
