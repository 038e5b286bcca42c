"""What a user gives as FILE.py:BUILD: how the file is imported, and what BUILD may return."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from rung import cli
from rung.tools.given import UserError, from_file

NET = '''\
import torch
import torch.nn.functional as F
from torch import nn

class Act(nn.Module):
    def forward(self, x, *, scale=1.0):
        return F.relu(x) * scale

def build():
    return nn.Sequential(nn.Linear(4, 4), Act()), (torch.randn(3, 4),)

def keywords(batch=3):
    return Act(), (torch.randn(batch, 4),), {"scale": torch.randn(4)}

def one():
    return Act(), torch.randn(3, 4)

def wrong():
    return Act(), 3

def fails(batch=3):
    return Act(), (nn.Linear(4, 4)(torch.randn(batch, 5)),)

def narrow():
    return nn.Sequential(Act(), nn.Linear(4, 4)), (torch.randn(3, 5),)

if __name__ == "__main__":
    raise SystemExit("run as a script")
'''
COMMANDS = ("show", "explain", "bisect", "repro", "certify")


@pytest.fixture(autouse=True)
def modules(tmp_path: Path) -> Iterator[None]:
    """What is imported here is not what a later test finds."""
    paths = list(sys.path)
    yield
    sys.path[:] = paths
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def net(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    return tmp_path / "net.py"


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = cli.main(args)
    return code, *capsys.readouterr()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("build", ["build", "keywords"])
def test_commands_take_classes_of_the_file_and_keywords(
        command: str, build: str, net: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, command, f"{net}:{build}")
    assert code == 0, err
    if command == "certify":
        assert out.endswith("certified\n") and "nothing was compiled" not in out


@pytest.mark.parametrize("command", COMMANDS)
def test_an_error_names_the_innermost_line_of_the_user(
        command: str, net: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = NET[:NET.index("return Act(), (nn.Linear")].count("\n") + 1
    code, out, err = run(capsys, command, f"{net}:fails")
    assert (code, out) == (1, "")
    told = "return Act(), (nn.Linear(4, 4)(torch.randn(batch, 5)),)"
    assert err.endswith(f"\n  {net}:{line}: {told}\n")
    assert "RuntimeError: mat1 and mat2" in err and "Traceback" not in err


def test_keywords_of_ranges(net: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "certify", f"{net}:keywords", "--dim", "batch=2..2", "--train")
    assert code == 0 and "0 wrong" in out
    code, _, err = run(capsys, "certify", f"{net}:fails", "--dim", "batch=2..2")
    assert code == 1 and f"{net}:" in err


def test_what_fails_in_eager_names_the_innermost_line_of_the_user(
        net: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (net.parent / "layers.py").write_text("def joined(x):\n    return x @ x\n")
    net.write_text(NET.replace("F.relu(x)", "layers.joined(x)").replace(
        "import torch\n", "import torch\nimport layers\n", 1))
    code, _, err = run(capsys, "show", f"{net}:one")
    assert code == 1
    assert err.splitlines()[-1] == f"  {net.parent / 'layers.py'}:2: return x @ x"


@pytest.mark.parametrize(("text", "code", "says"), [
    (NET + "\nimport nothing_that_is_there\n", 1, "ModuleNotFoundError: No module named 'nothing"),
    (NET + "\nx = = 3\n", 1, "SyntaxError: invalid syntax"),
    (NET + "\nraise SystemExit(0)\n", 1, "SystemExit: 0"),
    (NET.replace("def build", "def other"), 2, "has no function 'build'; it has Act, fails"),
])
def test_files_that_cannot_be_imported(text: str, code: int, says: str, net: Path,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    net.write_text(text)
    found, out, err = run(capsys, "show", f"{net}:build")
    assert (found, out) == (code, "") and says in err
    if code == 1:
        last = text.splitlines()[-1]
        assert err.splitlines()[-1] == f"  {net}:{len(text.splitlines())}: {last}"


def test_results_of_build(net: Path) -> None:
    found = from_file(f"{net}:one")
    assert [tuple(x.shape) for x in found.args] == [(3, 4)] and not found.kwargs
    assert set(from_file(f"{net}:keywords").kwargs) == {"scale"}
    with pytest.raises(UserError, match=r"must return .* not Act, int$"):
        from_file(f"{net}:wrong")


def test_classes_are_found_by_their_module(net: Path) -> None:
    model = from_file(f"{net}:build").function
    assert isinstance(model, nn.Sequential)
    again = pickle.loads(pickle.dumps(model))
    assert type(again[1]) is type(model[1]) and type(model[1]).__module__ == "net"


def test_a_relative_name(net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(net.parent)
    assert from_file("net.py:one").function.__class__.__module__ == "net"


def test_a_name_that_another_module_has(tmp_path: Path) -> None:
    import copy
    path = tmp_path / "copy.py"
    path.write_text(NET)
    found = from_file(f"{path}:build").function
    assert sys.modules["copy"] is copy
    assert isinstance(found, nn.Sequential)
    assert pickle.loads(pickle.dumps(found[1])).__class__ is found[1].__class__


@pytest.mark.parametrize("imports", ["from .layers import Act", "from pack.layers import Act",
                                     "from layers import Act"])
def test_a_member_of_a_package(imports: str, tmp_path: Path) -> None:
    inner = tmp_path / "pack" / "inner"
    inner.mkdir(parents=True)
    for name in ("__init__.py", "inner/__init__.py"):
        (tmp_path / "pack" / name).write_text("")
    (tmp_path / "pack" / "types.py").write_text("raise RuntimeError('not the standard one')\n")
    (tmp_path / "pack" / "layers.py").write_text(NET)
    path = tmp_path / "pack" / "net.py"
    path.write_text(f"import types\nimport torch\n{imports}\n"
                    "def build():\n    return Act(), torch.randn(3)\n")
    found = from_file(f"{path}:build")
    assert torch.equal(found.function(*found.args), found.args[0].relu())
    deep = inner / "net.py"
    deep.write_text("import torch\nfrom ..layers import Act\n"
                    "def build():\n    return Act(), torch.randn(3)\n")
    assert from_file(f"{deep}:build").function.__class__.__module__ == "pack.layers"
