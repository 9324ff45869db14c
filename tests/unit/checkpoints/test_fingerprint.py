"""A fingerprint changes with what it stands for."""

from pathlib import Path

from leadout.models import fingerprint


def test_the_fingerprint_sees_configuration_and_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    content = bytearray(20 << 20)
    weights.write_bytes(content)
    prints = [fingerprint(tmp_path)]
    for place in (0, 10 << 20):  # in the header, and in the midst
        content[place] = 1
        weights.write_bytes(content)
        prints.append(fingerprint(tmp_path))
    weights.write_bytes(content[:-1])
    prints.append(fingerprint(tmp_path))
    (tmp_path / "config.json").write_text('{"a": 1}')
    prints.append(fingerprint(tmp_path))
    assert len(set(prints)) == len(prints)
    assert prints[-1] == fingerprint(tmp_path)
