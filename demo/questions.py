"""Questions for the demo's training data: word problems from templates, functions described by the standard library's
own docstrings, and user turns that the target writes itself. No evaluation prompt is among them."""

from __future__ import annotations

import importlib
import inspect
import random
import re
from collections.abc import Sequence

NAMES = ("Amira", "Bruno", "Chen", "Divya", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kofi", "Lena")
GOODS = ("pencils", "oranges", "tickets", "books", "plants", "bottles", "stickers", "chairs", "lamps", "muffins")
PROBLEMS = (
    "{n} has {a} {g} and buys {b} more each week. How many {g} does {n} have after {c} weeks?",
    "A shop sells {g} for ${a} each. {n} buys {b} of them and pays with a ${c}00 bill. How much change does {n} get?",
    "{n} reads {a} pages on Monday and twice as many on Tuesday. The book has {c}00 pages. How many pages are left?",
    "A train travels {a} kilometers per hour for {b} hours and then {c} kilometers more. "
    "How far does it travel in total?",
    "{n} shares {a}0 {g} equally among {b} friends and keeps the rest. How many {g} does each friend get?",
    "A garden is {a} meters long and {b} meters wide. What is its area, and what is its perimeter?",
    "{n} earns ${a} an hour and works {b} hours a day, {c} days a week. How much does {n} earn in a week?",
    "There are {a} boxes with {b} {g} in each box. {c} of the {g} are broken. How many {g} are fine?",
    "{n} saves ${a} in January and ${b} more in each following month. How much does {n} save in {c} months?",
    "A recipe needs {a} cups of flour for {b} cakes. How many cups of flour does {n} need for {c} cakes?",
    "A class of {a} students goes on a trip. Each bus holds {b} students. How many buses are needed?",
    "{n} is {a} years old. In {b} years, {n} will be twice as old as a cousin. How old is the cousin now?",
)
MODULES = (
    "bisect",
    "calendar",
    "collections",
    "colorsys",
    "csv",
    "datetime",
    "difflib",
    "fractions",
    "functools",
    "glob",
    "heapq",
    "html",
    "itertools",
    "json",
    "keyword",
    "math",
    "operator",
    "os.path",
    "random",
    "re",
    "shutil",
    "statistics",
    "string",
    "textwrap",
    "urllib.parse",
    "zipfile",
)
REQUESTS = (
    "Write a Python function named {name} that does the following: {what}",
    "Explain what a function called {name} with this description does, and give an example: {what}",
    'Complete the code.\n\ndef {name}():\n    """{what}"""\n',
)
TOPICS = (
    "a healthy breakfast",
    "learning to swim",
    "the water cycle",
    "a first job interview",
    "saving electricity at home",
    "the moon",
    "a trip to the mountains",
    "making new friends",
    "how bread is made",
    "the history of writing",
    "taking care of a cat",
    "why leaves change color",
    "public libraries",
    "a rainy day",
    "good sleep",
    "planting tomatoes",
    "the human heart",
    "volcanoes",
)
ASKS = (
    "Write a short paragraph about {t}.",
    "Give me five tips about {t}.",
    "Explain {t} to a ten-year-old.",
    "Write a short poem about {t}.",
    "What should I know about {t}?",
    "Write a friendly email about {t}.",
    "List three questions that people ask about {t}, and answer them.",
    "Tell me a short story about {t}.",
)


def word_problems(count: int, rng: random.Random) -> list[str]:
    """`count` different word problems."""
    found: dict[str, None] = {}
    while len(found) < count:
        fields = {"n": rng.choice(NAMES), "g": rng.choice(GOODS), "a": rng.randint(3, 60), "b": rng.randint(2, 9)}
        found[rng.choice(PROBLEMS).format(**fields, c=rng.randint(3, 12))] = None
    return list(found)


def code_requests(count: int, rng: random.Random) -> list[str]:
    """`count` requests out of the first docstring lines of standard library functions."""
    lines: dict[str, str] = {}
    for module in MODULES:
        for name, member in inspect.getmembers(importlib.import_module(module)):
            text = inspect.getdoc(member) if callable(member) and not inspect.isclass(member) else None
            first = (text or "").split("\n\n")[0].replace("\n", " ").strip()
            if not name.startswith("_") and 30 < len(first) < 160 and re.fullmatch(r"[A-Z][\x20-\x7e]+\.", first):
                lines.setdefault(name, first)
    chosen = rng.sample(sorted(lines), min(count, len(lines)))
    return [rng.choice(REQUESTS).format(name=name, what=lines[name]) for name in chosen]


def chat_requests(count: int, rng: random.Random) -> list[str]:
    """`count` everyday requests."""
    every = [ask.format(t=topic) for ask in ASKS for topic in TOPICS]
    return rng.sample(every, min(count, len(every)))


def well_formed(texts: Sequence[str]) -> list[str]:
    """User turns worth keeping: printable, neither tiny nor huge, each once."""
    kept: dict[str, None] = {}
    for text in texts:
        text = text.strip()
        if 20 <= len(text) <= 400 and re.fullmatch(r"[\x20-\x7e\n]+", text) and text[0].isalnum():
            kept[text] = None
    return list(kept)
