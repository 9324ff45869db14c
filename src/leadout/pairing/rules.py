"""The pairing rules: what must hold between a drafter, its target and a server's settings.

A rule is an error only if no working pair breaks it; what a user may intend is a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from leadout.checkpoints import Checkpoint
from leadout.checkpoints.decoder_config import describe_rope
from leadout.errors import printable
from leadout.findings import Finding, Severity
from leadout.models import same_model
from leadout.pairing.target import TargetFacts

# Embeddings are padded to round sizes. A drafter that has up to this share of rows fewer than its
# target only lacks padding (published: 152064 of 152576 rows); beyond it, tokens are missing.
PADDING_SHARE = 0.01

ERROR, WARNING = Severity.ERROR, Severity.WARNING
_OTHER_DRAFTER = "Use the drafter that was trained for this target, or serve its own target"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings with which the engine will start."""

    draft_tokens: int  # K
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str  # float32, bfloat16 or float16, for target and drafter
    model_runner: Literal["V1", "V2"]
    backend_name: str | None  # the attention backend that runs the drafter
    backend_takes_non_causal: bool | None  # None: unknown
    served_causal: tuple[bool, ...] | None  # causality of each draft layer as served; None: unknown


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a drafter; without settings only their files are compared."""

    target: TargetFacts
    drafter: Checkpoint
    settings: EngineSettings | None = None


_Check: TypeAlias = Callable[[Pair], str | None]  # what is wrong; None: the rule holds
_ServerCheck: TypeAlias = Callable[[Pair, EngineSettings], str | None]


class Rule(NamedTuple):
    """A condition on a target, a drafter and the settings of their server."""

    name: str
    severity: Severity
    remedy: str
    broken: _Check


RULES: list[Rule] = []  # in the order in which findings are shown


def _rule(name: str, severity: Severity, remedy: str) -> Callable[[_Check], None]:
    """Adds the decorated function to `RULES`."""
    return lambda broken: RULES.append(Rule(name, severity, remedy, broken))


def _server_rule(
    name: str, remedy: str, severity: Severity = ERROR
) -> Callable[[_ServerCheck], None]:
    """A rule about settings; without settings it holds."""

    def register(broken: _ServerCheck) -> None:
        @_rule(name, severity, remedy)
        def _(pair: Pair) -> str | None:
            return None if pair.settings is None else broken(pair, pair.settings)

    return register


@_rule("hidden-size", ERROR, f"{_OTHER_DRAFTER}.")
def _hidden_size(pair: Pair) -> str | None:
    drafter, target = pair.drafter.config.context_size, pair.target.hidden_size
    if drafter == target:
        return None
    return (
        f"the drafter takes target states of size {drafter}, but the hidden_size of "
        f"{pair.target.name} is {target}"
    )


@_rule(
    "target-layers",
    ERROR,
    f"{_OTHER_DRAFTER}; correct the field in the drafter's config.json only if you are sure "
    "that it is a mistake.",
)
def _target_layers(pair: Pair) -> str | None:
    config, layers = pair.drafter.config, pair.target.num_layers
    beyond = [i for i in config.target_layer_ids if i >= layers]
    if beyond:
        return (
            f"the drafter reads target layers {beyond}, but {pair.target.name} has layers 0 to "
            f"{layers - 1}"
        )
    if config.target_num_layers not in (None, layers):
        return (
            f"num_target_layers of the drafter is {config.target_num_layers}, but "
            f"{pair.target.name} has {layers} layers"
        )
    return None


@_rule(
    "layer-order",
    ERROR,
    "If the drafter was trained with the ids in this order, sort the ids and the column blocks "
    "of fc.weight together; if only the list is out of order, sort it in its config.json.",
)
def _layer_order(pair: Pair) -> str | None:
    ids = list(pair.drafter.config.target_layer_ids)
    if ids == sorted(ids):
        return None
    return (
        f"the layer ids are {ids}; expected {sorted(ids)}, since vLLM passes the layers in "
        "ascending order, while the columns of fc.weight follow the order in the file"
    )


@_rule(
    "vocabulary",
    ERROR,
    f"{_OTHER_DRAFTER}. A reduced vocabulary belongs in draft_vocab_size of the speculators "
    "format, with the tensors lm_head.weight and d2t; vocab_size stays the target's.",
)
def _vocabulary(pair: Pair) -> str | None:
    drafter, target = pair.drafter.config.vocab_size, pair.target.vocab_size
    if drafter == target or _lacks_only_padding(drafter, target):
        return None
    return (
        f"vocab_size of the drafter is {drafter}, that of {pair.target.name} is {target}: token "
        "ids would have different meanings, or never be drafted"
    )


# Published drafters lack rows of padding, and a target may have a few new tokens.
@_rule(
    "vocabulary-padding",
    WARNING,
    "Nothing to do if the tokenizer has no such ids; otherwise train a drafter for this target.",
)
def _vocabulary_padding(pair: Pair) -> str | None:
    drafter, target = pair.drafter.config.vocab_size, pair.target.vocab_size
    if not _lacks_only_padding(drafter, target):
        return None
    return (
        f"vocab_size of the drafter is {drafter}, that of {pair.target.name} is {target}: ids from "
        f"{drafter} on are never drafted, which is harmless only if they are padding"
    )


def _lacks_only_padding(drafter: int, target: int) -> bool:
    return target * (1 - PADDING_SHARE) <= drafter < target


@_rule(
    "mask-token",
    ERROR,
    f"{_OTHER_DRAFTER}; mask_token_id in its config.json must be the id it was trained with.",
)
def _mask_token(pair: Pair) -> str | None:
    config = pair.drafter.config
    # The checkpoint's reader has checked a drafter's own embedding.
    if config.own_embedding or config.mask_token_id < pair.target.vocab_size:
        return None
    return (
        f"mask_token_id is {config.mask_token_id}, but the target's embedding has rows 0 to "
        f"{pair.target.vocab_size - 1}: the first request would crash the engine"
    )


# Names prove nothing: quantized and fine-tuned targets and renamed folders work with the
# drafter of the original. A model of other sizes breaks other rules.
@_rule(
    "verifier",
    WARNING,
    "This is fine for a quantized or fine-tuned copy of the named model, with a somewhat lower "
    "acceptance; otherwise serve the named target, or choose another drafter with --draft.",
)
def _verifier(pair: Pair) -> str | None:
    named = pair.drafter.target_name
    if not named or same_model(named, pair.target.name):
        return None
    return f"the target is {pair.target.name}, but the drafter names {printable(named)}"


# A drafter rotates its own queries and keys, so any theta works that it was trained with.
# Most drafters use the target's, but some published ones do not.
@_rule(
    "rope",
    WARNING,
    "Make sure that rope_theta and rope_parameters in the drafter's config.json are those of "
    "its training; most drafters use the target's.",
)
def _rope(pair: Pair) -> str | None:
    drafter, target = pair.drafter.config.rope, pair.target.rope
    # partial_rotary_factor is not compared: drafters of targets that rotate a part of each head
    # usually rotate whole heads.
    if target is None or (drafter.theta, drafter.scaling) == (target.theta, target.scaling):
        return None
    return (
        f"the rotary embedding of the drafter has {describe_rope(drafter)}, that of "
        f"{pair.target.name} has {describe_rope(target)}"
    )


# The files do not show whether the training code applied the field.
@_rule(
    "partial-rotary",
    WARNING,
    "If the drafter was trained with code that ignores the field, remove "
    "partial_rotary_factor from its config.json.",
)
def _partial_rotary(pair: Pair) -> str | None:
    fraction = pair.drafter.config.rope.fraction
    if fraction == 1.0:
        return None
    return (
        f"partial_rotary_factor of the drafter is {fraction:g}: vLLM rotates that part of each "
        "head, the training code of z-lab and of speculators rotates whole heads"
    )


@_rule(
    "embedding-scale",
    ERROR,
    "vLLM 0.32 cannot serve this drafter as trained; use another drafter, or serve without one.",
)
def _embedding_scale(pair: Pair) -> str | None:
    scale = pair.drafter.config.embedding_scale
    if scale == 1.0:
        return None
    return f"input_embedding_scale is {scale:g}, which vLLM's DFlash does not apply"


# The scaling is monotone: the best token stays the best.
@_rule(
    "logit-scaling",
    WARNING,
    'Keep "draft_sample_method": "greedy" in --speculative-config, which is the default.',
)
def _logit_scaling(pair: Pair) -> str | None:
    config = pair.drafter.config
    used = []
    if config.logit_multiplier != 1.0:
        used.append(f"output_multiplier is {config.logit_multiplier:g}")
    if config.logit_softcap is not None:
        used.append(f"final_logit_softcapping is {config.logit_softcap:g}")
    if not used:
        return None
    return (
        f"{' and '.join(used)}, which vLLM's DFlash does not apply: greedy drafts stay the same, "
        "the probabilities of sampled drafts change"
    )


def batched_tokens_for(max_num_seqs: int, draft_tokens: int) -> int:
    """The smallest max_num_batched_tokens with which all sequences decode in one step.

    For each sequence vLLM reserves 1 + K tokens to verify and K slots to draft in.
    """
    return max_num_seqs * (1 + 2 * draft_tokens)


@_server_rule("draft-tokens", "Lower num_speculative_tokens in --speculative-config.")
def _draft_tokens(pair: Pair, settings: EngineSettings) -> str | None:
    limit = pair.drafter.config.max_draft_tokens
    if 1 <= settings.draft_tokens <= limit:
        return None
    return (
        f"num_speculative_tokens is {settings.draft_tokens}; expected 1 to {limit}, since the "
        f"drafter's block of {limit + 1} tokens includes the anchor"
    )


@_server_rule(
    "positions", "Lower --max-model-len accordingly, or use a drafter trained for longer texts."
)
def _positions(pair: Pair, settings: EngineSettings) -> str | None:
    positions, length = pair.drafter.config.max_positions, settings.max_model_len
    if positions >= length:
        return None
    return (
        f"max_position_embeddings of the drafter is {positions}; expected at least max_model_len "
        f"({length}). A longer request would stop drafting for its whole batch, or read beyond the "
        "drafter's rotary table"
    )


@_server_rule(
    "causality",
    "Rewrite the drafter with `leadout convert DRAFTER NEW --to zlab`, which vLLM serves as "
    "trained; a drafter with its own head needs `--to speculators`.",
)
def _causality(pair: Pair, settings: EngineSettings) -> str | None:
    trained = tuple(layer.causal for layer in pair.drafter.config.layers)
    served = settings.served_causal
    if served is None or served == trained:
        return None
    return (
        f"vLLM would serve the draft layers as {_describe_causality(served)}, but they were "
        f"trained as {_describe_causality(trained)}"
    )


def _describe_causality(causal: tuple[bool, ...]) -> str:
    layers = ["causal" if each else "bidirectional" for each in causal]
    return layers[0] if len(set(layers)) == 1 else ", ".join(layers)


@_server_rule(
    "mixed-layers",
    "Start with VLLM_USE_V2_MODEL_RUNNER=1 where vLLM has Triton; V1 cannot run this drafter.",
)
def _mixed_layers(pair: Pair, settings: EngineSettings) -> str | None:
    windows = [layer.window for layer in pair.drafter.config.layers]
    mixed = None in windows and any(window is not None for window in windows)
    if not mixed or settings.model_runner == "V2":
        return None
    return (
        f"the model runner is {settings.model_runner}, but a drafter that mixes sliding and full "
        "attention requires V2"
    )


@_server_rule(
    "non-causal-backend",
    'Set another "attention_backend" in --speculative-config, such as FLASH_ATTN.',
)
def _non_causal_backend(pair: Pair, settings: EngineSettings) -> str | None:
    bidirectional = sum(not layer.causal for layer in pair.drafter.config.layers)
    if bidirectional == 0 or settings.backend_takes_non_causal is not False:
        return None
    backend = settings.backend_name or "none"
    return (
        f"the attention backend is {backend}; expected one with non-causal attention for the "
        f"{bidirectional} bidirectional layers of the drafter"
    )


# vLLM serves it, and the target's own text is as good as without a drafter. Quantized targets
# such as AWQ run in float16 by default.
@_server_rule(
    "dtype", "Prefer --dtype bfloat16, or float32 where the hardware has no bfloat16.", WARNING
)
def _dtype(_: Pair, settings: EngineSettings) -> str | None:
    if settings.dtype != "float16":
        return None
    return (
        "dtype is float16, not bfloat16 or float32: target states may overflow when the drafter "
        "fuses them, and then hardly any draft is accepted"
    )


# Only advice: a larger budget costs memory for activations and makes prompts delay other requests
# for longer, and few servers have so many requests at once.
@_server_rule(
    "batched-tokens",
    "Nothing to do if fewer requests run at once; otherwise set both flags, or lower "
    "--max-num-seqs.",
    WARNING,
)
def _batched_tokens(_: Pair, settings: EngineSettings) -> str | None:
    tokens, sequences = settings.max_num_batched_tokens, settings.max_num_seqs
    needed = batched_tokens_for(sequences, settings.draft_tokens)
    if tokens >= needed:
        return None
    at_once = tokens // batched_tokens_for(1, settings.draft_tokens)
    # The second flag bounds prompts to what they were before, or to what decoding needs.
    scheduled = max(tokens, sequences * (1 + settings.draft_tokens))
    return (
        f"max_num_batched_tokens is {tokens}, so {at_once} of up to {sequences} requests "
        f"(max_num_seqs) decode in a step with {settings.draft_tokens} drafts each, and the "
        f"others wait. All do with --max-num-batched-tokens {needed} and "
        f"--max-num-scheduled-tokens {scheduled}, which keeps the chunks of prompts short"
    )


def examine(pair: Pair) -> list[Finding]:
    """One finding for each broken rule; without settings, rules about settings are skipped."""
    found = ((rule, rule.broken(pair)) for rule in RULES)
    return [
        Finding(name=rule.name, severity=rule.severity, message=message, remedy=rule.remedy)
        for rule, message in found
        if message is not None
    ]
