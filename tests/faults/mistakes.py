"""Faults of what is said to a user who made a mistake."""

from __future__ import annotations

from tests.helpers.mutation import Mutant

_TESTS = ("tests/test_mistakes.py",)
MISTAKES = [
    Mutant(
        "prompts-cut-inside-a-string",
        "jaxspec/evaluation/prompts.py",
        'text.split("\\n")',
        "text.splitlines()",
        _TESTS,
        "U+2028 within a JSON string is no end of a line",
    ),
    Mutant(
        "config-numbers-without-end",
        "jaxspec/config/loading.py",
        "one > LARGEST",
        "one > LARGEST**2",
        _TESTS,
        "a step beyond int32 overflows inside the program",
    ),
    Mutant(
        "config-export-over-the-run",
        "jaxspec/config/rules.py",
        "if directory.is_relative_to(export) or",
        "if",
        _TESTS,
        "the export may not replace the run",
    ),
    Mutant(
        "cli-terminal-without-a-letter",
        "jaxspec/cli.py",
        'stream.reconfigure(errors="backslashreplace")',
        "stream.reconfigure()",
        _TESTS,
        "a letter that the encoding lacks is an escape",
    ),
    Mutant(
        "cli-backend-as-a-traceback",
        "jaxspec/cli.py",
        "if not _from_backends(error):",
        "if True:",
        _TESTS,
        "a platform that does not start is one line",
    ),
    Mutant(
        "sampling-after-the-load",
        "jaxspec/commands/generate.py",
        "    check_sampling(args)\n",
        "",
        _TESTS,
        "a wrong temperature does not wait for the weights",
    ),
    Mutant(
        "plan-options-unread",
        "jaxspec/commands/train.py",
        '    refuse_without_plan(args, "tpu")\n',
        "",
        _TESTS,
        "an option that nothing reads is refused",
    ),
    Mutant(
        "features-among-other-files",
        "jaxspec/training/featurestore/storage.py",
        "if found and not set(found) & set(names):",
        "if False:",
        _TESTS,
        "a folder of somebody else is left alone",
    ),
    Mutant(
        "weights-of-integers",
        "jaxspec/checkpoints/store.py",
        'if folder.dtype(name).kind in "biu":',
        "if False:",
        _TESTS,
        "weights that were cut to integers are no weights",
    ),
    Mutant(
        "kernel-of-another-device",
        "jaxspec/training/main.py",
        'if asked in ("tpu", "gpu") and platform != asked:',
        "if False:",
        _TESTS,
        "it fails inside the first step otherwise",
    ),
    Mutant(
        "client-stop-as-letters",
        "jaxspec/serving/client.py",
        'given["stop"] = [given["stop"]]',
        'given["stop"] = list(given["stop"])',
        _TESTS,
        "one stop string would end an answer at any of its letters",
    ),
    Mutant(
        "client-messages-as-ids",
        "jaxspec/serving/client.py",
        'if name == "messages" and not (job[name] and all(_is_message(one) for one in job[name])):',
        "if False:",
        _TESTS,
        "messages that are none are not token ids",
    ),
    Mutant(
        "gguf-number-of-any-kind",
        "jaxspec/checkpoints/gguf.py",
        "if not isinstance(value, kind) or isinstance(value, bool) or not value > 0:",
        "if value is None:",
        ("tests/checkpoints/test_gguf.py",),
        "a field of another kind is named",
    ),
]
