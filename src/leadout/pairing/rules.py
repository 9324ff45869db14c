"""Rules between a drafter's files and its target."""

from __future__ import annotations

from collections.abc import Callable

from leadout.checkpoints.decoder_config import describe_rope
from leadout.checkpoints.errors import printable
from leadout.findings import Finding, Severity
from leadout.models import same_model
from leadout.pairing.facts import EngineSettings, Pair, Rule

# Embeddings are padded to round numbers: a drafter that lacks up to this share of the target's rows
# lacks padding (published: 152064 rows of 152576), one that lacks more lacks tokens.
PADDING_SHARE = 0.01

_OTHER_DRAFTER = "Use the drafter that was trained for this target, or the target it names"


def _hidden_size(pair: Pair) -> str | None:
    found, wanted = pair.drafter.config.context_size, pair.target.hidden_size
    if found == wanted:
        return None
    return (
        f"found a drafter for target states of width {found}, wanted {wanted}, the hidden_size of "
        f"{pair.target.name}"
    )


def _target_layers(pair: Pair) -> str | None:
    config, layers = pair.drafter.config, pair.target.num_layers
    beyond = [i for i in config.target_layer_ids if i >= layers]
    if beyond:
        return (
            f"found layer ids {beyond} in the drafter, wanted ids in 0..{layers - 1}, the layers "
            f"of {pair.target.name}"
        )
    if config.target_num_layers not in (None, layers):
        return (
            f"found num_target_layers {config.target_num_layers} in the drafter, wanted {layers}, "
            f"the num_hidden_layers of {pair.target.name}"
        )
    return None


def _layer_order(pair: Pair) -> str | None:
    ids = list(pair.drafter.config.target_layer_ids)
    if ids == sorted(ids):
        return None
    return (
        f"found layer ids {ids}, wanted {sorted(ids)}: vLLM hands over the layers in ascending "
        "order, but the columns of fc.weight follow the file"
    )


def _vocabulary(pair: Pair) -> str | None:
    found, wanted = pair.drafter.config.vocab_size, pair.target.vocab_size
    if found == wanted or _lacks_padding_only(found, wanted):
        return None
    return (
        f"found vocab_size {found} in the drafter, wanted {wanted}, that of {pair.target.name}: "
        "token ids would not mean the same, or never be drafted"
    )


def _vocabulary_padding(pair: Pair) -> str | None:
    found, wanted = pair.drafter.config.vocab_size, pair.target.vocab_size
    if not _lacks_padding_only(found, wanted):
        return None
    return (
        f"found vocab_size {found} in the drafter, wanted {wanted}, that of {pair.target.name}: "
        f"ids from {found} on are never drafted, harmless only if they are padding"
    )


def _lacks_padding_only(found: int, wanted: int) -> bool:
    return wanted * (1 - PADDING_SHARE) <= found < wanted


def _mask_token(pair: Pair) -> str | None:
    config = pair.drafter.config
    # An embedding of its own has the row: the checkpoint's reader made sure of that.
    if config.own_embedding or config.mask_token_id < pair.target.vocab_size:
        return None
    return (
        f"found mask_token_id {config.mask_token_id}, wanted a row of the target's embedding, "
        f"0..{pair.target.vocab_size - 1}: the first request would end the engine"
    )


def _verifier(pair: Pair) -> str | None:
    named = pair.drafter.target_name
    if not named or same_model(named, pair.target.name):
        return None
    return (
        f"found the target {pair.target.name}, wanted {printable(named)}, which the drafter names"
    )


def _rope(pair: Pair) -> str | None:
    found, wanted = pair.drafter.config.rope, pair.target.rope
    # The rotated share of a head is left out: drafters of targets that rotate a part of each head
    # usually rotate all of it.
    if wanted is None or (found.theta, found.scaling) == (wanted.theta, wanted.scaling):
        return None
    return (
        f"found a rotary embedding with {describe_rope(found)} in the drafter, wanted "
        f"{describe_rope(wanted)}, that of {pair.target.name}"
    )


def _partial_rotary(pair: Pair) -> str | None:
    fraction = pair.drafter.config.rope.fraction
    if fraction == 1.0:
        return None
    return (
        f"found partial_rotary_factor {fraction:g} in the drafter, wanted none: vLLM rotates that "
        "part of each head, z-lab's and speculators' training code all of it"
    )


def _embedding_scale(pair: Pair) -> str | None:
    found = pair.drafter.config.embedding_scale
    if found == 1.0:
        return None
    return f"found input_embedding_scale {found:g}, wanted 1: vLLM's DFlash does not apply it"


def _logit_scaling(pair: Pair) -> str | None:
    config = pair.drafter.config
    used = []
    if config.logit_multiplier != 1.0:
        used.append(f"output_multiplier {config.logit_multiplier:g}")
    if config.logit_softcap is not None:
        used.append(f"final_logit_softcapping {config.logit_softcap:g}")
    if not used:
        return None
    return (
        f"found {' and '.join(used)}, wanted none: vLLM's DFlash applies neither; greedy drafts "
        "stay what they are, the probabilities of sampled ones do not"
    )


MODEL_RULES = (
    Rule(
        "hidden-size",
        Severity.ERROR,
        "the width of the target states that fc.weight takes, with the target's hidden_size",
        f"{_OTHER_DRAFTER}.",
        _hidden_size,
    ),
    Rule(
        "target-layers",
        Severity.ERROR,
        "the drafter's layer ids and num_target_layers, with the target's num_hidden_layers",
        f"{_OTHER_DRAFTER}; correct the field in the drafter's config.json only if you know it to "
        "be a slip.",
        _target_layers,
    ),
    Rule(
        "layer-order",
        Severity.ERROR,
        "the order of the drafter's layer ids, with the ascending order in which vLLM taps them",
        "If it was trained with the ids in this order, sort them and the column blocks of "
        "fc.weight alike; if only the list is jumbled, sort it in the drafter's config.json.",
        _layer_order,
    ),
    Rule(
        "vocabulary",
        Severity.ERROR,
        "the drafter's vocab_size, with the target's",
        f"{_OTHER_DRAFTER}. A reduced vocabulary belongs in draft_vocab_size of the speculators "
        "format, with the tensors lm_head.weight and d2t; vocab_size stays the target's.",
        _vocabulary,
    ),
    Rule(
        "vocabulary-padding",
        # Published drafters do lack rows of padding, and a target may have got a few new tokens.
        Severity.WARNING,
        "the drafter's vocab_size, with the target's, where they differ by no more than padding",
        "Nothing to do if the tokenizer has no such ids; else train a drafter for this target.",
        _vocabulary_padding,
    ),
    Rule(
        "mask-token",
        Severity.ERROR,
        "the drafter's mask_token_id, with the rows of the target's embedding",
        f"{_OTHER_DRAFTER}; mask_token_id in its config.json must be the id it was trained with.",
        _mask_token,
    ),
    Rule(
        "verifier",
        # A name proves nothing: quantized and fine-tuned targets and renamed folders are served
        # with the drafter of the original, and rightly so. A model of other sizes breaks other
        # rules.
        Severity.WARNING,
        "the target named in a speculators checkpoint, with the target that is served",
        "Fine for a quantized or fine-tuned copy of the named model, though drafts may be accepted "
        "less often; else serve the named target, or another drafter with --draft.",
        _verifier,
    ),
    Rule(
        "rope",
        # A drafter rotates its own queries and keys, so any theta works that it was trained with.
        # The usual recipe takes the target's, but published drafters exist that do not.
        Severity.WARNING,
        "theta and scaling of the drafter's rotary embedding, with the target's",
        "Make sure that rope_theta and rope_parameters in the drafter's config.json are those it "
        "was trained with; the usual recipe takes the target's.",
        _rope,
    ),
    Rule(
        "partial-rotary",
        # Only the trainer knows whether his code honoured the field.
        Severity.WARNING,
        "the drafter's partial_rotary_factor, with whole heads",
        "If the drafter was trained with code that ignores the field, remove "
        "partial_rotary_factor from its config.json.",
        _partial_rotary,
    ),
    Rule(
        "embedding-scale",
        Severity.ERROR,
        "the drafter's input_embedding_scale, with what vLLM applies: none",
        "vLLM 0.32 cannot serve this drafter as it was trained; use another one, or serve without "
        "speculation.",
        _embedding_scale,
    ),
    Rule(
        "logit-scaling",
        Severity.WARNING,  # monotone: the best token stays the best
        "the drafter's output_multiplier and final_logit_softcapping, with what vLLM applies: none",
        'Keep "draft_sample_method": "greedy" in --speculative-config, which is the default.',
        _logit_scaling,
    ),
)

# Rules between a drafter and the settings of the server that will run it.


def batched_tokens_for(max_num_seqs: int, draft_tokens: int) -> int:
    """The smallest max_num_batched_tokens with which all sequences decode in one step.

    vLLM books on each of them 1 + K tokens to verify and K slots to draft in.
    """
    return max_num_seqs * (1 + 2 * draft_tokens)


def _draft_tokens(pair: Pair, settings: EngineSettings) -> str | None:
    most = pair.drafter.config.max_draft_tokens
    if 1 <= settings.draft_tokens <= most:
        return None
    return (
        f"found num_speculative_tokens {settings.draft_tokens}, wanted 1..{most}: the drafter's "
        f"block of {most + 1} is the anchor and {most} drafts"
    )


def _positions(pair: Pair, settings: EngineSettings) -> str | None:
    found, wanted = pair.drafter.config.max_positions, settings.max_model_len
    if found >= wanted:
        return None
    return (
        f"found max_position_embeddings {found} in the drafter, wanted at least max_model_len, "
        f"{wanted}: a longer request would stop drafting for its whole batch, or read beyond the "
        "drafter's rotary table"
    )


def _causality(pair: Pair, settings: EngineSettings) -> str | None:
    trained = tuple(layer.causal for layer in pair.drafter.config.layers)
    served = settings.served_causal
    if served is None or served == trained:
        return None
    return (
        f"found draft layers that would be served {_causality_words(served)}, wanted "
        f"{_causality_words(trained)}, as they were trained"
    )


def _causality_words(causal: tuple[bool, ...]) -> str:
    words = ["causal" if each else "bidirectional" for each in causal]
    return words[0] if len(set(words)) == 1 else ", ".join(words)


def _mixed_layers(pair: Pair, settings: EngineSettings) -> str | None:
    windows = [layer.window for layer in pair.drafter.config.layers]
    mixed = None in windows and any(window is not None for window in windows)
    if not mixed or settings.model_runner == "V2":
        return None
    return (
        f"found model runner {settings.model_runner}, wanted V2: the drafter mixes sliding and "
        "full attention"
    )


def _non_causal_backend(pair: Pair, settings: EngineSettings) -> str | None:
    bidirectional = sum(not layer.causal for layer in pair.drafter.config.layers)
    if bidirectional == 0 or settings.backend_takes_non_causal is not False:
        return None
    found = settings.backend_name or "none at all"
    return (
        f"found attention backend {found}, wanted one that supports non-causal attention, for the "
        f"{bidirectional} bidirectional layers of the drafter"
    )


def _dtype(_: Pair, settings: EngineSettings) -> str | None:
    if settings.dtype != "float16":
        return None
    return (
        "found dtype float16, wanted bfloat16 or float32: target states overflow where the "
        "drafter fuses them, and drafts are no longer accepted"
    )


def _batched_tokens(_: Pair, settings: EngineSettings) -> str | None:
    found = settings.max_num_batched_tokens
    wanted = batched_tokens_for(settings.max_num_seqs, settings.draft_tokens)
    if found >= wanted:
        return None
    at_once = found // batched_tokens_for(1, settings.draft_tokens)
    return (
        f"found max_num_batched_tokens {found}, wanted at least {wanted}, which is max_num_seqs "
        f"({settings.max_num_seqs}) x (1 + 2 x {settings.draft_tokens} drafted tokens): no more "
        f"than {at_once} requests would decode in a step, the others wait"
    )


def _given_settings(
    broken: Callable[[Pair, EngineSettings], str | None],
) -> Callable[[Pair], str | None]:
    """Without settings there is nothing to compare."""
    return lambda pair: None if pair.settings is None else broken(pair, pair.settings)


SERVER_RULES = (
    Rule(
        "draft-tokens",
        Severity.ERROR,
        "num_speculative_tokens, with the drafter's block size",
        "Lower num_speculative_tokens in --speculative-config.",
        _given_settings(_draft_tokens),
    ),
    Rule(
        "positions",
        Severity.ERROR,
        "the drafter's max_position_embeddings, with max_model_len",
        "Lower --max-model-len to what the drafter covers, or use a drafter trained for longer "
        "texts.",
        _given_settings(_positions),
    ),
    Rule(
        "causality",
        Severity.ERROR,
        "the causality of each draft layer as vLLM will serve it, with the drafter's training",
        "Rewrite the drafter with `leadout convert DRAFTER NEW --to zlab`, which vLLM reads as it "
        "was trained; a drafter with its own head needs `--to speculators`.",
        _given_settings(_causality),
    ),
    Rule(
        "mixed-layers",
        Severity.ERROR,
        "the kinds of attention in the drafter, with vLLM's model runner",
        "Start with VLLM_USE_V2_MODEL_RUNNER=1 where vLLM has Triton; V1 cannot run this drafter.",
        _given_settings(_mixed_layers),
    ),
    Rule(
        "non-causal-backend",
        Severity.ERROR,
        "the drafter's bidirectional layers, with the attention backend that will run them",
        'Name another backend: "attention_backend" in --speculative-config, such as FLASH_ATTN.',
        _given_settings(_non_causal_backend),
    ),
    Rule(
        "dtype",
        Severity.ERROR,
        "the precision of target and drafter, with those that hold fused target states",
        "Add --dtype bfloat16, or float32 where the hardware has no bfloat16.",
        _given_settings(_dtype),
    ),
    Rule(
        "batched-tokens",
        Severity.ERROR,
        "max_num_batched_tokens, with max_num_seqs * (1 + 2K)",
        "Raise --max-num-batched-tokens to the wanted number, or lower --max-num-seqs.",
        _given_settings(_batched_tokens),
    ),
)

# All rules of pairing, in the order in which findings are shown.
#
# A rule refuses only what no working pair does; what somebody may rightly want is a warning.

RULES: tuple[Rule, ...] = MODEL_RULES + SERVER_RULES


def examine(pair: Pair) -> list[Finding]:
    """Every rule that this pair breaks; without settings, the rules about them are passed over."""
    found = ((rule, rule.broken(pair)) for rule in RULES)
    return [
        Finding(name=rule.name, severity=rule.severity, message=message, remedy=rule.remedy)
        for rule, message in found
        if message is not None
    ]
