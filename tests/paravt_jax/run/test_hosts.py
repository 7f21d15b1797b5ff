"""Hosts connect, compare values, share a mesh, and all end when one fails."""

import asyncio
import os
import signal
import socket
import sys
import time
from pathlib import Path

import forked
import hosts as several
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from model_port.cli import DEBUG_FLAG
from model_port.sharding import make_mesh, on_host
from paravt_jax.config import AUTO, HostsConfig
from paravt_jax.run import hosts, policy
from paravt_jax.run.compiles import Compiles
from paravt_jax.run.hosts import ALONE

pytestmark = pytest.mark.slow
UNIT = np.ones(1, np.float32)


def exchange(hosts):
    for turn in range(3):
        assert hosts.gather("turns", (turn, hosts.index)) == [[turn, host] for host in range(hosts.num)]
    sent = [{"text": "é" * 1000 * (1 + hosts.index), "number": np.float64(0.1), "nothing": None, "inf": float("inf")}]
    for host, (row,) in enumerate(hosts.gather("long", sent)):
        assert len(row["text"]) == 1000 * (1 + host) and row["number"] == 0.1 and row["inf"] == float("inf")
    assert asyncio.run(hosts.gather_async("async", hosts.index)) == [0, 1]
    with pytest.raises(TypeError, match="a set cannot be sent to other hosts"):
        hosts.gather("set", {1})
    hosts.check_same(lambda: {"seed": 3, "sizes": (1, 2)}, "set it back")
    made = Path("/proc/self/fd/1").readlink().with_name("made")  # beside the output

    def make() -> bool:
        time.sleep(0.3)
        made.touch()
        return True

    assert hosts.host_0_first(make if hosts.leads else made.exists)


def share_a_mesh(hosts):
    """A tensor of all hosts is gathered at every publish, and its program compiled once."""
    import jax

    assert jax.process_count() == hosts.num and jax.device_count() == 2 * hosts.num
    own = make_mesh(data=1, fsdp=2, tensor=2).devices[0, hosts.index]
    assert {device.process_index for device in own} == {hosts.index}
    with pytest.raises(ValueError, match="tensor=4 must stay within a host"):
        make_mesh(tensor=4)
    with pytest.raises(ValueError, match="must equal the 4 devices of all 2 hosts"):
        make_mesh(fsdp=2)
    split = NamedSharding(make_mesh(fsdp=2, tensor=2), PartitionSpec(("fsdp", "tensor")))
    array = jax.make_array_from_callback((4,), split, lambda index: UNIT * index[0].start)
    assert on_host(array).tolist() == [0, 1, 2, 3]
    compiles = Compiles()
    assert on_host(array).tolist() == [0, 1, 2, 3]
    assert compiles.pop_metrics()["perf/num_compiles"] == 0


def differ(hosts):
    added = {"added.py": "a"} if hosts.index else {}
    values = {"train.num_steps": 5 + hosts.index, "seed": 0, **added}
    hosts.check_same(lambda: values, "start all with the same settings")


def started_by_slurm(rank, job):
    """Sets the environment of a task that srun starts, which jax reads."""
    os.environ |= {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NODELIST": "localhost,node[002-004]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
    }
    several._joined(_all, HostsConfig("auto"))


def _all(hosts):
    """Runs all checks; the last check ends the hosts with an error."""
    for work in (exchange, share_a_mesh, differ):
        work(hosts)
        print(f"done: {work.__name__}", flush=True)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Runs all checks on the same two hosts, because starting hosts takes longest. Returns their exits."""
    each = [(rank, os.getpid()) for rank in range(2)]  # jax derives the port from the job
    return several.RunningHosts(tmp_path_factory.mktemp("all"), 2, 2, started_by_slurm, each).wait(120)


@pytest.mark.parametrize("work", [exchange, share_a_mesh])
def test_hosts_that_slurm_starts_exchange_values_and_share_a_mesh(work, ended):
    assert all(f"done: {work.__name__}" in host.output for host in ended), [host.output[-2000:] for host in ended]


def test_different_values_end_both_hosts_with_one_error(ended):
    for host in ended:
        assert host.code == 1 and host.output.count("error:") == 1, host.output
        assert "host 1 (" in host.output
        assert "train.num_steps is 6, not 5; added.py is a, not None; start all with the same" in host.output


def differ_and_close_slowly(hosts):
    try:
        differ(hosts)
    finally:
        time.sleep(3 * several.hosts.LAST_WORDS_S * hosts.index)


def test_a_host_that_closes_slowly_reports_the_error_before_jax_ends_it(tmp_path):
    """A run that ends first waits for the program that is being compiled, which takes longer on some hosts."""
    for ended in several.start_work(tmp_path, differ_and_close_slowly).wait(100):
        assert ended.code == 1 and "train.num_steps is 6, not 5" in ended.last_line, ended.output


def test_a_single_host_gets_its_own_values():
    assert ALONE.gather("anything", {"a": 1}) == [{"a": 1}] and ALONE.leads
    assert ALONE.host_0_first(lambda: 5) == 5
    ALONE.check_same(lambda: 1 / 0, "")


def late_at_a_sum(hosts):
    import jax

    mesh = make_mesh(fsdp=2, tensor=2)
    policy.first_collective(hosts, mesh)
    time.sleep(32 * hosts.index)
    ones = jax.make_array_from_callback((4,), NamedSharding(mesh, PartitionSpec(("fsdp", "tensor"))), lambda _: UNIT)
    print(jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))(ones).addressable_data(0))
    time.sleep(32 * hosts.index)
    hosts.gather("late", None)


@pytest.mark.nightly
def test_a_host_may_be_half_a_minute_late(tmp_path):
    """Gloo, which connects CPUs of several hosts, waits 30 s for a host's first connection."""
    assert [output.split()[-1] for output in several.run_work(tmp_path, late_at_a_sum, devices=2)] == ["4.0", "4.0"]


def in_another_order(hosts):
    hosts.gather("first" if hosts.leads else "second", None)


def fail_alone(hosts):
    if hosts.index == 1:
        raise ValueError("model.path=nowhere is not a directory")
    hosts.gather("never", None)


def killed(hosts, victim, signal_number):
    hosts.gather("start", None)
    if hosts.index == victim:
        os.kill(os.getpid(), signal_number)
    hosts.gather("never", None)


def test_hosts_at_different_points_of_the_program_exit_with_an_error(tmp_path):
    for ended in several.start_work(tmp_path, in_another_order).wait(100):
        assert ended.code == 1 and "host 0 at 'first', host 1 at 'second'" in ended.output


def test_an_error_of_one_host_ends_all_hosts(tmp_path):
    first, second = several.start_work(tmp_path, fail_alone).wait(100)
    assert second.code == 1 and "error: model.path=nowhere is not a directory" in second.output
    assert first.code not in (0, None)


def fail_like_jax(hosts):
    sys.argv[1:] = hosts.index * [DEBUG_FLAG]
    time.sleep(hosts.index)
    problem = ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer [10.0.0.2]:46218")
    if hosts.index == 1:
        problem = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes")
    raise ExceptionGroup("of tasks", [problem])


def test_an_error_of_a_collective_refers_to_the_other_hosts(tmp_path):
    """A collective fails where another host has failed. Host 0 exits later, because jax then ends the other hosts."""
    first, second = several.start_work(tmp_path, fail_like_jax).wait(60)
    assert first.code == second.code == 1
    assert first.last_line.startswith("error: UNKNOWN: ") and "Traceback" not in first.output
    assert first.last_line.endswith(":46218; another host may have failed, see its log")
    assert second.last_line.endswith("allocate 9 bytes") and second.output.count("Traceback") == 1


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_host_ends_the_other(victim, tmp_path):
    ended = several.start_work(tmp_path, killed, 2, victim, signal.SIGKILL).wait(100)
    assert ended[victim].code == -signal.SIGKILL and ended[1 - victim].code not in (0, None)


def test_a_hung_host_ends_the_other(tmp_path):
    """A hung host sends no heartbeats, like a disconnected machine."""
    started = several.start_work(tmp_path, killed, 2, 0, signal.SIGSTOP)
    started.processes[1].join(100)
    assert started.processes[1].exitcode not in (0, None)
    started.processes[0].kill()


def _alone(config, join_s):
    several.hosts.JOIN_S = join_s
    several._joined(exchange, config)


def test_a_missing_host_or_coordinator_and_a_used_port_are_errors(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        configs = [several.settings(2)[0], several.settings(2)[1], several.settings(2, server.getsockname()[1])[0]]
        configs.append(HostsConfig("192.0.2.1:8476", 2, 0))  # an address of no machine
        exits = several.RunningHosts(tmp_path, 4, 1, _alone, [(config, 3) for config in configs]).wait(100)
    assert "is not an address of this machine, but hosts.index=0" in exits.pop().output
    reasons = ("(another host is missing)", "(this host cannot reach host 0 there: Connection refused)", "not listen")
    for ended, reason in zip(exits, reasons, strict=True):
        assert ended.code == 1 and reason in ended.last_line and ended.output.count("error:") == 1, ended.output


def test_pods_with_the_network_of_their_machine_are_no_second_start(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", f"of the test {os.getpid()}")
    with hosts._lock(HostsConfig(AUTO)):
        with pytest.raises(RuntimeError, match=r"already runs with hosts\.coordinator=auto: wait for it"):
            hosts._lock(HostsConfig(AUTO))
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
        hosts._lock(HostsConfig(AUTO)).close()
    address = HostsConfig(f"pod{os.getpid()}:8476")
    with hosts._lock(address), pytest.raises(RuntimeError, match=r"hosts\.index=0: wait for it"):
        hosts._lock(address)


def test_the_port_of_closed_connections_is_free():
    """A restart must not wait until the kernel forgets the connections of the run before."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address):
            server.accept()[0].close()
    hosts._check_port(HostsConfig("{}:{}".format(*address)))


@pytest.mark.parametrize("name", ["a..b", "a" * 64])
def test_an_address_that_cannot_be_a_name_is_left_to_jax(name):
    assert hosts._is_local(f"{name}:8476")


def test_a_second_start_ends_with_an_error_and_leaves_the_run_alone(tmp_path):
    """gRPC would let both coordinators listen on the port, and jax would end all hosts that have a double."""
    configs = several.settings(2)
    each = [(wait_for_file, config, tmp_path / "go") for config in configs]
    run = several.RunningHosts(tmp_path / "run", 2, 1, several._joined, each)
    forked.wait_until(lambda: all("there" in file.read_text() for file in run.files), run.processes[0], run.files[0])
    by_name = HostsConfig(configs[0].coordinator.replace("127.0.0.1", "localhost"), 2, 0)
    second = several.RunningHosts(tmp_path / "second", 3, 1, _alone, [(config, 5) for config in (*configs, by_name)])
    reasons = ("hosts.index=0: wait for it", "hosts.index=1: wait for it", "cannot listen on port")
    for ended, reason in zip(second.wait(60), reasons, strict=True):
        assert ended.code == 1 and reason in ended.last_line, ended.output
    (tmp_path / "go").touch()
    assert [ended.code for ended in run.wait(60)] == [0, 0]


def wait_for_file(hosts, file):
    print("there", flush=True)
    while not all(hosts.gather("go", file.exists())):
        time.sleep(0.2)


def _behind_a_proxy(config):
    os.environ |= {"http_proxy": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
    several._joined(exchange, config)
    assert os.environ["http_proxy"] and os.environ["HTTPS_PROXY"]


def test_hosts_connect_without_the_proxies_of_the_environment(tmp_path):
    each = [(config,) for config in several.settings(2)]
    for ended in several.RunningHosts(tmp_path, 2, 1, _behind_a_proxy, each).wait(60):
        assert ended.code == 0, ended.output


def test_ctrl_c_ends_a_host_that_waits_for_others(tmp_path):
    started = several.RunningHosts(tmp_path, 1, 1, _reports_soon, [(several.settings(2)[0],)])
    output = started.files[0]
    forked.wait_until(lambda: "waiting up to" in output.read_text(), started.processes[0], output)
    os.kill(started.processes[0].pid, signal.SIGINT)
    (ended,) = started.wait(20)
    assert ended.code == 130 and "this is host 0 of hosts.num=2" in ended.output


def fail_while_another_works(hosts):
    hosts.all_failed = hosts.leads
    if hosts.leads:
        raise ValueError("no episode has a score")
    time.sleep(60)


def test_ctrl_c_ends_a_host_that_waits_for_others_to_report_its_error(tmp_path):
    """jax would otherwise disconnect twice, and abort with a stack trace."""
    started = several.start_work(tmp_path, fail_while_another_works)
    forked.wait_until(lambda: "no episode" in started.files[0].read_text(), started.processes[0], started.files[0])
    time.sleep(0.5)
    os.kill(started.processes[0].pid, signal.SIGINT)
    ended, _ = started.wait(60)
    assert ended.code == 1 and ended.last_line == "error: no episode has a score", ended.output


def _reports_soon(config):
    several.hosts.REPORT_S = 0.1
    _alone(config, 60)


def uneven(hosts):
    hosts.gather("devices", None)


def test_hosts_with_different_numbers_of_devices_are_rejected(tmp_path):
    started = [
        several.RunningHosts(tmp_path / f"{count}", 1, count, several._joined, [(uneven, settings)])
        for count, settings in zip((2, 1), several.settings(2), strict=True)
    ]
    for (ended,) in (run.wait(100) for run in started):
        assert ended.code == 1 and "but they have: host 0 2, host 1 1" in ended.output


def _auto_alone(in_slurm):
    several.hosts.JOIN_S = 3
    if in_slurm:
        started_by_slurm(0, os.getpid())
    several._joined(exchange, HostsConfig("auto"))


def test_jax_gets_all_gpus_that_the_process_sees(monkeypatch):
    given = {}
    monkeypatch.setattr("jax.distributed.initialize", lambda **options: given.update(options))
    monkeypatch.setattr(hosts, "num_visible_gpus", lambda: 3)
    hosts._connect(HostsConfig(AUTO))
    assert given["local_device_ids"] == range(3)


def test_auto_is_rejected_without_a_cluster_or_its_other_hosts(tmp_path):
    exits = several.RunningHosts(tmp_path, 2, 1, _auto_alone, [(False,), (True,)]).wait(100)
    reasons = ("neither Slurm nor a TPU pod nor Kubernetes describes the hosts", "let the launcher start all hosts")
    for ended, reason in zip(exits, reasons, strict=True):
        assert ended.code == 1 and reason in ended.last_line, ended.output
        assert "give hosts.coordinator=ADDRESS:PORT, hosts.num and hosts.index" in ended.last_line
