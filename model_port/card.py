"""The model card: what a reader of the hub needs to know of an export, from what its run wrote down.

Of a run only settings are told that say nothing of the machine: data by their names on the hub, never by a path.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from huggingface_hub import ModelCardData

from model_port.evaluated import Cell, evaluation_lines
from model_port.hf_files import HUB_ID, RECIPE_FILE
from model_port.layout import CHECKPOINTS_DIR

CURVE_FILE = "training.png"
CURVES = ("rewards.png", "loss.png")  # of RUN/plots, the first that is there
LICENCES = {"Qwen/Qwen3-VL-": "apache-2.0"}  # of base models, as published; of others nothing is said
HYPER_PARAMETERS = (
    *("train.num_steps", "sft.num_steps", "train.prompts_per_step", "train.group_size", "video.frame_budgets"),
    *("optim.learning_rate", "loss.kind", "loss.kl_coef", "advantage.credit", "rollout.dispatch", "lora.rank", "seed"),
)
CARD = Template("""\
---
$metadata
---

# $name

A Qwen3-VL in Hugging Face format, exported from $what with `model_port.export` of
paravt_jax, a JAX implementation of agentic reinforcement learning for long-video understanding.
$base$training$evaluation
## Ask it

```bash
python -m paravt_jax.ask VIDEO "QUESTION" --model $name
```

shows what it looks at while it answers, `python -m paravt_jax.serve --model $name` puts it behind OpenAI's API$recipe.
transformers loads it as any Qwen3-VL:

```python
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

model = Qwen3VLForConditionalGeneration.from_pretrained("$name", dtype="$dtype", device_map="auto")
processor = AutoProcessor.from_pretrained("$name")
```

vLLM and SGLang load it the same way, by this name or directory: `python -m sglang.launch_server --model-path $name`.
$citation""")
CITATION = """
## Citation

The method is that of *ParaVT: Taming the Tool Prior Paradox for Parallel Tool Use in Agentic Video Reinforcement
Learning*,
[arXiv:2605.20342](https://arxiv.org/abs/2605.20342), 2026.
"""


def make_card(
    src: Path, name: str, base: str | None, dtype: str, *, has_recipe: bool, cells: Sequence[Cell] = ()
) -> str:
    settings = run_settings(src)
    licence = next((known for prefix, known in LICENCES.items() if (base or "").startswith(prefix)), None)
    metadata = ModelCardData(
        base_model=base,
        license=licence,
        datasets=sorted(_datasets(settings)) or None,
        library_name="transformers",
        pipeline_tag="image-text-to-text",
        tags=["qwen3_vl", "paravt_jax", "jax"],
    )
    return CARD.substitute(
        metadata=metadata.to_yaml(),
        name=name,
        what=f"step {src.name} of a training run" if _is_of_a_run(src) else "a checkpoint",
        base=f"\nIt began as [{base}](https://huggingface.co/{base}), whose license applies.\n" if base else "",
        training="\n".join(["", *_training(settings, curve_of(src) is not None)]) if settings else "",
        evaluation="\n".join(["", *evaluation_lines(cells)]) if cells else "",
        recipe=f"; both go by its `{RECIPE_FILE}`, the words and pixels that it was trained with" if has_recipe else "",
        dtype=dtype,
        citation=CITATION if settings else "",
    )


def run_settings(src: Path) -> Mapping[str, Any]:
    """Those of the run that a checkpoint is of, by dotted key; empty where there is none."""
    file = src.absolute().parents[1] / "config.json" if _is_of_a_run(src) else None
    try:
        record = json.loads(file.read_bytes()) if file is not None else {}
    except (OSError, ValueError):
        return {}  # the weights are whole without it
    return dict(_flat(record["config"])) if isinstance(record, dict) and isinstance(record.get("config"), dict) else {}


def curve_of(src: Path) -> Path | None:
    """The picture of the run's training, as `paravt_jax.run.plots` drew it."""
    if not _is_of_a_run(src):
        return None
    plots = src.absolute().parents[1] / "plots"
    return next((plots / name for name in CURVES if (plots / name).is_file()), None)


def _training(settings: Mapping[str, Any], has_curve: bool) -> Iterator[str]:
    yield "## Training\n"
    imitated = "sft.num_steps" in settings
    yield "Imitation of traces (the cold start)." if imitated else "Reinforcement learning on its own episodes."
    if before := str(settings.get("model.path", "")):
        yield f"The stage began with {_link(before, 'models') or 'a checkpoint of before'}."
    data = " and ".join(sorted(_datasets(settings))) or "own data"
    yield f"Data: {data}.\n"
    yield "| setting | value |\n|---|---|"
    yield from (
        f"| {key} | {_cell(settings[key])} |" for key in HYPER_PARAMETERS if settings.get(key) not in (None, "")
    )
    if has_curve:
        yield f"\n![training]({CURVE_FILE})"
    yield ""


def _datasets(settings: Mapping[str, Any]) -> Iterator[str]:
    """By their names on the hub."""
    for key in ("data.train", "data.validation"):
        name = "/".join(str(settings.get(key, "")).partition("@")[0].split("/")[:2])
        if HUB_ID.fullmatch(name) and not Path(str(settings[key])).exists():
            yield name


def _link(name: str, kind: str) -> str | None:
    return f"[{name}](https://huggingface.co/{name})" if HUB_ID.fullmatch(name) and not Path(name).exists() else None


def _cell(value: Any) -> str:
    return re.sub(r"[|\n]", " ", json.dumps(value) if isinstance(value, list) else str(value))


def _is_of_a_run(src: Path) -> bool:
    return src.absolute().parent.name == CHECKPOINTS_DIR and src.name.isdecimal()


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
