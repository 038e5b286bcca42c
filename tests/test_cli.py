"""The command `rung`: exit codes, what goes to stdout and to stderr, and what its dumps are for."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.test_doctor import HALF, faulty

from rung import cli
from rung.core.options import MODES, Options
from rung.tools import bench
from rung.tools.benchmarks import NAMES, Benchmark, Variant

RELU_MM = "torch.relu((torch.randn(20, 12) + torch.randn(12)) @ torch.randn(12, 16))"
OURS = ("program", "tensor", "loop", "tile", "kernel")

Result = tuple[int, str, str]


@pytest.fixture
def rung(capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """`rung("show", "-c", "...")`: exit code, stdout, stderr."""
    def run(*args: str) -> Result:
        try:
            code = cli.main(args)
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err
    return run


# --- usage

def test_help_lists_commands_options_and_variables(rung) -> None:
    code, out, err = rung("--help")
    assert (code, err) == (0, "")
    for word in ("show", "explain", "opt", "bisect", "repro", "certify", "fuzz", "doctor",
                 "bench", "RUNG_CACHE_DIR", "CC", *(f.name for f in fields(Options)), *MODES):
        assert word in out


@pytest.mark.parametrize(("args", "says"), [
    ((), "COMMAND"),
    (("shw",), "'show', 'explain', 'opt', 'bisect', 'repro', 'certify', 'fuzz', 'doctor', 'bench'"),
    (("show",), "-c FILE.py:BUILD"),
    (("show", "-c", "torch.randn(3)", "--rung", "lop"), "'loop'"),
    (("show", "-c", "torch.randn(3).exp()", "--target", "gpu"), "cpu.avx2"),
    (("show", "-c", "torch.randn(3"), "not a Python expression"),
    (("show", "missing.py:build"), "no file missing.py"),
    (("show", "nothing"), "FILE.py:BUILD"),
    (("opt", "missing.ir"), "missing.ir"),
    (("bench", "fast"), "pointwise"),
    (("bench", "missing.py:build"), "no file missing.py"),
    (("bench", "tiny", "--threads", "0"), "a number from 1 on"),
    (("bench", "tiny", "--threads", "two"), "a number from 1 on"),
    (("bench", "tiny", "--json", "/nowhere/figures.json"), "cannot be written to"),
    (("fuzz", "--count", "-1"), "a number from 0 on"),
    (("fuzz", "--seed", "-1"), "a number from 0 on"),
    (("fuzz", "--minutes", "nan"), "a number from 0 on"),
    (("repro", "-c", "torch.randn(3) + 1", "-o", "/"), "cannot be written to"),
    (("show", "-c", "torch.randn(3) + 1", "--mapping", "missing.map"), "no file missing.map"),
    (("certify", f"{__file__}:build", "--dim", "batch=4"), "a range is like batch=0..64"),
    (("explain", "-c", "torch.randn(3) + 1", "--only", "loops"), "there are dynamo, guards"),
    (("explain", "-c", "torch.randn(3) + 1", "--again", "torch.rand("), "SyntaxError"),
    (("bench", "pointwise", "--against", "tvm"), "eager, inductor"),
])
def test_wrong_usage_is_2_and_names_what_is_known(rung, args: tuple[str, ...], says: str) -> None:
    code, out, err = rung(*args)
    assert (code, out) == (2, "")
    assert "rung: error: " in err
    assert says in err
    assert "Traceback" not in err


@pytest.mark.parametrize("args", [
    ("show", "missing.py:build"), ("opt", "missing.ir"), ("bench", "fast"),
    ("certify", "missing.py:build"), ("fuzz", "--count", "-1")])
def test_wrong_usage_is_told_before_anything_large_is_loaded(args: tuple[str, ...]) -> None:
    run = subprocess.run([sys.executable, "-X", "importtime", "-m", "rung", *args],
                         capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 2
    assert not re.findall(r"\| +(?:torch|numpy)\b", run.stderr)


def test_a_program_that_fails_is_1(rung) -> None:
    code, out, err = rung("show", "-c", "torch.randn(3) @ torch.randn(4)")
    assert (code, out) == (1, "")
    assert err.startswith("rung: error: the expression fails in eager: RuntimeError")


def test_an_expression_without_tensor_operations_is_1(rung) -> None:
    code, _, err = rung("explain", "-c", "1 + 1")
    assert code == 1
    assert "no graph was captured" in err


def test_a_bad_variable_is_2(tmp_path: Path) -> None:
    run = shell("show", "-c", "1", RUNG_DEBUG="9")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "rung: error: RUNG_DEBUG='9': expected 0 or 1\n"


def test_debug_shows_where_an_error_comes_from(rung, settings) -> None:
    settings(debug=True)
    with pytest.raises(Exception, match="fails in eager"):
        rung("show", "-c", "torch.randn(3) @ torch.randn(4)")


def shell(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "rung", *args], capture_output=True, text=True,
                          env=os.environ | environment, check=False, timeout=120)


def test_a_closed_pipe_is_quiet() -> None:
    command = f'"{sys.executable}" -m rung show -c "torch.randn(64).exp()" | head -n 1'
    run = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False,
                         timeout=120)
    assert run.stdout.startswith("torch ---")
    assert "BrokenPipe" not in run.stderr and "Traceback" not in run.stderr


# --- show

def test_all_rungs_have_headings(rung) -> None:
    code, out, err = rung("show", "-c", RELU_MM)
    assert (code, err) == (0, "")
    headings = re.findall(r"^(\w+) .*-----$", out, re.M)
    assert headings == list(cli.RUNGS)


def test_stdout_has_one_rung_and_stderr_the_rest(rung) -> None:
    code, out, err = rung("show", "-c", "(print('mine'), torch.randn(4).exp())[1]",
                          "--rung", "program")
    assert code == 0
    assert out.startswith("program ") and "mine" not in out
    assert "mine" in err


def test_factory_results_are_the_inputs_and_modules_keep_their_parameters(rung) -> None:
    expression = ("nn.Linear(8, 4)(torch.cat([torch.ones(2, 8), torch.rand(2, 8)])) "
                  "+ F.relu(torch.randint(0, 9, (4,)))")
    _, out, _ = rung("show", "-c", expression, "--rung", "program")
    first = " ".join(out[:out.index(")\n")].split())
    assert sorted(part.split(": ")[1] for part in first.split("(")[1].split(", ")) == [
        "f32[2,8] input", "f32[2,8] input", "f32[4,8] param", "f32[4] param", "i64[4] input"]


BUILD = '''\
import torch

def scaled(x, y):
    z = torch.floor(x)
    return z * y

def build():
    return scaled, (torch.randn(6, 8), torch.randn(8))

def broken():
    return 1 / 0

def wrong():
    return scaled
'''


@pytest.fixture
def module(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(BUILD)
    return str(path)


def test_a_file_and_its_lines(rung, module: str) -> None:
    code, out, _ = rung("show", f"{module}:build", "--rung", "loop")
    assert code == 0
    assert f"{module}:4" in out and f"{module}:5" in out
    assert "floor(x0[i,j]) * x1[j]" in out


@pytest.mark.parametrize(("name", "code", "says"), [
    ("none", 2, "it has broken, build, scaled, wrong"),
    ("broken", 1, "ZeroDivisionError"),
    ("wrong", 1, "must return (function or module, example arguments)"),
])
def test_bad_builds(rung, module: str, name: str, code: int, says: str) -> None:
    found, out, err = rung("show", f"{module}:{name}")
    assert (found, out) == (code, "")
    assert says in err


def test_training_shows_both_graphs(rung) -> None:
    _, out, _ = rung("show", "-c", "torch.tanh(torch.randn(4, 8))", "--train", "--rung", "program")
    assert "# graph 1 of 2: forward" in out and "# graph 2 of 2: backward" in out


def test_a_mapping_of_the_user(rung, tmp_path: Path) -> None:
    path = tmp_path / "mine.map"
    path.write_text("map floor on cpu.base\n  i: seq *, simd 4\n")
    args = ("-c", "torch.floor(torch.randn(64))", "--rung", "tile", "--target", "cpu.base")
    _, out, _ = rung("show", *args, "--mapping", str(path))
    assert "  i: seq *, simd 4\n" in out
    path.write_text("map floor on cpu.base\n  i: warp *\n")
    code, out, err = rung("show", *args, "--mapping", str(path))
    assert (code, out) == (1, "")
    assert "warp" in err


# --- dumps are input

@pytest.mark.parametrize("name", OURS)
def test_a_dump_lowers_to_the_same_source(rung, tmp_path: Path, name: str) -> None:
    _, source, _ = rung("show", "-c", RELU_MM, "--rung", "source")
    _, dump, _ = rung("show", "-c", RELU_MM, "--rung", name)
    path = tmp_path / "x.ir"
    path.write_text(dump)
    code, again, _ = rung("opt", str(path), "--to", "source")
    assert code == 0
    assert named_alike(again) == named_alike(source)


def named_alike(source: str) -> str:
    """C with its names by order of appearance: text does not name what prints inside its user."""
    names: dict[str, str] = {}
    return re.sub(r"\b[a-z]+[0-9]*(_[0-9]+)*\b",
                  lambda m: names.setdefault(m[0], f"n{len(names)}"), source)


@pytest.mark.parametrize("name", OURS)
def test_a_dump_prints_as_it_was(rung, tmp_path: Path, name: str) -> None:
    _, dump, _ = rung("show", "-c", RELU_MM, "--train", "--rung", name)
    path = tmp_path / "x.ir"
    path.write_text(dump)
    code, again, _ = rung("opt", str(path))
    assert code == 0
    kept = [x for x in dump.splitlines() if x and not (x.startswith("# ") and "graph" not in x)]
    assert [x for x in again.splitlines() if x] == kept


@pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc")
@pytest.mark.parametrize("target", ["cpu.avx512", "cpu.avx2", "cpu.base"])
def test_source_compiles_as_it_stands(rung, tmp_path: Path, target: str) -> None:
    _, out, _ = rung("show", "-c", f"F.softmax({RELU_MM}, -1).sum(0)", "--train", "--rung",
                     "source", "--target", target)
    path = tmp_path / "kernels.c"
    path.write_text(out)
    subprocess.run(["gcc", "-c", str(path), "-o", str(tmp_path / "kernels.o")], check=True)


LAYERS = '''\
from torch import nn

class Layer(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(n), nn.Linear(n, 2 * n), nn.Linear(2 * n, n)

    def forward(self, x):
        y = self.down(nn.functional.silu(self.up(self.norm(x))).sort()[0])
        return x + y

def build():
    import torch
    layers = [x for n in (8, 16, 24, 32, 40) for x in (Layer(n), Layer(n), nn.Linear(n, n + 8))]
    return nn.Sequential(*layers), (torch.randn(5, 8),)
'''


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "layers.py").write_text(LAYERS)
    return f"{tmp_path / 'layers.py'}:build"


def test_a_whole_model_is_shown_by_an_index(rung, tmp_path: Path, model: str) -> None:
    code, out, _ = rung("show", model)
    assert code == 0
    head, *rows = out.splitlines()
    assert head.startswith("index ---") and "--kernel NAME" in rows[-1]
    found = [re.match(r" +(\d+) x (\S+) +layers.py:(9|10) ", x) for x in rows[:-2]]
    names = {x[2]: int(x[1]) for x in found if x}
    assert names.pop("aten.sort.default") == 10 and len(names) > 8
    _, dump, _ = rung("show", model, "--rung", "loop")
    for name, count in names.items():
        assert len(re.findall(rf" = kernel {name}\(", dump)) == count
        assert f"\n# {count:4} x {name} " in f"\n{dump}"


def test_one_kernel_of_a_model_is_a_dump(rung, tmp_path: Path, model: str) -> None:
    _, whole, _ = rung("show", model, "--rung", "loop")
    name = re.findall(r"^kernel (\w+)\(", whole, re.M)[0]
    code, out, _ = rung("show", model, "--kernel", name)
    assert code == 0 and "layers.py:" in out
    assert re.findall(r"^(\w+) .*-----$", out, re.M) == ["loop", "tile", "kernel", "source"]
    _, source, _ = rung("show", model, "--kernel", name, "--rung", "source")
    for level in ("loop", "tile", "kernel"):
        code, dump, _ = rung("show", model, "--kernel", name, "--rung", level)
        path = tmp_path / "one.ir"
        path.write_text(dump)
        code, again, err = rung("opt", str(path), "--to", "source")
        assert code == 0, err
        assert f"run_{name}(" in again and named_alike(again) == named_alike(source)


@pytest.mark.parametrize(("args", "code", "says"), [
    (("--kernel", "nope"), 1, "no kernel is called 'nope'; there are "),
    (("--kernel", "nope", "--rung", "tensor"), 2, "no kernels on the rung tensor, but on loop"),
])
def test_kernels_that_are_not_there(rung, module: str, args: tuple[str, ...], code: int,
                                    says: str) -> None:
    found, out, err = rung("show", f"{module}:build", *args)
    assert (found, out) == (code, "") and says in err


def test_dumps_fit_the_page_and_are_read_back(rung, tmp_path: Path, model: str) -> None:
    for name in OURS:
        _, dump, _ = rung("show", model, "--rung", name)
        lines = [x.partition("  # ")[0] for x in dump.splitlines() if not x.startswith("#")]
        assert max(map(len, lines)) <= 100
        assert any(x.endswith(",") for x in lines)
        path = tmp_path / "x.ir"
        path.write_text(dump)
        code, again, _ = rung("opt", str(path))
        assert code == 0
        assert [x for x in again.splitlines() if x] == [x for x in lines if x]


# --- opt

@pytest.fixture
def dump(rung, tmp_path: Path) -> str:
    _, text, _ = rung("show", "-c", RELU_MM, "--rung", "tensor")
    path = tmp_path / "relu_mm.ir"
    path.write_text(text)
    return str(path)


def test_named_passes_in_order(rung, dump: str) -> None:
    code, out, _ = rung("opt", dump, "--passes", "to_loop,fuse,canonical")
    assert code == 0
    assert out.count("\nkernel ") == 1 and "kernel mm_relu(" in out


@pytest.mark.parametrize(("args", "says"), [
    (("--passes", "fusion"), "loop.fuse"),
    (("--passes", "simplify"), "tensor.simplify or loop.simplify"),
    (("--to", "program"), "lies above it"),
    (("--to", "tiles"), "'tile'"),
])
def test_opt_refuses(rung, dump: str, args: tuple[str, ...], says: str) -> None:
    code, out, err = rung("opt", dump, *args)
    assert (code, out) == (2, "")
    assert says in err


def test_opt_runs_both_sides(rung, dump: str) -> None:
    code, out, _ = rung("opt", dump, "--to", "kernel", "--run")
    assert code == 0
    last = out.splitlines()[-1]
    assert last.startswith("# relu [20,16]: mean ") and "checksum" in last


def test_opt_points_at_what_it_cannot_read(rung, tmp_path: Path) -> None:
    path = tmp_path / "bad.ir"
    path.write_text("program f(x: f32[4] input)\n  y = exq(x) : f32[4]\n  return y\n")
    code, out, err = rung("opt", str(path))
    assert (code, out) == (1, "")
    assert f"{path}:2:" in err


# --- explain

def test_explain_in_sections(rung) -> None:
    code, out, _ = rung("explain", "-c", "torch.randn(5).floor() + 1", "--only", "plan",
                        "--again", "torch.randn(7)")
    assert code == 0
    assert "host plan" in out and "recompiles: 1" in out and "kernel floor_add\n" not in out


# --- bisect and doctor

def test_bisect_tells_each_pass(rung) -> None:
    code, out, err = rung("bisect", "-c", RELU_MM)
    assert (code, err) == (0, "")
    assert "  loop.fuse                ok\n" in out
    assert out.endswith("no pass changes the result\n")


def test_repro_writes_a_file(rung, tmp_path: Path) -> None:
    path = tmp_path / "graph.py"
    code, out, err = rung("repro", "-c", RELU_MM, "-o", str(path))
    assert (code, out) == (0, "")
    assert err == (f"rung: wrote {path} and {path.with_suffix('.pt')}, its inputs\n"
                   f"{RELU_MM}: rung and eager agree\n")
    assert "rung and eager agree" in path.read_text()
    assert path.with_suffix(".pt").exists()
    code, out, _ = rung("repro", "-c", RELU_MM, "--kernel", "mm_relu")
    assert code == 0 and out.startswith("# rung opt") and "kernel mm_relu(" in out


def test_doctor_fails_where_the_compiler_halves_sums(rung, settings: Callable[..., None],
                                                     tmp_path: Path) -> None:
    settings(cc=str(faulty(tmp_path, HALF)))
    code, out, err = rung("doctor")
    assert code == 1 and not err
    assert "kinds of kernels are wrong" in out and "counts: changes result" in out
    assert "may compile them wrongly: use another one (RUNG_CC=clang" in out


def test_doctor_fails_where_something_is_missing(rung, settings: Callable[..., None]) -> None:
    code, out, err = rung("doctor")
    assert (code, err) == (0, "") and out.endswith("all is well\n")
    settings(cc="no-such-compiler")
    code, out, err = rung("doctor")
    assert (code, err) == (1, "")
    assert "no  compiler" in out


# --- reports as JSON

def keys_of(data: Any, values: frozenset[str]) -> set[str]:
    """All keys, but for those of the dicts at `values`, which are names of the program."""
    inner = list(data.items() if isinstance(data, dict) else enumerate(data))
    return {k for k, _ in inner if isinstance(k, str)}.union(*(
        keys_of(x, values) for k, x in inner if isinstance(x, dict | list) and k not in values))


@pytest.mark.parametrize("args", [
    ("doctor",), ("explain", "-c", RELU_MM, "--train"),
    ("explain", "-c", "(lambda x: torch.sort(x)[0] + 1)(torch.randn(9))", "--again",
     "torch.randn(5)"),
    ("certify", "{module}:build")])
def test_reports_have_the_keys_that_are_documented(rung, module: str, tmp_path: Path,
                                                   args: tuple[str, ...]) -> None:
    args = tuple(x.format(module=module) if x.endswith(":build") else x for x in args)
    code, out, _ = rung(*args, "--json")
    assert code == 0
    data = json.loads(out)
    text = (Path(__file__).parents[1] / "docs" / "json.md").read_text()
    section = text.split(f"## `rung {args[0]}`")[1].split("\n## ")[0]
    items = re.findall(r"^ *- (.*?):", section, re.M)
    known = {key for item in items for key in re.findall(r"`(\w+)`", item)}
    found = keys_of(data, frozenset({"sizes", "peak_bytes"}) | (
        {"seconds"} if args[0] == "certify" else set()))
    assert found <= known
    assert known - found <= {"line", "reason", "remedy", "what", "why", "lines"}
    path = tmp_path / "report.json"
    code, out, _ = rung(*args, "--json", str(path))
    assert code == 0 and not out.startswith("{")
    assert json.loads(path.read_text()).keys() == data.keys()


def test_a_report_says_what_the_text_says(rung, module: str,
                                          settings: Callable[..., None]) -> None:
    _, out, _ = rung("explain", "-c", RELU_MM, "--json")
    (graph,) = json.loads(out)["graphs"]
    (kernel,) = graph["kernels"]
    assert graph["flops"] == kernel["flops"] == 2 * 20 * 12 * 16 and kernel["calls"] == 1
    assert kernel["mapping"].startswith(f"map {kernel['name']} on ")
    settings(cc="no-such-compiler")
    code, out, _ = rung("doctor", "--json")
    data = json.loads(out)
    assert code == 1 and data["well"] is False
    assert {x["name"] for x in data["findings"] if x["remedy"]} >= {"compiler", "kernel"}


# --- bench

def test_bench_writes_its_figures(rung, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    code, out, _ = rung("bench", "relu_mm", "--quick", "--against", "eager", "--json", str(path))
    assert code == 0
    assert "relu_mm" in out and "of the FMA peak" in out
    found = json.loads(path.read_text())
    assert {"processor", "torch", "python", "threads", "seed", "target"} <= found.keys()
    (row,) = found["results"]
    assert row["seconds"].keys() == {"rung", "eager"}
    assert row["difference"] < 1e-5
    assert 0 < row["share_of_peak"] < 2


QUICK = ("--quick", "--against", "eager")


def test_bench_of_the_users_file(rung, module: str, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    code, out, _ = rung("bench", f"{module}:build", *QUICK, "--json", str(path))
    assert code == 0 and f"\n{module}:build" in out
    (row,) = json.loads(path.read_text())["results"]
    assert row["launches"] == 1 and row["ratio"].keys() == {"eager"}
    code, out, err = rung("bench", f"{module}:broken", *QUICK, "--json", str(path))
    assert code == 1 and "ZeroDivisionError" in out and "rung: error: " in err
    assert "ZeroDivisionError" in json.loads(path.read_text())["results"][0]["error"]
    code, out, err = rung("bench", f"{module}:none")
    assert code == 2 and "it has broken, build, scaled, wrong" in err


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (OSError("full"), 1)])
def test_bench_keeps_what_was_measured(rung, error: BaseException, code: int, tmp_path: Path,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tmp_path / "figures.json", bench.measured

    def measured(case: Benchmark, *rest: Any) -> bench.Row:
        if case.name == "tiny":
            return real(case, *rest)
        raise error
    monkeypatch.setattr(bench, "measured", measured)
    monkeypatch.setattr(bench, "BENCHMARKS", bench.BENCHMARKS[:2])
    monkeypatch.setattr(bench, "first_calls", lambda *_: {"name": "first"})
    found, out, _ = rung("bench", *QUICK, "--json", str(path))
    assert found == code and "\ntiny " in out
    first, *rest = json.loads(path.read_text())["results"]
    assert "seconds" in first
    assert [row.get("error") for row in rest] == ([] if code == 130 else ["OSError: full", None])


def test_bench_skips_what_needs_a_library_that_is_not_there(
        rung, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    code, out, _ = rung("bench", "timm", *QUICK)
    assert code == 1  # nothing was measured
    rows = [line for line in out.splitlines() if "skipped: timm cannot be imported" in line]
    assert len(rows) == 12 and all("rung[bench]" in row for row in rows)


def test_rows_in_other_batches_and_types() -> None:
    model, inputs, batch = Variant("resnet", 8, "bfloat16").built(quick=True)
    assert batch == len(inputs["input"]) == 8
    assert {x.dtype for x in (*model.parameters(), *inputs.values())} == {torch.bfloat16}
    assert {"bert_bf16", "train_vit_bf16", "swin_b2", "swin_b8_bf16"} <= set(NAMES)


@pytest.mark.slow
def test_first_call_in_a_new_process(rung) -> None:
    code, out, _ = rung("bench", "first_call", "--against", "eager")
    assert code == 0
    for what in ("floor(x) + 1", "bert"):
        assert f"first_call of {what} rung:" in out and f"first_call of {what} eager:" in out
    assert "s of CPU" in out and "; warm " in out
