"""Every reader of files and replies in `leadout`: the table of the fuzzing."""

from __future__ import annotations

from support.fuzz_engine_files import FROM_ENGINES
from support.fuzz_model_files import FILES_OF_MODELS
from support.fuzz_ring_files import RING_FILES
from support.fuzz_run_files import FILES_OF_RUNS

READERS = [*FILES_OF_RUNS, *FILES_OF_MODELS, *FROM_ENGINES, *RING_FILES]
