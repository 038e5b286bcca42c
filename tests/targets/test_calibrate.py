"""What this CPU reaches: measured once, kept in the cache, and what prices make of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rung.core import store
from rung.core.parse import parse_module
from rung.pipeline import VOCABULARIES
from rung.targets import libraries
from rung.targets.base import target
from rung.targets.cpu import build, calibrate, machine
from rung.targets.cpu import target as cpu
from rung.targets.cpu.figures import FAMILIES, FIXED, ZEN5, Figures, of_family, read
from rung.tile.choose import choose
from rung.tools import doctor

FEW = replace(ZEN5, f32=1e9)
Folder = Callable[[bool], Path]


@pytest.fixture
def folder(settings: Callable[..., None], tmp_path: Path) -> Iterator[Path]:
    """A cache of its own, and permission to measure."""
    settings(calibrate=True, cache_dir=tmp_path)
    calibrate._figures.cache_clear()
    yield tmp_path
    calibrate._figures.cache_clear()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of threads that were measured, instead of measuring."""
    found = list[int]()

    class Bench:
        def __init__(self, _: object, threads: int):
            found.append(threads)

        def figures(self) -> Figures:
            return FEW
    monkeypatch.setattr(calibrate, "_Measuring", Bench)
    return found


@pytest.mark.parametrize("name", ["cpu.base", machine.host().name])
def test_what_is_measured_are_figures_of_a_cpu(name: str, folder: Path) -> None:
    threads = torch.get_num_threads()
    found = calibrate.again(machine.MACHINES[name], threads)
    assert read(json.loads(json.dumps(found.data()))) == found
    assert found.f32 > 1e8 and 0 < found.scale <= 1 and found.fork > 0
    near, *_, far = (rate for _, rate, _ in found.spaces)
    assert near > far > 1e8
    assert found.reach.keys() == FIXED[name].reach.keys()
    assert torch.get_num_threads() == threads
    (kept,) = (p for p in (folder / build.KIND).glob("figures-*.json"))
    assert read(json.loads(kept.read_bytes())) == found


def test_a_cpu_is_measured_once_for_each_number_of_threads(folder: Path, counted: list[int]
                                                           ) -> None:
    for threads in (1, 3, 1, 3):
        assert calibrate.figures(machine.AVX512, threads) == FEW
        calibrate._figures.cache_clear()  # as in another process
    assert counted == [1, 3]
    assert calibrate.again(machine.AVX512, 3) == FEW
    assert counted == [1, 3, 3]
    assert target("cpu").machine.rates.flops["f32"] == FEW.f32


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"f32": 3}', json.dumps(
    {**ZEN5.data(), "spaces": [[1, 2, 3]]}).encode()])
def test_a_damaged_entry_is_measured_again(content: bytes, folder: Path, counted: list[int]
                                           ) -> None:
    store.write(build.KIND, calibrate.key(machine.AVX512, 1, torch.__version__), content)
    assert calibrate.figures(machine.AVX512, 1) == FEW
    assert counted == [1]


def test_a_cache_that_cannot_be_written_to_is_no_error(settings: Callable[..., None],
                                                       folder: Path, counted: list[int],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")
    monkeypatch.setattr(store, "write", full)
    assert calibrate.figures(machine.AVX512, 1) == calibrate.figures(machine.AVX512, 1) == FEW
    assert counted == [1]


def test_without_permission_nothing_is_measured(settings: Callable[..., None], counted: list[int]
                                                ) -> None:
    settings(calibrate=False)
    assert calibrate.figures(machine.AVX512, 2) == of_family("cpu.avx512", machine.features())
    assert target("cpu.avx512").machine.rates.flops["f32"] == ZEN5.f32
    assert not counted


def test_without_a_compiler_the_last_figures_of_the_cache_stand_in(
        settings: Callable[..., None], folder: Path) -> None:
    settings(calibrate=True, cache_dir=folder, cc="no-such-compiler")
    family = of_family("cpu.avx512", machine.features())
    assert calibrate.measure(machine.AVX512, 1, "figures-x.json") == family != FEW
    store.write(build.KIND, calibrate.LAST, json.dumps(FEW.data()).encode())
    assert calibrate.measure(machine.AVX512, 1, "figures-x.json") == FEW


def test_a_family_has_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    for one in FAMILIES:
        facts = {"vendor_id": one.vendor, "cpu family": str(one.numbers[0])}
        monkeypatch.setattr("rung.targets.cpu.figures.fact", facts.get)
        whole = frozenset({one.has, "avx512_bf16", "avx512_vnni"})
        assert of_family("cpu.avx512", whole) == one.figures
        assert of_family("cpu.avx2", frozenset({"avx2"})).f32 == FIXED["cpu.avx2"].f32
        bare = of_family("cpu.avx512", frozenset({one.has})).reach
        assert bare["aten.matmul bf16"].peak < 0.1 < one.figures.reach["aten.matmul bf16"].peak


@pytest.mark.parametrize("busy", [False, True])
def test_cores_that_others_keep_busy_are_not_measured(busy: bool, monkeypatch: pytest.MonkeyPatch,
                                                      folder: Path) -> None:
    bench, times = calibrate._Measuring(machine.BASE, 2), iter(range(100))
    bench.free = 1.0
    once, steps = 1e-9, 4 * calibrate.STEPS * calibrate.CHAINS
    monkeypatch.setattr(calibrate, "seconds", lambda _: (
        1.25 * once * steps * (1 + next(times) * busy)))
    assert bench._scale(once) == ((1.0, False) if busy else (0.8, True))


def test_no_memory_is_slower_than_one_behind_it() -> None:
    found = calibrate.ordered([(1, 9.0, 0.0), (2, 3.0, 0.0), (3, 1.0, 5.0), (4, 4.0, 8.0)])
    assert found == [(1, 9.0, 0.0), (2, 4.0, 0.0), (3, 4.0, 8.0), (4, 4.0, 8.0)]


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_defaults_of_the_user_do_not_matter(kind: torch.dtype) -> None:
    torch.set_default_dtype(kind)
    try:
        with torch.device("meta"):
            made = libraries.memory(1 << 20)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (made.nbytes, made.device.type) == (1 << 20, "cpu")
    assert torch.equal(made.view(torch.float32), torch.ones(1 << 18))


MATMUL = """
kernel mm(x: f32[128,512], w: f32[512,512]) -> y: f32[128,512]
  mm = contract add mul x[i,k], w[k,j] over k 512 : f32 over i,j acc f32
  y[i,j] = mm
"""


def test_a_library_is_called_where_it_reaches_more() -> None:
    (kernel,), wide = parse_module(MATMUL, VOCABULARIES), target("cpu.avx512")
    for share, called in ((1.0, True), (0.3, False)):
        reach = {n: replace(x, peak=share) for n, x in ZEN5.reach.items()}
        here = machine.reaching(machine.AVX512, replace(ZEN5, reach=reach))
        found = choose(kernel, here, wide.candidates, {}, wide.libraries)
        assert (found.library is not None) is called


def test_a_library_reads_memory_with_all_cores() -> None:
    text = MATMUL.replace("128", "16").replace("512", "4096")
    (kernel,), wide = parse_module(text, VOCABULARIES), target("cpu.avx512")
    alone, all_ = (choose(kernel, replace(machine.AVX512, cores=n), lambda *_: (), {},
                          wide.libraries).price.seconds for n in (1, 16))
    assert alone > 8 * all_


def test_doctor_shows_what_it_measured(folder: Path, counted: list[int]) -> None:
    text, well, data = doctor.calibrated()
    assert well and counted == [torch.get_num_threads()]
    assert "1 GFLOP/s a core" in text and "onednn.linear f32" in text
    assert (data["f32"], data["fork"]) == (FEW.f32, FEW.fork)
    told = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    assert all(f"`{name}`" in told for name in data)


def test_kernels_that_measure_are_made_for_each_machine() -> None:
    for one in (*machine.MACHINES.values(), cpu.here()):
        text = calibrate.source(one)
        assert "$" not in text
        assert all(f"float chains_{x.name}(" in text for x in calibrate.narrow(one))
