"""Structure of the packages: allowed imports, pure modules, lazy loading, and unique class names.

Every rule is a function of a source tree, and a test shows that it fails on a tree that violates it.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BACKEND = "a-backend-of-jax"
LEARNER_ONLY = {"jax", "jaxlib", "flax", "optax", "orbax", "torch"}
FORBIDDEN = {  # package -> modules that none of its files may import, at any depth of the file
    "model_port": {"paravt_jax", "rollout"},
    "rollout": {"paravt_jax", "model_port"} | LEARNER_ONLY,
    "paravt_jax": {"scripts", "tests"},
}
TORCH_ALLOWED = {  # modules that compare with torch, and import it lazily
    "model_port/reference.py"
}
PARTS = {  # parts of paravt_jax, lowest first, with the parts that each may import; these are listed above it
    "rewards": "",
    "learner": "rewards",
    "config": "rewards learner",
    "run": "config learner",
    "sampling": "config run",
    "data": "config rewards run",
    "plan": "config learner run",
    "view": "rewards run",
    "rl": "config data learner plan rewards run sampling",
    "asking": "config rewards run sampling view",
    "evaluation": "config data rewards rl run sampling",
    "imitation": "config data learner plan run sampling",
    "bench": "config data learner plan rewards rl run sampling",
    "train": "config plan rl run",
    "sft": "config imitation plan run",
    "eval": "config evaluation run",
    "ask": "asking config run",
    "serve": "ask asking run",
    "check": "bench config data learner plan rewards rl run sampling sft train",
    "prompts": "config evaluation run",
    "__main__": "",
}
PURE = (  # no config, no I/O, no logger
    *("rewards/terms", "rewards/grammar", "rewards/settings", "rewards/answers", "rewards/official"),
    *("evaluation/statistics", "learner/advantages", "learner/packing", "learner/losses", "learner/variants"),
)
SIDECAR = {"sglang_cpu", "sglang_plugin"}  # directories that belong to the sidecar's environment
IMPURE = {"config", "logging", "omegaconf", "yaml", "os", "io", "pathlib", "subprocess", "socket", "shutil", "requests"}


@cache
def nodes_of(source: str) -> list[ast.AST]:
    """Returns all imports and classes of a file."""
    kinds = ast.Import | ast.ImportFrom | ast.ClassDef
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]


def imports_of(path: Path) -> set[str]:
    """Returns the dotted names that a file imports, at any depth."""
    names = set()
    for node in nodes_of(path.read_text()):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def files_of(root: Path, package: str) -> list[Path]:
    """Returns the files of a package except those of the sidecar's environment."""
    return [path for path in sorted((root / package).rglob("*.py")) if SIDECAR.isdisjoint(path.parts)]


def forbidden_imports(root: Path) -> Iterator[str]:
    for package, forbidden in FORBIDDEN.items():
        for path in files_of(root, package):
            where = path.relative_to(root).as_posix()
            banned = forbidden - {"torch"} if where in TORCH_ALLOWED else forbidden | {"torch"}
            yield from (f"{where} imports {name}" for name in imports_of(path) if name.split(".")[0] in banned)


def imports_between_parts(root: Path) -> Iterator[str]:
    for path in files_of(root, "paravt_jax"):
        part = path.relative_to(root / "paravt_jax").parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        where = path.relative_to(root).as_posix()
        if part not in PARTS:
            yield f"{where} is in no part of PARTS"
            continue
        for name in imports_of(path):
            package, other = [*name.split("."), ""][:2]
            if package == "paravt_jax" and other not in (part, *PARTS[part].split()):
                yield f"{where} imports {name}"


def import_cycle(root: Path) -> list[str]:
    """Returns modules that import each other, also lazily, or an empty list."""
    files = {name: root / f"{name.replace('.', '/')}.py" for name in modules_of(root, list(FORBIDDEN))}
    files = {name: path if path.is_file() else path.with_suffix("") / "__init__.py" for name, path in files.items()}
    imports: dict[str, set[str]] = {}
    for name, path in files.items():
        imported = {each if each in files else each.rpartition(".")[0] for each in imports_of(path)}
        imports[name] = {each for each in imported if each in files and each != name}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as cycle:
        return cycle.args[1]
    return []


def impure_imports(root: Path) -> Iterator[str]:
    for module in PURE:
        path = root / "paravt_jax" / f"{module}.py"
        if not path.is_file():
            yield f"{path.relative_to(root)} does not exist; if it was renamed, update PURE"
            continue
        # The configs of model_port are plain shapes.
        outside = {name for name in imports_of(path) if not name.startswith("model_port.")}
        yield from (f"{path.name} imports {name}" for name in outside if IMPURE & set(name.split(".")))


def modules_of(root: Path, packages: Sequence[str]) -> list[str]:
    """Returns the dotted name of every file."""
    paths = [path.relative_to(root) for package in packages for path in files_of(root, package)]
    return [".".join(p.with_suffix("").parts).removesuffix(".__init__") for p in paths]


def loaded_after(root: Path, modules: Sequence[str]) -> set[str]:
    """Returns the top-level modules that importing `modules` loads, plus BACKEND if jax has initialized devices."""
    code = f"import importlib, sys; sys.path.insert(0, {str(root)!r})\n"
    code += "for name in sys.argv[1:]: importlib.import_module(name)\n"
    code += "bridge = sys.modules.get('jax._src.xla_bridge')\n"
    code += f"held = ['{BACKEND}'] if bridge and bridge.backends_are_initialized() else []\n"
    code += "print(' '.join([name for name in sys.modules if '.' not in name] + held))"
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def classes_of(root: Path) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yields each class of the packages, and its file."""
    for path in [path for package in FORBIDDEN for path in files_of(root, package)]:
        classes = (node for node in nodes_of(path.read_text()) if isinstance(node, ast.ClassDef))
        yield from ((path.relative_to(root).as_posix(), node) for node in classes)


def duplicate_class_names(root: Path) -> Iterator[str]:
    """Lists class names that are used twice, so that a name is never ambiguous; a leading `_` does not count."""
    homes: dict[str, list[str]] = {}
    for where, node in classes_of(root):
        homes.setdefault(node.name.lstrip("_"), []).append(where)
    yield from (f"{name} is a class in {' and '.join(where)}" for name, where in homes.items() if len(where) > 1)


def undocumented_classes(root: Path) -> Iterator[str]:
    """Lists large classes without a docstring."""
    for where, node in classes_of(root):
        if (node.end_lineno or 0) - node.lineno >= 40 and not ast.get_docstring(node):
            yield f"{where}: {node.name}"


def plant(root: Path, file: str, text: str) -> Path:
    """Writes a file below `root` and returns `root`."""
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(text)
    return root


@pytest.mark.parametrize(
    "violations",
    [
        *(forbidden_imports, imports_between_parts, impure_imports),
        *(import_cycle, duplicate_class_names, undocumented_classes),
    ],
)
def test_the_packages_follow_every_rule(violations):
    assert list(violations(ROOT)) == []


@pytest.mark.parametrize(
    ("rule", "file", "text"),
    [
        (forbidden_imports, "rollout/episode.py", "import jax\n"),
        (forbidden_imports, "rollout/video/worker.py", "def late():\n    from model_port.config import preset\n"),
        (forbidden_imports, "model_port/text.py", "from rollout.episode import Agent\n"),
        (forbidden_imports, "paravt_jax/run.py", "def late():\n    import torch.nn\n"),
        (forbidden_imports, "paravt_jax/data/rows.py", "from scripts.miniature.world import Scene\n"),
        (imports_between_parts, "paravt_jax/learner/credit.py", "from paravt_jax.run.log import RunLog\n"),
        (imports_between_parts, "paravt_jax/imitation/batches.py", "def late():\n    import paravt_jax.rl.scheduler\n"),
        (imports_between_parts, "paravt_jax/run/training.py", "from paravt_jax.data.sample_order import SampleOrder\n"),
        (imports_between_parts, "paravt_jax/helpers.py", "import math\n"),
    ],
)
def test_a_forbidden_import_is_detected_anywhere_in_a_file(tmp_path, rule, file, text):
    assert [problem for problem in rule(plant(tmp_path, file, text)) if problem.startswith(file)]


@pytest.mark.slow
def test_the_learner_and_the_sampler_need_no_video_decoder():
    """A machine that only measures an accelerator may lack PyAV (see `scripts/gpu_check.sh`)."""
    modules = ["paravt_jax.learner.learner", "paravt_jax.sampling.local_copy", "model_port.sampler"]
    assert not {"av", "decord", "torch"} & loaded_after(ROOT, modules)


def test_the_parts_are_layers_without_a_cycle():
    names = list(PARTS)
    below_root = {path.stem for path in (ROOT / "paravt_jax").iterdir()}
    assert {*names} <= below_root
    assert all(set(below.split()) <= set(names[: names.index(part)]) for part, below in PARTS.items())


def test_a_cycle_of_late_imports_is_detected(tmp_path):
    plant(tmp_path, "paravt_jax/rl/run.py", "from paravt_jax.rl import replay\n")
    plant(tmp_path, "paravt_jax/rl/replay.py", "def late():\n    from paravt_jax.rl.run import Run\n")
    assert sorted(set(import_cycle(tmp_path))) == ["paravt_jax.rl.replay", "paravt_jax.rl.run"]


def test_the_architecture_page_lists_the_parts_in_order():
    page = (ROOT / "docs" / "architecture.md").read_text().partition("only from parts above it here:\n\n```\n")[2]
    rows = [line.split("   ")[0].split() for line in page.partition("```")[0].splitlines()]
    assert sorted(part for row in rows for part in row) == sorted({*PARTS} - {"__main__"})
    above: set[str] = set()
    for row in rows:
        assert all(set(PARTS[part].split()) <= above for part in row), row
        above |= {*row}


def test_impure_and_missing_pure_modules_are_detected(tmp_path):
    planted = plant(tmp_path, "paravt_jax/learner/losses.py", "from paravt_jax.config import Config\n")
    problems = list(impure_imports(planted))
    assert "losses.py imports paravt_jax.config.Config" in problems
    assert [problem for problem in problems if "packing.py does not exist" in problem]


def test_duplicate_class_names_are_detected(tmp_path):
    plant(tmp_path, "rollout/episode.py", "class Request: ...\n")
    plant(tmp_path, "paravt_jax/rl/run.py", "def late():\n    class _Request: ...\nclass _Own: ...\n")
    (problem,) = duplicate_class_names(tmp_path)
    assert problem == "Request is a class in rollout/episode.py and paravt_jax/rl/run.py"


def test_a_large_class_without_a_docstring_is_detected(tmp_path):
    body = "".join(f"    field{number}: int = 0\n" for number in range(40))
    plant(tmp_path, "rollout/episode.py", f"class Silent:\n{body}")
    assert list(undocumented_classes(tmp_path)) == ["rollout/episode.py: Silent"]


@pytest.mark.slow
def test_rollout_loads_neither_jax_nor_torch():
    assert not loaded_after(ROOT, modules_of(ROOT, ["rollout"])) & LEARNER_ONLY


@pytest.mark.slow
def test_importing_the_learner_loads_no_torch_and_initializes_no_gpu():
    assert not loaded_after(ROOT, modules_of(ROOT, ["model_port", "paravt_jax"])) & {"torch", BACKEND}


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [*("model_port.cli", "model_port.push"), *(f"paravt_jax.{name}" for name in ("__main__", "train", "sft", "eval"))],
)
def test_importing_a_command_loads_no_heavy_libraries(module):
    assert not loaded_after(ROOT, [module]) & (LEARNER_ONLY | {"transformers", "grain", "tensorstore"})


def test_model_port_resolves_its_names_lazily():
    import model_port
    from model_port import load, preset

    assert model_port.load is load and preset("8b").text.num_layers == 36
    assert set(model_port.HOMES) == set(model_port.__all__) <= set(dir(model_port))
    assert all(getattr(model_port, name) for name in model_port.__all__)
    with pytest.raises(AttributeError, match="module 'model_port' has no attribute 'lode'"):
        model_port.lode  # noqa: B018


@pytest.mark.slow
def test_modules_loaded_by_subpackages_are_detected(tmp_path):
    plant(tmp_path, "planted/__init__.py", "")
    plant(tmp_path, "planted/deep/__init__.py", "")
    plant(tmp_path, "planted/deep/module.py", "import colorsys, jax\njax.devices()\n")
    modules = modules_of(tmp_path, ["planted"])
    assert set(modules) == {"planted", "planted.deep", "planted.deep.module"}
    assert {"colorsys", BACKEND} <= loaded_after(tmp_path, modules)
    assert "colorsys" not in loaded_after(tmp_path, [name for name in modules if "module" not in name])
