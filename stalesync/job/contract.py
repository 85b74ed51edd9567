"""Compare what is touched of another program with the sources of one of its versions, without importing it.

Rows are in the notation of `fusion/inference/backends/vllm_calls.py`. Bases of
classes and imported names are followed within the sources; a class with a base outside of them has any attribute of the
rows only if it sets it. Pure; imports only Python's own modules."""

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
Read = Callable[[str], str | None]
"""Returns the source of a file by its path, such as `vllm/config/__init__.py`; None: there is none."""


class _Found(NamedTuple):
    path: str
    node: ast.AST


def misfits(touched: Mapping[str, Sequence[str]], read: Read) -> list[str]:
    """Return in words what is touched but is not in the sources, or not with these arguments; [] if all is."""
    sources = _Sources(read)
    checked = ((path, _misfit(sources, path, row)) for path, rows in touched.items() for row in rows)
    return [f"{path}: {problem}" for path, problem in checked if problem]


def _misfit(sources: "_Sources", path: str, row: str) -> str | None:
    replaced, text = row.startswith("def "), row.removeprefix("def ")
    wanted = ast.parse(text, mode="eval").body
    call = wanted if isinstance(wanted, ast.Call) else None
    dotted = ast.unparse(call.func if call else wanted)
    owner, _, attribute = dotted.partition(".")
    definition = sources.find(path, owner)
    if definition is not None and attribute:
        definition = sources.members(definition).get(attribute)
    if definition is None:
        return f"no {dotted}"
    if call is None:
        return None
    if replaced:
        return _misfit_of_parameters(dotted, definition.node, call)
    if isinstance(definition.node, ast.ClassDef):
        members = sources.members(definition)
        if "__init__" not in members:
            return _misfit_of_fields(dotted, members, call)
        definition, attribute = members["__init__"], "__init__"
    return _misfit_of_call(dotted, definition.node, call, bound=bool(attribute))


def _misfit_of_call(dotted: str, function: ast.AST, call: ast.Call, bound: bool) -> str | None:
    if not isinstance(function, Function):
        return f"{dotted} is no function"
    arguments = function.args
    static = any(ast.unparse(decorator) == "staticmethod" for decorator in function.decorator_list)
    positional = [arg.arg for arg in [*arguments.posonlyargs, *arguments.args]][bound and not static :]
    optional = set(positional[len(positional) - len(arguments.defaults) :] if arguments.defaults else ())
    by_name = [arg.arg for arg in arguments.kwonlyargs]
    defaults = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    optional |= {one.arg for one, default in defaults if default is not None}
    passed = {keyword.arg for keyword in call.keywords} | {*positional[: len(call.args)]}
    if len(call.args) > len(positional) and arguments.vararg is None:
        return f"{dotted} takes {len(positional)} positional arguments, {len(call.args)} are given"
    if (unknown := passed - {*positional, *by_name}) and arguments.kwarg is None:
        return f"{dotted} has no parameter {', '.join(sorted(map(str, unknown)))}"
    if missing := {*positional, *by_name} - passed - optional:
        return f"{dotted} also needs {', '.join(sorted(missing))}"
    return None


def _misfit_of_fields(dotted: str, members: Mapping[str, _Found], call: ast.Call) -> str | None:
    """Compare a call with the fields of a dataclass; ones without a default must be given."""
    fields = {name: member.node for name, member in members.items() if isinstance(member.node, ast.AnnAssign)}
    passed = {keyword.arg for keyword in call.keywords} | {*[*fields][: len(call.args)]}
    if unknown := passed - fields.keys():
        return f"{dotted} has no field {', '.join(sorted(map(str, unknown)))}"
    if missing := {name for name, field in fields.items() if field.value is None} - passed:
        return f"{dotted} also needs {', '.join(sorted(missing))}"
    return None


def _misfit_of_parameters(dotted: str, function: ast.AST, call: ast.Call) -> str | None:
    if not isinstance(function, Function):
        return f"{dotted} is no function"
    arguments = function.args
    names = [arg.arg for arg in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]
    wanted = [ast.unparse(arg) for arg in call.args]
    others = wanted[-1:] == ["*_"]
    if names[: len(wanted) - others] != wanted[: len(wanted) - others] or not others and len(names) != len(wanted):
        return f"{dotted} has the parameters {', '.join(names)}, expected {', '.join(wanted)}"
    return None


class _Sources:
    def __init__(self, read: Read):
        self.read = read
        self._modules: dict[str, dict[str, ast.AST] | None] = {}
        self._found: dict[tuple[str, str], _Found | None] = {}

    def find(self, path: str, name: str) -> _Found | None:
        """Return where a name of a module is defined, if necessary in the module that it is imported from."""
        if (path, name) not in self._found:
            self._found[path, name] = None  # modules may import a name from each other
            self._found[path, name] = self._find(path, name)
        return self._found[path, name]

    def _find(self, path: str, name: str) -> _Found | None:
        names = self._names(path)
        node = names.get(name) if names else None
        if isinstance(node, ast.ImportFrom):
            original = next(alias.name for alias in node.names if name in (alias.asname, alias.name))
            for origin in _origins(path, node):
                if (definition := self.find(origin, original)) is not None:
                    return definition
        return None if node is None else _Found(path, node)

    def members(self, definition: _Found) -> dict[str, _Found]:
        """Return the attributes of a class and of its bases by name: methods, fields, and what methods set."""
        node, path = definition.node, definition.path
        if not isinstance(node, ast.ClassDef):
            return {}
        members: dict[str, _Found] = {}
        for base in reversed(node.bases):
            parent = self.find(path, ast.unparse(base).partition("[")[0].partition(".")[0])
            if parent is not None and parent != definition:
                members |= self.members(parent)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                if isinstance(inner.value, ast.Name) and inner.value.id == "self":
                    members.setdefault(inner.attr, _Found(path, inner))
        return members | {name: _Found(path, inner) for name, inner in _definitions(node.body)}

    def _names(self, path: str) -> dict[str, ast.AST] | None:
        if path not in self._modules:
            source = self.read(path)
            self._modules[path] = None if source is None else dict(_definitions(ast.parse(source).body))
        return self._modules[path]


def _definitions(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Yield (name, node) of what statements define, those of conditions among them."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                names = (node for node in ast.walk(target) if isinstance(node, ast.Name))
                yield from ((name.id, node) for name in names if isinstance(name.ctx, ast.Store))
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from ((alias.asname or alias.name.partition(".")[0], node) for alias in node.names)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            inner = [*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])]
            yield from _definitions(inner)


def _origins(path: str, node: ast.ImportFrom) -> list[str]:
    """Return the files that a module's `from … import` may read."""
    folder = path.split("/")[: -node.level] if node.level else []
    module = "/".join([*folder, *(node.module or "").split(".")]).strip("/")
    return [f"{module}/__init__.py", f"{module}.py"]
