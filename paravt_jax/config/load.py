"""Reads a run's settings: defaults, then the file, then `a.b=c`.

    load_config("configs/smoke_cpu.yaml", "train.num_steps=10")

Unknown keys, wrong types and conflicting settings raise errors here, before any model is loaded.
"""

import json
import pickle
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MappingNode, MarkedYAMLError, YAMLError, compose

from model_port.json_files import flattened
from paravt_jax.config.changed_keys import change_of
from paravt_jax.config.keys import keys_of, mappings_of, unknown_key
from paravt_jax.config.schema import Config, EvalConfig, SftConfig
from paravt_jax.config.shipped import config_file
from paravt_jax.learner.settings import LossConfig
from rollout.prompts import Prompts, prompts_of
from rollout.toolbox import forget_user_code

Schema = TypeVar("Schema", bound=Any)
NULLS = ("null", "~")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # as OmegaConf; only libyaml's accepts a tab after a colon
WRITTEN = "_written"  # attribute of loaded settings with the values as written, ${…} unresolved


def load_config(path: str | Path | None, *overrides: str, schema: type[Schema] = Config) -> Schema:
    """Loads settings: defaults, then YAML or RUN/config.json, then `a.b=c`.

    Raises ValueError for invalid settings, and FileNotFoundError without the file. `path` can be the name of a config
    of the package. If the command line sets another `loss.name`, the file's
    `loss.params` give way to that loss's defaults, as do `loss.correction_bounds` for another `loss.correction`.
    A `rollout.prompts_file` on the command line replaces the `rollout.prompts` of a file.
    """
    for override in overrides:
        if "=" not in override[1:]:
            raise ValueError(f"{override!r} is not a setting; write it as train.num_steps=10")
    path = None if path is None else config_file(path)
    layers = [] if path is None else [(str(path), one_line_errors(str(path), lambda: _read(path)))]
    layers += [(text, one_line_errors(text, partial(_override, text, schema))) for text in overrides]
    problems = [list(_key_problems(source, layer, schema)) for source, layer in layers]
    if path is not None and problems[0] and (command := _command_of(layers[0][1])):
        raise ValueError(f"{path} is for {command}: {problems[0][0].removeprefix(str(path)).lstrip(',: ')}")
    if any(problems):
        raise ValueError("; ".join(chain.from_iterable(problems)))
    if path is not None:
        _drop_params_of_another_loss(layers)
        if any(_by_key(layer).get("rollout.prompts_file") for _, layer in layers[1:]):
            OmegaConf.update(layers[0][1], "rollout.prompts", {}, merge=False)
    config = pickle.loads(_defaults(schema))
    for source, layer in layers:
        _check_text(source, layer, schema)
        _expand_homes(layer)
        config = one_line_errors(source, partial(OmegaConf.unsafe_merge, config, layer))
    config = one_line_errors("", partial(_with_prompts_file, config))
    forget_user_code()
    settings: Any = one_line_errors("", partial(OmegaConf.to_object, config))
    if schema is Config:
        object.__setattr__(settings, "loss", settings.loss.filled())
    if schema in (Config, SftConfig, EvalConfig):
        settings.rollout.check_tools()
    # `to_record` needs the unresolved values, because a ${…} may resolve to a secret.
    object.__setattr__(settings, WRITTEN, OmegaConf.to_container(config, resolve=False))
    return settings


def load_training_config(path: str | Path, *overrides: str) -> Config | SftConfig:
    """Loads an RL config, or an SFT config if the file has an `sft` section."""
    file = config_file(path)
    keys = one_line_errors(str(file), lambda: _read(file))
    return load_config(file, *overrides, schema=SftConfig if "sft" in keys else Config)


def _with_prompts_file(config: Any) -> Any:
    """Puts the texts of rollout.prompts_file into rollout.prompts."""
    if not (file := OmegaConf.select(config, "rollout.prompts_file")):
        return config
    prompts = Prompts(**cast(dict[str, Any], OmegaConf.to_container(config.rollout.prompts, resolve=True)))
    texts = asdict(prompts_of(file, prompts))
    escaped = {key: text.replace("${", "\\${") if isinstance(text, str) else text for key, text in texts.items()}
    return OmegaConf.unsafe_merge(config, {"rollout": {"prompts": escaped}})


@cache
def _defaults(schema: type) -> bytes:
    """The schema's defaults, cached as a pickle: OmegaConf is 30 times slower, and copy.deepcopy six times."""
    return pickle.dumps(OmegaConf.structured(schema))


def _read(path: Path) -> Any:
    if path.suffix != ".json":
        return OmegaConf.load(path)
    record = json.loads(path.read_bytes())
    return OmegaConf.create(record["config"] if isinstance(record, dict) and "config" in record else record)


def one_line_errors(source: str, work: Callable[[], Any]) -> Any:
    """Runs `work` and turns errors of OmegaConf and YAML into one line. `source` is a file or an override."""
    try:
        return work()
    except OmegaConfBaseException as problem:
        key, message = getattr(problem, "full_key", None) or "", str(problem).splitlines()[0]
        if "is not a ListConfig" in message:
            message = "expected a list, written as [a, b]"
        names = [f"{source}{_line_of(source, key)}", "" if key in source or key in message else key]
        raise ValueError(": ".join([*filter(None, names), message])) from None
    except TypeError as problem:
        if "incompatible container types" not in str(problem):
            raise
        raise ValueError(f"{source}: a mapping, expected a list, written as [a, b]") from None
    except MarkedYAMLError as problem:
        mark = problem.problem_mark
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark and Path(mark.name).is_file() else ""
        message = " ".join(filter(None, [problem.problem, problem.context]))
        raise ValueError(f"{source}{line}: invalid YAML: {message}") from None
    except (YAMLError, UnicodeDecodeError, json.JSONDecodeError) as problem:
        raise ValueError(f"{source}: invalid YAML: {' '.join(str(problem).split())}") from None


def _drop_params_of_another_loss(layers: list[tuple[str, Any]]) -> None:
    (_, file), *overrides = layers
    for key, params in (("name", "params"), ("correction", "correction_bounds")):
        names = [_selected(layer, f"loss.{key}") for _, layer in overrides]
        file_name = _selected(file, f"loss.{key}", getattr(LossConfig, key))
        if OmegaConf.select(file, f"loss.{params}") and any(name not in (None, file_name) for name in names):
            file.loss[params] = {}


def _by_key(layer: Any) -> dict[str, Any]:
    """A layer's values by dotted key, with ${…} unresolved."""
    return flattened(cast(dict[Any, Any], OmegaConf.to_container(layer)))


def _selected(layer: Any, key: str, default: Any = None) -> Any:
    """A value of a layer; None for a ${…} that needs other layers."""
    return OmegaConf.select(layer, key, default=default, throw_on_resolution_failure=False)


def _key_problems(source: str, layer: Any, schema: type) -> Iterable[str]:
    """Yields an error for every key that is unknown or has another kind of value than its setting."""
    if not isinstance(layer, DictConfig):
        raise ValueError(f"{source} is a list, expected settings such as train: {{num_steps: 10}}")
    settings = cast(dict[Any, Any], OmegaConf.to_container(layer))
    for key, value in flattened(settings).items():
        if problem := _key_problem(key, value, settings, schema):
            yield ("" if source.startswith(f"{key}=") else f"{source}{_line_of(source, key)}: ") + problem


def _key_problem(key: str, value: Any, settings: dict[Any, Any], schema: type) -> str:
    keys, mappings = _keys(schema)
    if isinstance(value, list) and any(isinstance(item, list | dict) for item in value):
        return f"{key} must be a list, written as [a, b]"
    if key in mappings:
        return f"{key} must be a mapping, written as {{name: value}}"
    if key not in keys and key.rpartition(".")[0] not in mappings:
        return change_of(key) or unknown_key(key, [*keys, *chain.from_iterable(mappings.values())])
    if not _is_nested(settings, key):
        return f"{key} has dots, which only the command line allows; write {_nested(key)}"
    return ""


def _is_nested(tree: Any, key: str) -> bool:
    """Whether a tree has a dotted key as nested names. A name in a file may have dots itself."""
    name, _, rest = key.partition(".")
    return name in tree and (not rest or _is_nested(tree[name], rest))


def _nested(key: str) -> str:
    name, _, rest = key.partition(".")
    return f"{name}: {{{_nested(rest)}}}" if rest else f"{name}: …"


def _command_of(layer: Any) -> str:
    """The only command whose schema has every key of a file; empty if no or several commands match."""
    schemas = {"train": Config, "sft": SftConfig, "eval": EvalConfig}
    commands = [command for command, schema in schemas.items() if not list(_key_problems("", layer, schema))]
    return f"python -m paravt_jax.{commands[0]}" if len(commands) == 1 else ""


def _line_of(source: str, key: str) -> str:
    """A key's line in a YAML file, as a suffix of the file name; empty for an override."""
    if Path(source).suffix not in (".yaml", ".yml") or not Path(source).is_file():
        return ""
    node, line = compose(Path(source).read_text(), LOADER), ""
    for name in key.split("."):
        pairs = node.value if isinstance(node, MappingNode) else []
        nodes = {key_node.value: (key_node, value_node) for key_node, value_node in pairs}
        if name not in nodes:
            break
        key_node, node = nodes[name]
        line = f", line {key_node.start_mark.line + 1}"
    return line


@cache
def _keys(schema: type) -> tuple[list[str], dict[str, list[str]]]:
    return list(keys_of(schema)), mappings_of(schema)


@cache
def _text_keys(schema: type) -> set[str]:
    defaults = pickle.loads(_defaults(schema))
    return {key for key in keys_of(schema) if isinstance(OmegaConf.select(defaults, key), str)}


def _override(text: str, schema: type) -> Any:
    """Parses `a.b=c`. A text setting gets c unchanged unless it is quoted; YAML would read `run_dir=a #2` as a."""
    key, _, value = text.partition("=")
    if key not in _text_keys(schema) or value.startswith(("'", '"')) or value in NULLS:
        return OmegaConf.from_dotlist([text if value else f"{text}''"])  # OmegaConf reads no value as null
    layer = OmegaConf.create({})
    OmegaConf.update(layer, key, value)
    return layer


def to_record(config: Config | SftConfig | EvalConfig) -> dict[str, Any]:
    """Every setting for RUN/config.json, with ${…} unresolved so that no secret is written, and infinity as text."""
    return json.loads(json.dumps(as_written(asdict(config), getattr(config, WRITTEN, {}))), parse_constant=str)


def _check_text(source: str, layer: Any, schema: type) -> None:
    """Raises for a text setting that YAML reads as a number, for example 20261128_1030 as 202611281030."""
    for key, value in _by_key(layer).items():
        if isinstance(value, int | float) and key in _text_keys(schema):
            where = f"{source}{_line_of(source, key)}"
            raise ValueError(f"{where}: {key} is text, but YAML reads {value}; put it in quotes")


def _expand_homes(layer: Any) -> None:
    """Expands `~/` in values such as a.b=~/videos, except in locations of code, which hosts compare as written."""
    for key, value in _by_key(layer).items():
        if (expanded := _expanded(value)) != value:
            OmegaConf.update(layer, key, expanded)


def _expanded(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_expanded, value)]
    is_path = isinstance(value, str) and value.startswith("~/") and ".py:" not in value
    return str(Path(value).expanduser()) if is_path else value


def as_written(used: Any, written: Any) -> Any:
    if isinstance(used, dict) and isinstance(written, dict):
        return {key: as_written(value, written.get(key)) for key, value in used.items()}
    if isinstance(used, list) and isinstance(written, list):
        return [as_written(*pair) for pair in zip(used, written, strict=True)]
    return written if isinstance(written, str) and "${" in written else used


def computed_on(config: Schema, platform: str) -> Schema:
    """Returns the settings with the dtype of this platform.

    CPUs compute in float32, because XLA emulates bfloat16 there, which is several times slower and takes more memory.
    """
    if platform != "cpu" or config.model.dtype == "float32":
        return config
    used = replace(config, model=replace(config.model, dtype="float32"))
    object.__setattr__(used, WRITTEN, getattr(config, WRITTEN, {}))
    return used


def written_dtype(config: Config | SftConfig | EvalConfig) -> str:
    """The value of `model.dtype` before `computed_on`."""
    return getattr(config, WRITTEN, {}).get("model", {}).get("dtype", config.model.dtype)
