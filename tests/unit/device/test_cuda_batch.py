"""Copies by the CUDA driver: arguments, prototypes, errors. The driver is a stand-in."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
from typing_extensions import override

from kv_core.device.copy import CopyBatch, CudaCopyBackend, CudaDriver, MemoryKind
from kv_core.device.copy._pinning import _DriverRegistrar
from kv_core.errors import CopyError, EngineStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

STUB = Path(__file__).with_name("driver_stub.c")
STREAM = 0xABCD
BATCH_VERSIONS = [12080, 12090, 13000, 13020]

HOST, DEVICE = 1, 2


class Record(ctypes.Structure):
    """What the stand-in was called with."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = [
        *(
            (name, ctypes.c_int64)
            for name in (
                "batch_calls",
                "single_calls",
                "prototype",
                "count",
                "attribute_sets",
                "first_index",
                "stream",
            )
        ),
        ("source_access_order", ctypes.c_int32),
        ("source_hint", ctypes.c_int32 * 2),
        ("destination_hint", ctypes.c_int32 * 2),
        ("flags", ctypes.c_uint32),
    ]


class Stub:
    """A driver library of its own for each test, and the driver over it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self.record = Record.in_dll(self._library, "record")
        self.driver = CudaDriver(str(path))

    def fail(self, code: int, index: int | None = None) -> None:
        """Let later calls fail, at one copy or as a whole."""
        ctypes.c_int.in_dll(self._library, "fail_code").value = code
        at = ctypes.c_size_t(-1).value if index is None else index
        ctypes.c_size_t.in_dll(self._library, "fail_index").value = at

    def add_memory(self, array: np.ndarray[Any, Any], memory_type: int, shift: int = 0) -> None:
        """Tell the driver what kind of memory an array is in."""
        add = self._library.add_memory
        add.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint, ctypes.c_uint64]
        add(array.ctypes.data, array.nbytes, memory_type, array.ctypes.data + shift)


@pytest.fixture(scope="module")
def build_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., bytes]:
    """Return a function that compiles the stand-in, once for each set of definitions."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("stub")
    built: dict[tuple[str, ...], bytes] = {}

    def build(*definitions: str) -> bytes:
        if definitions not in built:
            path = folder / f"{len(built)}.so"
            flags = ("-shared", "-fPIC", "-Werror", *(f"-D{name}" for name in definitions))
            subprocess.run([compiler, *flags, "-o", path, STUB], check=True, timeout=60)
            built[definitions] = path.read_bytes()
        return built[definitions]

    return build


@pytest.fixture
def build(build_once: Callable[..., bytes], tmp_path: Path) -> Callable[..., Path]:
    """Return a function that makes a library of this test's own: it has state."""

    def make(version: int, *definitions: str) -> Path:
        path = tmp_path / f"libcuda-{version}.so"
        path.write_bytes(build_once(f"DRIVER_VERSION={version}", *definitions))
        return path

    return make


@pytest.fixture
def stub(build: Callable[..., Path], request: pytest.FixtureRequest) -> Stub:
    """Return a stand-in of the parameter's version, by default 13.0."""
    return Stub(build(getattr(request, "param", 13000)))


class Pages:
    """Pages on two sides, in another order on each, with guards between them."""

    def __init__(self, count: int = 5, size: int = 48) -> None:
        random = np.random.default_rng(count)
        self.source = random.integers(-128, 128, (count, size + 8), dtype=np.int8)
        self.found = np.full((count, size + 8), 77, dtype=np.int8)
        order = random.permutation(count)
        self.expected = self.found.copy()
        self.expected[order, :size] = self.source[:, :size]
        rows = np.arange(count, dtype=np.int64) * (size + 8)
        self.batch = CopyBatch(
            self.source.ctypes.data + rows,
            self.found.ctypes.data + rows[order],
            np.full(count, size, dtype=np.int64),
        )
        self.order = order.tolist()


every_version = pytest.mark.parametrize("stub", BATCH_VERSIONS, indirect=True)


@every_version
def test_one_call_moves_a_batch(stub: Stub) -> None:
    """Every copy of the batch arrives, through the prototype that the driver's version has."""
    pages = Pages()
    stub.driver.copy_batch(pages.batch, STREAM, from_host=True, device=3)
    np.testing.assert_array_equal(pages.found, pages.expected)
    record = stub.record
    assert (record.batch_calls, record.single_calls) == (1, 0)
    assert (record.count, record.stream) == (5, STREAM)
    assert record.prototype == (12080 if stub.driver.version < 13000 else 13000)


@every_version
def test_one_set_of_attributes_is_for_all_copies(stub: Stub) -> None:
    """It begins with the first copy and asks for overlap with the engine's kernels."""
    stub.driver.copy_batch(Pages().batch, STREAM, from_host=True, device=3)
    assert (stub.record.attribute_sets, stub.record.first_index) == (1, 0)
    assert stub.record.flags == 1


@every_version
@pytest.mark.parametrize(
    ("from_host", "order", "source", "destination"),
    [(True, 3, [2, 0], [1, 3]), (False, 1, [1, 3], [2, 0])],
    ids=["load", "store"],
)
def test_only_sources_in_host_memory_may_be_read_at_any_time(
    stub: Stub, from_host: bool, order: int, source: list[int], destination: list[int]
) -> None:
    """Pages of the GPU are read in stream order: a kernel may still be writing (vllm#45704)."""
    stub.driver.copy_batch(Pages().batch, STREAM, from_host=from_host, device=3)
    assert stub.record.source_access_order == order
    assert list(stub.record.source_hint) == source
    assert list(stub.record.destination_hint) == destination


def test_an_empty_batch_is_no_call(stub: Stub) -> None:
    """The driver would refuse more sets of attributes than copies."""
    nothing = np.empty(0, dtype=np.int64)
    batch = CopyBatch(nothing, nothing, nothing)
    stub.driver.copy_batch(batch, STREAM, from_host=True, device=0)
    stub.driver.copy_each(batch, STREAM)
    assert (stub.record.batch_calls, stub.record.single_calls) == (0, 0)


def test_columns_need_not_be_contiguous(stub: Stub) -> None:
    """The driver gets arrays that it can walk, whatever the batch was cut from."""
    pages = Pages()
    batch = pages.batch
    table = np.stack([batch.sources, batch.destinations, batch.sizes], axis=1)
    stub.driver.copy_batch(CopyBatch(*table.T), STREAM, from_host=False, device=0)
    np.testing.assert_array_equal(pages.found, pages.expected)


@pytest.mark.parametrize("stub", [11080, 12040, 12070], indirect=True)
def test_a_driver_older_than_the_batch_call_copies_one_by_one(stub: Stub) -> None:
    """CUDA 12.8 brought the call; before, each copy is one of its own."""
    pages = Pages()
    assert not stub.driver.has_batch_copy
    stub.driver.copy_each(pages.batch, STREAM)
    np.testing.assert_array_equal(pages.found, pages.expected)
    assert (stub.record.single_calls, stub.record.stream) == (5, STREAM)


@pytest.mark.parametrize("version", [12080, 13000])
def test_the_driver_is_asked_not_believed(build: Callable[..., Path], version: int) -> None:
    """A driver that is new enough and has no batch call all the same is used without."""
    assert not CudaDriver(str(build(version, "WITHOUT_BATCH"))).has_batch_copy


@pytest.mark.parametrize(
    ("stub", "place"), [(12080, " at range 2 of 5"), (13000, " at 5 range(s)")], indirect=["stub"]
)
def test_an_error_has_its_name_and_place(stub: Stub, place: str) -> None:
    """Until CUDA 13 the driver says which copy of a batch it refused."""
    stub.fail(1, index=2)
    with pytest.raises(CopyError, match="INVALID_VALUE") as caught:
        stub.driver.copy_batch(Pages().batch, STREAM, from_host=True, device=0)
    assert caught.value.error_name == "CUDA_ERROR_INVALID_VALUE"
    text = f"cuMemcpyBatchAsync failed{place}: CUDA_ERROR_INVALID_VALUE (1)"
    assert text in str(caught.value)


def test_an_error_of_a_whole_batch_names_no_copy(stub: Stub) -> None:
    """An earlier error of the process belongs to none of the copies."""
    stub.fail(700)
    with pytest.raises(
        CopyError, match=r"failed at 5 range.s.: CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"
    ):
        stub.driver.copy_batch(Pages().batch, STREAM, from_host=True, device=0)


def test_an_error_without_a_name_keeps_its_number(stub: Stub) -> None:
    """A newer driver has errors that the name table may lack."""
    stub.fail(4242)
    with pytest.raises(CopyError, match=r"an error without a name \(4242\)"):
        stub.driver.copy_batch(Pages().batch, STREAM, from_host=True, device=0)


def test_a_single_copy_that_fails_ends_the_batch(stub: Stub) -> None:
    """Copies before it are queued, those after it are not."""
    pages = Pages()
    stub.fail(1, index=2)
    with pytest.raises(CopyError, match="cuMemcpyAsync failed at range 2 of 5"):
        stub.driver.copy_each(pages.batch, STREAM)
    arrived = [int(row) for row in range(5) if (pages.found[row] != 77).any()]
    assert arrived == sorted(pages.order[:2])


def test_the_kind_of_memory_is_the_drivers_answer(stub: Stub) -> None:
    """Host memory counts as pinned where kernels reach it at its own address."""
    device, pinned, elsewhere, unknown = (np.zeros(64, dtype=np.int8) for _ in range(4))
    stub.add_memory(device, DEVICE)
    stub.add_memory(pinned, HOST)
    stub.add_memory(elsewhere, HOST, shift=4096)
    kinds = [stub.driver.kind_of(a.ctypes.data + 63) for a in (device, pinned, elsewhere, unknown)]
    pageable = MemoryKind.PAGEABLE
    assert kinds == [MemoryKind.DEVICE, MemoryKind.PINNED, pageable, pageable]


def test_pinning_makes_memory_pinned(stub: Stub) -> None:
    """For every device and for kernels, until it is undone."""
    rows = np.zeros(4096, dtype=np.int8)
    registrar = _DriverRegistrar(stub.driver, lambda: None)
    assert registrar.register(rows.ctypes.data, rows.nbytes) is None
    assert stub.driver.kind_of(rows.ctypes.data) is MemoryKind.PINNED
    registrar.unregister(rows.ctypes.data)
    assert stub.driver.kind_of(rows.ctypes.data) is MemoryKind.PAGEABLE


def test_refused_pinning_says_why(stub: Stub) -> None:
    """By the driver's name for it, which the warning shows (vllm#51080)."""
    rows = np.zeros(4096, dtype=np.int8)
    stub.fail(1)
    registrar = _DriverRegistrar(stub.driver, lambda: None)
    assert registrar.register(rows.ctypes.data, rows.nbytes) == "CUDA_ERROR_INVALID_VALUE"
    assert stub.driver.kind_of(rows.ctypes.data) is MemoryKind.PAGEABLE


def test_a_failed_unpinning_does_not_stop_a_shutdown(
    stub: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    """The memory is unmapped all the same."""
    _DriverRegistrar(stub.driver, lambda: None).unregister(0x1000)
    assert "cuMemHostUnregister failed: CUDA_ERROR_INVALID_VALUE" in caplog.text


def test_without_a_driver_there_is_an_oserror(tmp_path: Path) -> None:
    """Most machines have none."""
    with pytest.raises(OSError, match="libcuda"):
        CudaDriver(str(tmp_path / "libcuda.so.1"))


def test_a_driver_that_does_not_answer_is_refused(build: Callable[..., Path]) -> None:
    """The library that NVIDIA gives to linkers has all names and does nothing."""
    with pytest.raises(CopyError, match="cuDriverGetVersion failed: CUDA_ERROR_STUB_LIBRARY"):
        CudaDriver(str(build(13000, "SILENT")))


class Mark:
    """An event that is reached when the test says so."""

    def __init__(self) -> None:
        self.is_reached = True

    def record(self, stream: object) -> None:
        """Do nothing: work ends when it is queued."""

    def query(self) -> bool:
        """Say what the test has said."""
        return self.is_reached

    def synchronize(self) -> None:
        """Be reached."""
        self.is_reached = True

    def elapsed_time(self, end_event: object) -> float:
        """Return milliseconds."""
        return 1500.0


class Api:
    """Streams and events of a device that works as soon as it is asked to."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []

    def Stream(self, device: object) -> Any:  # noqa: N802 - torch.cuda's name
        """Make a stream."""
        return SimpleNamespace(
            cuda_stream=STREAM, wait_event=lambda _event: None, synchronize=lambda: None
        )

    def Event(self, *, enable_timing: bool) -> Mark:  # noqa: N802 - torch.cuda's name
        """Make an event."""
        self.marks.append(Mark())
        return self.marks[-1]

    def current_stream(self, device: object) -> object:
        """Return the compute stream."""
        return self

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        """Do nothing."""
        yield

    @override
    def __repr__(self) -> str:
        return "Api()"


@pytest.fixture
def api() -> Api:
    """Return a device's streams and events."""
    return Api()


def _backend(stub: Stub, api: Api) -> CudaCopyBackend:
    device: Any = SimpleNamespace(type="cuda", index=1)
    return CudaCopyBackend(stub.driver, api, device)


def test_a_stream_sends_a_batch_to_the_driver(stub: Stub, api: Api) -> None:
    """A load from pinned memory is one call on the stream's own handle."""
    pages = Pages()
    stub.add_memory(pages.source, HOST)
    stub.add_memory(pages.found, DEVICE)
    ticket = _backend(stub, api).open_stream("cpu-to-gpu").submit(pages.batch)
    assert ticket.done()
    assert ticket.error is None
    assert ticket.elapsed_seconds == 1.5
    np.testing.assert_array_equal(pages.found, pages.expected)
    record = stub.record
    assert (record.batch_calls, record.stream, record.source_access_order) == (1, STREAM, 3)
    assert list(record.destination_hint) == [1, 1]


@pytest.fixture
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Define the kernel anew, for the interpreter, and let nobody else find it."""
    kernel = "kv_core.device.copy._triton_kernel"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, kernel, raising=False)
    yield
    sys.modules.pop(kernel, None)


@pytest.mark.torch
@pytest.mark.usefixtures("_interpreter")
def test_a_stream_leaves_loads_of_small_pages_to_the_kernel(stub: Stub, api: Api) -> None:
    """The driver is asked about the memory only."""
    torch: Any = pytest.importorskip("torch")
    pytest.importorskip("triton")
    pages = Pages(count=20)
    stub.add_memory(pages.source, HOST)
    stub.add_memory(pages.found, DEVICE)
    backend = CudaCopyBackend(stub.driver, api, torch.device("cpu"), page_sizes=[48])
    ticket = backend.open_stream("cpu-to-gpu").submit(pages.batch)
    assert ticket.error is None
    np.testing.assert_array_equal(pages.found, pages.expected)
    assert (stub.record.batch_calls, stub.record.single_calls) == (0, 0)


def test_a_store_is_read_in_stream_order(stub: Stub, api: Api) -> None:
    """The direction follows from the memory, not from names."""
    pages = Pages()
    stub.add_memory(pages.source, DEVICE)
    stub.add_memory(pages.found, HOST)
    _backend(stub, api).open_stream("any name").submit(pages.batch)
    assert (stub.record.batch_calls, stub.record.source_access_order) == (1, 1)


def test_memory_that_is_not_pinned_is_copied_call_by_call(stub: Stub, api: Api) -> None:
    """vllm#51080: where pinning failed, copies are slower and right."""
    pages = Pages()
    stub.add_memory(pages.found, DEVICE)
    ticket = _backend(stub, api).open_stream("load").submit(pages.batch)
    assert ticket.error is None
    np.testing.assert_array_equal(pages.found, pages.expected)
    assert (stub.record.batch_calls, stub.record.single_calls) == (0, 5)


def test_a_refused_batch_is_a_failed_ticket(stub: Stub, api: Api) -> None:
    """Reported when the device has passed the copies that were queued; later batches run."""
    pages = Pages()
    stub.add_memory(pages.source, HOST)
    stub.add_memory(pages.found, DEVICE)
    stream = _backend(stub, api).open_stream("load")
    stub.fail(700)
    refused = stream.submit(pages.batch)
    end = api.marks[-1]
    end.is_reached = False
    assert (refused.done(), refused.error) == (False, None)
    end.is_reached = True
    assert refused.done()
    error = refused.error
    assert isinstance(error, CopyError)
    assert error.error_name == "CUDA_ERROR_ILLEGAL_ADDRESS"
    stub.fail(0)
    assert stream.submit(pages.batch).error is None
    np.testing.assert_array_equal(pages.found, pages.expected)


def test_a_closed_stream_refuses_batches(stub: Stub, api: Api) -> None:
    """Closing twice is fine."""
    stream = _backend(stub, api).open_stream("load")
    stream.close()
    stream.close()
    with pytest.raises(EngineStateError, match="closed"):
        stream.submit(Pages().batch)
