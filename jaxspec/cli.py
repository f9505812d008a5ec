"""The `jaxspec` command: one parser, one module per subcommand, errors as one line.

A subcommand's module has `add_arguments(parser)` and `main(args) -> int` and is imported only when it is the one that
was asked for, so `jaxspec --help` needs neither jax nor grpc.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import io
import os
import platform
import re
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from jaxspec import __version__
from jaxspec.errors import JaxspecError
from jaxspec.platform import quiet_platform

COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": ("jaxspec.commands.doctor", "versions, devices, caches and chosen kernels of this machine"),
    "train": ("jaxspec.commands.train", "train a drafter from a config"),
    "serve": ("jaxspec.commands.serve", "serve a target and its drafter over gRPC"),
    "profile": ("jaxspec.commands.profile", "measure what rounds cost: a table for engine.cost_table"),
    "generate": ("jaxspec.commands.generate", "generate offline, with or without a drafter"),
    "client": ("jaxspec.serving.client", "send prompts to a running server"),
    "prepare": ("jaxspec.commands.prepare", "turn conversations into a token file to train on"),
    "regenerate": ("jaxspec.commands.regenerate", "let the target answer the prompts of a data set"),
    "capture": ("jaxspec.commands.capture", "store or spool the target's features of a run's data"),
    "calibrate": ("jaxspec.commands.calibrate", "fit the temperatures of a drafter's confidence head"),
    "inspect": ("jaxspec.commands.inspect", "what a drafter's folder holds, and what it lacks"),
    "convert": ("jaxspec.commands.convert", "write a drafter in another public layout"),
    "quantization": ("jaxspec.commands.quantization", "what an int8 target costs a drafter: bytes and tau"),
    "conformance": ("jaxspec.evaluation.conformance.main", "run the golden cases of a folder"),
    "config": ("jaxspec.commands.config", "check a config and print it resolved"),
    "version": ("jaxspec.commands.version", "the version of jaxspec and of what it runs on"),
}

_EXIT_ERROR = 2
_EXIT_INTERRUPT = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `jaxspec ARGV`. Returns the exit code: 0, 1 for a failed check, 2 for an error that the user can mend."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _print_anything()
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    parser = Parser(
        prog="jaxspec", description="Trains and serves speculative-decoding drafters in JAX.", allow_abbrev=False
    )
    parser.add_argument(
        "--version", action="version", version=f"jaxspec {__version__} (Python {platform.python_version()})"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    meant = parser
    for name, (module, summary) in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name == chosen:
            _fill(sub, module)
            meant = sub
    args = _parse(parser, arguments, meant)
    if args.command is None:
        parser.print_help()
        return 0
    return _run(COMMANDS[args.command][0], args)


def run_command(name: str, argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand under the name of the script that called it (`train.py`, `serve.py`)."""
    module, summary = COMMANDS[name]
    _print_anything()
    parser = Parser(description=summary, allow_abbrev=False)
    _fill(parser, module)
    return _run(module, _parse(parser, argv, parser))


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line, as all of jaxspec's are, with the nearest name."""

    def error(self, message: str) -> NoReturn:
        """Prints the line and exits with 2."""
        line = " ".join(message.split())
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", line)
        if choice:
            line += _nearest(choice[1], re.findall(r"[\w-]+", choice[2]))
        self.exit(_EXIT_ERROR, f"error: {line} ({self.prog} --help lists all)\n")

    def unknown(self, words: Sequence[str]) -> NoReturn:
        """The same for arguments that nothing has taken."""
        known = re.findall(r"(?<![\w-])--[a-z][a-z-]*", self.format_help())
        near = _nearest(words[0].partition("=")[0], known) if words[0].startswith("-") else ""
        self.error(f"unknown argument: {' '.join(words)}{near}")


def _nearest(found: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(found, names, n=1)
    return f"; the nearest is {near[0]}" if near else ""


def _parse(parser: Parser, argv: Sequence[str] | None, meant: Parser) -> argparse.Namespace:
    """parse_args, with `section.key=value` allowed before and after the options; `meant` is the command's own."""
    args, extra = parser.parse_known_args(argv)
    if extra and not (hasattr(args, "overrides") and all("=" in word and not word.startswith("-") for word in extra)):
        meant.unknown(extra)
    if extra:
        args.overrides = [*args.overrides, *extra]
    return args


def _fill(parser: argparse.ArgumentParser, module: str) -> None:
    quiet_platform()
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )
    importlib.import_module(module).add_arguments(parser)


def _run(module: str, args: argparse.Namespace) -> int:
    try:
        code = importlib.import_module(module).main(args)
        if sys.stdout is not None:  # closed by whoever started this
            sys.stdout.flush()
        return int(code or 0)
    except JaxspecError as error:
        if getattr(args, "debug", False):
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return _EXIT_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _EXIT_INTERRUPT
    except BrokenPipeError:
        _close_stdout()  # the reader (`| head`) has left
        return 128 + 13
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        _close_stdout()
        print(f"error: standard output: {error.strerror}, expected a place that takes it", file=sys.stderr)
        return _EXIT_ERROR
    except (AssertionError, RuntimeError) as error:
        if not _from_backends(error):
            raise
        asked = os.environ.get("JAX_PLATFORMS") or "none"
        reason = f" ({' '.join(str(error).split())})" if str(error) else ""
        line = f"error: JAX_PLATFORMS: found {asked}, which does not start here{reason}; see jaxspec doctor"
        print(line, file=sys.stderr)
        return _EXIT_ERROR


def _print_anything() -> None:
    """What the terminal's encoding does not have is printed as an escape, not answered with an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _close_stdout() -> None:
    """A second error at the interpreter's exit would only repeat the first."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _from_backends(error: BaseException) -> bool:
    """Whether jax raised it because a platform that was asked for does not start."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__") == "jax._src.xla_bridge"


if __name__ == "__main__":
    sys.exit(main())
