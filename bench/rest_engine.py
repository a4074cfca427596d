"""REST's engine on the text and the contexts of bench/suffix.py, which runs this in a Python that has `draftretriever`.

Stands alone: that Python is another one (REST's wheel is for 3.9), without specds and numpy.
"""

import array
import json
import sys
import tempfile
import time
from pathlib import Path

import draftretriever


def main() -> None:
    text_path, contexts_path = sys.argv[1:]
    text, contexts = array.array("H"), array.array("H")
    text.frombytes(Path(text_path).read_bytes())
    contexts.frombytes(Path(contexts_path).read_bytes())
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "index"
        writer = draftretriever.Writer(index_file_path=str(path), vocab_size=65536)
        writer.add_entry(text.tolist())
        began = time.perf_counter()
        writer.dump_data()
        seconds = time.perf_counter() - began
        writer.finalize()
        size = path.stat().st_size
        reader = draftretriever.Reader(index_file_path=str(path))
        lookups, nodes = [], []
        for start in range(0, len(contexts), 16):
            context = contexts[start : start + 16].tolist()
            began = time.perf_counter()
            for length in range(16, 1, -1):
                drafts = reader.search(context[-length:], choices=64)
                if drafts[0]:
                    break
            lookups.append((time.perf_counter() - began) * 1e6)
            nodes.append(len(drafts[1]) if drafts[0] else 0)
    print(json.dumps({"seconds": seconds, "bytes": size, "lookups": lookups, "nodes": sum(nodes) / len(nodes)}))


if __name__ == "__main__":
    main()
