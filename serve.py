"""Serves a model and its drafter: `python serve.py --config configs/serve/quickstart.yaml [section.key=value ...]`."""

import sys

from jaxspec.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command("serve"))
