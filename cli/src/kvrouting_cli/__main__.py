"""Entry point of `kvrouting` and of `python -m kvrouting_cli`."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line; without any of the extras installed it says which one to install."""
    try:
        from kvrouting_cli.commands import kvrouting
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        print(
            "kvrouting: this installation has no commands; install one with its extra, for example "
            "pip install 'kvrouting[router]' (also: sidecar, simulator)",
            file=sys.stderr,
        )
        sys.exit(2)
    kvrouting()


if __name__ == "__main__":
    main()
