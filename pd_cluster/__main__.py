"""Runs the command line: `python -m pd_cluster`."""

from __future__ import annotations

from pd_cluster.cli import main

main()
