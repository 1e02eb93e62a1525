"""Print where the package is heavy: a report that nobody has to pass, for people who look.

For each folder its lines; then the definitions at the top of three lists: classes by how many
attributes they set on themselves, functions by their parameters and by their lines, and the public
definitions that one other module uses or none. Names are compared as text.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "swpipe"
MOST = 12


def attributes(kind: ast.ClassDef) -> int:
    """Fields, and what methods assign to ``self``."""
    fields = {
        n.target.id
        for n in kind.body
        if isinstance(n, ast.AnnAssign)
        if isinstance(n.target, ast.Name)
    }
    own = {
        node.attr
        for node in ast.walk(kind)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    return len(fields | own)


def parameters(function: ast.FunctionDef) -> int:
    """Return the number of parameters without ``self`` and ``cls``."""
    given = function.args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def show(title: str, rows: Iterable[tuple[int, str]]) -> None:
    """Print the greatest rows first."""
    print(f"\n{title}")
    for number, name in sorted(rows, reverse=True)[:MOST]:
        print(f"  {number:5}  {name}")


def main() -> None:
    """Read the package once."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    lines: Counter[str] = Counter()
    kinds, functions, long = [], [], []
    defined: dict[str, list[Path]] = {}
    words = {path: set(re.findall(r"\w+", text)) for path, text in texts.items()}
    for path, text in texts.items():
        place = path.relative_to(PACKAGE)
        lines[place.parts[0]] += text.count("\n")
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                kinds.append((attributes(node), f"{place}: {node.name}"))
            elif isinstance(node, ast.FunctionDef):
                functions.append((parameters(node), f"{place}: {node.name}"))
                long.append(((node.end_lineno or 0) - node.lineno + 1, f"{place}: {node.name}"))
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                defined.setdefault(node.name, []).append(path)
    users = {
        name: sum(name in found for path, found in words.items() if path not in paths)
        for name, paths in defined.items()
    }
    print(f"{sum(lines.values())} lines in {len(texts)} modules")
    show("Lines of a folder", ((n, name) for name, n in lines.items()))
    show("Attributes of a class", kinds)
    show("Parameters of a function", functions)
    show("Lines of a function, with its docstring", long)
    show(
        "Definitions of one name",
        ((len(paths), name) for name, paths in defined.items() if len(paths) > 1),
    )
    alone = Counter(min(n, 2) for n in users.values())
    print(
        f"\nModules that use a public definition: none {alone[0]}, one {alone[1]}, more {alone[2]}"
    )
    print("  none:", ", ".join(sorted(name for name, n in users.items() if n == 0)))


if __name__ == "__main__":
    main()
