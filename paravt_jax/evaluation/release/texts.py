"""The texts of the released evaluation, from the file that import-release writes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter

from paravt_jax.config import RELEASE_MODES

OWN_TEXTS = ("system.agentic_videozoomer", "system.agentic_sage", "system.agentic_longvt")  # not in the release
PLACEHOLDERS: Mapping[str, tuple[str, ...]] = {  # template -> its placeholders, in the release's order
    "instruction.direct": (),
    "instruction.other": (),
    "question.videomme": ("question", "options", "instruction"),
    "question.videomme_subtitles": ("subtitles", "question", "options", "instruction"),
    "question.longvideobench": ("question", "options", "instruction"),
    "question.lvbench": ("question", "instruction"),
    "question.mlvu": ("question", "options", "instruction"),
    "question.mmvu": ("question", "options", "instruction"),
    "question.charades": ("caption",),
    "subtitles": ("lines",),
    "file_name": ("question", "name"),
    "response": ("num_frames", "start_s", "end_s"),
    "response_error": ("start_s", "end_s"),
    "last.choice": (),
    "last.window": (),
}
IMPORT = "python -m paravt_jax.prompts import-release ParaVT --dst release.yaml"


@dataclass(frozen=True)
class ReleaseTexts:
    """Texts by name; those with placeholders are templates."""

    texts: Mapping[str, str]

    def fill(self, name: str, /, **values: object) -> str:
        return self.texts[name].format(**values)

    def system(self, mode: str) -> str:
        return self.texts[f"system.{mode}"]

    def check_mode(self, key: str, mode: str) -> None:
        if f"system.{mode}" not in self.texts:
            raise ValueError(
                f"{key}={mode} needs the system text of that model, which the release does not have; import it from "
                f"your own file: {IMPORT} --text {mode}=FILE"
            )


def read_texts(file: str) -> ReleaseTexts:
    """Reads eval.release_texts, which must have every text of the release with its placeholders."""
    from yaml import YAMLError, safe_load  # imported late, because most runs have no such file

    label = f"eval.release_texts={file}"
    try:
        texts = safe_load(Path(file).read_text())
    except OSError as problem:
        raise ValueError(f"{label}: {problem.strerror}; make it with {IMPORT}") from None
    except (YAMLError, UnicodeDecodeError) as problem:
        raise ValueError(f"{label} is invalid YAML: {' '.join(str(problem).split())}") from None
    if not isinstance(texts, dict) or not all(isinstance(text, str) for pair in texts.items() for text in pair):
        raise ValueError(f"{label} must have a text for each name; make it with {IMPORT}")
    for problem in text_problems(texts):
        raise ValueError(f"{label}: {problem}; make it with {IMPORT}")
    return ReleaseTexts(texts)


def text_problems(texts: Mapping[str, str]) -> list[str]:
    """Problems of texts: missing names, unknown names, and templates with wrong placeholders."""
    names = [*(f"system.{mode}" for mode in RELEASE_MODES), *PLACEHOLDERS]
    problems = [f"the text {name} is missing" for name in names if name not in texts and name not in OWN_TEXTS]
    problems += [f"{name} is not a text of the release" for name in texts if name not in names]
    for name, expected in PLACEHOLDERS.items():
        if name in texts and _fields(texts[name]) != expected:
            listing = ", ".join(f"{{{field}}}" for field in expected) or "none"
            problems.append(f"{name} must have these placeholders in this order: {listing}")
    return problems


def _fields(template: str) -> tuple[str, ...] | None:
    try:
        parts = [(field, spec) for _, field, spec, _ in Formatter().parse(template) if field is not None]
    except ValueError:
        return None
    return tuple(field for field, _ in parts) if all(spec in ("", ".1f") for _, spec in parts) else None
