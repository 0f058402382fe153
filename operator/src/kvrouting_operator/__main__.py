"""Entry point of `python -m kvrouting_operator`."""

from __future__ import annotations

from kvrouting_operator.command import operator

if __name__ == "__main__":
    operator(auto_envvar_prefix="KVROUTING_OPERATOR")
