"""Ring files and frames of relays, for the fuzzing: a valid sample of each."""

from __future__ import annotations

import struct
from pathlib import Path

import torch

from leadout.ring.memory import RingFileReader, RingWriter
from leadout.ring.records import RingInfo, StatesRecord, TextRecord
from leadout.ring.relay import FrameParser, pack_sequence, parse_sequence
from leadout.ring.sequences import ServedSequence
from support.fuzzing import Reader, put

INFO = RingInfo(
    target="tiny",
    target_fingerprint="f" * 64,
    layer_ids=(0,),
    hidden_size=4,
    dtype="float32",
    server_id="a server",
)
_LENGTH = struct.Struct("<H")
STATES = StatesRecord(bytes(16), 0, torch.arange(3, dtype=torch.int32), torch.ones(3, 4))
TEXT = TextRecord(bytes(16), [1, 2], [3, 4, 5], 0.5)
SEQUENCE = b"".join(pack_sequence(ServedSequence([1, 2], [3, 4], 0.5, 0, torch.ones(3, 4))))
FRAMES = (b"I" + INFO.model_dump_json().encode(), b"P" + SEQUENCE[:20], b"E" + SEQUENCE[20:])


def _write_ring(folder: Path) -> None:
    writer = RingWriter(folder / "ring", 1 << 12)
    writer.write(TEXT.packed())
    content = writer.path.read_bytes()
    writer.close()
    (folder / "states-1").write_bytes(content)


def _read_ring(folder: Path) -> None:
    reader = RingFileReader(folder / "states-1")
    try:
        for content in reader.records():
            TextRecord.parse(content)
    finally:
        reader.close()


def _parse_frames(folder: Path) -> None:
    """What a holder of the key could send: frames that are sealed as they should be."""
    content, parser, at = (folder / "frames").read_bytes(), FrameParser(), 0
    while at + _LENGTH.size <= len(content):
        (length,) = _LENGTH.unpack_from(content, at)
        at += _LENGTH.size
        parser.add(content[at : at + length])
        at += length


RING_FILES = [
    Reader("ring: file", "states-1", "bytes", _write_ring, _read_ring),
    Reader("ring: states", "record", "bytes", put("record", b"".join(STATES.packed(INFO))),
           lambda folder: StatesRecord.parse((folder / "record").read_bytes(), INFO),
           is_file=False),
    Reader("ring: text", "record", "bytes", put("record", b"".join(TEXT.packed())),
           lambda folder: TextRecord.parse((folder / "record").read_bytes()), is_file=False),
    Reader("relay: sequence", "record", "bytes", put("record", SEQUENCE),
           lambda folder: parse_sequence((folder / "record").read_bytes(), INFO), is_file=False),
    Reader("relay: opened frames", "frames", "bytes",
           put("frames", b"".join(_LENGTH.pack(len(frame)) + frame for frame in FRAMES)),
           _parse_frames, is_file=False),
]  # fmt: skip
