"""Tools that `verl tool-server` brings: Python in the sandbox, a calculator, search in a folder of texts.

They run in tool processes (`tool_processes.py`), which are killed when a call exceeds its time.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.agents.base import ToolFailed
from verl.agents.hosted import HostedFactory, HostedFunctions, HostedInfo
from verl.agents.schemas import ToolFunction
from verl.config.sections.reward import SandboxConfig
from verl.errors import ConfigError
from verl.json_input import open_regular


@dataclass(frozen=True)
class BuiltinTools:
    """Which tools there are, besides the calculator."""

    python: SandboxConfig | None = None
    documents: Path | None = None


def load_builtin(wanted: BuiltinTools) -> HostedFactory:
    """What the tools read, they read here: forked processes share it."""
    functions = [calculator]
    if wanted.python is not None:
        functions.append(python_within(wanted.python))
    if wanted.documents is not None:
        functions.append(search_in(wanted.documents))
    tools = [(ToolFunction.of(function), function) for function in functions]
    info = HostedInfo("built-in tools", [tool.schema for tool, _ in tools], hooks=(), stateful=False)
    return HostedFactory(info, functools.partial(HostedFunctions, tools))


# ---- calculator

_MAX_EXPRESSION = 1000
_MAX_BITS = 4096  # of an integer on the way: 1233 digits
_MAX_ROUND = 1300  # places; beyond the digits of any number here
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_CONSTANTS = {"pi": math.pi, "e": math.e}


def _round(value: int | float, digits: int | None = None) -> int | float:
    # Checked before: Python computes 10 ** -digits, whatever the size of the value.
    if isinstance(digits, int) and abs(digits) > _MAX_ROUND:
        raise ToolFailed(f"round takes {_MAX_ROUND} digits at most.")
    return round(value, digits)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "round": _round, "min": min, "max": max, "sqrt": math.sqrt, "exp": math.exp, "log": math.log,
    "log10": math.log10, "sin": math.sin, "cos": math.cos, "tan": math.tan, "floor": math.floor, "ceil": math.ceil,
    "gcd": math.gcd,
}  # fmt: skip


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** ( ), pi, e, and functions such as sqrt, log, sin, round, min, max, gcd
    """
    if len(expression) > _MAX_EXPRESSION:
        raise ToolFailed(f"The expression is longer than {_MAX_EXPRESSION} characters.")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ToolFailed(f"{expression!r} is not an expression: {error.msg}") from None
    except (ArithmeticError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ToolFailed(f"{type(error).__name__}: {error}") from None
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else f"{value:.12g}"
    return str(value)


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            result = value
        case ast.Name(id=name) if name in _CONSTANTS:
            result = _CONSTANTS[name]
        case ast.UnaryOp(op=operation, operand=operand) if type(operation) in _UNARY:
            result = _UNARY[type(operation)](_value(operand))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _BINARY:
            result = _binary(_BINARY[type(operation)], _value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            result = _FUNCTIONS[name](*map(_value, arguments))
        case _:
            raise ToolFailed(
                f"{ast.unparse(node)!r} is not allowed; only numbers, operators and functions are"
            )
    if isinstance(result, complex):
        raise ToolFailed(f"{ast.unparse(node)!r} is not a real number.")
    if isinstance(result, int) and result.bit_length() > _MAX_BITS:
        raise ToolFailed("A number is too large.")
    return result


def _binary(operation: Callable[[Any, Any], Any], left: int | float, right: int | float) -> int | float:
    # Checked before the power is computed: its size is not bounded by that of its operands.
    powers = operation is operator.pow and isinstance(left, int) and isinstance(right, int)
    if powers and abs(right) * int(left).bit_length() > _MAX_BITS:
        raise ToolFailed("A number is too large.")
    return operation(left, right)


# ---- search

_TEXT_FILES = (".txt", ".md", ".rst")
_PASSAGE_WORDS = 120
_K1, _B = 1.5, 0.75
_MAX_HITS = 20


def search_in(folder: Path) -> Callable[..., str]:
    """A tool over the text files below `folder`; ConfigError where there are none."""
    passages = Passages.read(folder)

    def search(query: str, top_k: int = 3) -> str:
        """Search the documents. Gives the best passages with the names of their files.

        Args:
            query: Words to look for
            top_k: How many passages, 20 at most
        """
        found = passages.best(query, min(max(top_k, 1), _MAX_HITS))
        if not found:
            return "nothing found"
        return "\n\n".join(f"[{rank}] {name}\n{text}" for rank, (name, text) in enumerate(found, 1))

    return search


class Passages:
    """Passages of texts, ranked by BM25."""

    def __init__(self, passages: list[tuple[str, str]]) -> None:
        self._passages = passages
        self._postings: dict[str, list[tuple[int, int]]] = {}
        self._lengths = []
        for number, (name, text) in enumerate(passages):
            words = _words(f"{name} {text}")
            self._lengths.append(len(words))
            for word, count in Counter(words).items():
                self._postings.setdefault(word, []).append((number, count))
        self._mean = sum(self._lengths) / max(len(self._lengths), 1)

    @classmethod
    def read(cls, folder: Path) -> Passages:
        if not folder.is_dir():
            raise ConfigError(f"--documents {folder} is not a folder")
        files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _TEXT_FILES)
        passages = []
        for path in files:
            with open_regular(path) as file:
                text = file.read().decode("utf-8", errors="replace")
            passages += [(str(path.relative_to(folder)), passage) for passage in split_passages(text)]
        if not passages:
            raise ConfigError(
                f"--documents {folder} has no text in files that end with {', '.join(_TEXT_FILES)}"
            )
        return cls(passages)

    def best(self, query: str, top_k: int) -> list[tuple[str, str]]:
        """File and text of the passages that share words with the query, best first."""
        scores: dict[int, float] = defaultdict(float)
        for word in dict.fromkeys(_words(query)):
            postings = self._postings.get(word, ())
            rarity = math.log(1 + (len(self._passages) - len(postings) + 0.5) / (len(postings) + 0.5))
            for number, count in postings:
                length = 1 - _B + _B * self._lengths[number] / self._mean
                scores[number] += rarity * count * (_K1 + 1) / (count + _K1 * length)
        order = sorted(scores, key=lambda number: (-scores[number], number))
        return [self._passages[number] for number in order[:top_k]]


def split_passages(text: str) -> list[str]:
    """Paragraphs, short ones joined and long ones cut, of about `_PASSAGE_WORDS` words."""
    passages: list[str] = []
    held: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        words = paragraph.split()
        if held and len(held) + len(words) > _PASSAGE_WORDS:
            passages.append(" ".join(held))
            held = []
        held += words
        while len(held) > _PASSAGE_WORDS:
            passages.append(" ".join(held[:_PASSAGE_WORDS]))
            held = held[_PASSAGE_WORDS:]
    return [*passages, " ".join(held)] if held else passages


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


# ---- Python

_ENDS: Mapping[str, str] = {
    "memory": "it needed too much memory",
    "output": "it wrote too much",
    "processes": "it started too many processes",
}
_MAX_OUTPUT = 20_000


def python_within(limits: SandboxConfig) -> Callable[..., str]:
    """A tool that runs programs in the sandbox; RewardError where they cannot be isolated and `limits` demand it."""
    from verl.config.sections.reward import RewardConfig
    from verl.reward import sandbox

    sandbox.configure(RewardConfig(sandbox=limits))
    sandbox.require()

    def python(code: str) -> str:
        """Run a Python program and read what it prints.

        Args:
            code: The program; what it prints is the result
        """
        outcome = sandbox.run(sandbox.Program(code), limits)
        if outcome.end == "sandbox":
            raise ToolFailed(f"The program could not be run: {outcome.stderr[-500:]}")
        said = outcome.stdout[:_MAX_OUTPUT] + outcome.stderr[-_MAX_OUTPUT:]
        if outcome.end == "timeout":
            said += f"\n[stopped after {limits.timeout_s:g} s]"
        elif outcome.end in _ENDS:
            said += f"\n[stopped: {_ENDS[outcome.end]}]"
        return said.strip() or "[no output; use print]"

    return python
