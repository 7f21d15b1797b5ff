"""The model card of an export, written from the run's settings and, if given, the results of an evaluation.

A card shows no path of this machine: data and models appear by their names on the hub. It shows only evaluations of the
exported model, and no headline score that the evaluation's certificate rejects.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from model_port.config import FAMILIES
from model_port.hf_files import HUB_ID, RECIPE_FILE
from model_port.json_files import flattened
from model_port.layout import CHECKPOINTS_DIR, RESULTS_FILE

CURVE_FILE = "training.png"
CURVES = ("rewards.png", "learner.png")  # of RUN/plots; the first that exists is shown
LICENSES = dict.fromkeys(  # of base models, by the start of their names
    ("Qwen/Qwen3-VL-", "Qwen/Qwen2.5-VL-7B-", "Qwen/Qwen2.5-VL-32B-"), "apache-2.0"
)
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

A {{ title }} in Hugging Face format, exported from {{ source }} with `model_port.export` of
paravt_jax, a JAX implementation of agentic reinforcement learning for long-video understanding.
{% if base %}
The base model is [{{ base }}](https://huggingface.co/{{ base }}), whose license applies.
{% endif %}{% if settings %}
## Training

{% if "sft.num_steps" in settings %}Supervised fine-tuning on traces (the cold start).
{%- else %}Reinforcement learning on the model's own episodes.{% endif %}
{% if start %}This stage started from {{ start }}.
{% endif %}Data: {{ data }}.

| setting | value |
|---|---|
{% for key, value in table %}| {{ key }} | {{ value }} |
{% endfor %}{% if has_curve %}
![training]({{ curve_file }})
{% endif %}{% endif %}{% if cells %}
## Evaluation

| split | calls | frames | scored by | score, % | 95 % interval | missing counted as wrong | samples |
|---|---|---|---|---|---|---|---|
{% for row in rows %}| {{ row | join(" | ") }} |
{% endfor %}{% if refused %}
No headline score for {{ refused | join("; ") }}.
{% endif %}
The interval bootstraps whole videos. Missing samples count as neither right nor wrong, except in their own column.

{% for line in certificates %}{{ line }}
{% endfor %}{% endif %}
## Ask it

```bash
python -m paravt_jax.ask VIDEO "QUESTION" --model {{ name }}
```

shows the frames it looks at while it answers; `python -m paravt_jax.serve --model {{ name }}` serves it with OpenAI's
API.{% if recipe %} Both use the prompts and frame sizes it was trained with, from its `{{ recipe }}`.{% endif %}

transformers loads it like any {{ title }}:

```python
from transformers import AutoModelForImageTextToText, AutoProcessor

model = AutoModelForImageTextToText.from_pretrained("{{ name }}", dtype="{{ dtype }}", device_map="auto")
processor = AutoProcessor.from_pretrained("{{ name }}")
```

So do vLLM and SGLang: `python -m sglang.launch_server --model-path {{ name }}`.
{% if settings %}
## Citation

The method is from *ParaVT: Taming the Tool Prior Paradox for Parallel Tool Use in Agentic Video Reinforcement
Learning*, [arXiv:2605.20342](https://arxiv.org/abs/2605.20342), 2026.
{% endif %}"""

Cell = Mapping[str, Any]  # one row of an evaluation's results: a split, a dispatch and a frame budget


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
    datasets = sorted(_datasets(settings))
    card_data = ModelCardData(
        base_model=base,
        license=next((license_ for prefix, license_ in LICENSES.items() if (base or "").startswith(prefix)), None),
        datasets=datasets or None,
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
        dtype=dtype,
        source=f"step {src.name} of a training run" if _is_of_a_run(src) else "a checkpoint",
        settings=settings,
        start=_link(str(settings.get("model.path") or "")),
        data=" and ".join(datasets) or "own data",
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


def run_settings(src: Path) -> Mapping[str, Any]:
    """The settings of the run that wrote this checkpoint, by dotted key; empty if there are none to read."""
    file = src.absolute().parents[1] / "config.json" if _is_of_a_run(src) else None
    try:
        record = json.loads(file.read_bytes()) if file is not None else {}
    except (OSError, ValueError):
        return {}  # the weights are complete without it
    return flattened(record["config"]) if isinstance(record, dict) and isinstance(record.get("config"), dict) else {}


def curve_of(src: Path) -> Path | None:
    """The plot of the run's training, as `paravt_jax.run.plots` drew it."""
    if not _is_of_a_run(src):
        return None
    plots = src.absolute().parents[1] / "plots"
    return next((plots / name for name in CURVES if (plots / name).is_file()), None)


def read_cells(run: Path, model_names: Sequence[str]) -> list[Cell]:
    """The results of an evaluation, which must have evaluated the model with one of these names."""
    file = run / RESULTS_FILE
    try:
        cells = json.loads(file.read_bytes())["cells"]
    except FileNotFoundError:
        raise ValueError(f"{run} has no {RESULTS_FILE}; give the run_dir of a finished evaluation") from None
    except (ValueError, KeyError, TypeError) as problem:
        raise ValueError(f"{file} is not an evaluation's ({problem}); run paravt_jax.eval again") from None
    names = {str(Path(name).resolve()) for name in model_names} | {*model_names}
    for cell in cells:
        path = str(cell["model"]["path"])
        if not names & {path, str(Path(path).resolve())}:
            raise ValueError(
                f"{run} evaluated {path}, but you export {model_names[0]}; give an evaluation of that model"
            )
    return cells


def _row(cell: Cell, scorer: str, scores: Mapping[str, Any]) -> list[str]:
    count, (low, high) = cell["n"], scores["interval_95"]
    return [
        *(_split(cell), cell["dispatch"], str(cell["frame_budget"]), SCORERS.get(scorer, scorer)),
        f"{100 * scores['score']:.1f}",
        f"{100 * low:.1f} to {100 * high:.1f}",
        f"{100 * scores['missing_as_wrong']:.1f}",
        f"{count['answered'] + count['unanswered']} of {count['expected'] or count['rows']}",
    ]


def _split(cell: Cell) -> str:
    return cell["split"] or "own data"


def _certificate(cell: Cell) -> str:
    """Names data by repository and checksum, never by file name, which would be a path of this machine."""
    data = cell["data"]
    is_public = cell["split"] is not None and HUB_ID.fullmatch(str(data["repository"]))
    sums = ", ".join(f"sha256 {text[:DIGEST_CHARS]}" for text in data["sha256"].values())
    source = f"{data['repository']} at {data['revision'] or 'an unknown revision'}" if is_public else "own data"
    digests = ", ".join(f"{name} {text[:DIGEST_CHARS]}" for name, text in cell["hashes"].items())
    engines = ", ".join(dict.fromkeys(str(engine["kind"]) for engine in cell["engines"])) or "an unknown engine"
    commit = str(cell.get("git_commit") or "an unknown commit")[:DIGEST_CHARS]
    return (
        f"- {_split(cell)}: {source} ({sums}), mode `{cell['mode']}`, seed {cell['seed']}, "
        f"samples per question {cell['num_samples']}; {digests}; engine {engines}; paravt_jax at {commit}."
    )


def _datasets(settings: Mapping[str, Any]) -> Iterator[str]:
    """Their names on the hub."""
    for key in ("data.train", "data.validation"):
        name = "/".join(str(settings.get(key, "")).partition("@")[0].split("/")[:2])
        if HUB_ID.fullmatch(name) and not Path(str(settings[key])).exists():
            yield name


def _link(name: str) -> str:
    """A link to a model on the hub; words for a local one, and nothing for none."""
    if HUB_ID.fullmatch(name) and not Path(name).exists():
        return f"[{name}](https://huggingface.co/{name})"
    return "an earlier checkpoint" if name else ""


def _cell_text(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, list) else str(value)
    return text.replace("|", " ").replace("\n", " ")


def _is_of_a_run(src: Path) -> bool:
    return src.absolute().parent.name == CHECKPOINTS_DIR and src.name.isdecimal()
