"""Packing as a program: what the kill tests kill, and run again until it ends.

    python packing_program.py FOLDER TOKENIZER '{"kill_at": 17, "workers": 2}'

`kill_at` n: SIGKILL from inside at the n-th point, so that tests reach every kind of moment without
a clock. Points are operations on files in the folder, and the moments before and after tokens are
appended."""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bosch.data.pack import PackConfig, pack_documents
from bosch.data.sources.open import open_sources
from bosch.data.token_files import GrowingFiles
from bosch.data.tokenizer_files import TokenizerText
from tests.kill_points import POINT, watch_operations


def main() -> None:
    folder, tokenizer = Path(sys.argv[1]), TokenizerText(Path(sys.argv[2]).read_text(), end_id=0)
    options: dict[str, Any] = json.loads(sys.argv[3])
    append = GrowingFiles.append

    def append_in_steps(files: GrowingFiles, name: str, ids: Any, ends: Any) -> None:
        sys.audit(POINT, str(folder))
        append(files, name, ids, ends)
        for file in files.files:  # they may reach the disk long before a shard is done
            file.flush()
            sys.audit(POINT, str(folder))

    GrowingFiles.append = append_in_steps  # type: ignore[method-assign]
    seen = watch_operations(folder, at=options.get("kill_at"))
    config = PackConfig(
        sequence_length=64,
        tokens=64 * 400,
        held_out_sequences=7,
        epochs=2,
        chunk_chars=3000,
        shard_chunks=3,
        workers=options["workers"],
    )
    pack_documents(open_sources(options["sources"], 0, config.tokens), tokenizer, config, folder)
    print(f"points {seen[0]}")


if __name__ == "__main__":
    main()
