"""Writes the model card of an export from the run's settings and, if given, an evaluation's results.

A card has no local paths: data and models appear by their names on the hub. It only shows evaluations of the exported
model, and no headline score that the evaluation's certificate rejects.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from model_port.config import FAMILIES
from model_port.hf_files import HUB_ID, RECIPE_FILE
from model_port.json_files import Section, flattened, read_object
from model_port.layout import CHECKPOINTS_DIR, read_results

CURVE_FILE = "training.png"
CURVES = ("rewards.png", "learner.png")  # in RUN/plots; the card shows the first that exists
LICENSES = dict.fromkeys(  # base model's name prefix -> license
    ("Qwen/Qwen3-VL-", "Qwen/Qwen2.5-VL-7B-", "Qwen/Qwen2.5-VL-32B-"), "apache-2.0"
)
DATA_LICENSES = {"ParaVT/ParaVT-Parquet": "apache-2.0", "synthetic data": "no license, drawn by the run"}
DATA_SETTINGS = ("data.train", "data.validation")
SYNTHETIC = "synthetic"  # the value of data.train for rows that the run draws
SHOWN_SETTINGS = (
    *("train.num_steps", "sft.num_steps", "train.prompts_per_step", "train.group_size", "video.frame_budgets"),
    *("optim.learning_rate", "loss.name", "loss.kl_coef", "advantage.credit", "rollout.dispatch", "lora.rank", "seed"),
)
DIGEST_CHARS = 12
SCORERS = {"strict": "ours", "official": "the benchmark's"}
TEMPLATE = """\
---
{{ card_data }}
---

# {{ name }}

{% if settings %}{{ title }}, trained {% if "sft.num_steps" in settings -%}
by supervised fine-tuning on traces (a cold start)
{%- else %}by reinforcement learning{% endif %} to answer questions about long videos with parallel tool calls.
{%- else %}Weights of {{ title }} in Hugging Face format.{% endif %}
Exported from {{ source }} with paravt_jax, an implementation of ParaVT (agentic reinforcement learning for long
videos) in JAX.

## Model details

| | |
|---|---|
{% for key, value in details %}| {{ key }} | {{ value }} |
{% endfor %}
## How to use

The agent, with its tools and sub-agents:

```bash
python -m paravt_jax.ask VIDEO "QUESTION" --model {{ name }}   # prints the answer, its calls and their reports
python -m paravt_jax.serve --model {{ name }} --video-root DIR   # an OpenAI-compatible server
```
{% if recipe %}
Both use the prompts and frame sizes of its training, from `{{ recipe }}`.
{% endif %}
In JAX, as a Flax NNX module:

```python
import model_port
from model_port.download import source_directory

# to shard it: mesh=model_port.make_mesh(fsdp=8)
model = model_port.load(source_directory("{{ name }}"), dtype="{{ dtype }}")
```

In transformers:

```python
from transformers import AutoModelForImageTextToText, AutoProcessor

model = AutoModelForImageTextToText.from_pretrained("{{ name }}", dtype="{{ dtype }}", device_map="auto")
processor = AutoProcessor.from_pretrained("{{ name }}")
content = [{"type": "video", "path": "film.mp4"}, {"type": "text", "text": "What happens?"}]
inputs = processor.apply_chat_template(
    [{"role": "user", "content": content}],
    add_generation_prompt=True,
    tokenize=True,
    return_dict=True,
    return_tensors="pt",
).to(model.device)
tokens = model.generate(**inputs, max_new_tokens=1024)[:, inputs["input_ids"].shape[1] :]
print(processor.batch_decode(tokens, skip_special_tokens=True)[0])
```

vLLM and SGLang serve it as well: `vllm serve {{ name }}`, `python -m sglang.launch_server --model-path {{ name }}`.
{% if settings %}These three run no tools: the model's calls are then part of its text.
{% endif %}{% if settings %}
## Training

| setting | value |
|---|---|
{% for key, value in table %}| {{ key }} | {{ value }} |
{% endfor %}{% if has_curve %}
![training]({{ curve_file }})
{% endif %}{% endif %}
## Evaluation
{% if cells %}
| split | calls | frames | temperature | scored by | score, % | 95 % interval | missing counted as wrong | samples |
|---|---|---|---|---|---|---|---|---|
{% for row in rows %}| {{ row | join(" | ") }} |
{% endfor %}{% if refused %}
No headline score for {{ refused | join("; ") }}.
{% endif %}
The interval is a bootstrap over videos. Missing samples (failures of the engine, a video or the judge) count as neither
right nor wrong, except in their own column.

{% for line in certificates %}{{ line }}
{% endfor %}{% else %}
Not evaluated: the export was made without `--evaluation`.
{% endif %}
## License

{% if base %}The license of {{ base_link }} applies to the weights{% if license %}: {{ license }}{% endif %}.
{%- else %}The license of the base model applies to the weights; the export does not know which model it is.{% endif %}
{% if data_licenses %}
Licenses of the data; videos keep the licenses of their sources:

{% for line in data_licenses %}{{ line }}
{% endfor %}{% endif %}{% if settings %}
## Citation

```bibtex
@misc{paravt2026,
  title = {ParaVT: Taming the Tool Prior Paradox for Parallel Tool Use in Agentic Video Reinforcement Learning},
  year = {2026},
  eprint = {2605.20342},
  archivePrefix = {arXiv},
  url = {https://arxiv.org/abs/2605.20342},
}
```
{% endif %}"""

NAMED = re.compile(r"[^\n{}]*\{\{ name \}\}[^\n{}]*\n?")  # the text of a line around the model's name
Cell = Mapping[str, Any]  # an evaluation's results for a split, a dispatch and a frame budget


def make_card(
    src: Path,
    name: str,
    base: str | None,
    dtype: str,
    *,
    has_recipe: bool,
    cells: Sequence[Cell] = (),
    model_type: str = "qwen3_vl",
) -> str:
    settings = run_settings(src)
    data = [_data(settings[key]) for key in DATA_SETTINGS if settings.get(key)]
    license_ = next((name for prefix, name in LICENSES.items() if (base or "").startswith(prefix)), None)
    card_data = ModelCardData(
        base_model=base,
        license=license_,
        datasets=sorted({text for text in data if HUB_ID.fullmatch(text)}) or None,
        library_name="transformers",
        pipeline_tag="image-text-to-text",
        tags=[model_type, "paravt_jax", "jax"],
    )
    card = ModelCard.from_template(
        card_data,
        template_str=TEMPLATE,
        name=name,
        title=FAMILIES[model_type].title,
        base=base,
        base_link=_link(base or ""),
        license=license_,
        dtype=dtype,
        source=f"step {src.name} of a training run" if _is_run_checkpoint(src) else "a checkpoint",
        settings=settings,
        details=[(key, value) for key, value in _details(settings, base, dtype, model_type) if value],
        data_licenses=dict.fromkeys(map(_data_license, data)),
        table=[(key, _cell_text(settings[key])) for key in SHOWN_SETTINGS if settings.get(key) not in (None, "", [])],
        has_curve=curve_of(src) is not None,
        curve_file=CURVE_FILE,
        cells=cells,
        rows=[_row(cell, scorer, scores) for cell in cells for scorer, scores in cell["scores"].items()],
        refused=dict.fromkeys(f"{_split(cell)}: {cell['refused']}" for cell in cells if cell["refused"]),
        certificates=dict.fromkeys(map(_certificate, cells)),
        recipe=RECIPE_FILE if has_recipe else None,
    )
    return str(card)


def renamed(card: bytes, old: str, new: str) -> bytes:
    """Renames the model where TEMPLATE names it, and only there: the old name may be a word like `model`."""
    for line in NAMED.findall(TEMPLATE):
        before, after = (line.replace("{{ name }}", name).encode() for name in (old, new))
        card = card.replace(before, after)
    return card


def _details(settings: Mapping[str, Any], base: str | None, dtype: str, model_type: str) -> Iterator[tuple[str, str]]:
    yield "architecture", f"{FAMILIES[model_type].title} (`{model_type}`)"
    yield "weights", f"safetensors, {dtype}"
    yield "base model", _link(base or "")
    yield "initialized from", _link(str(settings.get("model.path") or ""))
    yield "training data", _data_link(_data(settings.get("data.train")))
    yield "validation data", _data_link(_data(settings.get("data.validation")))


def run_settings(src: Path) -> Mapping[str, Any]:
    """Returns the settings of the run that wrote this checkpoint, by dotted key; empty if they are not on disk."""
    if not _is_run_checkpoint(src) or not (file := src.absolute().parents[1] / "config.json").is_file():
        return {}
    return flattened(Section(str(file), read_object(file)).section("config").values)


def curve_of(src: Path) -> Path | None:
    """Returns the path of the run's training plot from `paravt_jax.run.plots`, or None."""
    if not _is_run_checkpoint(src):
        return None
    plots = src.absolute().parents[1] / "plots"
    return next((plots / name for name in CURVES if (plots / name).is_file()), None)


def read_cells(run: Path, model_names: Sequence[str]) -> Sequence[Cell]:
    """Reads an evaluation's results. Raises unless it evaluated a model with one of these names."""
    cells = read_results(run)
    names = {str(Path(name).resolve()) for name in model_names} | {*model_names}
    for cell in cells:
        path = str(cell["model"]["path"])
        if not names & {path, str(Path(path).resolve())}:
            raise ValueError(
                f"{run} evaluated {path}, but you export {model_names[0]}; give an evaluation of the exported model"
            )
    return cells


def _row(cell: Cell, scorer: str, scores: Mapping[str, Any]) -> list[str]:
    count, (low, high) = cell["n"], scores["interval_95"]
    return [
        *(_split(cell), cell["dispatch"], str(cell["frame_budget"]), _temperature(cell), SCORERS.get(scorer, scorer)),
        f"{100 * scores['score']:.1f}",
        f"{100 * low:.1f} to {100 * high:.1f}",
        f"{100 * scores['missing_as_wrong']:.1f}",
        f"{count['answered'] + count['unanswered']} of {count['expected'] or count['rows']}",
    ]


def _split(cell: Cell) -> str:
    return cell["split"] or "own data"


def _temperature(cell: Cell) -> str:
    return f"{temperature:g}" if (temperature := cell.get("temperature")) is not None else "—"


def _certificate(cell: Cell) -> str:
    """Describes an evaluation in one line. Data appears by repository and checksum, because file names are local."""
    data = cell["data"]
    is_public = cell["split"] is not None and HUB_ID.fullmatch(str(data["repository"]))
    sums = ", ".join(f"sha256 {text[:DIGEST_CHARS]}" for text in data["sha256"].values())
    source = f"{data['repository']} at {data['revision'] or 'an unknown revision'}" if is_public else "own data"
    digests = ", ".join(f"{name} {text[:DIGEST_CHARS]}" for name, text in cell["hashes"].items())
    engines = ", ".join(dict.fromkeys(_cell_text(engine["kind"]) for engine in cell["engines"])) or "an unknown engine"
    version = _cell_text(cell.get("packages", {}).get("paravt_jax", "of an unknown version"))
    code = f"at {cell['git_commit'][:DIGEST_CHARS]}" if cell.get("git_commit") else version  # a wheel has no commit
    return (
        f"- {_split(cell)}: {source} ({sums}), mode `{cell['mode']}`, seed {cell['seed']}, "
        f"samples per question {cell['num_samples']}; {digests}; engine {engines}; paravt_jax {code}."
    )


def _data(setting: Any) -> str:
    """Returns the hub's name for a run's data, or a description without a path."""
    text = str(setting or "")
    name = "/".join(text.partition("@")[0].split("/")[:2])
    if HUB_ID.fullmatch(name) and not Path(text).exists():
        return name
    return text and ("synthetic data" if text == SYNTHETIC else "own data")


def _data_link(data: str) -> str:
    return f"[{data}](https://huggingface.co/datasets/{data})" if HUB_ID.fullmatch(data) else data


def _data_license(data: str) -> str:
    license_ = DATA_LICENSES.get(data, "see its page" if HUB_ID.fullmatch(data) else "not recorded by the run")
    return f"- {_data_link(data)}: {license_}"


def _link(name: str) -> str:
    """Returns a link to a model on the hub, a description of a local model, or "" if there is no name."""
    if HUB_ID.fullmatch(name) and not Path(name).exists():
        return f"[{name}](https://huggingface.co/{name})"
    return "an earlier checkpoint" if name else ""


def _cell_text(value: Any) -> str:
    """Formats a value for a table cell. A path becomes its file name."""
    text = json.dumps(value) if isinstance(value, list) else str(value).rpartition("/")[2]
    return text.replace("|", " ").replace("\n", " ")


def _is_run_checkpoint(src: Path) -> bool:
    return src.absolute().parent.name == CHECKPOINTS_DIR and src.name.isdecimal()
