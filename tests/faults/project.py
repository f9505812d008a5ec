"""Faults of the configuration and the command line."""

from __future__ import annotations

from tests.helpers.mutation import Mutant

_CONFIG = ("tests/test_config.py",)
CONFIG = [
    Mutant(
        "config-nearest-key",
        "jaxspec/config/loading.py",
        "    if same_name:",
        "    if not same_name:",
        _CONFIG,
        "an unknown key must name the key of the same name in another section",
    ),
    Mutant(
        "config-float-exponent",
        "jaxspec/config/loading.py",
        "|[0-9]+(?=[eE]))",
        ")",
        _CONFIG,
        "6e-4 is text in YAML 1.1",
    ),
    Mutant(
        "config-repeated-key",
        "jaxspec/config/loading.py",
        "        if repeated:",
        "        if False:",
        _CONFIG,
        "a key given twice silently takes the last",
    ),
    Mutant(
        "config-version",
        "jaxspec/config/loading.py",
        '    if "version" not in data:',
        "    if False:",
        _CONFIG,
        "a file that names no format is read as if it were this one",
    ),
    Mutant(
        "config-extra",
        "jaxspec/config/schema.py",
        'extra="forbid"',
        'extra="ignore"',
        _CONFIG,
        "an unknown key is ignored",
    ),
    Mutant(
        "config-strict",
        "jaxspec/config/schema.py",
        "strict=True",
        "strict=False",
        _CONFIG,
        "the string yes becomes true",
    ),
    Mutant(
        "config-dflash-gamma",
        "jaxspec/config/rules.py",
        "if block >= least or",
        "if block > least or",
        _CONFIG,
        "gamma 7 belongs to block 16, 5 to block 10",
    ),
    Mutant(
        "config-dspark-gamma",
        "jaxspec/config/rules.py",
        "_DSPARK_GAMMA = 4.0",
        "_DSPARK_GAMMA = 7.0",
        _CONFIG,
        "DSpark's decay is not DFlash's",
    ),
    Mutant(
        "config-null-gamma",
        "jaxspec/config/rules.py",
        "{**defaults, **objective}",
        "{**objective, **defaults}",
        _CONFIG,
        "an explicit null means no decay",
    ),
    Mutant(
        "config-anchor-row",
        "jaxspec/config/rules.py",
        '"confidence_head": True, "sample_from_anchor": True}',
        '"confidence_head": True, "sample_from_anchor": False}',
        _CONFIG,
        "DSpark's anchor row predicts",
    ),
    Mutant(
        "config-sliding-window",
        "jaxspec/config/rules.py",
        "    if sliding and drafter.sliding_window is None:",
        "    if False and drafter.sliding_window is None:",
        _CONFIG,
        "sliding layers without a window",
    ),
    Mutant(
        "config-no-limit",
        "jaxspec/config/rules.py",
        "and run.epochs is None and run.seconds is None:",
        "and run.epochs is None and run.seconds is not None:",
        _CONFIG,
        "a run without an end",
    ),
    Mutant(
        "config-drafter-none",
        "jaxspec/config/serve.py",
        'drafter.lower() == "none"',
        'drafter.lower() == "null"',
        _CONFIG,
        "drafter none is plain decoding, not a folder of that name",
    ),
]

_CLI = ("tests/test_cli.py",)
CLI = [
    Mutant("cli-exit-code", "jaxspec/cli.py", "_EXIT_ERROR = 2", "_EXIT_ERROR = 0", _CLI, "an error that exits 0"),
    Mutant(
        "cli-explicit-platform",
        "jaxspec/platform.py",
        'if "JAX_PLATFORMS" in os.environ or',
        "if",
        _CLI,
        "an explicit JAX_PLATFORMS is overruled",
    ),
    Mutant(
        "cli-tpu-taken-away",
        "jaxspec/platform.py",
        "not has_libtpu or tpu_present():",
        "not has_libtpu:",
        _CLI,
        "a real TPU is disabled",
    ),
    Mutant(
        "cli-gpu-taken-away",
        "jaxspec/platform.py",
        '"cuda,cpu" if plugins',
        '"cpu" if plugins',
        _CLI,
        "a real GPU is disabled",
    ),
    Mutant(
        "cli-no-nearest-name",
        "jaxspec/cli.py",
        'return f"; the nearest is {near[0]}" if near else ""',
        'return ""',
        ("tests/test_cli.py::test_usage_errors_are_one_line_with_the_nearest_name",),
        "a misspelt option names the nearest one",
    ),
]
