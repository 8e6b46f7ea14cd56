"""Stands in for the VMM and the guest in it: `fake_vmm_process.py --uds V.SOCK --dir FOLDER`.

Needs the host's listeners `<uds>_1024` and `<uds>_1025` to be there, as a real guest does.
SIGKILL ends it and its kernel.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "guest"))  # an agent with a folder of its own

from tests.fakes.fake_guest import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uds", type=Path, required=True, help="the hybrid vsock's Unix socket")
    parser.add_argument("--dir", type=Path, required=True, help="folder for the kernel's sockets")
    parser.add_argument("--uid", type=int, help="whom the kernel runs as (root only)")
    arguments = parser.parse_args()
    run(arguments.uds, arguments.dir, arguments.uid)


if __name__ == "__main__":
    main()
