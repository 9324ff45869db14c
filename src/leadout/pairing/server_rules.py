"""Rules between a drafter and the settings of the server that will run it."""

from __future__ import annotations

from collections.abc import Callable

from leadout.pairing.facts import EngineSettings, Pair
from leadout.pairing.rule import Rule, Severity


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
        Severity.REFUSE,
        "num_speculative_tokens, with the drafter's block size",
        "Lower num_speculative_tokens in --speculative-config.",
        _given_settings(_draft_tokens),
    ),
    Rule(
        "positions",
        Severity.REFUSE,
        "the drafter's max_position_embeddings, with max_model_len",
        "Lower --max-model-len to what the drafter covers, or use a drafter trained for longer "
        "texts.",
        _given_settings(_positions),
    ),
    Rule(
        "causality",
        Severity.REFUSE,
        "the causality of each draft layer as vLLM will serve it, with the drafter's training",
        "Rewrite the drafter with `leadout convert DRAFTER NEW --to zlab`, which vLLM reads as it "
        "was trained; a drafter with its own head needs `--to speculators`.",
        _given_settings(_causality),
    ),
    Rule(
        "mixed-layers",
        Severity.REFUSE,
        "the kinds of attention in the drafter, with vLLM's model runner",
        "Start with VLLM_USE_V2_MODEL_RUNNER=1 where vLLM has Triton; V1 cannot run this drafter.",
        _given_settings(_mixed_layers),
    ),
    Rule(
        "non-causal-backend",
        Severity.REFUSE,
        "the drafter's bidirectional layers, with the attention backend that will run them",
        'Name another backend: "attention_backend" in --speculative-config, such as FLASH_ATTN.',
        _given_settings(_non_causal_backend),
    ),
    Rule(
        "dtype",
        Severity.REFUSE,
        "the precision of target and drafter, with those that hold fused target states",
        "Add --dtype bfloat16, or float32 where the hardware has no bfloat16.",
        _given_settings(_dtype),
    ),
    Rule(
        "batched-tokens",
        Severity.REFUSE,
        "max_num_batched_tokens, with max_num_seqs * (1 + 2K)",
        "Raise --max-num-batched-tokens to the wanted number, or lower --max-num-seqs.",
        _given_settings(_batched_tokens),
    ),
)
