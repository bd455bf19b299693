"""Array code takes its namespace from its input, and nothing goes to the host behind its back."""

import ast
import inspect
from pathlib import Path

import array_api_strict
import numpy as np
import pytest

from dbksvd_dask.kernels import lanczos
from tests.naive.kernels import unit_rows

ROOT = Path(__file__).resolve().parents[2] / "dbksvd_dask"
NAMES = ("kernels/lanczos", "gpu/encode", "gpu/products", "gpu/screened", "gpu/update", "gpu/moments", "gpu/chunk")
GENERIC = [ROOT / f"{name}.py" for name in NAMES]
DEVICE = array_api_strict.Device("device1")


def put(a):
    return array_api_strict.asarray(np.array(a), device=DEVICE)


def same(strict, plain, tolerance):
    assert strict.device == DEVICE
    np.testing.assert_allclose(strict._array, plain, rtol=tolerance, atol=tolerance)
    assert strict._array.dtype == plain.dtype


def test_the_strict_device_does_refuse_the_host():
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        np.asarray(put([1.0, 2.0]))
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        put([1.0]) + array_api_strict.asarray([1.0])


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_lanczos_stays_on_its_device_and_equals_numpy(rng, dtype, steps):
    old = unit_rows(rng.standard_normal((5, 7))).astype(dtype)
    W, x2 = rng.standard_normal((5, 7)).astype(dtype), rng.random(5) + 1
    W[3], x2[3] = 0, 0  # an atom without samples
    plain, strict = lanczos.warm_start(W, x2, old), lanczos.warm_start(put(W), put(x2), put(old))
    for _ in range(1, steps):
        W, sx, s2 = rng.standard_normal((5, 7)).astype(dtype), rng.standard_normal(5), rng.random(5) + 2
        plain = lanczos.advance(plain, W, sx, s2, old)
        strict = lanczos.advance(strict, put(W), put(sx), put(s2), put(old))
    tolerance = 1e-4 if dtype == np.float32 else 1e-10
    for a, b in zip(strict.basis, plain.basis, strict=True):
        same(a, b, tolerance)
    same(strict.dv, plain.dv, tolerance)
    same(lanczos.leading_vectors(strict, put(old)), lanczos.leading_vectors(plain, old), tolerance)


def test_device_sums_norms_and_grams_equal_numpy_without_touching_the_host(rng, monkeypatch):
    from dbksvd_dask.gpu import device, encode, moments, products

    fetched = []

    def to_host(a):
        fetched.append(a.shape)
        return a._array.copy()

    monkeypatch.setattr(device, "to_host", to_host)
    monkeypatch.setattr(moments, "_SUM_ROWS", 4)
    Y = rng.standard_normal((9, 5)).astype(np.float32)
    total, square, norms = moments.row_sums(put(Y))
    np.testing.assert_allclose(total, Y.sum(axis=0, dtype=np.float64), rtol=1e-12)
    np.testing.assert_allclose(square, (Y.astype(np.float64) ** 2).sum(axis=0))
    np.testing.assert_allclose(norms, np.linalg.norm(Y.astype(np.float64), axis=1))
    assert fetched == [(5,), (5,), (9,)], "sums leave the device, samples do not"
    same(products.squared_norms(put(Y)), (Y.astype(np.float64) ** 2).sum(axis=1), 1e-12)
    same(encode.gram_matrix(put(Y)), Y @ Y.T, 1e-6)


def test_samples_are_whitened_on_their_device(rng, monkeypatch):
    from dbksvd_dask.gpu import chunk, device

    space = type("Space", (), {"asarray": staticmethod(put)})
    monkeypatch.setattr(device, "current", space)
    Y, W = (rng.standard_normal(shape).astype(np.float32) for shape in ((9, 5), (5, 5)))
    same(chunk.whiten(put(Y), W), Y @ W, 1e-5)


def test_a_cupy_array_finds_its_namespace(monkeypatch):
    """CuPy's arrays have no `__array_namespace__`; the name of their module leads to it."""
    import sys

    library = type(sys)("cupy")
    array = type("ndarray", (), {"__module__": "cupy"})()
    monkeypatch.setitem(sys.modules, "cupy", library)
    assert lanczos.namespace(array) is library


def names_used(path):
    """Names that a module takes from a namespace: `xp.name` and `xp.linalg.name`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        chain = []
        while isinstance(node, ast.Attribute):
            chain.append(node.attr)
            node = node.value
        if chain and isinstance(node, ast.Name) and node.id == "xp":
            found.add(".".join(reversed(chain)))
    return found


@pytest.mark.parametrize("path", GENERIC, ids=lambda path: path.name)
def test_names_taken_from_a_namespace_are_in_the_array_api_and_in_cupy(path):
    used = {name for name in names_used(path) if not name.startswith("cuda.")}
    assert used or path.name == "chunk.py"
    libraries = [array_api_strict]
    try:
        import cupy  # importable without a driver

        libraries.append(cupy)
    except ImportError:
        pass
    for library in libraries:
        for name in used:
            target = library
            for part in name.split("."):
                assert hasattr(target, part), f"{library.__name__} has no {name}"
                target = getattr(target, part)


def test_every_field_of_the_encoder_reaches_the_device():
    """A GPU twin must not ignore a parameter that its CPU twin obeys."""
    from dbksvd_dask.gpu import encode, products, screened
    from dbksvd_dask.plan.encoder import EncodeSpec

    shared = inspect.getsource(products)
    for module, decided in ((encode, {"gram"}), (screened, {"gram", "encoder"})):  # by whoever chooses the module
        source = inspect.getsource(module) + shared
        for name in set(EncodeSpec._fields) - decided:
            assert f"spec.{name}" in source, (module, name)


def test_a_pursuit_without_a_gram_runs_on_the_device(monkeypatch):
    from dbksvd_dask.graph import backend
    from dbksvd_dask.plan.device import Sizes

    monkeypatch.setattr(backend, "workers", lambda: [backend.Worker("", "", 13 << 30, 2)])
    sizes = Sizes(65536, 8192, 768, 65536, 32)
    for gram, pursuit in (("auto", "gpu"), ("never", "gpu"), ("always", "cpu")):
        monkeypatch.setattr(backend, "process_memory", lambda: 1 << 40)
        made = backend.place("gpu", sizes, "mp", gram)
        assert (made.placement.device, made.placement.pursuit) == ("gpu", pursuit)
        assert made.device_bytes < 13 << 30
