"""What the reference pages tell of; see make_reference.py."""

# Each file of ours, and the models it is made of, the outermost first.
FILES: dict[str, tuple[str, list[str]]] = {
    "Training settings": (
        "Yaml for `leadout train --config`; every field is a flag as well. The resolved settings "
        "are written to the run's folder and beside the drafter, as `training.yaml`.",
        ["leadout.train.config:TrainConfig"],
    ),
    "Training record": (
        "`training.json` beside a drafter: what it was made from, and how it fared.",
        ["leadout.train.progress:TrainReport", "leadout.train.served:ServedAcceptance"],
    ),
    "Training text": (
        "`samples-I-of-N.jsonl`, one sample a line, and `manifest-I-of-N.json`, as `leadout data` "
        "writes them.",
        [
            "leadout.shards:Sample",
            "leadout.data.manifest:Manifest",
            "leadout.data.manifest:Job",
            "leadout.data.manifest:Sampling",
            "leadout.data.manifest:Count",
        ],
    ),
    "Result of a check": (
        "What `leadout check --json` prints and `--save` writes; `--baseline` reads it.",
        [
            "leadout.check.result:CheckResult",
            "leadout.check.result:Finding",
            "leadout.check.result:OfflineAcceptance",
            "leadout.check.result:ServedAcceptance",
            "leadout.check.result:Parity",
            "leadout.check.result:Lossless",
            "leadout.check.result:Divergence",
            "leadout.check.result:Tried",
            "leadout.evaluate.acceptance:AcceptanceTable",
        ],
    ),
    "Tuned file": (
        "What `leadout tune` writes, and `leadout serve --tuned` and `leadout bench --tuned` read.",
        [
            "leadout.control.tuned_file:Tuned",
            "leadout.control.tuned_file:Model",
            "leadout.control.tuned_file:Acceptance",
            "leadout.control.tuned_file:PrefillLaw",
            "leadout.stats:Interval",
        ],
    ),
    "Result of a bench": (
        "`results.json` in the folder of a bench; `rounds.jsonl` beside it has every load.",
        [
            "leadout.bench.results:BenchResult",
            "leadout.bench.settings:BenchSettings",
            "leadout.bench.settings:Arm",
            "leadout.bench.results:CellResult",
            "leadout.bench.results:RoundNumbers",
            "leadout.bench.results:MeanSpeedup",
            "leadout.bench.results:PredictionSummary",
            "leadout.bench.results:Latency",
            "leadout.stats:Spread",
        ],
    ),
    "Registry": (
        "The folder of a drafter's versions: `version.json` in each, `serving.json`, which points "
        "to the one to serve, `marks/` on those that failed, and `ledger.jsonl`, one entry a line.",
        [
            "leadout.registry:Manifest",
            "leadout.registry:Promise",
            "leadout.registry:Pointer",
            "leadout.registry:Mark",
            "leadout.registry:Entry",
        ],
    ),
    "Captured traffic": (
        "`capture.json` in the folder of `leadout serve --capture`; beside it samples as in "
        "training text. The settings are a section of vLLM's `--additional-config`.",
        ["leadout.engine.capture_store:CaptureInfo", "leadout.engine.settings:CaptureSettings"],
    ),
    "Result of learning": (
        "What `leadout learn --json` prints.",
        [
            "leadout.learn.report:LearnResult",
            "leadout.learn.report:Adaptation",
            "leadout.learn.config:LearnConfig",
        ],
    ),
    "Provenance": (
        "Part of every result: how it can be made again.",
        ["leadout.provenance:Provenance"],
    ),
}

# What may be imported by others; a package stands for the names in its __all__.
API: dict[str, str] = {
    "leadout.dflash.config": "What a drafter is",
    "leadout.dflash.drafter": "The drafter itself",
    "leadout.dflash.target": "A Hugging Face model as a target",
    "leadout.dflash.generate": "Reference decoding",
    "leadout.dflash.verify": "Greedy and sampled verification",
    "leadout.checkpoints": "Checkpoints in both formats",
    "leadout.registry": "Versions of a drafter",
    "leadout.pairing": "The pairing rules",
    "leadout.control.tuned_file": "The tuned file",
    "leadout.control.policy": "The policy of live control",
    "leadout.engine.server": "A real server for as long as a block lasts",
}
