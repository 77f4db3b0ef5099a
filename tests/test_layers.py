"""Arrows point down: who may import whom, read from the sources."""

from __future__ import annotations

import ast
from pathlib import Path

import transformers

import tidekv_cli

PACKAGE = Path(tidekv_cli.__file__).parent
FILES = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_the_engine_knows_nothing_above_it() -> None:
    allowed = ("tidekv_cli.engine", "tidekv_cli.errors")
    for path in (PACKAGE / "engine").rglob("*.py"):
        own = {name for name in imports(path) if name.startswith("tidekv_cli")}
        assert all(name.startswith(allowed) for name in own), path


def test_only_the_adapter_drives_transformers_in_the_engine() -> None:
    users = {
        p.name for p in (PACKAGE / "engine").rglob("*.py") if any(n.startswith("transformers") for n in imports(p))
    }
    assert users == {"adapter.py", "session.py"}  # the session only names the model's type


def private_names(path: Path) -> set[str]:
    """What `path` reads of other objects that begins with an underscore; what a class has of its own is not listed."""
    own = ("self", "cls", "super()")
    return {
        node.attr
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__")
        if ast.unparse(node.value) not in own
    }


def test_only_the_adapter_touches_what_transformers_keeps_private() -> None:
    """Elsewhere private names are torch's, and all that is imported is what `transformers` itself offers."""
    kernels = {"_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention"}
    allowed = {"_cdata", "_flash_attention_forward", *kernels}
    adapter = PACKAGE / "engine" / "adapter.py"
    assert {"_no_split_modules", "_attn_implementation"} <= private_names(adapter)
    paths = [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "benchmarks").rglob("*.py")]
    for path in paths:
        assert path == adapter or private_names(path) <= allowed, path
        modules = {name for name in imports(path) if name.startswith("transformers.")}
        assert all(name.count(".") == 1 and hasattr(transformers, name.split(".")[1]) for name in modules), path
    strings = {path.name for path in paths if '"_attn_implementation"' in path.read_text(encoding="utf-8")}
    assert strings == {"few_layers.py"}


def test_only_the_report_uses_rich() -> None:
    users = {p.name for p in PACKAGE.rglob("*.py") if any(name.split(".")[0] == "rich" for name in imports(p))}
    assert users == {"report.py"}


def test_nothing_below_imports_commands() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.name not in ("cli.py", "entry.py", "__main__.py") and path.parent.name != "commands":
            above = ("tidekv_cli.commands", "tidekv_cli.cli", "tidekv_cli.runner", "tidekv_cli.report")
            if path.name in ("runner.py", "prober.py"):
                above = above[:2]
            assert not any(name.startswith(above) for name in imports(path)), path


def test_planning_needs_no_torch() -> None:
    names = ("plan", "model_spec", "methods", "profile", "device", "sources", "gguf_file", "request", "documents")
    planning = ("plan_settings", "memory_model", "fitting", "setup", "estimate", "capacity", "prober", "room")
    fetching = ("hub", "hub_errors", "checkpoint_files", "quantisation")
    for name in (*names, *planning, "catalog", "model_shape", "yaml_lines", "architectures", *fetching):
        assert not {"torch", "transformers"} & {n.split(".")[0] for n in imports(PACKAGE / f"{name}.py")}, name


def test_files_stay_small() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, path


def test_nothing_imports_itself_in_the_end() -> None:
    """No module of the package depends on itself, imports inside functions included."""
    modules = {f"tidekv_cli.{p.relative_to(PACKAGE).with_suffix('').as_posix().replace('/', '.')}": p for p in FILES}
    needs = {name: imports(path) & modules.keys() - {name} for name, path in modules.items()}
    while done := {name for name, needed in needs.items() if not needed & needs.keys()}:
        needs = {name: needed for name, needed in needs.items() if name not in done}
    assert not needs
