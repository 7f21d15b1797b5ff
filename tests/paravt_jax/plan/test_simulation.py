"""The simulation against hand arithmetic: what is read once, what waits for what, and what more servers change."""

from dataclasses import replace

import numpy as np
import pytest

from paravt_jax.plan.service import ServiceTimes
from paravt_jax.plan.simulation import CallScript, GroupScript, TurnScript, Work, World, reports_s, simulate

# A request takes 1 s, a token of a prompt 0.01 s, a token of all sequences 0.1 s.
SERVICE = ServiceTimes(1.0, 0.01, 0.0, 0.0, 0.1, 0.0, 0.0)


def group(name="g", tokens=100, frames=0, members=2, sampled=11, **turn) -> GroupScript:
    return GroupScript(name, tokens, frames, ((TurnScript(sampled, **turn),),) * members)


def rollout_s(groups, service=SERVICE, num_servers=1) -> float:
    world = World(service, num_servers)
    world.clock.run(world.clock.start(world.groups(groups)))
    return world.clock.now_s


def random_groups(seed: int, num_groups=4, members=3) -> list[GroupScript]:
    random = np.random.default_rng(seed)

    def turns(name: str) -> tuple[TurnScript, ...]:
        calls = tuple(CallScript(f"{name}/{n}", int(random.integers(50, 300)), 4, 29) for n in range(2))
        return TurnScript(int(random.integers(5, 60)), 3, calls), TurnScript(int(random.integers(5, 60)), 70)

    return [
        GroupScript(f"{n}", int(random.integers(100, 900)), 8, tuple(turns(f"{n}/{m}") for m in range(members)))
        for n in range(num_groups)
    ]


def test_two_episodes_on_one_server_take_what_a_hand_finds():
    # Read: 1 + 100 x 0.01, then 1 for the other, whose prompt is known. Then 10 tokens more for both at once.
    assert rollout_s([group()]) == pytest.approx(2 + 1 + 10 * 0.1)


def test_sequences_and_their_contexts_make_a_token_slower():
    service = replace(SERVICE, request_s=0.0, token_s=0.0, row_s=0.05, context_token_s=0.001)
    # A prompt of 100 and a first token: contexts of 101, 102, 103 before the other tokens.
    assert rollout_s([group(members=1, sampled=4)], service) == pytest.approx(
        3 * (0.1 + 0.05) + 0.001 * (101 + 102 + 103)
    )


def test_a_second_turn_reads_only_what_is_new():
    turns = (TurnScript(11, read_tokens=5), TurnScript(11, read_tokens=7))
    # 1 + (100 + 5) x 0.01 + 10 x 0.1, then 1 + 7 x 0.01 + 10 x 0.1.
    assert rollout_s([GroupScript("g", 100, 0, (turns,))]) == pytest.approx(3.05 + 2.07)


def test_calls_of_a_turn_go_on_at_the_same_time_and_the_turn_waits_for_the_last():
    calls = (CallScript("a", 100, 0, 11), CallScript("b", 100, 0, 31))
    # 2 + 2 to read both, the first of which waits; then 30 x 0.1 for the longer.
    assert reports_s(calls, SERVICE) == pytest.approx(2 + 2 + 30 * 0.1)
    assert reports_s(calls, SERVICE, num_servers=2) == pytest.approx(2 + 30 * 0.1)


def test_frames_are_decoded_once_and_seen_once():
    service = replace(SERVICE, decode_s=0.5, shown_s=0.25, frame_s=2.0)
    # Decoded 3 x 0.5; read 2 + 3 x 0.25 + 3 x 2, then 1 + 3 x 0.25; 10 tokens.
    assert rollout_s([group(frames=3)], service) == pytest.approx(1.5 + 8.75 + 1.75 + 1.0)


def test_the_prefix_cache_saves_exactly_the_shared_reading():
    together = rollout_s([group("g", members=5)])
    apart = rollout_s([group(f"g{number}", members=1) for number in range(5)])
    assert apart - together == pytest.approx(4 * 100 * 0.01)


def test_the_embedded_engine_reads_a_dialogue_again_at_every_turn():
    turns = (TurnScript(11, read_tokens=5), TurnScript(11, read_tokens=7))
    embedded = replace(SERVICE, prefixes=False)
    # 1 + 105 x 0.01 + 1, then 1 + (100 + 5 + 11 + 7) x 0.01 + 1.
    assert rollout_s([GroupScript("g", 100, 0, (turns,))], embedded) == pytest.approx(3.05 + 3.23)
    assert rollout_s([group()], embedded) == rollout_s([group()])  # equal prompts in a row are one


def test_a_stride_rounds_the_tokens_up():
    assert rollout_s([group(members=1)], replace(SERVICE, stride=16)) == pytest.approx(2 + 16 * 0.1)


def test_no_more_run_at_once_than_may():
    assert rollout_s([group()], replace(SERVICE, max_running=1)) == pytest.approx((2 + 1) + (1 + 1))


@pytest.mark.parametrize("num_servers", [1, 3])
def test_every_token_is_sampled_once_also_when_weights_change_on_the_way(num_servers):
    groups = random_groups(0)
    world = World(replace(SERVICE, request_s=0.01, token_s=1e-4, step_s=0.01, publish_s=0.3), num_servers)

    def publish():
        for _ in range(3):
            yield Work(0.4)
            yield from world.publish()

    published = world.clock.start(publish())
    world.clock.run(world.clock.start(world.groups(groups)))
    assert published.fired
    assert sum(server.sampled_tokens for server in world.servers) == sum(one.sampled_tokens for one in groups)
    assert all(server.num_requests == 0 for server in world.servers)


def test_new_weights_cost_the_servers_what_they_knew():
    service = replace(SERVICE, publish_s=0.5)

    def read_tokens(when_s: float) -> int:
        world = World(service, 1)

        def publish():
            yield Work(when_s)
            yield from world.publish()

        world.clock.start(publish())
        world.clock.run(world.clock.start(world.groups([group(members=1)])))
        return world.servers[0].read_tokens

    assert read_tokens(100.0) == 100
    assert read_tokens(2.45) == 100 + 100 + 6  # the first token, and five until then


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("prefixes", [True, False])
def test_more_servers_are_never_slower(seed, prefixes):
    service = ServiceTimes(0.01, 1e-3, 0.001, 0.01, 0.02, 0.001, 1e-6, prefixes=prefixes)
    times = [rollout_s(random_groups(seed), service, num_servers) for num_servers in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)


def test_servers_that_share_a_machine_win_nothing_beyond_it():
    groups = [group(f"g{number}", members=1) for number in range(8)]
    one_s = rollout_s(groups[:1], replace(SERVICE, share=0.5))
    together = {n: rollout_s(groups, replace(SERVICE, share=0.5), n) for n in (2, 4, 8)}
    assert together[8] == pytest.approx(4 * one_s)  # eight halves of a machine
    assert rollout_s(groups, SERVICE, 8) == pytest.approx(one_s)
    assert together[8] >= 0.99 * together[4] or together[4] >= 0.99 * together[2]


@pytest.mark.parametrize("update_s", [2.0, 5.0])
def test_staleness_hides_the_shorter_of_rollout_and_update(update_s):
    # Nothing is read again, and a server has no room for a later step's episodes: 2 x 0.5 + 10 x 2 x 0.1 = 3 s of work.
    service = ServiceTimes(0.5, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0, prefixes=False, max_running=2)

    def groups(step):
        return [group(f"{step}")]

    waiting = simulate(groups, service, update_s=update_s)
    beside = simulate(groups, service, update_s=update_s, steps_ahead=1)
    assert waiting.step_s == pytest.approx(3 + update_s)
    assert beside.step_s == pytest.approx(max(3, update_s))
    assert waiting.bound_by == ("the update" if update_s > 3 else "the rollout")


def test_episodes_that_are_begun_early_slow_those_that_are_waited_for():
    service = ServiceTimes(0.5, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0, prefixes=False)
    step = simulate(lambda step: [group(f"{step}")], service, update_s=2.0, steps_ahead=1)
    assert 3 < step.step_s < 3 + 2 and step.busy_frac < 1


def test_staleness_hides_nothing_where_learner_and_sampler_are_one_device():
    service = ServiceTimes(0.5, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0, prefixes=False, share=1.0)
    step = simulate(lambda step: [group(f"{step}")], service, update_s=2.0, steps_ahead=1)
    assert step.step_s == pytest.approx(3 + 2)


def test_publishing_is_part_of_a_step():
    step = simulate(lambda step: [group(f"{step}")], replace(SERVICE, publish_s=0.7), update_s=2.0)
    assert (step.rollout_s, step.publish_s, step.step_s) == pytest.approx((4, 0.7, 6.7))
    assert step.busy_frac == pytest.approx(4 / 6.7)


def test_a_server_too_few_is_refused():
    with pytest.raises(ValueError, match="0 servers can answer nobody"):
        World(SERVICE, 0)
