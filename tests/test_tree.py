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
    "ask": "asking run",
    "serve": "ask asking run",
    "check": "bench config data learner plan rewards rl run sampling sft train",
    "prompts": "config evaluation run",
    "__main__": "",
}
PURE = (  # no config, no I/O, no logger
    "rewards/terms",
    "rewards/grammar",
    "rewards/settings",
    "rewards/answers",
    "rewards/official",
    "evaluation/statistics",
    "learner/advantages",
    "learner/packing",
    "learner/losses",
    "learner/variants",
)
SIDECAR = {"sglang_cpu", "sglang_plugin"}  # directories that belong to the sidecar's environment
IMPURE = {"config", "logging", "omegaconf", "yaml", "os", "io", "pathlib", "subprocess", "socket", "shutil", "requests"}


@cache
def nodes_of(source: str) -> list[ast.AST]:
    """Returns all imports and classes of a file."""
    return [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef)
    ]


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
        outside = {
            name for name in imports_of(path) if not name.startswith("model_port.")
        }  # its configs are plain shapes
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


def plant(root: Path, file: str, text: str) -> Path:
    """Writes a file below `root` and returns `root`."""
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(text)
    return root


def test_no_package_has_forbidden_imports():
    assert not list(forbidden_imports(ROOT))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("rollout/episode.py", "import jax\n"),
        ("rollout/video/worker.py", "def late():\n    from model_port.config import preset\n"),
        ("model_port/text.py", "from rollout.episode import Agent\n"),
        ("paravt_jax/run.py", "def late():\n    import torch.nn\n"),
        ("paravt_jax/data/rows.py", "from scripts.miniature.world import Scene\n"),
    ],
)
def test_a_forbidden_import_is_detected_anywhere_in_a_file(tmp_path, file, text):
    assert [problem for problem in forbidden_imports(plant(tmp_path, file, text)) if problem.startswith(file)]


def test_every_part_imports_only_from_the_parts_that_it_may():
    assert not list(imports_between_parts(ROOT))


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


def test_there_are_no_import_cycles():
    assert import_cycle(ROOT) == []


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


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("paravt_jax/learner/credit.py", "from paravt_jax.run.log import RunLog\n"),
        ("paravt_jax/imitation/batches.py", "def late():\n    import paravt_jax.rl.scheduler\n"),
        ("paravt_jax/run/training.py", "from paravt_jax.data.sample_order import SampleOrder\n"),
        ("paravt_jax/helpers.py", "import math\n"),
    ],
)
def test_an_import_from_the_wrong_part_is_detected(tmp_path, file, text):
    assert [problem for problem in imports_between_parts(plant(tmp_path, file, text)) if problem.startswith(file)]


def test_pure_modules_import_no_config_and_no_io():
    assert not list(impure_imports(ROOT))


def test_impure_and_missing_pure_modules_are_detected(tmp_path):
    planted = plant(tmp_path, "paravt_jax/learner/losses.py", "from paravt_jax.config import Config\n")
    problems = list(impure_imports(planted))
    assert "losses.py imports paravt_jax.config.Config" in problems
    assert [problem for problem in problems if "packing.py does not exist" in problem]


def duplicate_class_names(root: Path) -> Iterator[str]:
    """Lists class names that are used twice, so that a name is never ambiguous; a leading `_` does not count."""
    homes: dict[str, list[str]] = {}
    for path in [path for package in FORBIDDEN for path in files_of(root, package)]:
        for node in nodes_of(path.read_text()):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.lstrip("_"), []).append(path.relative_to(root).as_posix())
    yield from (f"{name} is a class in {' and '.join(where)}" for name, where in homes.items() if len(where) > 1)


def test_no_two_classes_have_the_same_name():
    assert not list(duplicate_class_names(ROOT))


def test_duplicate_class_names_are_detected(tmp_path):
    plant(tmp_path, "rollout/episode.py", "class Request: ...\n")
    plant(tmp_path, "paravt_jax/rl/run.py", "def late():\n    class _Request: ...\nclass _Own: ...\n")
    assert list(duplicate_class_names(tmp_path)) == [
        "Request is a class in rollout/episode.py and paravt_jax/rl/run.py"
    ]


def undocumented_classes(root: Path) -> Iterator[str]:
    """Lists large classes without a docstring."""
    for path in [path for package in FORBIDDEN for path in files_of(root, package)]:
        for node in nodes_of(path.read_text()):
            large = isinstance(node, ast.ClassDef) and (node.end_lineno or 0) - node.lineno >= 40
            if large and not ast.get_docstring(node):
                yield f"{path.relative_to(root).as_posix()}: {node.name}"


def test_every_large_class_has_a_docstring():
    assert not list(undocumented_classes(ROOT))


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
