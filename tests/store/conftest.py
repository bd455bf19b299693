"""A bucket on the loopback interface."""

from __future__ import annotations

import fsspec
import pytest

SECRET = "wJalrXUtnFEMI-very-secret"


@pytest.fixture(scope="module")
def s3_server():
    """Return host and port of a server: that of moto."""
    pytest.importorskip("s3fs")
    server_module = pytest.importorskip("moto.server")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    yield server.get_host_and_port()
    server.stop()


@pytest.fixture(scope="module")
def s3(s3_server):
    """Return the URL of a bucket; s3fs speaks to the server over HTTP."""
    host, port = s3_server
    old = dict(fsspec.config.conf)
    fsspec.config.conf["s3"] = {"endpoint_url": f"http://{host}:{port}", "key": "k", "secret": SECRET}
    fs = fsspec.filesystem("s3")
    if not fs.exists("bucket"):  # servers of one process share what they hold
        fs.mkdir("bucket")
    yield "s3://bucket"
    fsspec.config.conf.clear()
    fsspec.config.conf.update(old)
    type(fs).clear_instance_cache()


@pytest.fixture
def place(s3, request):
    return f"{s3}/{request.node.name.replace('[', '-').replace(']', '')}"


@pytest.fixture
def secret():
    """What must not be stored or told."""
    return SECRET
