"""Damaged copies of a valid content, each from a seed: single bytes, values, names, or structure.

The places of a content at which something can be changed are found once. A mutation then only
joins pieces of bytes, so that a case costs microseconds.
"""

from __future__ import annotations

import io
import json
import random
import re
import struct
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Mutate = Callable[[random.Random], bytes]
Span = tuple[int, int]

DEEP = (1, 3, 70, 250, 2000, 100_000)
# Most are valid JSON, a few are what only some parsers take.
ODD = [
    *(b"null", b"true", b"false", b"0", b"1", b"-1", b"2", b"3", b"8", b"64", b"1001", b"-0"),
    *(str(2**power + more).encode() for power in (31, 53, 63, 64) for more in (-1, 0, 1)),
    *(str(-(2**63) - more).encode() for more in (0, 1)),
    *(b"9e18", b"1e30", b"1e308", b"1e999", b"-1e999", b"5e-324", b"0.0", b"-0.5", b"0.5", b"1.0"),
    *(b"NaN", b"Infinity", b"-Infinity", b"nan", b"0x10", b"01", b"1_000", b"+1", b".5", b"1."),
    *(b"9" * 30, b"9" * 400, b"9" * 5000, b"-" + b"9" * 4000, b"1e" + b"9" * 30),
    *(b'""', b'"0"', b'"16"', b'"1e5"', b'"nan"', b'"\\u0000"', b'"\\ud800"', b'"\\udc00x"'),
    *(b'"\xff\xfe"', b'"\xc3"', b'"\xed\xa0\x80"', b'"\x00"', b'"\x1b[2J"', b'"a\\nb"'),
    *('"ÿ\u202e"'.encode(), '"\U0001f600"'.encode(), b'"' + b"x" * 5000 + b'"'),
    *(b'"../../../etc/passwd"', b'"/dev/zero"', b'"/etc/passwd"', b'"C:\\\\x"', b'"."', b'".."'),
    *(b'"full_attention"', b'"sliding_attention"', b'"yarn"', b'"llama3"', b'"linear"'),
    *(b'"default"', b'"dflash"', b'"silu"', b'"2020-13-45"', b'"<script>"', b'"%s%n{0}"'),
    *(b"[]", b"[[]]", b"{}", b"[0]", b"[1,3]", b"[1,1]", b"[null]", b'["full_attention"]'),
    *(b'{"a":{}}', b'{"":[]}', b"[[[[[[]]]]]]", b'{"\\ud800":1}', b'[{"a":1},{"a":2}]'),
    b'{"rope_type":"yarn","factor":2}',
    b'{"rope_type":"llama3","factor":1,"low_freq_factor":1,"high_freq_factor":4}',
    b'{"full_attention":{"rope_theta":7}}',
    json.dumps(list(range(70))).encode(),
    json.dumps([0] * 3000).encode(),
]
NAMES = [
    b"", b"id", b"__class__", b"version", b"0", b"-1", b"1", b"1e3", b"\\ud800mask", b"\\u0000",
    b"x" * 300, b"9" * 40, b"is_causal", b"causal", b"use_swa", b"swa_window_size",
    b"sliding_window", b"use_sliding_window", b"max_window_layers", b"layer_types",
    b"partial_rotary_factor", b"rope_scaling", b"rope_parameters", b"rope_theta",
    b"target_hidden_size", b"num_target_layers", b"target_layer_ids", b"block_size",
    b"final_logit_softcapping", b"output_multiplier", b"input_embedding_scale",
    b"draft_vocab_size", b"eagle_aux_hidden_state_layer_ids", b"hc_mult", b"auto_map",
    b"quantization_config", b"mystery", b"attention_bias", b"head_dim", b"v_head_dim",
    b"sample_from_anchor", b"gating", b"speculators_model_type", b"dflash_config",
    b"transformer_layer_config", b"architectures", b"text_config", b"messages", b"turns", b"tools",
]  # fmt: skip
YAML = [
    b"~", b"yes", b"off", b".inf", b"-.inf", b".nan", b"1e3", b"0o8", b"0b1", b"1:60", b"1_000",
    b"2020-13-45", b"2020-01-01", b"2020-01-01T99:99:99Z", b"!!int x", b"!!float x", b"!!binary @",
    b"!!binary aGk=", b"!!timestamp x", b"!!set {a}", b"!!python/object/apply:os.system [id]",
    b"!!omap [a: 1]", b"!!pairs [a: 1]", b"!x y", b"&a [*a]", b"*a", b"&a x", b"{", b"[", b"- x",
    b"|", b">", b"'", b'"\\x07"', b'"\\ud800"', b"\t", b"@", b"%YAML 9.9", b"? [1]", b"--- x",
    b"[" * 300, b"[" * 5000, b"{a: " * 300, b"9" * 5000, b"\xff", b"\xef\xbb\xbf", b"<<: {a: 1}",
    b"{<<: [1]}", b"{[1]: 2}", b"{null: 1}", b"null: 1", b"1: 2",
]  # fmt: skip
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')
_YAML_VALUE = re.compile(rb"^[^\s:#][^:\n]*:[ ]?(.*)$", re.MULTILINE)


def mutate_bytes(data: bytes, dice: random.Random) -> bytes:
    """Cut, flip, insert, drop, repeat, zero or encode a piece."""
    at = dice.randrange(len(data))
    piece = dice.randbytes(dice.randint(1, 8))
    match dice.randrange(12):
        case 0 | 1:
            return data[:at]
        case 2 | 3 | 4:
            return data[:at] + bytes([data[at] ^ (1 << dice.randrange(8))]) + data[at + 1 :]
        case 5:
            return data[:at] + piece + data[at:]
        case 6:
            return data[:at] + data[at + len(piece) :]
        case 7:
            return data + data[at:]
        case 8:  # what a power failure leaves of a page
            return data[:at] + bytes(min(512, len(data) - at)) + data[at + 512 :]
        case 9:
            return data[:at] + dice.choice([b"\x00", b"\xff", b"\n", b'"', b"}", b"{"]) + data[at:]
        case 10:
            return dice.choice([b"\xef\xbb\xbf", b"\n", b" ", b"\x00", b"\xff\xfe"]) + data
        case _:
            encoding = dice.choice(["utf-16", "utf-32", "utf-16-be"])
            return data.decode("latin-1").encode(encoding)[: 4 * at + 4]


@dataclass(frozen=True)
class _Places:
    """Where values and keys are in JSON text, and where each member of an object ends."""

    values: Sequence[Span]
    keys: Sequence[Span]
    members: Sequence[Span]

    @classmethod
    def of(cls, text: bytes) -> _Places:
        values, keys, opened = [], [], []
        tokens = list(_TOKEN.finditer(text))
        for token, following in zip(tokens, [*tokens[1:], None], strict=True):
            match token[0]:
                case b"{" | b"[":
                    opened.append(token.start())
                case b"}" | b"]":
                    values.append((opened.pop(), token.end()))
                case b"," | b":":
                    pass
                case _ if following is not None and following[0] == b":":
                    keys.append(token.span())
                case _:
                    values.append(token.span())
        end_of = dict(values)
        starts = sorted(end_of)
        members = []
        for start, end in keys:
            value = next(place for place in starts if place > end)
            members.append((start, end_of[value]))
        return cls(values, keys, members)


class MutatedJson:
    """One to three changes of JSON text, or of its bytes."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._places = _Places.of(text)

    def __call__(self, dice: random.Random) -> bytes:
        if dice.random() < 0.25:
            return mutate_bytes(self._text, dice)
        count = dice.choice([1, 1, 1, 2, 3])
        # From the back, so that the places in front stay where they are.
        changes = sorted((self._change(dice) for _ in range(count)), reverse=True)
        text, last = self._text, len(self._text) + 1
        for (start, end), new in changes:
            if end <= last:
                text, last = text[:start] + new + text[end:], start
        return text

    def _change(self, dice: random.Random) -> tuple[Span, bytes]:
        text, places = self._text, self._places
        kind = dice.randrange(10)
        if kind >= 7 and places.keys:
            if kind == 7:
                start, end = span = dice.choice(places.members)
                if dice.random() < 0.5:
                    return span, text[start:end] + b"," + text[start:end]  # twice
                if text[end : end + 1] == b",":
                    return (start, end + 1), b""
                return span, b'"":null'
            if kind == 8:
                return dice.choice(places.keys), b'"' + dice.choice(NAMES) + b'"'
            start, _ = dice.choice(places.keys)
            return (start, start), b'"' + dice.choice(NAMES) + b'":' + dice.choice(ODD) + b","
        start, end = span = dice.choice(places.values)
        value = text[start:end]
        match kind:
            case 0:
                depth = dice.choice(DEEP[:-1]) if dice.random() < 0.98 else DEEP[-1]
                return span, b"[" * depth + value + b"]" * depth
            case 1:
                other = dice.choice(places.values)
                return span, text[other[0] : other[1]]
            case 2 if value[:1].isdigit():
                nudged = (b"-", b""), (b"", b"0"), (b"", b".5"), (b"", b"e9"), (b'"', b'"')
                before, after = dice.choice(nudged)
                return span, before + value + after
            case 3 if value[:1] == b"[":
                return span, value[:-1] + b"," + value[1:]  # twice as many
            case _:
                return span, dice.choice(ODD)


def mutated_yaml(text: bytes) -> Mutate:
    values = [match.span(1) for match in _YAML_VALUE.finditer(text)]

    def mutate(dice: random.Random) -> bytes:
        if dice.random() < 0.3:
            return mutate_bytes(text, dice)
        start, end = dice.choice(values)
        new = dice.choice(ODD if dice.random() < 0.5 else YAML)
        if dice.random() < 0.1:  # a line of its own
            return text[:end] + b"\n" + new + text[end:]
        return text[:start] + new + text[end:]

    return mutate


def mutated_safetensors(content: bytes) -> Mutate:
    """Damages the length, the header's JSON, one tensor's entry, or the bytes."""
    length = struct.unpack("<Q", content[:8])[0]
    header, body = content[8 : 8 + length], content[8 + length :]
    mutate_header = MutatedJson(header)
    lengths = [0, 1, 8, length - 1, length + 1, len(content), 2**32, 2**63, 2**64 - 1]

    def with_header(changed: bytes) -> bytes:
        return struct.pack("<Q", len(changed)) + changed + body

    def mutate(dice: random.Random) -> bytes:
        match dice.randrange(8):
            case 0:
                return struct.pack("<Q", dice.choice(lengths)) + header + body
            case 1 | 2 | 3:
                return with_header(mutate_header(dice))
            case 4 | 5:
                return with_header(json.dumps(_changed_tensor(json.loads(header), dice)).encode())
            case 6:  # values that are not finite, among others
                at = dice.randrange(len(body) or 1)
                return content[: 8 + length] + body[:at] + b"\xff" * 8 + body[at + 8 :]
            case _:
                return mutate_bytes(content, dice)

    return mutate


def _changed_tensor(fields: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    tensor = fields[dice.choice([name for name in fields if name != "__metadata__"])]
    shape = tensor["shape"]
    match dice.randrange(3):
        case 0:
            types = ["F16", "BF16", "F64", "F32", "I8", "I64", "U8", "BOOL", "F8_E4M3", "C64", "Z9"]
            tensor["dtype"] = dice.choice(types)
        case 1:
            size = 1
            for extent in shape:
                size *= extent
            odd = [[], [0], [-1], [2**62, 4], shape[::-1], [size], [1, *shape], [*shape, 1]]
            tensor["shape"] = dice.choice(odd)
        case _:
            tensor["data_offsets"] = [dice.randint(-9, 9000), dice.randint(-9, 2**40)]
    return fields


def mutated_zip(content: bytes) -> Mutate:
    """Damages one entry, its name or its compression, or the bytes of the archive."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}

    def mutate(dice: random.Random) -> bytes:
        if dice.random() < 0.5:
            return mutate_bytes(content, dice)
        chosen = dice.choice(list(entries))
        method = dice.choice([zipfile.ZIP_STORED] * 4 + [zipfile.ZIP_DEFLATED])
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", method) as archive:
            for name, value in entries.items():
                changed = mutate_bytes(value, dice) if name == chosen and value else value
                archive.writestr(name, changed)
        return out.getvalue()

    return mutate


def mutated_bytes(content: bytes) -> Mutate:
    return lambda dice: mutate_bytes(content, dice)


MUTATIONS: dict[str, Callable[[bytes], Mutate]] = {
    "json": MutatedJson,
    "yaml": mutated_yaml,
    "safetensors": mutated_safetensors,
    "zip": mutated_zip,
    "bytes": mutated_bytes,
}
