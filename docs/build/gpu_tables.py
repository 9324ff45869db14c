"""Tables on faked GPUs: what vLLM resolves there, and graphs of steps; see fill_docs.py."""

from typing import Any

from result_tables import result, table

FIELDS = {
    "runner": "model runner",
    "async_scheduling": "async scheduling",
    "max_num_seqs": "sequences",
    "max_num_batched_tokens": "batched tokens",
    "max_num_scheduled_tokens": "scheduled tokens",
    "cudagraph_mode": "graph mode",
    "capture_sizes": "capture sizes",
    "full_graphs": "full graphs",
    "graph_gaps": "batch sizes without a full graph below these",
    "graphs": "captured graphs, target and drafter",
    "target_attention": "attention of the target",
    "drafter_attention": "attention of the drafter",
    "drafter_graphs": "full graphs of the drafter",
}


def plain() -> str:
    """Plain vLLM with a DFlash drafter."""
    found = result("gpu/resolution.json")
    rows = {row["gpu"]: row for row in found["rows"] if row["mode"] == "vllm, DFlash"}
    lines = [(name, *(_cell(rows[gpu][field]) for gpu in rows)) for field, name in FIELDS.items()]
    return table(("", *rows), lines)


def differences() -> str:
    """What differs from plain vLLM, once for all ways to start in which the same differs."""
    rows = [row for row in result("gpu/resolution.json")["rows"] if "compared_with" in row]
    modes: dict[str, list[str]] = {}  # by what differs
    for mode in dict.fromkeys(row["mode"] for row in rows):
        here = [row for row in rows if row["mode"] == mode]
        refused = {row["refused"].replace("\n", " ") for row in here if "refused" in row}
        said = [f"refused: {each}" for each in sorted(refused)]
        fields: dict[tuple[str, str], list[str]] = {}
        for row in here:
            for each in row.get("differs", ()):
                fields.setdefault((each["field"], each["reason"]), []).append(row["gpu"])
        for (field, reason), gpus in fields.items():
            where = "" if len(gpus) == len(here) else f" ({', '.join(gpus)})"
            said.append(f"{FIELDS[field]}{where}: {reason}")
        modes.setdefault("; ".join(said) or "nothing", []).append(f"`{mode}`")
    lines = [(", ".join(names), what) for what, names in modes.items()]
    return table(("ways to start", "differ from plain vLLM in"), lines)


def gaps() -> str:
    """How many batch sizes lack a full graph, with a table of K of plain vLLM and of Leadout."""
    rows = result("gpu/resolution.json")["rows"]
    modes = ("vllm, DFlash, a table of K", "leadout --draft --live", "leadout --draft --tuned")
    lines = []
    for row in rows:
        if row["mode"] not in modes:
            continue
        ends, missing = row["full_graphs"], row["graph_gaps"]
        share = [f"K = {k}: {missing.get(k, 0)} of {ends[k]}" for k in ends]
        drafter = row["drafter_graphs"]
        last = f"up to {drafter} requests" if drafter else "none"
        lines.append((row["gpu"], f"`{row['mode']}`", "; ".join(share), last))
    heads = (
        "GPU",
        "way to start",
        "batch sizes without a full graph",
        "full graphs of the drafter",
    )
    return table(heads, lines)


def dispatch() -> str:
    """Shares of full graphs."""
    cells = result("gpu/dispatch.json")["cells"]
    counts = list(dict.fromkeys(cell["concurrency"] for cell in cells))
    found = {(cell["gpu"], cell["mode"], cell["concurrency"]): cell for cell in cells}
    lines = [
        (gpu, f"`{mode}`", *(f"{100 * found[gpu, mode, count]['full']:.1f}%" for count in counts))
        for gpu, mode in dict.fromkeys((cell["gpu"], cell["mode"]) for cell in cells)
    ]
    heads = [f"{count} request{'s' if count > 1 else ''}" for count in counts]
    return table(("GPU", "way to start", *heads), lines)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return f"{len(value)}, up to {max(value, default=0)} tokens"
    if isinstance(value, dict):
        if not value:
            return "none"
        return "; ".join(f"K = {k}: up to {count} requests" for k, count in value.items())
    if value is None:
        return "not set"
    return f"{value:,}" if isinstance(value, int) else str(value)
