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
        ["leadout.train.report:TrainReport", "leadout.train.served:ServedAcceptance"],
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
            "leadout.check.findings:Finding",
            "leadout.check.result:OfflineAcceptance",
            "leadout.check.result:ServedAcceptance",
            "leadout.check.result:Parity",
            "leadout.check.result:Lossless",
            "leadout.check.result:Divergence",
            "leadout.check.result:Tried",
            "leadout.check.acceptance:AcceptanceTable",
        ],
    ),
    "Tuned file": (
        "What `leadout tune` writes, and `leadout serve --tuned` and `leadout bench --tuned` read.",
        [
            "leadout.control.tuned:Tuned",
            "leadout.control.tuned:Model",
            "leadout.control.tuned:Acceptance",
            "leadout.control.tuned:PrefillLaw",
            "leadout.control.interval:Interval",
        ],
    ),
    "Result of a bench": (
        "`results.json` in the folder of a bench; `rounds.jsonl` beside it has every load.",
        [
            "leadout.bench.result:BenchResult",
            "leadout.bench.settings:BenchSettings",
            "leadout.bench.settings:Arm",
            "leadout.bench.result:CellResult",
            "leadout.bench.result:RoundNumbers",
            "leadout.bench.result:MeanSpeedup",
            "leadout.bench.result:PredictionSummary",
            "leadout.bench.result:Latency",
            "leadout.bench.statistics:Spread",
        ],
    ),
    "Registry": (
        "The folder of a drafter's versions: `version.json` in each, `serving.json`, which points "
        "to the one to serve, `marks/` on those that failed, and `ledger.jsonl`, one entry a line.",
        [
            "leadout.checkpoints.registry:Manifest",
            "leadout.checkpoints.registry:Promise",
            "leadout.checkpoints.registry:Pointer",
            "leadout.checkpoints.registry:Mark",
            "leadout.checkpoints.ledger:Entry",
        ],
    ),
    "Captured traffic": (
        "`capture.json` in the folder of `leadout serve --capture`; beside it samples as in "
        "training text. The settings are a section of vLLM's `--additional-config`.",
        ["leadout.captured:CaptureInfo", "leadout.engine.capture_settings:CaptureSettings"],
    ),
    "Result of learning": (
        "What `leadout learn --json` prints.",
        [
            "leadout.learn.result:LearnResult",
            "leadout.learn.result:Adaptation",
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
    "leadout.checkpoints.registry": "Versions of a drafter",
    "leadout.pairing": "The pairing rules",
    "leadout.control.tuned": "The tuned file",
    "leadout.control.gain": "What drafts gain",
    "leadout.control.policy": "The policy of live control",
    "leadout.engine.server": "A real server for as long as a block lasts",
}
