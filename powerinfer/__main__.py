"""`python -m powerinfer` and the console script."""

from __future__ import annotations

import sys


def main() -> None:
    from powerinfer.cli import run_app

    sys.exit(run_app(sys.argv[1:]))


if __name__ == "__main__":
    main()
