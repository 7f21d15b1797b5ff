"""Weights are transferred atomically to servers of other hosts, which cannot read the learner's files."""

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import pytest
from async_tests import given, until
from fake_server import FakeServer
from test_sglang_engine import IMPATIENT, NO_PROBES, QUICK, adapter, engine_of, request, trained

from rollout import receiver as receiver_module
from rollout.engine.labels import WITH_WEIGHTS_PORT, Label
from rollout.engine.protocol import EngineError
from rollout.engine.publishing import ADAPTER_SCHEME
from rollout.engine.weight_root import WeightRoot
from rollout.receiver import MAX_HEADER_BYTES, Receiver
from rollout.server import ServerSettings, settled_port

OURS = {"owner": "t/"}


class Held(Receiver):
    """A receiver that blocks until `unblock` is set, and drops the connection if `dies` is set."""

    def __init__(self, *args):
        super().__init__(*args)
        self.began, self.unblock, self.dies, self.num_received = asyncio.Event(), asyncio.Event(), False, 0
        self.unblock.set()

    async def receive(self, request):
        self.began.set()
        await self.unblock.wait()
        if self.dies:
            await request.content.read(20)
            request.transport.abort()
        self.num_received += 1
        return await super().receive(request)


class Served:
    """A fake server and its receiver on a host whose only weights directory is `directory`."""

    def __init__(self, server: FakeServer, receiver: Held, port: int, directory: Path | None):
        self.server, self.receiver, self.directory = server, receiver, directory
        self.inbox = f"http://127.0.0.1:{port}/"
        receiver.server_url, server.first_label = server.url, f"default;weights_port={port}"

    @classmethod
    async def open(cls, stack: AsyncExitStack, directory: Path | None) -> "Served":
        server, port = await stack.enter_async_context(FakeServer()), settled_port("127.0.0.1", 0)
        root = WeightRoot(directory or "")
        receiver = await stack.enter_async_context(Held.open("127.0.0.1", port, root))
        return cls(server, receiver, port, directory)

    @property
    def left(self) -> list[Path]:
        return list(self.directory.glob("*/[!.]*"))

    def loaded_from(self) -> list[Path]:
        paths = (body["model_path"] for body in self.server.bodies["/update_weights_from_disk"])
        return [Path(path.removeprefix(ADAPTER_SCHEME)) for path in paths]


def on_hosts(*hosts, settings=QUICK):
    """Makes a test of an engine with servers on the given hosts; None is the learner's host."""

    async def start(stack):
        root = Path(stack.enter_context(TemporaryDirectory()))
        for host in {host for host in hosts if host is not None}:
            (root / str(host)).mkdir()
        each = [await Served.open(stack, None if host is None else root / str(host)) for host in hosts]
        return await engine_of(stack, [one.server.url for one in each], settings), *each

    return given(1 + len(hosts), start)


@pytest.mark.parametrize(
    ("make", "read"), [(trained, ["frozen trained", "trained"]), (adapter, ["a adapter b", "a adapter b"])]
)
@on_hosts(1, 1, 2)
async def test_each_host_gets_missing_tensors_once_and_deletes_them(engine, *each, make, read):
    for version in (1, 2):
        await engine.publish(make(version), version)
    assert [one.server.read for one in each] == [read] * 3
    assert [one.server.version for one in each] == ["t/2"] * 3
    received = [one.receiver.num_received for one in each]  # any server of a host may receive a version
    assert [received[0] + received[1], received[2]] == [2, 2]
    assert each[0].loaded_from() == each[1].loaded_from() != each[2].loaded_from()
    assert not any(list(one.directory.glob("[!.]*")) for one in each)
    assert (await engine.generate(request(version=2))).versions.tolist() == [2] * 4


@on_hosts(1, 1, settings=NO_PROBES)
async def test_a_host_with_a_restarted_server_gets_all_tensors(engine, kept, restarted):
    await engine.publish(trained(1), 1)
    restarted.server.version = restarted.server.first_label  # not yet detected by a probe
    await engine.publish(trained(2), 2)
    assert kept.server.read == restarted.server.read == ["frozen trained"] * 2
    assert kept.receiver.num_received + restarted.receiver.num_received == 2


@on_hosts(None, 1)
async def test_a_server_of_the_learners_own_host_reads_its_files(engine, own, other):
    await engine.publish(trained(1), 1)
    assert own.loaded_from() == [engine.fleet.files.root / "all"]
    assert (own.receiver.num_received, other.receiver.num_received) == (0, 1)


def test_nothing_is_sent_to_hosts_that_share_the_directory(tmp_path):
    @on_hosts(1, settings=replace(QUICK, weights_dir=str(tmp_path)))
    async def work(engine, one):
        await engine.publish(trained(1), 1)
        assert one.loaded_from() == [engine.fleet.files.root / "all"] and one.receiver.num_received == 0

    work()


@on_hosts(1)
async def test_servers_sample_while_weights_are_sent(engine, one):
    one.receiver.unblock.clear()
    publishing = asyncio.create_task(engine.publish(trained(1), 1))
    await one.receiver.began.wait()
    found = await engine.generate(request(version=0, deadline_s=1))
    assert found.versions.tolist() == [0] * 4 and not one.server.requests["/pause_generation"]
    one.receiver.unblock.set()
    await publishing
    assert one.server.version == "t/1"


@on_hosts(1, 2)
async def test_a_server_that_dies_during_a_transfer_gets_no_requests_until_it_has_weights(engine, bad, good):
    await engine.publish(trained(1), 1)
    bad.receiver.dies = True
    await engine.publish(trained(2), 2)
    found = await asyncio.gather(*(engine.generate(request(f"e{n}", version=2)) for n in range(4)))
    assert {one.server for one in found} == {good.server.url} and not bad.left
    assert bad.server.version == "t/1" and bad.server.requests["/pause_generation"] == 1
    bad.receiver.dies = False
    await until(lambda: engine.fleet.servers[0].up)
    assert bad.server.read == ["frozen trained"] * 2 and bad.server.version == "t/2"


@on_hosts(1, 1, settings=NO_PROBES)
async def test_if_a_receiver_dies_the_next_server_of_its_host_receives(engine, first, second):
    first.receiver.dies = True
    await engine.publish(trained(1), 1)
    assert [one.up for one in engine.fleet.servers] == [False, True] and second.server.version == "t/1"


@on_hosts(1, settings=IMPATIENT)
async def test_an_unreachable_port_is_named_with_advice(engine, one):
    one.server.first_label = f"default;weights_port={settled_port('127.0.0.1', 0)}"
    with pytest.raises(EngineError, match=r"cannot receive weights: .*--weights-port.*engine\.weights_dir"):
        await engine.publish(trained(1), 1)


async def one_host(stack):
    """Yields a single receiver, whose server has the run t's label, and a client session."""
    directory = Path(stack.enter_context(TemporaryDirectory()))
    one = await Served.open(stack, directory)
    one.server.version = "t/3"
    session = await stack.enter_async_context(aiohttp.ClientSession())
    async with session.post(one.inbox, params=OURS | {"num_bytes": "8"}) as reply:
        assert (await reply.json())["name"] == next(directory.glob("[!.]*")).name
    return one, session


def tensor(name: str = "x", num_bytes: object = 8, **header: object) -> bytes:
    content = {name: {"dtype": "F32", "shape": [2], "data_offsets": [0, num_bytes]}, **header}
    encoded = json.dumps(content).encode()
    return len(encoded).to_bytes(8, "little") + encoded + bytes(8)


async def start_putting(one, body):
    """Sends a part of a request with two tensors, and returns the connection's writer."""
    head = f"PUT /?owner=t/ HTTP/1.1\r\nHost: x\r\nContent-Length: {2 * len(tensor())}\r\n\r\n".encode()
    _, writer = await asyncio.open_connection("127.0.0.1", int(one.inbox[:-1].rpartition(":")[2]))
    writer.write(head + body)
    return writer


async def put(session, one, body, owner=OURS, headers=None):
    async with session.put(one.inbox, data=body, params=owner, headers=headers) as reply:
        return reply.status, await reply.text()


@given(2, one_host)
async def test_an_interrupted_transfer_leaves_no_files(one, session):
    for body in (b"", tensor()[:4], tensor()[:-1], tensor()):
        writer = await start_putting(one, body)
        await writer.drain()
        if len(body) > 8:
            await until(lambda: one.left)
        writer.close()
        await until(lambda: not one.left and not one.receiver._receiving.locked())
    assert (await put(session, one, tensor()))[0] == 200 and len(one.left) == 1


@pytest.mark.parametrize(
    "body",
    [
        tensor()[:-1],
        tensor() + b"x",
        tensor(num_bytes=9),
        tensor(num_bytes=-1),
        tensor(num_bytes="8"),
        tensor(y={"data_offsets": [0, 8]}),
        (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + bytes(MAX_HEADER_BYTES + 1),
        (4000).to_bytes(8, "little") + b"[" * 4000,
        (4).to_bytes(8, "little") + b"\xff{}]",
    ],
    ids=["short", "long", "larger", "negative", "text", "two", "a large header", "nested", "no text"],
)
@given(2, one_host)
async def test_an_invalid_tensor_stream_is_rejected_and_leaves_no_files(one, session, body):
    status, text = await put(session, one, body)
    assert (status, one.left) == (400, []) and "not complete safetensors files" in text


@given(2, one_host)
async def test_tensor_names_are_not_used_as_file_names(one, session):
    assert (await put(session, one, tensor("../../../escaped") + tensor("/escaped")))[0] == 200
    (directory,) = one.left
    assert sorted(path.name for path in directory.iterdir()) == ["000000.safetensors", "000001.safetensors"]


@pytest.mark.parametrize("owner", [{}, {"owner": "u/"}, {"owner": "t"}, {"owner": "t/3"}])
@given(2, one_host)
async def test_another_run_can_neither_send_to_a_server_nor_remove_what_it_received(one, session, owner):
    assert (await put(session, one, tensor()))[0] == 200
    kept = one.left
    assert await put(session, one, tensor(), owner) == (403, "the server has weights of another run, t")
    async with session.delete(one.inbox, params=owner) as reply:
        assert reply.status == 403 and one.left == kept
    async with session.post(one.inbox, params=owner | {"num_bytes": "8"}) as reply:
        assert reply.status == 403 and one.left == kept
    async with session.delete(one.inbox, params=OURS) as reply:
        assert reply.status == 200 and not list(one.directory.glob("[!.]*"))
    assert (await put(session, one, tensor()))[0] == 409


@given(2, one_host)
async def test_too_large_and_unknown_sizes_are_rejected_before_reading(one, session):
    async def endless():
        yield tensor()

    assert (await put(session, one, endless()))[0] == 411  # chunked
    for num_bytes, expected in ((-1, 400), ("x", 400), (10**4000, 400), (10**17, 507), (8, 200)):
        async with session.post(one.inbox, params=OURS | {"num_bytes": str(num_bytes)}) as reply:
            assert reply.status == expected
    status, text = await put(session, one, endless(), headers={"Content-Length": str(2**60)})
    assert status == 507 and "do not fit" in text and not one.left


@given(2, one_host)
async def test_only_one_transfer_is_received_at_a_time(one, session):
    async def slow():
        yield tensor()[:10]
        assert (await put(session, one, tensor()))[0] == 409
        yield tensor()[10:]

    length = {"Content-Length": str(len(tensor()))}
    assert (await put(session, one, slow(), headers=length))[0] == 200


@given(2, one_host)
async def test_an_unreachable_learner_does_not_block_the_next_one(one, session):
    """Its connection stays open, because no packet closes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(receiver_module, "STALL_S", 0.2)
        writer = await start_putting(one, tensor()[:-1])
        await until(lambda: one.left)
        await until(lambda: not one.receiver._receiving.locked(), 5)
        assert (await put(session, one, tensor()))[0] == 200 and len(one.left) == 1
        writer.close()


@on_hosts(1, settings=replace(IMPATIENT, probe_every_s=60))
async def test_a_host_without_space_gets_no_weights_and_reports_it(engine, one):
    one.directory.rmdir()
    with pytest.raises(EngineError, match=r"cannot receive weights: .* answered 507: .* do not fit into"):
        await engine.publish(trained(1), 1)


def test_a_label_with_only_a_port_belongs_to_no_run(tmp_path):
    command = ServerSettings(tmp_path, python=tmp_path, weights_port=24_000).command()
    label = command[command.index("--weight-version") + 1]
    match = WITH_WEIGHTS_PORT.fullmatch(label)
    assert match is not None and match[1] == "24000" and Label.of(label) == Label.of("default")
    assert "--weight-version" not in ServerSettings(tmp_path, python=tmp_path).command()
