"""Where exactly each rule begins and ends to be broken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from leadout.dflash.config import LayerAttention, Llama3Scaling, Rope, Yarn
from leadout.findings import Severity
from leadout.models import same_model
from leadout.pairing import RULES, Pair, batched_tokens_for, examine
from support.pairs import DRAFTER, changed

FULL, SLIDING = LayerAttention(), LayerAttention(window=64, causal=True)
YARN = Rope(10_000.0, Yarn(4.0, 128))
RULE = {rule.name: rule for rule in RULES}


def findings(
    pair: Pair,
    target: dict[str, Any] | None = None,
    drafter: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    named: str | None = None,
) -> dict[str, str]:
    """The messages by rule after changes to the healthy pair."""
    assert pair.settings is not None
    found = examine(
        Pair(
            replace(pair.target, **(target or {})),
            replace(changed(pair.drafter, **(drafter or {})), target_name=named),
            replace(pair.settings, **(settings or {})),
        )
    )
    return {finding.name: finding.message for finding in found}


# rule, what breaks it, what just does not, and what the message must name.
TABLE: list[tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    ("hidden-size", {"target": {"hidden_size": 32}}, {}, ("16", "32", "tests/tiny-target")),
    (
        "hidden-size",  # a drafter of another width is fine if it takes the target's states
        {"drafter": {"hidden_size": 8, "own_embedding": True, "own_head": True}},
        {
            "drafter": {
                "hidden_size": 8,
                "target_hidden_size": 16,
                "own_embedding": True,
                "own_head": True,
            }
        },
        ("8", "16"),
    ),
    (
        "target-layers",
        {"drafter": {"target_layer_ids": (1, 3, 6), "target_num_layers": None}},
        {"drafter": {"target_layer_ids": (1, 3, 5), "target_num_layers": None}},  # the last layer
        ("[6]", "0 to 5"),
    ),
    (
        "target-layers",
        {"drafter": {"target_num_layers": 7}},
        {"drafter": {"target_num_layers": None}},
        ("num_target_layers of the drafter is 7", "has 6 layers"),
    ),
    (
        "layer-order",
        {"drafter": {"target_layer_ids": (3, 1, 4)}},
        {"drafter": {"target_layer_ids": (0, 1, 5)}},
        ("[3, 1, 4]", "[1, 3, 4]"),
    ),
    ("vocabulary", {"drafter": {"vocab_size": 321}}, {}, ("321", "320")),
    (
        "vocabulary",
        {"drafter": {"vocab_size": 152000}, "target": {"vocab_size": 160000}},
        {"drafter": {"vocab_size": 152064}, "target": {"vocab_size": 152576}},
        ("152000", "160000"),
    ),
    (
        "vocabulary",  # a reduced vocabulary does not excuse another target's
        {"drafter": {"vocab_size": 200, "own_head": True, "draft_vocab_size": 100}},
        {"drafter": {"own_head": True, "draft_vocab_size": 100}},
        ("200", "320"),
    ),
    (
        "vocabulary-padding",
        {"drafter": {"vocab_size": 152064}, "target": {"vocab_size": 152576}},
        {},
        ("152064", "152576"),
    ),
    (
        "mask-token",
        {"drafter": {"vocab_size": 400, "mask_token_id": 320}},
        {"drafter": {"vocab_size": 400, "mask_token_id": 319}},
        ("320", "0 to 319"),
    ),
    (
        "mask-token",
        {"drafter": {"vocab_size": 400, "mask_token_id": 320}},
        {"drafter": {"vocab_size": 400, "mask_token_id": 320, "own_embedding": True}},
        ("320", "0 to 319"),
    ),
    (
        "verifier",
        {"named": "tests/tiny-target-base"},
        {"named": "elsewhere/Tiny-Target"},
        ("tests/tiny-target-base", "is tests/tiny-target,"),
    ),
    ("rope", {"drafter": {"rope": Rope(1e6)}}, {}, ("theta 1000000", "theta 10000")),
    ("rope", {"target": {"rope": YARN}}, {"target": {"rope": None}}, ("yarn x4 from 128",)),
    (
        "rope",
        {"drafter": {"rope": Rope(1e4, Llama3Scaling(8.0, 1.0, 4.0, 64))}},
        {"target": {"rope": Rope(1e4, fraction=0.25)}},  # drafters of such targets rotate it all
        ("llama3 x8 from 64",),
    ),
    ("partial-rotary", {"drafter": {"rope": Rope(1e4, fraction=0.5)}}, {}, ("0.5",)),
    ("embedding-scale", {"drafter": {"embedding_scale": 73.3}}, {}, ("73.3",)),
    ("logit-scaling", {"drafter": {"logit_multiplier": 0.2}}, {}, ("output_multiplier is 0.2",)),
    (
        "logit-scaling",
        {"drafter": {"logit_softcap": 30.0}},
        {},
        ("final_logit_softcapping is 30",),
    ),
    ("draft-tokens", {"settings": {"draft_tokens": 4}}, {}, ("4", "1 to 3")),
    (
        "draft-tokens",
        {"settings": {"draft_tokens": 0}},
        {"settings": {"draft_tokens": 1}},
        ("0", "1 to 3"),
    ),
    (
        "positions",
        {"settings": {"max_model_len": 513}},
        {"settings": {"max_model_len": 512}},
        ("512", "513"),
    ),
    (
        "causality",
        {"settings": {"served_causal": (False, True)}},
        {"settings": {"served_causal": None}},
        ("bidirectional, causal", "trained as bidirectional"),
    ),
    (
        "causality",
        {"drafter": {"layers": (SLIDING, SLIDING)}},
        {"drafter": {"layers": (SLIDING, SLIDING)}, "settings": {"served_causal": (True, True)}},
        ("as bidirectional", "trained as causal"),
    ),
    (
        "mixed-layers",
        {"drafter": {"layers": (SLIDING, FULL)}},
        {"drafter": {"layers": (SLIDING, FULL)}, "settings": {"model_runner": "V2"}},
        ("V1", "V2"),
    ),
    (
        "mixed-layers",
        {"drafter": {"layers": (FULL, SLIDING)}},
        {"drafter": {"layers": (SLIDING, SLIDING)}},
        ("V1", "V2"),
    ),
    (
        "non-causal-backend",
        {"settings": {"backend_takes_non_causal": False}},
        {"settings": {"backend_takes_non_causal": None}},
        ("CPU_ATTN", "2 bidirectional"),
    ),
    (
        "non-causal-backend",
        {"settings": {"backend_takes_non_causal": False, "backend_name": None}},
        {
            "drafter": {"layers": (SLIDING, SLIDING)},
            "settings": {"backend_takes_non_causal": False},
        },
        ("backend is none",),
    ),
    (
        "dtype",
        {"settings": {"dtype": "float16"}},
        {"settings": {"dtype": "float32"}},
        ("float16", "bfloat16"),
    ),
    (
        "batched-tokens",
        {"settings": {"max_num_batched_tokens": 55}},
        {"settings": {"max_num_batched_tokens": 56}},
        (
            "is 55",
            "7 of up to 8 requests",
            "--max-num-batched-tokens 56",
            "--max-num-scheduled-tokens 55",
        ),
    ),
]


@pytest.mark.parametrize(("rule", "breaking", "holding", "named"), TABLE)
def test_where_a_rule_is_broken(
    rule: str,
    breaking: dict[str, Any],
    holding: dict[str, Any],
    named: tuple[str, ...],
    pair: Pair,
) -> None:
    message = findings(pair, **breaking)[rule]
    for part in named:
        assert part in message
    assert rule not in findings(pair, **holding)


def test_the_table_has_every_rule() -> None:
    assert {row[0] for row in TABLE} == RULE.keys()


def test_findings_come_in_the_order_of_the_rules(pair: Pair) -> None:
    found = findings(
        pair,
        target={"hidden_size": 32, "vocab_size": 100},
        settings={"dtype": "float16", "draft_tokens": 9},
    )
    assert list(found) == [name for name in RULE if name in found]
    assert {"hidden-size", "vocabulary", "draft-tokens", "dtype"} <= found.keys()


def test_without_settings_only_the_files_are_examined(pair: Pair) -> None:
    target = replace(pair.target, hidden_size=32)
    assert [finding.name for finding in examine(Pair(target, pair.drafter))] == ["hidden-size"]


def test_what_a_drafter_names_cannot_write_to_the_terminal(pair: Pair) -> None:
    message = findings(pair, named="evil/\x1b[2Jname")["verifier"]
    assert message.isprintable()


def test_what_vllm_serves_is_only_advised_against(pair: Pair) -> None:
    severities = {rule.name: rule.severity for rule in RULES}
    assert severities["dtype"] is severities["batched-tokens"] is Severity.WARNING


def test_prompts_keep_their_budget_unless_decoding_needs_more(pair: Pair) -> None:
    wide = {"max_num_batched_tokens": 8192, "draft_tokens": 3}
    assert "batched-tokens" not in findings(pair, settings={**wide, "max_num_seqs": 1170})
    message = findings(pair, settings={**wide, "max_num_seqs": 4096})["batched-tokens"]
    assert "1170 of up to 4096 requests" in message
    assert "--max-num-batched-tokens 28672 and --max-num-scheduled-tokens 16384" in message


def test_room_for_drafting() -> None:
    assert batched_tokens_for(16, 7) == 16 * (1 + 7 + 7)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Qwen/Qwen3-8B", "qwen/qwen3-8b", True),
        ("Qwen/Qwen3-8B", "/models/Qwen3-8B/", True),
        ("Qwen/Qwen3-8B", "/hub/models--Qwen--Qwen3-8B/snapshots/0ac7575", True),
        ("Qwen/Qwen3-8B", "/hub/models--Qwen--Qwen3-4B/snapshots/0ac7575", False),
        ("Qwen/Qwen3-8B", "/hub/models--Qwen--Qwen3-8B/tuned/my-model", False),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base", False),
        ("./Qwen3-8B", "Qwen3-8B", True),
        ("x" * 10_000, "Qwen/Qwen3-8B", False),
        ("", "/", True),
    ],
)
def test_the_same_model_by_its_names(one: str, other: str, same: bool) -> None:
    assert same_model(one, other) is same
    assert same_model(other, one) is same


def test_the_pair_that_the_table_changes_breaks_no_rule(pair: Pair) -> None:
    assert pair.drafter.config == DRAFTER
    assert findings(pair) == {}
