"""What this package uses of Dask without Dask promising it. A failure here names what a new release has moved."""

import asyncio
import importlib.util
import pickle
import re
import sys
from pathlib import Path

import dask
import pytest

import dbksvd_dask
from dbksvd_dask.graph import _compat
from dbksvd_dask.graph._compat import DataNode, List, Task, TaskRef
from dbksvd_dask.graph.tasks import Tasks
from tests.helpers import clusters

PACKAGE = Path(dbksvd_dask.__file__).parent


def total(numbers, factor):
    return factor * sum(numbers)


def at_home(key):
    return ["tcp://home"] if key == "sum" else []


GRAPH = {
    "three": DataNode("three", 3),
    "sum": Task("sum", total, List(TaskRef("three"), 4), TaskRef("three")),
    "twice": Task("twice", total, List(TaskRef("sum")), 2),
}


def test_only_the_compat_module_uses_private_names_of_dask():
    private = re.compile(r"\b(dask|distributed)\.(_\w+|\w+\._\w+)|import get_scheduler|MaterializedLayer")
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(private.search(line.replace("dbksvd_dask", "")) for line in path.read_text().splitlines())
    }
    assert found == {"graph/_compat.py"}


def test_a_release_without_the_tasks_says_which_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dask._task_spec", None)
    spec = importlib.util.spec_from_file_location("compat_again", _compat.__file__)
    with pytest.raises(ImportError, match=r"dask .* has no tasks in dask\._task_spec .*pip install dask=="):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_tasks_take_data_lists_and_results_of_others():
    assert _compat.delayed_of("twice", GRAPH).compute(scheduler="synchronous") == 42


def test_any_task_of_a_graph_can_be_its_result():
    for graph in (_compat.delayed_of("twice", GRAPH), _compat.placed_delayed("twice", GRAPH, "graph", at_home)):
        assert sorted(_compat.keys_of(graph)) == sorted(GRAPH)
        assert _compat.subgraph(graph, "sum").compute(scheduler="synchronous") == 21


def test_preferred_workers_travel_as_annotations_of_the_graph():
    graph = _compat.placed_delayed("twice", GRAPH, "graph", at_home)
    assert graph.compute(scheduler="synchronous") == 42
    (layer,) = pickle.loads(pickle.dumps(graph.dask)).layers.values()
    assert layer.annotations["workers"]("sum") == ["tcp://home"]
    assert layer.annotations["allow_other_workers"] is True


def test_a_value_of_another_graph_brings_its_tasks_along():
    names = Tasks()
    number = dask.delayed(total, pure=False)([1, 2], 5)
    graph = names.finish(names.call(total, "total", (), [number, 1], 1))
    assert graph.compute(scheduler="synchronous") == 16


def test_a_scheduler_that_is_no_client_is_none():
    class Scheduler:
        def get(self, graph, keys, **options):
            raise AssertionError

    assert _compat.scheduler_client() is None
    with dask.config.set(scheduler=Scheduler().get):
        assert _compat.scheduler_client() is None


def test_a_graph_is_computed_by_the_scheduler_that_is_set():
    asked = []

    def scheduler(graph, keys, **options):
        asked.append(keys)
        return dask.get(graph, keys)

    graph = dask.delayed(total)([1, 2], 5)
    with dask.config.set(scheduler=scheduler):
        assert _compat.compute_graph(graph) == 15
    assert len(asked) == 1
    assert _compat.compute_graph(graph) == 15


@pytest.mark.cluster
def test_the_client_whose_scheduler_is_current_is_found():
    distributed = pytest.importorskip("distributed")
    with distributed.Client(**clusters.IN_PROCESS, n_workers=1, threads_per_worker=1) as client:
        assert _compat.scheduler_client() is client
        with dask.config.set(scheduler="threads"):
            assert _compat.scheduler_client() is None


@pytest.mark.cluster
def test_the_socket_of_a_connection_can_be_borrowed_and_given_back():
    """Between two messages of Dask, bytes pass that its event loop does not see."""
    core = pytest.importorskip("distributed.core")
    from distributed.comm import connect

    async def main():
        loop, seen = asyncio.get_running_loop(), []

        async def lend(comm):
            await comm.write("yours")
            sock = _compat.borrow_socket(comm)
            seen.append(await loop.sock_recv(sock, 100))
            await loop.sock_sendall(sock, b"raw answer")
            return "given back"

        async with core.Server({"lend": lend}) as server:
            await server.listen("tcp://127.0.0.1:0")
            comm = await connect(server.address)
            for _ in range(2):
                await comm.write({"op": "lend"})
                assert await comm.read() == "yours"
                sock = _compat.borrow_socket(comm)
                await loop.sock_sendall(sock, b"raw question")
                assert await loop.sock_recv(sock, 10) == b"raw answer"
                assert await comm.read() == "given back"
            await comm.close()
            with pytest.raises(ConnectionError):
                _compat.borrow_socket(comm)
        return seen

    assert asyncio.run(main()) == [b"raw question"] * 2


def test_a_connection_without_a_socket_of_its_own_lends_none():
    assert _compat.borrow_socket(object()) is None
