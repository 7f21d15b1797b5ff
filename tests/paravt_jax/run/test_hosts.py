"""Hosts meet, tell each other what must be equal, and none of them ends alone."""

import os
import pickle
import queue
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import hosts as several
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from model_port.sharding import make_mesh, on_host
from paravt_jax.config import HostsConfig
from paravt_jax.run import coordinator, policy
from paravt_jax.run.compiles import Compiles
from paravt_jax.run.hosts import ALONE
from rollout.supervisor import descendants

pytestmark = pytest.mark.slow
CUT_OFF_S = 15  # longer than the others take to notice
ONE = np.ones(1, np.float32)


def meet(hosts):
    import jax

    for turn in range(3):
        assert hosts.gather("turns", (turn, hosts.index)) == [(turn, host) for host in range(hosts.num)]
    hosts.check_same(lambda: {"seed": 3}, "set it back")
    assert jax.process_count() == hosts.num and jax.device_count() == 2 * hosts.num
    own = make_mesh(data=1, fsdp=2, tensor=2).devices[0, hosts.index]
    assert {device.process_index for device in own} == {hosts.index}
    with pytest.raises(ValueError, match="tensor=4 stays within a host"):
        make_mesh(tensor=4)
    with pytest.raises(ValueError, match="must be all 4 devices of the 2 hosts"):
        make_mesh(fsdp=2)


def see_all(hosts):
    """What is gathered at every publish is compiled at the first."""
    import jax

    split = NamedSharding(make_mesh(fsdp=2, tensor=2), PartitionSpec(("fsdp", "tensor")))
    array = jax.make_array_from_callback((4,), split, lambda index: ONE * index[0].start)
    assert on_host(array).tolist() == [0, 1, 2, 3]
    compiles = Compiles()
    assert on_host(array).tolist() == [0, 1, 2, 3]
    assert compiles.taken()["perf/num_compiles"] == 0


def late(hosts):
    several.hosts.LATE_S = 1.0
    if hosts.index == 1:
        time.sleep(4)
    hosts.gather("rollouts", None)


def late_at_a_sum(hosts):
    import jax

    mesh = make_mesh(fsdp=2, tensor=2)
    policy.meet(hosts, mesh)
    time.sleep(32 * hosts.index)
    ones = jax.make_array_from_callback((4,), NamedSharding(mesh, PartitionSpec(("fsdp", "tensor"))), lambda _: ONE)
    print(jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))(ones).addressable_data(0))


def test_a_host_may_be_half_a_minute_late_at_the_first_sum(tmp_path):
    """Gloo, by which CPUs of several hosts add up, waits 30 s for one that it does not know yet."""
    assert [said.split()[-1] for said in several.run_work(tmp_path, late_at_a_sum, devices=2)] == ["4.0", "4.0"]


def stopped(hosts):
    heard = queue.Queue()
    hosts.when_stopped(heard.put)
    if hosts.index == 1:
        hosts.stop_all(signal.SIGTERM)
    assert heard.get(timeout=20) == signal.SIGTERM


def differ(hosts):
    hosts.check_same(lambda: {"train.num_steps": 5 + hosts.index, "seed": 0}, "start all with the same settings")


def started_by_slurm(rank, job):
    """As srun starts a task: what auto finds is in the environment. The last thing that the hosts do ends them."""
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
    for work in (meet, see_all, late, stopped, differ):
        work(hosts)
        print(f"done: {work.__name__}", flush=True)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """How two hosts ended that did all this one after another: to start them takes longer."""
    job = os.getpid()  # of which jax makes the port
    each = [(rank, job) for rank in range(2)]
    return several.Started(tmp_path_factory.mktemp("all"), 2, 2, started_by_slurm, each).ended(60)


def test_hosts_that_slurm_starts_meet_and_hear_each_other_in_order(ended):
    assert all("done: meet" in one.said for one in ended), [one.said[-2000:] for one in ended]


def test_hosts_gather_a_tensor_of_all_with_one_program(ended):
    assert all("done: see_all" in one.said for one in ended), [one.said[-2000:] for one in ended]


def test_a_slow_host_is_named(ended):
    first, second = (one.said for one in ended)
    assert "host 1 (" in first and "later than this one at 'rollouts'" in first
    assert "later than" not in second


def test_what_one_host_is_told_to_stop_all_stop(ended):
    assert all("done: stopped" in one.said for one in ended)


def test_what_two_hosts_have_otherwise_ends_both_with_one_sentence(ended):
    for one in ended:
        assert one.code == 1 and one.said.count("error:") == 1
        assert "is not as host 0" in one.last and "train.num_steps is 6 there and 5 here" in one.last


def test_one_host_hears_itself_and_costs_nothing():
    assert ALONE.gather("anything", {"a": 1}) == [{"a": 1}] and ALONE.leads
    assert ALONE.first(lambda: 5) == 5
    ALONE.check_same(lambda: 1 / 0, "")


def fail_alone(hosts):
    if hosts.index == 1:
        raise ValueError("model.path=nowhere is not a directory")
    hosts.gather("never", None)


def test_an_error_of_one_host_is_said_by_all(tmp_path):
    first, second = several.start_work(tmp_path, fail_alone).ended(60)
    assert second.code == 1 and second.last == "error: model.path=nowhere is not a directory"
    assert first.code == 1 and first.said.count("error:") == 1
    assert first.last.startswith("error: host 1 (") and first.last.endswith(
        "ended: model.path=nowhere is not a directory"
    )


def killed(hosts, victim):
    hosts.gather("there", None)
    several.hosts.LOST_S = 6.0
    if hosts.index == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    hosts.gather("never", None)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_host_ends_the_other_which_names_it(victim, tmp_path):
    ended = several.start_work(tmp_path, killed, 2, victim).ended(60)
    assert ended[victim].code == -signal.SIGKILL
    other = ended[1 - victim]
    assert other.code == 1
    assert other.last.startswith(f"error: host {victim} (") and "is lost: nothing was heard of it" in other.last
    assert len(other.said.strip().splitlines()) == 1


def machine_gone(hosts, how):
    """Host 0 with the coordinator beside it, as where a container or a machine ends, or is cut off."""
    hosts.gather("there", None)
    several.hosts.LOST_S = 6.0
    if hosts.leads:
        pids = [*descendants(os.getpid()), os.getpid()]
        subprocess.Popen(["sh", "-c", f"sleep {CUT_OFF_S}; kill -KILL {' '.join(map(str, pids))}"])
        for pid in pids:
            os.kill(pid, how)
    hosts.gather("never", None)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_where_the_machine_of_host_0_is_gone_the_others_end_and_name_it(how, tmp_path):
    first, second = several.start_work(tmp_path, machine_gone, 2, how).ended(60)
    assert first.code == -signal.SIGKILL and second.code == 1
    assert second.last.startswith("error: host 0 (") and "is lost: nothing was heard of it" in second.last
    assert len(second.said.strip().splitlines()) == 1


def test_a_coordinator_that_never_comes_and_a_taken_port_are_one_sentence(tmp_path):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        none, second = several.settings(2, several.free_port())
        of_taken = several.settings(2, port)[0]
        started = several.Started(tmp_path, 2, 1, _alone, [(second, 3.0), (of_taken, 3.0)])
        late, refused = started.ended(60)
    assert none.index == 0
    assert late.code == 1 and "host 0 does not answer at hosts.coordinator=127.0.0.1:" in late.last
    assert refused.code == 1 and f"port {port} of host 0 cannot be had (Address already in use)" in refused.last


def _alone(config, join_s):
    several.hosts.JOIN_S = join_s
    several._joined(meet, config)


def test_a_host_that_never_starts_is_missed_in_one_sentence(tmp_path):
    config = several.settings(3)[0]
    (ended,) = several.Started(tmp_path, 1, 1, _alone, [(config, 3.0)]).ended(60)
    assert ended.code == 1 and "of hosts.num=3 hosts these did not come within 3 s: 1, 2" in ended.last


def test_hosts_that_cannot_be_those_of_one_run_are_told_so(tmp_path):
    first, second = several.settings(2)
    for other, said in ((replace(second, num=3), "host 1 has hosts.num=3, host 0 has 2"), (first, "hosts.index=0")):
        folder = tmp_path / said[:6]
        wrong = replace(other, coordinator=(address := several.settings(1)[0].coordinator))
        leader = several.Started(folder, 1, 1, _alone, [(replace(first, coordinator=address), 5.0)])
        time.sleep(1)
        guest = several.Started(folder / "other", 1, 1, several.answer, [(wrong,)])
        assert said in leader.ended(60)[0].last and said in guest.ended(60)[0].said


def answers_to(*words):
    """What the coordinator of two hosts says to these, who come one after the other; None has left before the next."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        roll = pool.submit(coordinator.call_roll, server, 2, 20.0)
        files = []
        for said, stays in words:
            guest = socket.create_connection(server.getsockname())
            file = guest.makefile("rw")
            assert file.readline() == f"{coordinator.HELLO}\n"
            file.write(f"{said}\n")
            file.flush()
            if stays:
                files.append(file)
            else:
                file.close()
            guest.close()  # the file keeps it
        return roll.result(), [file.readline().strip() for file in files]


def test_a_host_that_was_started_again_is_the_one_that_counts():
    assert answers_to(("[1, 2]", False), ("[1, 2]", True), ("[0, 2]", True)) == ("", [coordinator.GO] * 2)
    problem, told = answers_to(("[1, 2]", True), ("[1, 2]", True))
    assert problem == "two hosts have hosts.index=1; give each its own" and told == [problem] * 2


@pytest.mark.parametrize("words", ["5", "[0]", "GET / HTTP/1.1", ""])
def test_a_stranger_at_the_port_is_no_host(words):
    assert answers_to((words, False), ("[1, 2]", True), ("[0, 2]", True)) == ("", [coordinator.GO] * 2)


def test_a_stranger_that_sends_no_end_of_line_is_no_host():
    assert answers_to(("[" * 10**6, False), ("[1, 2]", True), ("[0, 2]", True)) == ("", [coordinator.GO] * 2)


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


def joined_by_a_stranger(config, file, relayed):
    """It takes the place of host 1, and its first word is a pickle. What it connects through is a relay, or is not."""
    if not relayed:
        several.hosts.port_that_leads_to = lambda address: address[1]
    store = several.hosts._connected(config.coordinator, config.num, 1)
    store.key_value_set_bytes(several.hosts._key("names", 0, 1), pickle.dumps(Bomb(file)))
    time.sleep(60)


@pytest.mark.parametrize("relayed", [False, True])
def test_what_a_stranger_at_the_coordinator_or_a_relay_sends_is_not_run(relayed, tmp_path):
    file = tmp_path / "ran"
    config = several.settings(2)[0]
    stranger = several.Started(tmp_path / "stranger", 1, 1, joined_by_a_stranger, [(config, file, relayed)])
    try:
        (ended,) = several.Started(tmp_path, 1, 1, several._joined, [(meet, config)]).ended(60)
        assert not file.exists() and ended.code == 1
        assert "at the coordinator the value 'names' of host 1 is not one that a host sends" in ended.last
    finally:
        stranger.processes[0].kill()


def uneven(hosts):
    make_mesh(fsdp=3)


def test_hosts_with_other_numbers_of_devices_are_told_so(tmp_path):
    each = [(uneven, one) for one in several.settings(2)]
    started = [
        several.Started(tmp_path / f"{count}", 1, count, several._joined, [arguments])
        for count, arguments in zip((2, 1), each, strict=True)
    ]
    for (ended,) in (one.ended(60) for one in started):
        assert ended.code == 1 and "and they have: host 0 2, host 1 1" in ended.last


def test_where_nobody_says_which_hosts_there_are_auto_is_refused(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    with pytest.raises(ValueError, match="neither Slurm nor a TPU pod nor Kubernetes says which hosts there are"):
        several.hosts._place(HostsConfig("auto"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (dict(num=2), "hosts.num=2 does nothing with hosts.coordinator=''"),
        (dict(coordinator="auto", num=2), "leave the number to what auto finds"),
        (dict(coordinator="somewhere", num=2), "hosts.coordinator=somewhere is no ADDRESS:PORT"),
        (dict(coordinator="a:1", num=2, index=2), "hosts.index=2 is none of hosts.num=2"),
    ],
)
def test_settings_of_hosts_that_mean_nothing_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        HostsConfig(**settings)
