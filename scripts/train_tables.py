"""Tables on what was tried in training; see fill_docs.py."""

from result_tables import blocks_of, result, table


def ablations() -> str:
    found = result("train/ablations.json")
    families = {"goes on": "a half-trained drafter", "starts anew": "nothing"}
    rows = [
        (families[each["family"]], name, f"{each['acceptance_length']:.3f}")
        for name, each in found["variants"].items()
    ]
    return table(("starts from", "variant", "held-out acceptance length"), rows)


def from_random() -> str:
    """A long run from random weights beside the shipped drafter's, which began otherwise."""
    found, shipped = result("train/from_random_weights.json"), result("train/smollm2.json")
    (run,) = found["variants"].values()
    blocks = (
        found["steps"] * found["sequences_per_step"] * shipped["runs"][0]["settings"]["anchors"]
    )
    rows = [("random weights", f"{blocks:,}", f"{run['acceptance_length']:.2f}")]
    for number, part in enumerate(shipped["runs"], start=1):
        so_far = blocks_of({"runs": shipped["runs"][:number]})
        length = part["held_out_curve"][-1]["acceptance_length"]
        rows.append(("target layers", f"{so_far:,}", f"{length:.2f}"))
    return table(("starts from", "blocks", "held-out acceptance length"), rows)


def against_speculators() -> str:
    arms = result("train/against_speculators.json")["arms"]
    rows = [
        (
            name,
            f"{each['acceptance_length']:.3f}",
            f"{each['blocks']:,}",
            f"{each['processor_minutes']:.1f}",
        )
        for name, each in sorted(arms.items(), key=lambda arm: -arm[1]["acceptance_length"])
    ]
    return table(("trainer", "held-out acceptance length", "blocks", "processor minutes"), rows)
