"""Accelerators by their data sheets, for estimates on paper: `decode_costs` and `train.costs`."""

from __future__ import annotations

from dataclasses import dataclass

# Of a data sheet's figures, what a server reaches in practice: operations on prompts, and bytes
# read per second while it decodes. Assumptions, not measurements.
PREFILL_SHARE = 0.4
BANDWIDTH_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Device:
    """Figures of one accelerator's data sheet."""

    name: str
    memory: float  # bytes
    bandwidth: float  # bytes per second, of that memory
    operations: float  # per second, dense bfloat16
    source: str = ""  # the address of the data sheet


_PAGES = "https://www.nvidia.com/en-us/data-center"

L40S = Device("L40S", 48e9, 864e9, 362e12, f"{_PAGES}/l40s/")
A100 = Device("A100", 80e9, 2039e9, 312e12, f"{_PAGES}/a100/")
H100 = Device("H100", 80e9, 3350e9, 989e12, f"{_PAGES}/h100/")
H200 = Device("H200", 141e9, 4800e9, 989e12, f"{_PAGES}/h200/")
B200 = Device("B200", 180e9, 8000e9, 2250e12, f"{_PAGES}/hgx/")
