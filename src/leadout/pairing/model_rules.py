"""Rules between a drafter's files and its target."""

from __future__ import annotations

from leadout.checkpoints.errors import printable
from leadout.checkpoints.rope import describe_rope
from leadout.pairing.facts import Pair
from leadout.pairing.names import same_model
from leadout.pairing.rule import Rule, Severity

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
        Severity.REFUSE,
        "the width of the target states that fc.weight takes, with the target's hidden_size",
        f"{_OTHER_DRAFTER}.",
        _hidden_size,
    ),
    Rule(
        "target-layers",
        Severity.REFUSE,
        "the drafter's layer ids and num_target_layers, with the target's num_hidden_layers",
        f"{_OTHER_DRAFTER}; correct the field in the drafter's config.json only if you know it to "
        "be a slip.",
        _target_layers,
    ),
    Rule(
        "layer-order",
        Severity.REFUSE,
        "the order of the drafter's layer ids, with the ascending order in which vLLM taps them",
        "If it was trained with the ids in this order, sort them and the column blocks of "
        "fc.weight alike; if only the list is jumbled, sort it in the drafter's config.json.",
        _layer_order,
    ),
    Rule(
        "vocabulary",
        Severity.REFUSE,
        "the drafter's vocab_size, with the target's",
        f"{_OTHER_DRAFTER}. A reduced vocabulary belongs in draft_vocab_size of the speculators "
        "format, with the tensors lm_head.weight and d2t; vocab_size stays the target's.",
        _vocabulary,
    ),
    Rule(
        "vocabulary-padding",
        # Published drafters do lack rows of padding, and a target may have got a few new tokens.
        Severity.WARN,
        "the drafter's vocab_size, with the target's, where they differ by no more than padding",
        "Nothing to do if the tokenizer has no such ids; else train a drafter for this target.",
        _vocabulary_padding,
    ),
    Rule(
        "mask-token",
        Severity.REFUSE,
        "the drafter's mask_token_id, with the rows of the target's embedding",
        f"{_OTHER_DRAFTER}; mask_token_id in its config.json must be the id it was trained with.",
        _mask_token,
    ),
    Rule(
        "verifier",
        # A name proves nothing: quantized and fine-tuned targets and renamed folders are served
        # with the drafter of the original, and rightly so. A model of other sizes breaks other
        # rules.
        Severity.WARN,
        "the target named in a speculators checkpoint, with the target that is served",
        "Fine for a quantized or fine-tuned copy of the named model, though drafts may be accepted "
        "less often; else serve the named target, or another drafter with --draft.",
        _verifier,
    ),
    Rule(
        "rope",
        # A drafter rotates its own queries and keys, so any theta works that it was trained with.
        # The usual recipe takes the target's, but published drafters exist that do not.
        Severity.WARN,
        "theta and scaling of the drafter's rotary embedding, with the target's",
        "Make sure that rope_theta and rope_parameters in the drafter's config.json are those it "
        "was trained with; the usual recipe takes the target's.",
        _rope,
    ),
    Rule(
        "partial-rotary",
        # Only the trainer knows whether his code honoured the field.
        Severity.WARN,
        "the drafter's partial_rotary_factor, with whole heads",
        "If the drafter was trained with code that ignores the field, remove "
        "partial_rotary_factor from its config.json.",
        _partial_rotary,
    ),
    Rule(
        "embedding-scale",
        Severity.REFUSE,
        "the drafter's input_embedding_scale, with what vLLM applies: none",
        "vLLM 0.32 cannot serve this drafter as it was trained; use another one, or serve without "
        "speculation.",
        _embedding_scale,
    ),
    Rule(
        "logit-scaling",
        Severity.WARN,  # monotone: the best token stays the best
        "the drafter's output_multiplier and final_logit_softcapping, with what vLLM applies: none",
        'Keep "draft_sample_method": "greedy" in --speculative-config, which is the default.',
        _logit_scaling,
    ),
)
