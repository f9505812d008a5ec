"""Trains a drafter: `python train.py --config configs/quickstart.yaml [section.key=value ...]`."""

import sys

from jaxspec.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command("train"))
