"""The target's tokenizer files, compared with its embedding and with the drafter's mask token.

The files are read directly: importing a tokenizer class takes longer than all other static checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from leadout.errors import shortened
from leadout.files import FileError, read_object, read_text
from leadout.findings import Finding, Severity, error, finding, note, warning

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
# Tokenizers of other libraries, which are not examined.
_OTHER_TOKENIZERS = ("tokenizer.model", "*.tiktoken", "tiktoken.model", "tekken.json", "vocab.json")


@dataclass(frozen=True, slots=True)
class TokenFiles:
    """The contents of the tokenizer's files; without tokenizer.json there are no tokens."""

    tokens: Mapping[int, str]
    special: frozenset[int]  # never part of ordinary text
    roles: Mapping[int, str]  # such as "end-of-text", by token id
    template: str | None


def read_token_files(folder: Path, findings: list[Finding]) -> TokenFiles | None:
    """Read the tokenizer's files; problems are added to `findings`."""
    settings = _json_object(folder / SETTINGS)
    template = _template(folder, settings)
    if template is None:
        message = (
            f"{folder} has no chat template ({TEMPLATE}): chats cannot be served, and drafters are "
            "rarely trained on plain text"
        )
        remedy = f"Add {TEMPLATE}, or give the server one with --chat-template."
        findings.append(warning("chat-template-missing", message, remedy))
    if not (folder / TOKENIZER).is_file():
        findings.append(_no_tokenizer(folder))
        return TokenFiles({}, frozenset(), {}, template)

    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as problem:  # the library raises nothing more precise
        message = f"{folder / TOKENIZER} is not a valid tokenizer: {shortened(str(problem))}"
        findings.append(error("tokenizer-unreadable", message, "Download the target again."))
        return None
    tokens = {number: token for token, number in tokenizer.get_vocab().items()}
    added = tokenizer.get_added_tokens_decoder()
    special = frozenset(number for number, token in added.items() if token.special)
    return TokenFiles(tokens, special, dict(_roles(folder, settings, tokens)), template)


def vocabulary_findings(files: TokenFiles, rows: int, draft_rows: int) -> list[Finding]:
    """Tokens without a row in the target's embedding or in the drafter."""
    findings = []
    beyond = sorted(number for number in files.tokens if number >= rows)
    if beyond:
        # Text-only copies of multimodal models keep the special tokens of images.
        severity = Severity.NOTE if files.special.issuperset(beyond) else Severity.WARNING
        message = (
            f"{len(beyond)} tokens from id {beyond[0]} on have no row in the target's embedding of "
            f"{rows} rows: the target cannot read text with them"
        )
        remedy = "Use the tokenizer that belongs to these weights."
        evidence = {"tokens": len(beyond), "rows": rows}
        findings.append(
            finding(severity, "tokenizer-beyond-embedding", message, remedy, **evidence)
        )
    undrafted = [number for number in files.tokens if draft_rows <= number < rows]
    if undrafted:
        message = (
            f"the drafter, with vocab_size {draft_rows}, can never draft {len(undrafted)} tokens "
            f"of the tokenizer from id {min(undrafted)} on"
        )
        remedy = "Train a drafter for this target, with its whole vocabulary."
        evidence = {"tokens": len(undrafted), "drafter_rows": draft_rows}
        findings.append(warning("tokens-never-drafted", message, remedy, **evidence))
    return findings


def mask_findings(files: TokenFiles, mask: int) -> list[Finding]:
    """A mask token that also occurs in text: such an anchor looks like an empty slot."""
    token = files.tokens.get(mask)
    if token is None:
        return []  # no text can contain it: ideal
    role = files.roles.get(mask)
    if role is not None:
        why = f"the target's {role} token"
    elif mask not in files.special:
        why = "a token of ordinary text"
    elif files.template is not None and token in files.template:
        why = "a token that the chat template writes"
    else:
        return []
    return [
        finding(
            # Padding fills batches and does not occur in texts.
            Severity.NOTE if role == "padding" else Severity.WARNING,
            "mask-in-text",
            f"mask_token_id {mask} is {token!r}, {why}; expected a token that no text contains",
            "Make sure that mask_token_id in the drafter's config.json is that of its training; "
            "if so, nothing is wrong with the file.",
            mask_token_id=mask,
            token=token,
        )
    ]


def _no_tokenizer(folder: Path) -> Finding:
    others = [path.name for pattern in _OTHER_TOKENIZERS for path in folder.glob(pattern)]
    if others:
        message = f"{folder} has {others[0]} but no {TOKENIZER}, so tokens were not examined"
        return note("tokenizer-not-examined", message, "Nothing to do if vLLM serves the target.")
    message = f"{folder} has no tokenizer ({TOKENIZER}): no text can be served"
    remedy = "Put the target's tokenizer files into its folder."
    return warning("tokenizer-missing", message, remedy)


def _template(folder: Path, settings: Mapping[str, object]) -> str | None:
    """The chat template that transformers would use: a separate file comes before the settings."""
    try:
        return read_text(folder / TEMPLATE) or None
    except FileError:
        stated = settings.get("chat_template")
    if isinstance(stated, list):  # several by name
        named = [each for each in stated if isinstance(each, dict)]
        default = [each.get("template") for each in named if each.get("name") == "default"]
        stated = default[-1] if default else None
    return stated if isinstance(stated, str) and stated else None


def _roles(
    folder: Path, settings: Mapping[str, object], tokens: Mapping[int, str]
) -> Iterator[tuple[int, str]]:
    """Token ids and their roles. Padding comes first, so that a later role overrides it."""
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
        return read_object(path)
    except FileError:
        return {}
