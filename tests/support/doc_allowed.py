"""Numbers on the pages that are no results: patterns with the reason why each may be there."""

from __future__ import annotations

Allowed = tuple[tuple[str, str], ...]  # pattern, reason

EVERYWHERE: Allowed = (
    (r"vLLM(?: other than)? 0\.32(?:\.0)?|torch 2\.13(?:\.0)?|Python 3\.11", "supported versions"),
    (
        r"SmolLM2(?:-135M)?(?:-Instruct)?|gsm8k|math500|Apache-2\.0|DFlash 2|EAGLE-3|jinja2",
        "names of models, prompt sets, algorithms, libraries and licences",
    ),
    (r"\bEd25519\b", "the name of an algorithm"),
    (r"Qwen2\.5-Coder-1\.5B(?:-Instruct)?", "the name of a model"),
    (r"\bb?float(?:16|32)\b|\bV[12]\b|\b\dB\b", "names of types, runners and model sizes"),
    (r"\b20\d\d(?:-\d\d-\d\d)?\b", "dates"),
    (r"\bK = (?:B ?- ?1|\d)|\b[BKi] ?[-+] ?1\b|\b1 \+ K\b", "definitions of K, B and layer ids"),
    (r"exit code[^.|]*", "exit codes"),
    (r"\btwo (?:CPU )?(?:cores|workers)\b", "the machine; compared with the results' provenance"),
    (r"95% (?:confidence )?intervals?", "the level of all intervals"),
    (r"\btwo (?:best tokens|tokens|texts|formats|phases|steps)\b", "a pair of things, not a count"),
)

BY_PAGE: dict[str, Allowed] = {
    "docs/alternatives.md": ((r"\b0\.3 of August", "version of SpecForge that was read"),),
    "docs/architecture.md": ((r"a few hundred lines", "the size of the code"),),
    "docs/bench.md": (
        (r"a quarter of a second", "a rule of leadout.bench"),
        (r"none with fewer than 6", "a rule of leadout.bench"),
        (r"would be exactly 1 without|differs from 1 by no more", "arithmetic"),
        (
            r"between its two measurements|two servers that are alike|two chunks|count twice",
            "a pair of things, not a count",
        ),
    ),
    "docs/concepts/acceptance-length.md": ((r"on five prompt sets", "drawn in the figure"),),
    "docs/concepts/break-even.md": (
        (r"at three loads", "drawn in the figure"),
        (r"above some load it is 0", "a draft length"),
    ),
    "docs/concepts/dflash.md": ((r"Five drafts take five passes", "arithmetic"),),
    "docs/concepts/lossless.md": ((r"min\(1,|max\(0,", "a formula"),),
    "docs/concepts/speculative-decoding.md": (
        (r"five drafts, two of them accepted", "an example, drawn in the figure"),
    ),
    "docs/decisions.md": (
        (r"the half second that", "a limit that a test enforces"),
        (r"1024 sequences and 8192 tokens per step", "vLLM's defaults on an H100"),
        (r"a quarter of a second", "a rule of leadout.bench"),
        (r"the steps of two engines", "those of the sentence"),
        (r"no pre-shared keys before 3\.13", "a version of Python"),
        (r"up to 128 tokens and stores", "a limit of leadout.engine.draft_model"),
        (r"reads 0\.25 GB beside the 16 GB", "arithmetic with bytes of weights"),
    ),
    "docs/howto/check.md": (
        (r"its two models|more than two checks", "a pair of things, not a count"),
    ),
    "docs/howto/kubernetes.md": ((r"needs Kubernetes 1\.30", "a version"),),
    "docs/howto/make.md": (
        (r"^\| \d+ \|", "exit codes"),
        (r"\(default: 1\)", "a default"),
        (r"depends on two numbers", "those of the sentence"),
        (r"one and a half times", "a setting"),
        (r"of at most 90 MB", "what the settings were chosen for"),
    ),
    "docs/howto/metrics.md": (
        (r"0 is the first", "an index"),
        (r"Acceptance length near 1", "the smallest possible value"),
        (r"of 2 does not mean twice the speed", "an example"),
        (r"half hour is a tenth below|a fifth below", "thresholds of ops/prometheus/alerts.yml"),
        (r"below which a tenth of the requests", "the quantile of the query above it"),
    ),
    "docs/howto/long-context.md": ((r"served twice", "what the check does"),),
    "docs/howto/privacy.md": (
        (r"0\.05 keeps one request in twenty|1 GiB and 30 days", "a setting and defaults"),
    ),
    "docs/howto/per-request.md": ((r"at most 3 for each|0 is the same as", "values of a setting"),),
    "docs/howto/selftest.md": (
        (r"at least 0\.95 of|of six windows", "rules of leadout.selftest"),
        (r"the last two servers|up to five servers", "those of the table"),
        (r"\(10 by default\)", "a default"),
    ),
    "docs/howto/serve.md": ((r"\(default (?:1\.1|3)\)|1 disables the warning", "a setting"),),
    "docs/howto/tpus.md": (
        (r"tpu-inference 0\.32\.0|transformers 5", "versions"),
        (r"heads of (?:64|128)|multiples of 128", "sizes that kernels of tpu-inference take"),
    ),
    "docs/howto/train.md": (
        (r"to 128 unless you set it", "a setting"),
        (r"by default 2 for targets below 1B parameters, else 5", "defaults"),
        (r"write 2,000 prompts", "the number in the command above it"),
    ),
    "docs/learn.md": (
        (r"a fixed tenth", "a rule of leadout.learn.data"),
        (r"the same 60 sequences", "the rule before, as experiments/gate_cycles.py has it"),
        (r"[Vv]ersion 1\b", "a name"),
        (r"is above 0,", "a default"),
        (r"two real candidates", "those of the script"),
        (r"occupy its 32", "a limit of leadout.ring.relay"),
        (r"the newest fifth|Half of the training text|half its learning rate", "defaults"),
    ),
    "docs/limits.md": (
        (r"training on two ranks", "a test"),
        (r"24 GB", "the machine"),
        (r"temperature above 0|`top_p` below 1", "settings"),
        (
            r"K = 15, a step therefore holds at most 66 of 256 requests if they verify drafts, "
            r"and 128",
            "vLLM's budget, by arithmetic",
        ),
    ),
    "docs/live.md": (
        (r"\(0, 1, 3, 7, 15 for blocks of 16\)", "the ladder of K; a test has it"),
        (r"so 1 is a good value|ends below 1", "equal speed"),
        (r"up to 128 tokens at once", "a limit of leadout.engine.draft_model"),
    ),
    "docs/quickstart.md": (
        (r"has 270 MB|\(1\.1 GB\)", "bytes of weights"),
        (r"Four servers take turns", "those of the command below"),
        (r"bare vLLM twice|The two bare servers", "a pair of things, not a count"),
    ),
    "docs/reference/commands.md": ((r"^\| \d+ \|", "exit codes"),),
    "docs/reliability.md": ((r"Linux with x86-64 only", "name of a kind of processor"),),
    "docs/results.md": (
        (r"one or two hundredths", "a warning, not a measurement"),
        (r"the two also differ", "those of the table"),
    ),
    "docs/reference/targets.md": (
        (r"DeepSeek-V3|Gemma 3|Qwen3", "names of models"),
        (r"(?:(?:MX)?FP[48]|int8) weights", "names of types"),
    ),
    "docs/scale.md": (
        # Arithmetic with bytes per token id, and the run of the table's last line.
        (r"a billion tokens are at most 7 GB", "arithmetic"),
        (r"a million tokens|the 800 million|per million", "units of the tables"),
    ),
    "docs/swap.md": (
        (r"whether the two are compared", "those of the sentence"),
        (r"at least 16 characters", "a limit"),
        (r"fewer than three tokens", "a limit"),
    ),
    "docs/tune.md": (
        (r"batch size \(1, 2, 4,", "the measured batch sizes"),
        (r"\(16 by default\)|more than 512 tokens", "a default and a limit of leadout.tune"),
        (r"Two engines|the two terms|two upper bounds|step before it", "those of the sentence"),
        (r"above 1\)|near 1,", "the speed of a bare server"),
    ),
    "docs/worth-it.md": (
        (r"on three numbers|[Tt]he three (?:numbers|drafters)|for three drafters", "as listed"),
        (r"acceptance length of 1\.2", "an example"),
        (r"0 if nothing pays", "a draft length"),
        (r"so two measured numbers|has two numbers", "those of the sentence"),
    ),
}
