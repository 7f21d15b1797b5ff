"""Launching a run on several hosts: the Slurm script (with fake srun and scontrol), job files, and images."""

import importlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from string import Template

import pytest
import yaml

from paravt_jax.config import load_config

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "configs" / "launch"
LAUNCH_SLURM = ("bash", str(ROOT / "scripts" / "launch_slurm.sh"))
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do echo "$1" >> options; shift; done
echo "${*: -2}" >> srun
trap 'again=1; kill -TERM $tasks' TERM
for rank in 0 1; do SLURM_NTASKS=2 SLURM_PROCID=$rank "$@" & tasks="$tasks $!"; done
status=0
for task in $tasks; do
    again=1
    while [ $again ]; do again=; code=0; wait $task || code=$?; done
    [ $code -eq 0 ] || status=$code
done
exit $status
"""
TASK = """#!{python}
import signal, sys, threading
from pathlib import Path

index = int(sys.argv[-1].removeprefix("hosts.index="))
with Path(f"task{{index}}").open("a") as log:
    print(*sys.argv[1:], file=log)
if len(Path("srun").read_text().splitlines()) == 1:
    sys.exit(7 * index)

sys.path.insert(0, "{root}")
from paravt_jax.config import HostsConfig
from paravt_jax.run.hosts import joined

stopped = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stopped.set())
settings = dict(word.split("=") for word in sys.argv if word.startswith("hosts."))
with joined(HostsConfig(settings["hosts.coordinator"], int(settings["hosts.num"]), index)) as hosts:
    assert hosts.gather("there", index) == [0, 1]
    Path(f"joined{{index}}").touch()
    assert stopped.wait(30)
sys.exit(128 + signal.SIGTERM)  # as train and sft do
"""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def job(tmp_path):
    """The environment of a two-node job, whose fake Python only connects to the other task."""
    program(tmp_path / "bin" / "srun", SRUN)
    program(tmp_path / "bin" / "scontrol", "#!/bin/sh\necho $3 | tr , '\\n'\n")
    program(tmp_path / ".venv" / "bin" / "python", TASK.format(python=sys.executable, root=ROOT))
    return os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "localhost,node002",
    }


def until(condition, deadline_s=60):
    give_up_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.05)


@pytest.mark.slow
def test_a_slurm_job_restarts_after_a_failure_and_forwards_sigterm(job, tmp_path):
    command = [*LAUNCH_SLURM, "train", "--config", "run.yaml", "seed=3"]
    script = subprocess.Popen(command, env=job, stderr=subprocess.PIPE, text=True)
    until(lambda: all((tmp_path / f"joined{rank}").exists() for rank in range(2)) or script.poll() is not None)
    script.send_signal(signal.SIGTERM)  # as sbatch --signal=B:TERM does before the time limit
    _, errors = script.communicate(timeout=60)
    assert script.returncode == 128 + signal.SIGTERM, errors
    assert "attempt 0 ended with exit code 7" in errors and "attempt 1" not in errors
    for rank in range(2):
        words = (tmp_path / f"task{rank}").read_text().splitlines()
        assert len(words) == 2 and words[0] == words[1]
        assert words[0].startswith("-m paravt_jax.train --config run.yaml seed=3 hosts.coordinator=localhost:")
        assert words[0].endswith(f"hosts.num=2 hosts.index={rank}")


@pytest.mark.parametrize("words", [[], ["--help"], ["--config", "run.yaml"]])
def test_a_slurm_job_without_a_command_prints_its_usage(words, job):
    done = subprocess.run([*LAUNCH_SLURM, *words], env=job, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2 and "sbatch --nodes 2" in done.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_JOB_NODELIST": ""}, "this is not a Slurm job; start it with sbatch"),
        ({"SLURM_JOB_ID": ""}, "this is not a Slurm job; start it with sbatch"),
        ({"RESTARTS": "-1"}, "RESTARTS=-1 is not a number of restarts"),
        ({"SLURM_SUBMIT_DIR": "/"}, "/ has no .venv/bin/python; run sbatch in a clone, after scripts/setup.sh cuda12"),
    ],
)
def test_a_slurm_job_that_cannot_start_has_one_error(changes, message, job, tmp_path):
    done = subprocess.run([*LAUNCH_SLURM, "train"], env=job | changes, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr == f"launch_slurm: {message}\n"
    assert not (tmp_path / "srun").exists()


def test_a_slurm_job_without_nodes_has_one_error(job, tmp_path):
    program(tmp_path / "bin" / "scontrol", "#!/bin/sh\n")
    done = subprocess.run([*LAUNCH_SLURM, "train"], env=job, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2 and "lists no node of SLURM_JOB_NODELIST=localhost,node002" in done.stderr


def test_a_slurm_job_may_have_thousands_of_nodes(job, tmp_path):
    """A pipe to `head` would kill scontrol while it still writes, and with it the job."""
    program(tmp_path / "bin" / "scontrol", "#!/bin/sh\nseq -f a-node-with-a-long-name-%g 100000\n")
    program(tmp_path / ".venv" / "bin" / "python", '#!/bin/sh\necho "$@" > "task$SLURM_PROCID"\n')
    subprocess.run([*LAUNCH_SLURM, "train"], env=job, check=True, timeout=60)
    assert "hosts.coordinator=a-node-with-a-long-name-1:" in (tmp_path / "task1").read_text()


STARTS = [*((code, 1) for code in (0, 2, 127, 130, 143)), pytest.param(7, 3, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("code", "starts"), STARTS)
def test_a_slurm_job_restarts_unless_its_run_finished_was_stopped_or_cannot_start(code, starts, job, tmp_path):
    program(tmp_path / ".venv" / "bin" / "python", f"#!/bin/sh\nexit {code}\n")
    env = job | {"RESTARTS": "2"}
    done = subprocess.run([*LAUNCH_SLURM, "train"], env=env, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == code and ("attempt" in done.stderr) == (starts > 1)
    assert len((tmp_path / "srun").read_text().splitlines()) == starts


@pytest.mark.slow
def test_a_requeued_slurm_job_connects_on_its_new_nodes(job, tmp_path):
    """With `--requeue`, Slurm runs the script again on other nodes after it loses a node."""
    program(tmp_path / ".venv" / "bin" / "python", '#!/bin/sh\necho "$@" >> "task$SLURM_PROCID"\n')
    for nodes in ("node001,node002", "node003,node001"):
        env = job | {"SLURM_JOB_NODELIST": nodes}
        subprocess.run([*LAUNCH_SLURM, "train", "seed=3"], env=env, check=True, timeout=60)
    port = 20000 + os.getpid() % 10000
    for rank in range(2):
        assert (tmp_path / f"task{rank}").read_text().splitlines() == [
            f"-m paravt_jax.train seed=3 hosts.coordinator={first}:{port} hosts.num=2 hosts.index={rank}"
            for first in ("node001", "node003")
        ]
    # each task gets all CPUs of its node, and a task that exits does not kill the others before they log
    options = (tmp_path / "options").read_text().split()
    assert set(options) == {"--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=0"}


def test_a_slurm_job_requests_whole_nodes_and_requeueing():
    """Without --exclusive and --mem, Slurm gives a task only one CPU and a part of the memory."""
    lines = (ROOT / "scripts" / "launch_slurm.sh").read_text().splitlines()
    options = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}
    assert {"--ntasks-per-node=1", "--exclusive", "--mem=0", "--requeue", "--open-mode=append"} <= options


def gke_tpu():
    """Returns the command of each container, the number of hosts and devices, and host 0's address."""
    service, job = yaml.safe_load_all((LAUNCH / "gke_tpu.yaml").read_text())
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    assert spec["subdomain"] == service["metadata"]["name"]
    called = f"{job['metadata']['name']}-0.{spec['subdomain']}:{container['ports'][0]['containerPort']}"
    # The disk has the recipe's model and data.
    assert container["workingDir"] == container["volumeMounts"][0]["mountPath"]
    devices = container["resources"]["limits"]["google.com/tpu"]
    return container["args"][0].removeprefix("exec "), job["spec"]["completions"], devices, called


def two_gpu_nodes():
    (service,) = yaml.safe_load((LAUNCH / "two_gpu_nodes.yaml").read_text())["services"].values()
    (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert service["volumes"] == [f"/runs:{service['working_dir']}"]
    command, num_required = re.subn(r":\?[^}]*}", "}", service["command"])
    assert num_required == 1  # without HOST, compose stops with a message, not each of 40 restarts
    return command, 2, devices["count"], "FIRST:8476"


@pytest.mark.parametrize("read", [gke_tpu, two_gpu_nodes])
def test_each_host_of_a_job_file_has_a_valid_command_and_its_part_of_the_mesh(read, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    command, num, devices, called = read()
    for index in range(num):
        words = shlex.split(Template(command).substitute(JOB_COMPLETION_INDEX=index, HOST=index))
        assert words[:2] == ["python", "-m"]
        monkeypatch.setattr(sys, "argv", [*words[2:], "--show"])
        importlib.import_module(words[2]).main()
        config = load_config(words[4], *words[5:])
        assert (config.hosts.num, config.hosts.index, config.hosts.coordinator) == (num, index, called)
        assert config.mesh.num_devices == num * devices and config.pack.num_rows % num == 0
    assert {path.stem for path in LAUNCH.glob("*.yaml")} == {"gke_tpu", "two_gpu_nodes"}


def test_hadolint_accepts_the_dockerfiles():
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, *sorted(LAUNCH.glob("*.Dockerfile"))], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_files_of_an_image_install_and_run(tmp_path):
    """The image contains the tracked files that .dockerignore allows."""
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    for name in tracked.stdout.splitlines():
        if Path(name).parts[0] in kept:
            (tmp_path / "paravt" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "paravt" / name, follow_symlinks=False)
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", "here"]
    subprocess.run([sys.executable, *install, "./paravt"], cwd=tmp_path, check=True, timeout=120)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "here")}
    command = [sys.executable, "-m", "paravt_jax", "configs"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert "paragrpo_8b" in done.stdout, done.stderr
