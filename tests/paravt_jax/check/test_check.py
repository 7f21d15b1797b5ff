"""`paravt check` passes on a working setup, and each of its stages detects a fault."""

import asyncio
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from processes import all_gone, family

from model_port.loading import abstract_model
from model_port.output_dir import GIB
from model_port.sharding import flat_params
from model_port.tiny import make_tiny, tiny_config
from model_port.weights import num_params
from paravt_jax.check import files, gradient, logits, media, round_trip, step, weights
from paravt_jax.check.__main__ import parser_of, target_of
from paravt_jax.check.model import make_model
from paravt_jax.check.page import page
from paravt_jax.check.process import PartResult, part_of
from paravt_jax.check.prompts import text_prompt
from paravt_jax.check.report import NO_TORCH, Measured, StageReport, table
from paravt_jax.check.stages import STAGES
from paravt_jax.check.target import Target
from paravt_jax.config import SftConfig
from rollout.engine.labels import Label

ROOT = Path(__file__).parents[3]


def run_check(*arguments: str, deadline_s: float) -> tuple[subprocess.CompletedProcess[str], dict]:
    """Runs the command without the tests' eight devices."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    command = ["timeout", str(deadline_s), sys.executable, "-m", "paravt_jax.check", *arguments]
    environment = os.environ | {"XLA_FLAGS": " ".join(flags)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode != 124, f"timed out after {deadline_s:g} s: {done.stderr}"
    return done, json.loads(Path(arguments[arguments.index("--json") + 1]).read_text())


@pytest.fixture
def target(tiny_hf, tmp_path) -> Target:
    return Target(str(tmp_path), str(tiny_hf))


@pytest.fixture
def wrong_rows(tmp_path) -> str:
    """An unreadable data file."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "q"}\n')
    return str(rows)


@pytest.mark.slow
def test_the_command_runs_the_requested_stages_and_names_the_one_that_fails(wrong_rows, tmp_path):
    arguments = ["--quick", "--json", str(tmp_path / "check.json"), "--data", wrong_rows]
    arguments += ["--stage", "weights", "--stage", "data"]
    done, report = run_check(*arguments, deadline_s=250)
    assert [(stage["stage"], stage["failed"]) for stage in report["stages"]] == [("weights", False), ("data", True)]
    assert done.returncode == 1 and done.stderr.endswith("error: 1 of 2 stages failed: data\n")
    assert "| weights " in done.stdout and "| logits " not in done.stdout


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_tiny_model_passes_every_stage(wrong_rows, tmp_path):
    arguments = ["--quick", "--json", str(tmp_path / "check.json"), "--data", wrong_rows]
    done, report = run_check(*arguments, deadline_s=850)
    by_name = {stage["stage"]: stage for stage in report["stages"]}
    failed = {name: stage for name, stage in by_name.items() if stage["failed"]}
    assert list(by_name) == list(STAGES) and list(failed) == ["data"], failed
    assert done.returncode == 1 and done.stderr.endswith("error: 1 of 8 stages failed: data\n")
    assert all(stage["seconds"] > 0 and stage["peak_gib"] > 0.05 for stage in by_name.values())
    planned = {name for name, stage in by_name.items() if "planned_gib" in stage["facts"]}
    assert {"logits", "gradient", "step"} <= planned
    assert all(f"| {name} " in done.stdout for name in STAGES)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stages", [["files", "weights", "logits"], ["gradient"]], ids=" ".join)
def test_four_layers_of_the_2b_equal_transformers(stages, tmp_path):
    arguments = ["--model", "2b", "--layers", "4", "--json", str(tmp_path / "check.json"), "--stage", *stages]
    done, report = run_check(*arguments, deadline_s=1700)
    assert done.returncode == 0, done.stdout
    assert [stage["stage"] for stage in report["stages"]] == stages
    assert all(line["value"] <= line["bound"] for stage in report["stages"] for line in stage["lines"] if line["bound"])


def test_bytes_that_a_process_reads_at_its_start_are_not_a_videos(monkeypatch):
    counts = iter([1, 5, 9, 9, 12])
    monkeypatch.setattr(media, "bytes_read", lambda: next(counts))
    monkeypatch.setattr(media, "REST_S", 0)
    assert asyncio.run(media.bytes_read_at_rest()) == 9


def lines_of(stage, target: Target) -> list[Measured]:
    return [line for line in stage(target) if isinstance(line, Measured)]


def copied(source: Path, dst: Path, name: str, old: str, new: str) -> Path:
    """Copies a model and changes one of its text files."""
    shutil.copytree(source, dst)
    text = (dst / name).read_text()
    assert old in text
    (dst / name).write_text(text.replace(old, new))
    return dst


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_files_of_every_family_equal_transformers(family, tmp_path):
    make_tiny(tmp_path / "hf", config=tiny_config(family))
    assert not [line for line in lines_of(files.files, Target(str(tmp_path), str(tmp_path / "hf"))) if line.failed]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "old", "new", "noticed"),
    [
        ("preprocessor_config.json", "0.5,", "0.4,", "processor"),
        ("chat_template.jinja", "# Tools", "# Tool", "template"),
    ],
)
def test_a_file_that_only_one_side_reads_is_detected(name, old, new, noticed, target, tiny_hf, tmp_path, monkeypatch):
    """Our model reads one directory, transformers another."""
    from transformers import AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    other = copied(tiny_hf, tmp_path / "other", name, old, new)
    for reader in (AutoTokenizer, Qwen2VLImageProcessorPil):
        read = reader.from_pretrained
        monkeypatch.setattr(reader, "from_pretrained", lambda _, read=read: read(other))
    assert [line.case.split()[0] for line in lines_of(files.files, target) if line.failed] in ([noticed], ["chat"])


@pytest.mark.slow
def test_a_tensor_that_changes_during_conversion_is_detected(target, monkeypatch):
    kept = weights.checksums

    def changed(directory: Path, config) -> dict[str, str]:
        sums = kept(directory, config)
        return sums | ({next(iter(sums)): "other"} if directory.name == weights.EXPORTED else {})

    assert not [line for line in lines_of(weights.weights, target) if line.failed]
    monkeypatch.setattr(weights, "checksums", changed)
    (failed,) = [line for line in lines_of(weights.weights, target) if line.failed]
    assert failed.problem.startswith("1 differ, for example ")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["logits", "gradient"])
def test_another_model_in_transformers_is_detected(stage, target, tmp_path, monkeypatch):
    make_tiny(tmp_path / "other", seed=1)
    module = {"logits": logits, "gradient": gradient}[stage]
    reference = module.Reference
    monkeypatch.setattr(module, "Reference", lambda _, *dtype: reference(tmp_path / "other", *dtype))
    reports = list(getattr(module, stage)(target))
    lines = [report for report in reports if isinstance(report, Measured)]
    assert lines and all(line.failed for line in lines if "bfloat16" not in line.case)
    (planned_gib,) = [report["planned_gib"] for report in reports if not isinstance(report, Measured)]
    weights_gib = 4 * num_params(target.config) / GIB
    assert planned_gib == pytest.approx(weights_gib) if stage == "logits" else planned_gib > 3 * weights_gib


def test_a_kernel_whose_gradient_is_nan_is_the_worst(target, monkeypatch):
    names = [rule.hf_names[layer] for rule, layer in gradient.kernels(target.config)]
    ours = {name: np.full(2, math.nan if "blocks.2.attn.proj" in name else 1.0) for name in names}
    theirs = SimpleNamespace(gradients=lambda *_: {name: np.ones(2) for name in names})
    program = SimpleNamespace(memory_analysis=lambda: None)
    monkeypatch.setattr(gradient, "Reference", lambda _: nullcontext(theirs))
    monkeypatch.setattr(gradient, "compiled_gradients", lambda *_: program)
    monkeypatch.setattr(gradient, "our_gradients", lambda *_: ours)
    vision, text = lines_of(gradient.gradient, target)
    assert vision.failed and math.isnan(vision.value) and "blocks.2.attn.proj" in vision.case
    assert not text.failed


@pytest.mark.parametrize(("module", "stage"), [(logits, "logits"), (gradient, "gradient")])
def test_without_torch_a_comparison_is_skipped_and_does_not_fail(module, stage, target, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (line,) = lines_of(getattr(module, stage), target)
    assert line.skipped == NO_TORCH and not line.failed


def test_a_text_that_does_not_match_its_ids_is_detected(chat):
    ids = chat.encode("<think>\nIt is red.</think><answer>A</answer><|im_end|>").tolist()
    turn = {"token_span": [0, len(ids)], "text": "<think>\nIt is red.</think><answer>A</answer>"}
    episode = {"segments": [{"ids": ids}], "turns": [turn], "missing": False}
    assert not step.decoded_line([episode], chat).failed
    for wrong in ({"turns": [turn | {"text": "It is blue."}]}, {"missing": True}, {"turns": []}):
        assert step.decoded_line([episode | wrong], chat).failed


def test_matching_greedy_ids_are_counted_up_to_the_first_difference():
    assert not round_trip.ids_line("SGLang's", [1, 2, 3], [1, 2, 3]).failed
    line = round_trip.ids_line("SGLang's", [1, 2, 3], [1, 5, 3])
    assert line.failed and line.value == "1 of 3" and line.problem == "id 2 differs"


@pytest.mark.parametrize(
    ("label", "step", "reason"),
    [
        ("default", None, ""),
        ("default;weights_port=24000", None, ""),
        ("run-1/2", "2", ""),
        ("run-1/2", None, "weights of the run run-1, not the model's"),
        ("default", "2", "did not get the step's weights"),  # a cold start publishes nothing
        ("run-1/1", "2", "did not get the step's weights"),
    ],
)
def test_a_server_with_other_weights_is_skipped_with_the_reason(label, step, reason):
    found = round_trip.other_weights(Label.of(label), step and Path(step))
    assert reason in found and bool(reason) == bool(found)


def test_the_step_is_a_shortened_recipe_on_the_available_devices(target):
    recipe = replace(target, recipe=str(ROOT / "configs" / "8b_8x80gb.yaml"))
    config = step.shortened(recipe, 2)
    assert (config.train.group_size, config.mesh.num_devices, config.pack.num_rows % 2) == (4, 2, 0)
    assert config.engine.kind == "jax" and config.loss == recipe.run_config.loss
    served = step.shortened(replace(target, server="http://127.0.0.1:1"), 1)
    assert served.engine.kind == "sglang" and served.engine.urls == ["http://127.0.0.1:1"]


def test_the_step_of_a_cold_start_keeps_the_size_of_its_rows(target):
    recipe = replace(target, recipe=str(ROOT / "configs" / "sft_8b.yaml"))
    config = step.shortened(recipe, 2)
    assert isinstance(config, SftConfig) and (config.mesh.num_devices, config.data.train) == (2, "synthetic")
    assert config.pack.row_tokens == recipe.run_config.pack.row_tokens
    assert (config.sft.num_steps, config.sft.rows_per_step) == (2, config.pack.num_rows)


def test_the_stored_kernels_are_free_before_their_gradients_are_computed(target, monkeypatch):
    """A running conversion would keep them."""
    monkeypatch.setattr(gradient, "compared", lambda _: (None, {"kernel": jnp.zeros(2**26, jnp.bfloat16)}, {}))

    def program(chosen, *_):
        raise StopIteration(chosen["kernel"].is_ready())

    with pytest.raises(StopIteration) as started:
        gradient.our_gradients(program, target, text_prompt(target))
    assert started.value.value


def test_every_compared_layer_is_a_separate_stack():
    for num_layers in (*range(1, 8), 27, 36):
        starts = gradient.stack_starts(num_layers)
        sizes = dict(zip(starts, np.diff(starts), strict=False))
        assert starts[0] == 0 and starts[-1] == num_layers
        assert {sizes[layer] for layer in gradient.compared_layers(num_layers)} == {1}


def test_only_the_compared_layers_have_gradients(target):
    model = abstract_model(target.config)
    _, chosen, _ = gradient.compared(nnx.eval_shape(gradient.apart, model))
    sizes = {name: leaf.size for name, leaf in flat_params(chosen).items()}
    kernels = gradient.kernels(target.config)
    assert len(sizes) < len(kernels)
    assert sum(sizes.values()) == sum(math.prod(rule.hf_shape) for rule, _ in kernels)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_cold_start_takes_its_step(tmp_path):
    arguments = ["--quick", "--recipe", "configs/sft_smoke.yaml", "--json", str(tmp_path / "check.json")]
    done, report = run_check(*arguments, "--stage", "step", deadline_s=850)
    (stage,) = report["stages"]
    assert done.returncode == 0 and stage["facts"]["planned_gib"] > 0, done.stdout + done.stderr
    (loss,) = [line["value"] for line in stage["lines"] if line["case"].startswith("loss")]
    assert 5 < loss < 10  # close to the log of the vocabulary size, because the model is random


def test_every_video_that_cannot_be_read_is_named(target, tmp_path):
    paths = [str(tmp_path / name) for name in ("cut.mp4", "gone.mp4")]
    Path(paths[0]).write_text("no video")
    whole = str(media.synthetic_video(target))
    *read, cut, gone = lines_of(media.video, replace(target, videos=(paths[0], whole, paths[1])))
    assert [cut.case, gone.case] == paths and cut.failed and gone.failed
    assert len(read) == 5 and not any(line.failed for line in read)  # unreadable videos come last, where a user looks
    assert cut.problem.startswith("the video cannot be decoded: ")


def test_videos_are_read_within_the_deadlines_and_rows_are_counted(target, tmp_path):
    lines = lines_of(media.video, target)
    assert not [line for line in lines if line.failed] and len(lines) == 5
    assert any("overview of 8 frames" in line.case for line in lines)
    (skipped,) = lines_of(media.data, target)
    assert skipped.skipped and not skipped.failed


@pytest.mark.parametrize("source", ["directory", "tiny"])
def test_fewer_layers_keep_their_weights(source, tiny_hf, tmp_path):
    from model_port.safetensors_io import HfTensors

    make_model(str(tiny_hf) if source == "directory" else "tiny", tmp_path / "cut", 3)
    with HfTensors(tiny_hf) as whole, HfTensors(tmp_path / "cut") as cut:
        assert {name for name in whole.infos if ".layers.3." in name} == whole.infos.keys() - cut.infos.keys()
        assert all(np.array_equal(cut.read(name), whole.read(name)) for name in cut.infos)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--quick", "--layers", "5"], "--layers 5 is more than the model's 4"),
        (["--model", "2b", "--layers", "2"], "--layers 2: 3 DeepStack maps need as many text layers, not 2"),
        (["--model", "3x"], "^model 3x is not a local directory"),
        (["--quick", "--recipe", "gone"], "^gone is neither a file nor a config of the package"),
        (["--quick", "--video", "gone.mp4", "--video", __file__], r"^--video gone\.mp4 is not a file$"),
        (["--quick", "--data", "gone.jsonl"], r"^--data gone\.jsonl does not exist$"),
    ],
)
def test_invalid_arguments_fail_before_any_stage(options, problem, tmp_path):
    parser = parser_of()
    with pytest.raises((ValueError, FileNotFoundError), match=problem):
        target_of(parser, parser.parse_args(options), str(tmp_path))


@pytest.mark.parametrize(
    ("line", "failed"),
    [
        (Measured("a", 1.0, 1.0), False),
        (Measured("a", 1.1, 1.0), True),
        (Measured("a", float("nan"), 1.0), True),
        (Measured("a", "text", 1.0), True),
        (Measured("a", problem="no"), True),
        (Measured("a", skipped="none"), False),
    ],
)
def test_a_line_fails_unless_it_is_within_its_bound(line, failed):
    assert line.failed is failed


def test_a_report_has_lines_facts_and_the_problem_of_the_process():
    row = {"case": "error", "value": 1e-6, "bound": 1e-4, "problem": "", "skipped": ""}
    report = StageReport.of("logits", PartResult([row, {"planned_gib": 2.0, "peak_gib": 3.0}], "", 1.5, 2**30))
    assert not report.failed and report.peak_gib == 3.0 and report.facts == {"planned_gib": 2.0}
    dead = StageReport.of("step", PartResult([row], "ended with exit code -9: killed", 0.5, 2**31))
    assert dead.failed and dead.to_record()["failed"]
    shown = table([report, dead]).splitlines()
    without = StageReport.of("data", PartResult([row | {"skipped": "no file"}], "", 0.5, 2**20))
    assert "skipped" in table([without]).splitlines()[2] and "skipped" not in table([report])
    assert len({len(line) for line in shown}) == 1
    assert "| logits " in shown[2] and "| 3.00     | 2.00 " in shown[2] and "1e-06" in shown[3]
    assert shown[4].count("FAILED") == 1 and "exit code -9" in shown[4] and "2.00" in shown[4]


DOES_NOT_COMPILE = """
import jax
import jax.numpy as jnp
from model_port.cli import run_cli
from paravt_jax.check import stages, weights
from paravt_jax.check.report import Measured

def uncompiled(target):
    yield Measured("before", 1.0, 2.0)
    jax.jit(jax.ffi.ffi_call("no_such_kernel", jax.ShapeDtypeStruct((2,), jnp.float32)))()

weights.weights = uncompiled
run_cli(stages.main)
"""


@pytest.mark.slow
def test_a_stage_that_does_not_compile_keeps_its_lines_and_is_named_as_failed(target, tmp_path):
    command = [sys.executable, "-c", DOES_NOT_COMPILE, "weights", target.to_json()]
    report = StageReport.of("weights", part_of(command, tmp_path / "weights.log", env=os.environ | {"PYTHONPATH": "."}))
    record = report.to_record()
    assert record["failed"] and "no_such_kernel" in record["problem"]
    assert [(line["case"], line["failed"]) for line in record["lines"]] == [("before", False)]
    _, _, stage, line = table([report]).splitlines()
    assert stage.startswith("| weights | ended with exit code 1: error: ") and stage.endswith("| FAILED |")
    assert line.startswith("|         | before") and line.endswith("| ok     |")


def test_the_page_has_every_cell_and_no_markup_of_its_values():
    line = Measured("error <b>", 1e-3, 1e-4)
    reports = [StageReport("logits", [line], {}, "", 1.0, 2.0), StageReport("data", [], {}, "", 1.0, 2.0)]
    record = {"machine": {"cpu": "a & b", "versions": {"jax": "0.1"}}, "command": ["--model", "<x>"], "date": "2026"}
    shown = page(record, reports)
    assert "<h1>logits failed</h1>" in shown
    assert "<p>cpu a &amp; b, jax 0.1<br><code>paravt check --model &#x27;&lt;x&gt;&#x27;</code>" in shown
    assert '<tr class="failed"><td></td><td>error &lt;b&gt;</td><td>0.001</td><td>0.0001</td>' in shown
    assert shown.count('<tr class="stage') == 2 and "<b>" not in shown and "<script" not in shown
    assert "<h1>1 stage passed</h1>" in page(record, reports[1:])
    skipped = StageReport("gradient", [Measured("gradient", skipped="no torch")], {}, "", 1.0, 2.0)
    assert "<h1>1 stage passed, 1 skipped</h1>" in page(record, [*reports[1:], skipped])


@pytest.mark.parametrize(
    ("script", "deadline_s", "problem"),
    [
        ("echo '{\"a\": 1}'; echo no JSON", None, ""),
        ("echo '{\"a\": 1}'; echo \"{'printed by': 'own code'}\"; printf '\\377\\n7\\n'", None, ""),
        ("echo '{\"a\": 1}'; echo bad >&2; exit 3", None, "ended with exit code 3: bad"),
        ("echo '{\"a\": 1}'; exec sleep 60", 0.5, "timed out after 0.5 s"),
    ],
)
def test_a_part_keeps_its_rows_if_it_fails(script, deadline_s, problem, tmp_path):
    part = part_of(["/bin/sh", "-c", script], tmp_path / "part.log", deadline_s)
    assert part.rows == [{"a": 1}] and part.problem == problem
    assert part.seconds > 0 and part.peak_bytes > 2**17


PART = """
import sys
from pathlib import Path
from paravt_jax.check.process import part_of
part_of(["/bin/sh", "-c", "sleep 600 & sleep 600"], Path(sys.argv[1], "part.log"))
"""
STAGES_OF_A_TINY_MODEL = """
import sys
from pathlib import Path
from model_port.output_dir import exit_on_sigterm
from paravt_jax.check import __main__ as check
from paravt_jax.check.target import Target

def run_stage(name, target):
    command = ["/bin/true"] if name == "files" else ["/bin/sleep", "600"]
    return check.part_of(command, target.file(name))

check.run_stage = run_stage
exit_on_sigterm()
check.run_stages(["files", "weights", "logits", "step"], Target(sys.argv[1], "tiny"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", [PART, STAGES_OF_A_TINY_MODEL])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_stages_end_with_a_killed_check(script, number, tmp_path):
    check = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT)
    while [process.name() for process in family(check.pid)].count("sleep") < 2:
        time.sleep(0.05)
    processes = family(check.pid)
    check.send_signal(number)
    check.wait(60)
    assert all_gone(processes)
