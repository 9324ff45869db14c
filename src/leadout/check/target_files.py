"""Whether the target's weight files are whole, from their headers alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from leadout.check.result import Finding, Gravity
from leadout.pairing import TargetFacts

INDEX = "model.safetensors.index.json"
EMBEDDING = "embed_tokens.weight"  # after whatever prefix the architecture has
_DOWNLOAD_AGAIN = "Download the target again."


def weight_file_findings(folder: Path, facts: TargetFacts) -> list[Finding]:
    missing = missing_shards(folder)
    if missing:
        return [
            Finding(
                name="target-incomplete",
                gravity=Gravity.UNFIT,
                message=(
                    f"{folder}: found {len(missing)} of the files in {INDEX} missing, the first "
                    f"is {missing[0]!r}; wanted all of them"
                ),
                evidence={"missing": len(missing)},
                remedy=_DOWNLOAD_AGAIN,
            )
        ]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return [
            Finding(
                name="target-weights-absent",
                gravity=Gravity.NOTE,
                message=f"{folder}: found no safetensors, so no weights were looked at",
                remedy="Give the target's whole folder if it has one.",
            )
        ]
    return _header_findings(files, facts)


def has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) and not missing_shards(folder)


def missing_shards(folder: Path) -> list[str]:
    """Files that the index names and the folder lacks, if it has any weights at all."""
    if not any(folder.glob("*.safetensors")):
        return []
    try:
        shard_of = json.loads((folder / INDEX).read_bytes())["weight_map"]
        names = sorted({str(name) for name in shard_of.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []  # no index, or one that nobody could read: the headers tell the rest
    return [name for name in names if not (folder / name).is_file()]


def _header_findings(files: list[Path], facts: TargetFacts) -> list[Finding]:
    """A header that its file does not fill, and an embedding of other rows than the config says."""
    from safetensors import SafetensorError, safe_open

    rows = None
    for path in files:
        try:
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    if name.endswith(EMBEDDING):
                        rows = opened.get_slice(name).get_shape()[0]
        except (SafetensorError, OSError) as problem:
            return [
                Finding(
                    name="target-unreadable",
                    gravity=Gravity.UNFIT,
                    message=f"{path}: found {problem}, wanted a whole safetensors file",
                    remedy=_DOWNLOAD_AGAIN,
                )
            ]
    if rows in (None, facts.vocab_size):
        return []
    return [
        Finding(
            name="target-embedding",
            gravity=Gravity.DOUBTFUL,
            message=(
                f"found {rows} rows in the target's {EMBEDDING}, wanted {facts.vocab_size}, the "
                "vocab_size in its config.json"
            ),
            evidence={"rows": rows, "vocab_size": facts.vocab_size},
            remedy="Config and weights are not of the same model; download the target again.",
        )
    ]


# The target's tokenizer beside its embedding and the drafter's mask token.
#
# The files are read as they are: importing a tokenizer class would take longer than all else.

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
# Tokenizers of other libraries, which are not looked into.
_OTHER_TOKENIZERS = ("tokenizer.model", "*.tiktoken", "tiktoken.model", "tekken.json", "vocab.json")


@dataclass(frozen=True, slots=True)
class TokenFiles:
    """What the tokenizer's files say; without tokenizer.json, no tokens."""

    tokens: Mapping[int, str]
    special: frozenset[int]  # never part of written text
    roles: Mapping[int, str]  # ids with a task, such as "end of text"
    template: str | None


def read_token_files(folder: Path, findings: list[Finding]) -> TokenFiles | None:
    """The tokenizer's files; what is wrong with them goes into `findings`."""
    settings = _json_object(folder / SETTINGS)
    template = _template(folder, settings)
    if template is None:
        findings.append(
            Finding(
                name="chat-template-missing",
                gravity=Gravity.DOUBTFUL,
                message=(
                    f"{folder}: found no chat template, wanted {TEMPLATE}: chats cannot be served, "
                    "and plain text is not what drafters are usually trained on"
                ),
                remedy=f"Add {TEMPLATE}, or name one to the server with --chat-template.",
            )
        )
    if not (folder / TOKENIZER).is_file():
        findings.append(_no_tokenizer(folder))
        return TokenFiles({}, frozenset(), {}, template)

    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as problem:  # the library raises nothing more precise
        findings.append(
            Finding(
                name="tokenizer-unreadable",
                gravity=Gravity.UNFIT,
                message=f"{folder / TOKENIZER}: found {problem}, wanted a tokenizer",
                remedy="Download the target again.",
            )
        )
        return None
    tokens = {number: token for token, number in tokenizer.get_vocab().items()}
    added = tokenizer.get_added_tokens_decoder()
    special = frozenset(number for number, token in added.items() if token.special)
    return TokenFiles(tokens, special, dict(_roles(folder, settings, tokens)), template)


def vocabulary_findings(files: TokenFiles, rows: int, draft_rows: int) -> list[Finding]:
    """Tokens that the target's embedding or the drafter has no row for."""
    findings = []
    beyond = sorted(number for number in files.tokens if number >= rows)
    if beyond:
        written = [number for number in beyond if number not in files.special]
        findings.append(
            Finding(
                name="tokenizer-beyond-embedding",
                # Text-only copies of models that also see keep the tokens of pictures.
                gravity=Gravity.DOUBTFUL if written else Gravity.NOTE,
                message=(
                    f"found {len(beyond)} tokens from id {beyond[0]} on, wanted ids below {rows}, "
                    "the rows of the target's embedding: a text with them cannot be read"
                ),
                evidence={"tokens": len(beyond), "rows": rows},
                remedy="Use the tokenizer that belongs to these weights.",
            )
        )
    undrafted = [number for number in files.tokens if draft_rows <= number < rows]
    if undrafted:
        findings.append(
            Finding(
                name="tokens-never-drafted",
                gravity=Gravity.DOUBTFUL,
                message=(
                    f"found {len(undrafted)} tokens of the tokenizer from id {min(undrafted)} on "
                    f"that the drafter, with vocab_size {draft_rows}, can never draft"
                ),
                evidence={"tokens": len(undrafted), "drafter_rows": draft_rows},
                remedy="Train a drafter for this target: it has tokens that the old one lacked.",
            )
        )
    return findings


def mask_findings(files: TokenFiles, mask: int) -> list[Finding]:
    """A mask token that also occurs in text: such an anchor looks like an empty slot."""
    token = files.tokens.get(mask)
    if token is None:
        return []  # a row that no text can reach: the best there is
    role = files.roles.get(mask)
    if role is not None:
        why, gravity = f"the target's {role} token", Gravity.DOUBTFUL
        if role == "padding":
            gravity = Gravity.NOTE  # of batches, not of texts
    elif mask not in files.special:
        why, gravity = "a token of ordinary text", Gravity.DOUBTFUL
    elif files.template is not None and token in files.template:
        why, gravity = "a token that the chat template writes", Gravity.DOUBTFUL
    else:
        return []
    return [
        Finding(
            name="mask-in-text",
            gravity=gravity,
            message=(
                f"found mask_token_id {mask}, {token!r}, {why}; wanted one that no text contains"
            ),
            evidence={"mask_token_id": mask, "token": token},
            remedy=(
                "Make sure that mask_token_id in the drafter's config.json is the one it was "
                "trained with; if it is, nothing is wrong with the file."
            ),
        )
    ]


def _no_tokenizer(folder: Path) -> Finding:
    others = [path.name for pattern in _OTHER_TOKENIZERS for path in folder.glob(pattern)]
    if others:
        return Finding(
            name="tokenizer-not-examined",
            gravity=Gravity.NOTE,
            message=f"{folder}: found {others[0]} and no {TOKENIZER}, so tokens were not looked at",
            remedy="Nothing to do if vLLM serves the target as it is.",
        )
    return Finding(
        name="tokenizer-missing",
        gravity=Gravity.DOUBTFUL,
        message=f"{folder}: found no tokenizer, wanted {TOKENIZER}: no text can be served",
        remedy="Put the target's tokenizer files into its folder.",
    )


def _template(folder: Path, settings: Mapping[str, object]) -> str | None:
    """The template as transformers picks it: a file of its own before the settings."""
    try:
        return (folder / TEMPLATE).read_text(encoding="utf-8") or None
    except (OSError, UnicodeDecodeError):
        stated = settings.get("chat_template")
    if isinstance(stated, list):  # several by name
        named = {
            each.get("name"): each.get("template") for each in stated if isinstance(each, dict)
        }
        stated = named.get("default")
    return stated if isinstance(stated, str) and stated else None


def _roles(
    folder: Path, settings: Mapping[str, object], tokens: Mapping[int, str]
) -> Iterator[tuple[int, str]]:
    """Padding first: a token that pads and ends is one that ends."""
    id_of = {token: number for number, token in tokens.items()}
    files = [_json_object(folder / name) for name in ("config.json", "generation_config.json")]
    for short, role in (("pad", "padding"), ("bos", "begin-of-text"), ("eos", "end-of-text")):
        stated = settings.get(f"{short}_token")
        token = stated.get("content") if isinstance(stated, dict) else stated
        if isinstance(token, str) and token in id_of:
            yield id_of[token], role
        for file in files:
            ids = file.get(f"{short}_token_id")
            for number in ids if isinstance(ids, list) else [ids]:
                if isinstance(number, int):
                    yield number, role


def _json_object(path: Path) -> Mapping[str, object]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
