"""A file of any size is refused in a sentence, and takes no memory before it is known to be whole."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

import child
from tiny import Files, Target

import pyllama_dflash as pd

N_MORE = 3 << 28
LOAD = """
    import resource, sys
    from pathlib import Path
    import pyllama_dflash as pd
    with pd.Speculator(sys.argv[1], n_ctx=256, n_threads=1) as spec:
        before = spec.run([5, 6, 7], max_tokens=8).tokens
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (1 << 29)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            spec.load(sys.argv[2])
        except Exception as error:
            print(type(error).__name__, error)
        assert spec.run([5, 6, 7], max_tokens=8).tokens == before
"""


def test_a_file_larger_than_the_memory(alone: Path, files: Files) -> None:
    target, path = files.path(Target()), alone / "text.state"
    with pd.Speculator(target, n_ctx=256, n_threads=1) as spec:
        spec.prefill([1, 2, 3, 4])
        spec.save(path)
    os.truncate(path, path.stat().st_size + N_MORE)  # it takes no room on the disk
    said = child.output(LOAD, target, path)
    assert said == f"ModelLoadError {path} is damaged or cut short: its checksum is wrong; save the text anew\n"
    digest = blake2b(digest_size=32)
    with path.open("r+b") as file:
        while part := file.read(1 << 20):
            digest.update(part)
        file.write(digest.digest())
    said = child.output(LOAD, target, path)
    sentence = f"the 768 MiB that {path} holds; make room, or evaluate the text again"
    assert said == f"MemoryError there is no memory for {sentence}\n"
