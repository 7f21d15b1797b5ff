"""Hosts meet, tell each other what must be equal, and none of them ends alone."""

import os
import signal
import socket
import threading
import time
from dataclasses import replace

import hosts as several
import pytest

from model_port.sharding import make_mesh
from paravt_jax.config import HostsConfig
from paravt_jax.run.hosts import ALONE

pytestmark = pytest.mark.slow


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


def test_hosts_meet_and_hear_each_other_in_order(tmp_path):
    several.run_work(tmp_path, meet, 2, devices=2)


def test_one_host_hears_itself_and_costs_nothing():
    assert ALONE.gather("anything", {"a": 1}) == [{"a": 1}] and ALONE.leads
    assert ALONE.first(lambda: 5) == 5
    ALONE.check_same(lambda: 1 / 0, "")


def differ(hosts):
    hosts.check_same(lambda: {"train.num_steps": 5 + hosts.index, "seed": 0}, "start all with the same settings")


def test_what_two_hosts_have_otherwise_ends_both_with_one_sentence(tmp_path):
    for ended in several.start_work(tmp_path, differ).ended(60):
        assert ended.code == 1
        assert ended.said.count("error:") == 1
        assert "is not as host 0" in ended.last and "train.num_steps is 6 there and 5 here" in ended.last


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


def late(hosts):
    several.hosts.LATE_S = 1.0
    if hosts.index == 1:
        time.sleep(4)
    hosts.gather("rollouts", None)


def test_a_slow_host_is_named(tmp_path):
    first, second = several.run_work(tmp_path, late)
    assert "host 1 (" in first and "later than this one at 'rollouts'" in first
    assert not second


def stopped(hosts):
    heard = threading.Event()
    hosts.when_stopped(heard.set)
    if hosts.index == 1:
        hosts.stop_all()
    assert heard.wait(20)


def test_what_one_host_is_told_to_stop_all_stop(tmp_path):
    several.run_work(tmp_path, stopped)
