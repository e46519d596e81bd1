"""How an SGLang resolves its arguments for speculation, said by its own functions.

They import most of the engine, so only they are taken from its source by their syntax tree and run on a stand-in for
the server's arguments, a plain object with the declared defaults. Runs in any Python; standard library only.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

REPORTED = (
    "speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens",
    "speculative_draft_model_path", "speculative_draft_window_size", "speculative_draft_model_quantization",
    "speculative_use_rejection_sampling", "max_running_requests",
)  # fmt: skip
_SHORT = {"speculative_draft_model": "speculative_draft_model_path", "model": "model_path"}


class Log:
    """A logger that keeps what is said, and how loudly."""

    def __init__(self) -> None:
        self.said: list[list[str]] = []

    def __getattr__(self, level: str) -> Any:
        return lambda text, *values, **_: self.said.append([level, (text % values) if values else str(text)])


class Arguments:
    """The server's arguments: declared defaults, what a command line sets, None for whatever else is asked."""

    def __init__(self, values: Mapping[str, Any], architecture: str) -> None:
        self.__dict__.update(values)
        self._architectures = [architecture]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def get_model_config(self) -> Any:
        return SimpleNamespace(hf_config=SimpleNamespace(architectures=self._architectures))


@cache
def defaults(root: Path) -> dict[str, Any]:
    """Declared defaults of the arguments, with the ones a GPU machine fills in."""
    found: dict[str, Any] = {}
    for path in [*sorted((root / "arg_groups" / "fields").glob("*.py")), root / "server_args.py"]:
        if path.is_file():
            for name, kind, value in _fields(path):
                found.setdefault(name, (kind, value))
    return {name: value for name, (_, value) in found.items()} | {"device": "cuda", "page_size": 1}


@cache
def kinds(root: Path) -> dict[str, str]:
    """The type of every argument: int, float, bool or str."""
    found: dict[str, str] = {}
    for path in [*sorted((root / "arg_groups" / "fields").glob("*.py")), root / "server_args.py"]:
        if path.is_file():
            for name, kind, _ in _fields(path):
                found.setdefault(name, kind)
    return found


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8-sig"))


def _fields(path: Path) -> Iterator[tuple[str, str, Any]]:
    for node in _tree(path).body:
        for part in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                words = {n.id for n in ast.walk(part.annotation) if isinstance(n, ast.Name)}
                kind = next((k for k in ("int", "float", "bool") if k in words), "str")
                try:
                    value = ast.literal_eval(part.value) if part.value is not None else None
                except ValueError:
                    value = None
                yield part.target.id, kind, value


def given(flags: Sequence[str], types: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Arguments and environment out of a command line, as far as it is one of flags and values."""
    values: dict[str, Any] = {}
    environment: dict[str, str] = {}
    words = list(flags)
    while words:
        word, equals, value = words.pop(0).partition("=")
        name = word.lstrip("-").replace("-", "_")
        name = _SHORT.get(name, name)
        kind = types.get(name, "str")
        if not word.startswith("-"):
            environment[word] = value
            continue
        if kind == "bool":
            values[name] = True
            continue
        if not equals:
            value = words.pop(0) if words and not words[0].startswith("--") else ""
        values[name] = {"int": int, "float": float}.get(kind, str)(value)
    return values, environment


def resolve(root: Path, flags: Sequence[str], architecture: str) -> dict[str, Any]:
    """{"resolved": arguments by name, "said": [[level, text]], "error"} for a target of ``architecture``.

    ``root`` is the folder sglang/srt of the source.
    """
    types = kinds(root)
    values, environment = given(flags, types)
    arguments = Arguments(defaults(root) | {"model_path": "TARGET"} | values, architecture)
    log = Log()
    error = None
    try:
        for function in _functions(root, log, environment):
            function(arguments)
    except (ValueError, TypeError, AssertionError, NotImplementedError) as stop:
        error = {"type": type(stop).__name__, "message": str(stop)}
    known = {name: getattr(arguments, name) for name in REPORTED if name in types or name in values}
    return {"resolved": known, "said": log.said, "error": error}


def _functions(root: Path, log: Log, environment: Mapping[str, str]) -> list[Any]:
    hook = root / "arg_groups" / "speculative_hook.py"
    names = _standins(log, environment)
    if hook.is_file():
        _define(hook, names)
        names["_resolve_speculative_algorithm_alias"] = _no_draft_read(names["_resolve_speculative_algorithm_alias"])
        names["SpeculativeAlgorithm"] = _algorithms(names)
        quantised = _quantisation(root / "arg_groups" / "serving_hook.py", "cfg", names)
        return [quantised, names["handle_speculative_decoding"]]
    server = root / "server_args.py"
    _define(server, names)
    names["_resolve_speculative_algorithm_alias"] = _no_draft_read(names["_resolve_speculative_algorithm_alias"])
    names["SpeculativeAlgorithm"] = _algorithms(names)
    return [_quantisation(server, "self", names), names["_handle_speculative_decoding"]]


def _define(path: Path, names: dict[str, Any]) -> None:
    """Every function that bears on speculation, and such methods of ServerArgs, over ``names``."""
    for name, code in _code(path):
        if name not in names:
            exec(code, names)


@cache
def _code(path: Path) -> list[tuple[str, Any]]:
    found = []
    everything = path.name != "server_args.py"
    for node in _tree(path).body:
        for member in node.body if isinstance(node, ast.ClassDef) and node.name == "ServerArgs" else [node]:
            if isinstance(member, ast.FunctionDef) and (everything or "specul" in member.name):
                found.append((member.name, compile(ast.Module([_bare(member)], []), path.name, "exec")))
    return found


def _bare(node: ast.FunctionDef) -> ast.FunctionDef:
    """Without annotations, decorators and imports of the engine, whose names are handed in."""
    node = copy.deepcopy(node)
    node.decorator_list, node.returns = [], None
    for argument in (*node.args.args, *node.args.kwonlyargs):
        argument.annotation = None

    class Imports(ast.NodeTransformer):
        def visit_ImportFrom(self, found: ast.ImportFrom) -> ast.stmt:
            return ast.copy_location(ast.Pass(), found) if (found.module or "").startswith("sglang") else found

    return ast.fix_missing_locations(Imports().visit(node))  # type: ignore[no-any-return]


def _quantisation(path: Path, holder: str, names: dict[str, Any]) -> Any:
    """The statement that hands the target's quantisation to the drafter, as a function of the arguments."""
    for node in ast.walk(_tree(path)):
        if (
            isinstance(node, ast.If)
            and ast.unparse(node.test) == f"{holder}.speculative_draft_model_quantization is None"
        ):
            code = compile(ast.Module([node], []), path.name, "exec")
            # the names as they are when it runs
            return lambda arguments: exec(code, {**names, holder: arguments, "server_args": arguments})
    return lambda arguments: None


def _no_draft_read(own: Any) -> Any:
    """The engine's own, without a drafter: it would be opened, to see whether it is Gemma 4's assistant."""
    return lambda algorithm, path, **_: own(algorithm, None)


class _CustomSpecAlgo:
    """No algorithm of a plug-in is looked at."""


def _algorithms(names: Mapping[str, Any]) -> Any:
    known = {"EAGLE", "EAGLE3", "STANDALONE", "NGRAM", "DFLASH", "FROZEN_KV_MTP", "DSPARK", "UNO", "NONE"}

    def handle(arguments: Arguments) -> None:
        if arguments.speculative_algorithm in ("EAGLE", "EAGLE3"):
            names["_handle_eagle_family"](arguments)

    def from_string(name: str) -> Any:
        if name.upper() not in known:
            raise ValueError(f"Unknown speculative algorithm name: {name}")
        return SimpleNamespace(supports_mixed_chunk=lambda: True, handle_server_args=handle)

    return SimpleNamespace(from_string=from_string)


def _standins(log: Log, environment: Mapping[str, str]) -> dict[str, Any]:
    def declare(arguments: Arguments, where: str, **values: Any) -> None:
        arguments.__dict__.update(values)

    return {
        "logger": log,
        "declare_resolution": declare,
        "resolving_view": lambda arguments: arguments,
        "resolved_view": lambda arguments: arguments,
        "model_config_of": lambda arguments: arguments.get_model_config(),
        "attention_backends_of": lambda arguments: (arguments.attention_backend,),
        "run_post_process_pass": lambda *_: None,
        "record_foreign_defaults": lambda *_: None,
        "_speculative_moe_runner_default": None,
        "_handle_iquest_q1_mtp_draft": lambda arguments: False,
        "attn_dp_enabled_of": lambda arguments: False,
        "get_platform": lambda: SimpleNamespace(is_hip=False),
        "current_platform": SimpleNamespace(is_out_of_tree=lambda: False),
        "envs": _Environment(environment),
        "CustomSpecAlgo": _CustomSpecAlgo,
        "Optional": dict,
    }


class _Environment:
    """The engine's environment variables: SGLANG_ENABLE_SPEC_V2 on, as it is declared; the rest off unless given."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = given

    def __getattr__(self, name: str) -> Any:
        unset = True if name == "SGLANG_ENABLE_SPEC_V2" else -1 if name.endswith("_LEN") else False
        return SimpleNamespace(get=lambda: self._given.get(name, unset))
