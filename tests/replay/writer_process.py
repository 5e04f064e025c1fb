"""A searcher's writing end in a process of its own: PATH OWNER PUTS ROWS. Prints each uid once it is acknowledged."""

from __future__ import annotations

import sys
from pathlib import Path

from trajectory_cases import trajectory

from tba.replay.journal import JournalWriter


def main(path: str, owner: str, puts: str, rows: str) -> None:
    with JournalWriter(Path(path), owner) as writer:
        for n in range(int(puts)):
            uids = [f"{owner}-{n}-{i}" for i in range(int(rows))]
            writer.put(
                [trajectory(n, (n, i), uid=uid) for i, uid in enumerate(uids)], counters={"generated": len(uids)}
            )
            print("\n".join(uids), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
