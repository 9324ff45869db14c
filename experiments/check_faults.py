"""Seeded faults and healthy variants of a real pair through `leadout check`'s files and reference.

    python experiments/check_faults.py TARGET DRAFTER --tuning-text PROMPTS --work DIR --out FILE

Every fault is written as a separate checkpoint (or target), without the training record unless only
the record can show the fault, and is checked on as many texts as by default. Reported for each
fault: the acceptance it costs, what the check names first, and what the repair restores. The
fine-tuned target was trained on the texts of PROMPTS, a prompt set that the drafter's training did
not contain. The cases are shared out over `--processes`; results do not depend on their number.
DIR keeps what was found in each case, so that an interrupted run goes on where it was; use an empty
one for another pair or other code.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from leadout.check.diagnosis import (
    Diagnosis,
    Probe,
    Text,
    as_served,
    diagnose,
    drafter_of,
    served_weights,
    write_repaired,
)
from leadout.check.run import mask_candidates
from leadout.check.static import static_findings
from leadout.checkpoints import load_weights, read_checkpoint, write_checkpoint
from leadout.console import Progress
from leadout.data.chat import Chat
from leadout.dflash.config import DrafterConfig, LayerAttention, Rope
from leadout.engine.offline import SessionRequest, run_session
from leadout.evaluate.hidden_states import load_model
from leadout.evaluate.prompts import check_prompts
from leadout.findings import Finding, Severity, worst_first
from leadout.models import fingerprint
from leadout.pairing import read_target
from leadout.provenance import Provenance, RunStart

TOKENS = 64
TUNING_STEPS, TUNING_BATCH, TUNING_LENGTH, TUNING_RATE = 40, 4, 128, 3e-5
SMALL_EFFECT = 0.02  # below this a fault need not be found
# The names of these causes where files alone show them.
ALSO_CORRECT = {
    "rope-theta": "rope",
    "rope-fraction": "partial-rotary",
    "mask-token": "mask-in-text",
}
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A pair to check; `cause` is the expected finding, None: nothing is wrong."""

    name: str
    cause: str | None
    target: Path
    drafter: Path
    same_texts: Path | None = None  # a target with the same answers that can be run


@dataclass(frozen=True)
class Part:
    """The cases of one process: every n-th of all cases, from number `first` on."""

    arguments: argparse.Namespace
    cases: list[Case]
    first: int


def folder_name(case_name: str) -> str:
    return case_name.replace(" ", "-").replace("%", "")


def main() -> None:
    started = RunStart.now()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--tuning-text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    # bfloat16 is as SmolLM2 is served by default; float32 is faster on processors without it.
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        maker = CaseMaker(arguments.target, arguments.drafter, arguments.tuning_text, Path(folder))
        cases = [*maker.faults(), *maker.healthy()]
        parts = [Part(arguments, cases, number) for number in range(arguments.processes)]
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(len(parts), mp_context=context) as pool:
            references = [*pool.map(check_part, parts)]  # the same in all parts
    rows = [json.loads(row_file(arguments.work, case).read_text()) for case in cases]
    write(arguments, started, references[0], rows)
    print(json.dumps(summary(rows), indent=2))


def row_file(work: Path, case: Case) -> Path:
    return work / f"{folder_name(case.name)}.json"


def check_part(part: Part) -> float:
    """Write what is found in every n-th case; the acceptance without a fault."""
    arguments = part.arguments
    bench = Bench(arguments.target, arguments.drafter, arguments.dtype)
    for case in part.cases[part.first :: arguments.processes]:
        file = row_file(arguments.work, case)
        if not file.exists():
            row = json.dumps(bench.check(case))
            print(row, flush=True)
            file.write_text(row)
    return bench.reference


def write(arguments: Any, started: RunStart, reference: float, rows: list[dict[str, Any]]) -> None:
    models = {"target": arguments.target, "drafter": arguments.drafter}
    made = Provenance.of_this_run({r: fingerprint(f) for r, f in models.items()}, started)
    result = {
        "provenance": made.model_dump(),
        "dtype": arguments.dtype,
        "healthy_acceptance": reference,
        "faults": [row for row in rows if row["cause"] is not None],
        "healthy": [row for row in rows if row["cause"] is None],
        "summary": summary(rows),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")


class Bench:
    """Probes are shared: most faults are in the drafter, so the target's states are the same."""

    def __init__(self, target: Path, drafter: Path, dtype: str) -> None:
        self._probes: dict[Path, Probe] = {}
        self._dtype = dtype
        self._precision: torch.dtype = getattr(torch, dtype)
        self._config = read_checkpoint(drafter).config
        self.reference = 0.0
        self.reference = self._length(target, drafter)

    def check(self, case: Case) -> dict[str, Any]:
        findings = static_findings(case.target, case.drafter)
        errors = [f for f in findings if f.severity is Severity.ERROR]
        row: dict[str, Any] = {"name": case.name, "cause": case.cause}
        if errors:  # the pair would not start, so there is no acceptance
            return {**row, **self._named(case, errors), "acceptance": None, "repaired": None}
        probed_target = case.same_texts or case.target
        found = self._diagnose(probed_target, case.drafter)
        length = found.offline.overall.length.value
        row |= self._named(case, worst_first([*findings, *found.findings]))
        row |= {"acceptance": length, "effect": length / self.reference - 1, "repaired": None}
        if found.repair is not None and case.cause is not None:
            with tempfile.TemporaryDirectory() as folder:
                fixed = Path(folder, "fixed")
                write_repaired(case.drafter, found.repair, fixed, self._config.target_num_layers)
                row["repaired"] = self._length(probed_target, fixed)
        return row

    def _named(self, case: Case, findings: list[Finding]) -> dict[str, Any]:
        problems = [f for f in findings if f.severity is not Severity.NOTE]
        says = problems[0].message if problems else ""
        # Without the folder that the cases were made in, which is gone when the result is read.
        says = says.replace(f"{case.target.parent}/", "").replace(f"{case.drafter.parent}/", "")
        return {"named": [f.name for f in problems], "says": says}

    def _diagnose(self, target: Path, drafter: Path) -> Diagnosis:
        facts, checkpoint = read_target(target), read_checkpoint(drafter)
        return diagnose(
            self._probe(target),
            facts,
            checkpoint,
            checkpoint.config.max_draft_tokens,
            mask_candidates(target, facts.vocab_size),
            self._precision,
            Progress.silent(),
        )

    def _length(self, target: Path, drafter: Path) -> float:
        checkpoint = read_checkpoint(drafter)
        config = as_served(checkpoint.config, checkpoint.config.max_draft_tokens)
        weights = served_weights(checkpoint, self._precision)
        steps = [
            s
            for t in self._probe(target).acceptance(drafter_of(config, weights))
            for s in t.at_steps
        ]
        return 1 + sum(steps) / len(steps)

    def _probe(self, target: Path) -> Probe:
        if target not in self._probes:
            # Taps that are seeded one off are tried another layer further.
            near = {i + step for i in self._config.target_layer_ids for step in range(-2, 3)}
            layers = [i for i in near if 0 <= i < read_target(target).num_layers]
            model = load_model(target, self._precision)
            self._probes[target] = Probe(
                target, model, texts_of(target, self._dtype), layers, self._precision
            )
        return self._probes[target]


def texts_of(target: Path, dtype: str) -> list[Text]:
    """The target's own greedy answers in vLLM."""
    prompts = check_prompts((), Chat(target), 1200)
    request = SessionRequest(
        target=str(target), prompts=prompts, max_tokens=TOKENS, max_length=1400, dtype=dtype
    )
    runs = run_session(request, lambda text: None).runs
    return [
        Text(run.prompt_set, prompt, answer)
        for run in runs
        for prompt, answer in zip(prompts[run.prompt_set], run.answers, strict=True)
        if len(answer) > 8
    ]


class CaseMaker:
    """Writes every case into a folder of its own."""

    def __init__(self, target: Path, drafter: Path, tuning_text: Path, folder: Path) -> None:
        self._target = target
        self._tuning_text = tuning_text
        self._source = read_checkpoint(drafter)
        self._config = self._source.config
        self._weights = load_weights(self._source)
        self._folder = folder

    def faults(self) -> Iterator[Case]:
        config, ids = self._config, self._config.target_layer_ids
        shift = {step: tuple(i + step for i in ids) for step in (-1, 1)}
        yield self._edited("taps one too low", "taps-one-too-low", target_layer_ids=shift[-1])
        yield self._edited("taps one too high", "taps-one-too-high", target_layer_ids=shift[1])
        yield self._weighted("taps trained in reverse order", "tap-order", self._taps_reversed)
        yield self._weighted("two taps swapped", "tap-order", self._taps_swapped)
        causal = tuple(LayerAttention(None, True) for _ in config.layers)
        yield self._edited("causal instead of bidirectional", "causality", layers=causal)
        window_layers = tuple(LayerAttention(32) for _ in config.layers)
        yield self._edited("a window of 32 that was not trained", "window", layers=window_layers)
        for theta in (1e4, 1e6):
            rope = replace(config.rope, theta=theta)
            yield self._edited(f"RoPE theta {theta:g}", "rope-theta", rope=rope)
        half = Rope(config.rope.theta, config.rope.scaling, 0.5)
        yield self._edited("half of each head rotated", "rope-fraction", rope=half)
        for token in (0, 2):
            yield self._edited(f"mask token {token}", "mask-token", mask_token_id=token)
        yield self._weighted("draft layers swapped", "layer-order", self._layers_swapped)
        yield self._weighted("weights rounded to 4 bits", "weights-quantised", rounded_to_4_bits)
        yield self._weighted("a dead MLP", "weights-dead", self._dead_mlp)
        yield self._other_target("target fine-tuned a little", self._fine_tuned)
        yield self._other_target("a drafter of another target", permuted)
        yield self._without_template()

    def healthy(self) -> Iterator[Case]:
        config = self._config
        yield Case("as trained", None, self._target, self._source.path)
        yield self._edited("without its record", None)
        yield self._weighted(
            "float32 weights", None, lambda w: {n: t.float() for n, t in w.items()}
        )
        yield self._written("speculators format", None, config, self._weights, "speculators")
        wide = tuple(LayerAttention(config.max_positions) for _ in config.layers)
        yield self._edited("a window wider than any text", None, layers=wide)
        yield self._edited("fewer positions", None, max_positions=2048)
        for number, share in enumerate((0.002, 0.005, 0.01)):
            noisy = noise_of(share, number)
            yield self._weighted(f"weights with {share:.1%} noise", None, noisy)
        fewer = config.block_size - 2
        yield self._edited(f"a block of {fewer}", None, block_size=fewer)

    def _edited(self, name: str, cause: str | None, **fields: Any) -> Case:
        return self._written(name, cause, replace(self._config, **fields), self._weights)

    def _weighted(self, name: str, cause: str | None, change: Callable[[Weights], Weights]) -> Case:
        return self._written(name, cause, self._config, change(dict(self._weights)))

    def _written(
        self,
        name: str,
        cause: str | None,
        config: DrafterConfig,
        weights: Weights,
        to: Any = "zlab",
    ) -> Case:
        path = self._folder / folder_name(name)
        write_checkpoint(path, weights, config, to, target_name=str(self._target))
        return Case(name, cause, self._target, path)

    def _taps_reversed(self, weights: Weights) -> Weights:
        return self._taps(weights, lambda parts: parts[::-1])

    def _taps_swapped(self, weights: Weights) -> Weights:
        return self._taps(weights, lambda parts: [*parts[:-2], parts[-1], parts[-2]])

    def _taps(self, weights: Weights, order: Callable[[list[Tensor]], list[Tensor]]) -> Weights:
        parts = list(torch.split(weights["fc.weight"], self._config.context_size, dim=1))
        return {**weights, "fc.weight": torch.cat(order(parts), dim=1)}

    def _layers_swapped(self, weights: Weights) -> Weights:
        other = {"0": "1", "1": "0"}
        swapped = {}
        for name, tensor in weights.items():
            first, _, rest = name.partition(".")
            number, _, rest = rest.partition(".")
            is_layer = first == "layers" and number in other
            swapped[f"layers.{other[number]}.{rest}" if is_layer else name] = tensor
        return swapped

    def _dead_mlp(self, weights: Weights) -> Weights:
        name = "layers.1.mlp.down_proj.weight"
        return {**weights, name: torch.zeros_like(weights[name])}

    def _other_target(self, name: str, change: Callable[[Weights], Weights]) -> Case:
        path = self._folder / folder_name(name)
        shutil.copytree(self._target, path)
        file = path / "model.safetensors"
        weights = load_file(file)
        file.unlink()
        save_file(change(weights), file, metadata={"format": "pt"})
        return Case(name, "other-target", path, self._source.path)

    def _fine_tuned(self, weights: Weights) -> Weights:
        """The target after a short training on other texts."""
        model: Any = load_model(self._target, torch.float32)
        chat = Chat(self._target)
        turns = [json.loads(line)["turns"][0] for line in self._tuning_text.open()]
        model.train().requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=TUNING_RATE, weight_decay=0.0)
        for step in range(TUNING_STEPS):
            part = turns[step * TUNING_BATCH % len(turns) :][:TUNING_BATCH]
            for turn in part:
                tokens = torch.tensor([chat.plain(turn)[:TUNING_LENGTH]])
                (model(input_ids=tokens, labels=tokens).loss / len(part)).backward()
            optimizer.step()
            optimizer.zero_grad()
        tuned = {name: p.detach() for name, p in model.named_parameters()}
        return {name: tuned[name].to(tensor.dtype) for name, tensor in weights.items()}

    def _without_template(self) -> Case:
        path = self._folder / "without-a-template"
        shutil.copytree(self._target, path)
        for file in path.glob("chat_template*"):
            file.unlink()
        settings = json.loads((path / "tokenizer_config.json").read_text())
        settings.pop("chat_template", None)
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
        name = "chat template missing"
        return Case(name, "chat-template-missing", path, self._source.path, self._target)


def noise_of(share: float, seed: int) -> Callable[[Weights], Weights]:
    def noisy(weights: Weights) -> Weights:
        generator = torch.Generator().manual_seed(seed)
        changed = {}
        for name, tensor in weights.items():
            size = tensor.float().std() * share if tensor.dim() == 2 else 0.0
            noise = torch.randn(tensor.shape, generator=generator) * size
            changed[name] = (tensor.float() + noise).to(tensor.dtype)
        return changed

    return noisy


def rounded_to_4_bits(weights: Weights) -> Weights:
    """Symmetric, in groups of 32 columns, as weight-only quantisers do."""
    changed = dict(weights)
    for name, tensor in weights.items():
        if tensor.dim() == 2:
            groups = tensor.float().unflatten(1, (-1, 32))
            scale = groups.abs().amax(-1, keepdim=True) / 7
            rounded = (groups / scale.clamp(min=1e-12)).round().clamp(-8, 7) * scale
            changed[name] = rounded.flatten(1).to(tensor.dtype)
    return changed


def permuted(weights: Weights) -> Weights:
    """Another model with the same output: its hidden dimensions are in another order."""
    width = weights["model.embed_tokens.weight"].shape[1]
    order = torch.randperm(width, generator=torch.Generator().manual_seed(0))
    writes = ("o_proj.weight", "down_proj.weight")
    changed = {}
    for name, tensor in weights.items():
        if name.endswith(writes):
            changed[name] = tensor[order].contiguous()
        elif tensor.shape[-1] == width:
            changed[name] = tensor[..., order].contiguous()
        else:
            changed[name] = tensor
    return changed


def summary(rows: list[dict[str, Any]]) -> dict[str, int]:
    faults = [row for row in rows if row["cause"] is not None]
    healthy = [row for row in rows if row["cause"] is None]
    costly = [f for f in faults if f["acceptance"] is None or f["effect"] <= -SMALL_EFFECT]
    return {
        "faults": len(faults),
        "faults_that_cost_2_percent": len(costly),
        "of_these_found": sum(bool(f["named"]) for f in costly),
        "right_cause_first": sum(first_finding_is_correct(fault) for fault in faults),
        "healthy": len(healthy),
        "false_alarms": sum(bool(h["named"]) for h in healthy),
    }


def first_finding_is_correct(fault: dict[str, Any]) -> bool:
    right = {fault["cause"], ALSO_CORRECT.get(fault["cause"])}
    return bool(fault["named"]) and fault["named"][0] in right


if __name__ == "__main__":
    main()
