"""Which states an SGLang captures for ids of a drafter's config, said by its own code.

The models import kernels that exist only for GPUs, so no model is built: the setter ``set_eagle3_layers_to_capture``
of a target's class and the tests of its forward pass that pick the layers are taken from the source by their syntax
tree and run on stand-ins with n layers. Runs in any Python; imports nothing but the standard library.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SETTER = "set_eagle3_layers_to_capture"
_FLAG = "_is_layer_to_capture"
_INNER = ("model", "language_model")
_PACKAGE = "sglang.srt.models"


class Models:
    """The classes under ``sglang/srt/models``; a file is parsed when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._parsed: dict[str, ast.Module] = {}
        self.registered: dict[str, str] = {}  # architecture -> module
        for path in sorted(folder.rglob("*.py")):
            text = path.read_text(encoding="utf-8-sig")
            start = text.find("\nEntryClass")
            if start >= 0:
                module = ".".join(path.relative_to(folder).with_suffix("").parts)
                for name in _entries(ast.parse(text[start:])):
                    self.registered.setdefault(name, module)

    def tree(self, module: str) -> ast.Module:
        if module not in self._parsed:
            path = self.folder.joinpath(*module.split(".")).with_suffix(".py")
            text = path.read_text(encoding="utf-8-sig") if path.is_file() else ""
            self._parsed[module] = ast.parse(text)
        return self._parsed[module]

    @cache  # noqa: B019 - lives as long as one run of a script
    def classes(self, module: str) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in self.tree(module).body if isinstance(node, ast.ClassDef)}

    @cache  # noqa: B019
    def imports(self, module: str) -> dict[str, tuple[str, str]]:
        """Names brought in from other models: (module, class), or (module, "") for a module itself."""
        found: dict[str, tuple[str, str]] = {}
        for node in ast.walk(self.tree(module)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(_PACKAGE):
                source = node.module.removeprefix(_PACKAGE).lstrip(".")
                for alias in node.names:
                    found[alias.asname or alias.name] = (source, alias.name) if source else (alias.name, "")
        return found

    def find(self, module: str, name: str) -> tuple[str, ast.ClassDef] | None:
        """The class that ``name`` means in ``module``, followed through imports inside the folder."""
        if name in self.classes(module):
            return module, self.classes(module)[name]
        where = self.imports(module).get(name)
        return self.find(*where) if where is not None and where[1] and where[0] != module else None

    def lineage(self, module: str, name: str) -> Iterator[tuple[str, ast.ClassDef]]:
        """The class and its bases, depth first."""
        found = self.find(module, name)
        if found is None:
            return
        yield found
        for base in found[1].bases:
            if isinstance(base, ast.Name) and base.id != name:
                yield from self.lineage(found[0], base.id)
            elif isinstance(base, ast.Name) and name in self.imports(found[0]):
                yield from self.lineage(*self.imports(found[0])[name])  # a subclass named as its base

    @cache  # noqa: B019
    def method(self, module: str, name: str, wanted: str) -> tuple[str, ast.FunctionDef] | None:
        for where, node in self.lineage(module, name):
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name == wanted:
                    return where, member
        return None


def _entries(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "EntryClass" for t in node.targets):
            yield from (part.id for part in ast.walk(node.value) if isinstance(part, ast.Name))


class Standin:
    """An object with n layers and the setter of one class, as far as setters look."""

    def __init__(self, models: Models, module: str, name: str, n: int, depth: int = 0) -> None:
        self._models, self._module, self._name, self._n = models, module, name, n
        self.config = SimpleNamespace(num_hidden_layers=n, text_config=SimpleNamespace(num_hidden_layers=n))
        self.pp_group = SimpleNamespace(is_last_rank=True, is_first_rank=True)
        self.layers = [SimpleNamespace() for _ in range(n)]
        self.layers_to_capture: list[int] = []
        self.start_layer, self.end_layer = 0, n
        setter = models.method(module, name, SETTER)
        if setter is not None:
            self.setter_at = f"models/{setter[0].replace('.', '/')}.py:{setter[1].lineno}"
            function = _compiled(setter[1])
            setattr(self, SETTER, lambda *args: function(self, *args))
        if depth < 2:
            for attribute in _INNER:
                inner = _class_of(models, module, name, attribute)
                if inner is not None:
                    setattr(self, attribute, Standin(models, *inner, n, depth + 1))

    def inside(self) -> Iterator[Standin]:
        yield self
        for attribute in _INNER:
            if isinstance(inner := getattr(self, attribute, None), Standin):
                yield from inner.inside()


@cache
def _compiled(node: ast.FunctionDef) -> Any:
    """A function of the engine's, without the names in its annotations."""
    bare = copy.deepcopy(node)
    bare.decorator_list, bare.returns = [], None
    for argument in bare.args.args:
        argument.annotation = None
    module = ast.Module([bare], [])
    group = SimpleNamespace(is_last_rank=True, is_first_rank=True)
    names: dict[str, Any] = {
        "get_parallel": lambda: SimpleNamespace(pp_group=group),
        "get_pp_group": lambda: group,
    }
    exec(compile(module, "<sglang>", "exec"), names)
    return names[node.name]


@cache
def _class_of(models: Models, module: str, name: str, attribute: str) -> tuple[str, str] | None:
    """The class of ``self.<attribute>``: the first of those its constructors may put there that can capture."""
    for where, node in models.lineage(module, name):
        candidates: list[tuple[str, str]] = []
        for part in ast.walk(node):
            if isinstance(part, ast.Assign) and any(_is_self(t, attribute) for t in part.targets):
                candidates += _classes(models, where, part.value) + _made_by(models, module, name, part.value)
        for part in node.body:  # def __init__(..., language_model_cls=SomeModel)
            if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                candidates += [c for d in part.args.defaults for c in _classes(models, where, d)]
        for candidate in candidates:
            if _picks(models, *candidate) or models.method(*candidate, SETTER):
                return candidate
    return None


def _made_by(models: Models, module: str, name: str, value: ast.expr) -> list[tuple[str, str]]:
    """Classes behind ``self.x`` in an assignment: what a method of the class returns, or a constant of the class."""
    found: list[tuple[str, str]] = []
    for part in ast.walk(value):
        if not (isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self"):
            continue
        made = models.method(module, name, part.attr)
        for step in ast.walk(made[1]) if made is not None else ():
            if isinstance(step, ast.Return) and step.value is not None and made is not None:
                found += _classes(models, made[0], step.value)
        for where, node in models.lineage(module, name):
            for member in node.body:
                if isinstance(member, ast.Assign) and any(
                    isinstance(t, ast.Name) and t.id == part.attr for t in member.targets
                ):
                    found += _classes(models, where, member.value)
    return found


def _classes(models: Models, module: str, value: ast.expr) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for part in ast.walk(value):
        known = None
        if isinstance(part, ast.Name):
            known = models.find(module, part.id)
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            where = models.imports(module).get(part.value.id, ("", "?"))
            known = models.find(where[0], part.attr) if not where[1] else None
        if known is not None:
            found.append((known[0], known[1].name))
    return found


def _is_self(target: ast.expr, attribute: str) -> bool:
    return (
        isinstance(target, ast.Attribute)
        and target.attr == attribute
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    )


# -- what a forward pass looks at ------------------------------------------------------------------------------


@cache
def _picks(models: Models, module: str, name: str) -> list[tuple[ast.expr, ast.expr | None, bool]]:
    """Tests by which a class's methods pick what to capture: (test, what is kept, stands in a loop over layers)."""
    found: list[tuple[ast.expr, ast.expr | None, bool]] = []
    seen: set[str] = set()
    for _, node in models.lineage(module, name):
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name not in seen and "capture" not in method.name:
                if f"super().{method.name}(" not in ast.unparse(method):
                    seen.add(method.name)
                loops = {id(part) for loop in ast.walk(method) if isinstance(loop, ast.For) for part in ast.walk(loop)}
                kept = {id(i.test): _kept(i) for i in ast.walk(method) if isinstance(i, ast.If)}
                for part in ast.walk(method):
                    if isinstance(part, ast.expr) and _is_test(part):
                        found.append((part, kept.get(id(part)), id(part) in loops))
    return found


def _is_test(node: ast.expr) -> bool:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.In):
        return _is_self(node.comparators[0], "layers_to_capture")
    return isinstance(node, ast.Call) and any(isinstance(a, ast.Constant) and a.value == _FLAG for a in node.args)


def _kept(node: ast.If) -> ast.expr | None:
    """What ``if i in self.layers_to_capture: states.append(WHAT)`` keeps, where it stands there plainly."""
    for part in ast.walk(node):
        if not (isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == "append"):
            continue
        if part.args and not isinstance(part.args[0], ast.Name | ast.Call):
            return part.args[0]
    return None


class _State:
    """A tensor, for ``hidden_states + residual``; adding None to it fails as it does with one."""

    def __add__(self, other: object) -> _State:
        return self if isinstance(other, _State) else NotImplemented


def reached(inner: Standin) -> list[int]:
    """Taps that the forward pass of the class behind ``inner`` comes by, in the order in which it keeps them."""
    n, taps = inner._n, []
    for test, kept, in_loop in _picks(inner._models, inner._module, inner._name):
        for i in range(n) if in_loop else (n,):
            names: dict[str, Any] = {"self": inner, "num_layers": n, "total_num_layers": n}
            if in_loop:
                names |= dict.fromkeys(("i", "idx", "layer_idx", "layer_id"), i) | {"layer": inner.layers[i]}
            if not eval(_expression(test), names):
                continue
            if kept is not None and in_loop:  # before the first layer nothing is held apart from the embedding
                eval(_expression(kept), names | {"hidden_states": _State(), "residual": _State() if i else None})
            at = eval(_expression(test.left), names) if isinstance(test, ast.Compare) else i
            taps.append(at)
    return sorted(set(taps))


@cache
def _expression(node: ast.expr) -> Any:
    return compile(ast.Expression(node), "<sglang>", "eval")


def captured(models: Models, architecture: str, n: int, ids: list[int] | None) -> dict[str, Any]:
    """{"taps"} that a target of ``architecture`` with n layers gives for ``ids``, or {"error"} as the engine stops.

    {"error": "no setter"} where the class has no such method, {"error": "not registered"} where there is no class.
    """
    module = models.registered.get(architecture)
    if module is None:
        return {"error": "not registered"}
    target = Standin(models, module, architecture, n)
    if not hasattr(target, SETTER):
        return {"error": "no setter"}
    try:
        getattr(target, SETTER)(None if ids is None else list(ids))
        asked = next((s for s in target.inside() if s.layers_to_capture), None)
        if asked is None:
            return {"error": "nothing was set"}
        taps = reached(asked)
    except (IndexError, TypeError, AttributeError) as error:
        return {"error": type(error).__name__}
    return {"taps": taps, "asked": len(asked.layers_to_capture)}


def setter_at(models: Models, architecture: str) -> str | None:
    """File and line of a target's setter."""
    module = models.registered.get(architecture)
    found = models.method(module, architecture, SETTER) if module else None
    return f"models/{found[0].replace('.', '/')}.py:{found[1].lineno}" if found else None


def chosen(root: Path, config: dict[str, Any] | Any) -> dict[str, Any]:
    """{"ids", "aux"}: what the engine's own lines take out of a drafter's config, under ``root`` (sglang/srt)."""
    for file in ("model_executor/model_runner_components/spec_aux_hidden_state.py", "model_executor/model_runner.py"):
        path = root / file
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8-sig"))) if path.is_file() else ():
            if isinstance(node, ast.Try) and "eagle_aux_hidden_state_layer_ids" in ast.unparse(node):
                found = SimpleNamespace(eagle_use_aux_hidden_state=True, eagle_aux_hidden_state_layer_ids=None)
                draft = SimpleNamespace(hf_config=SimpleNamespace(**config))
                names = {"config": found, "self": found, "draft_model_config": draft}
                exec(compile(ast.Module([node], []), "<sglang>", "exec"), names)
                return {"ids": found.eagle_aux_hidden_state_layer_ids, "aux": found.eagle_use_aux_hidden_state}
    raise LookupError("this release has no lines that read eagle_aux_hidden_state_layer_ids")
