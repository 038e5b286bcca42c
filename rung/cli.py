"""The command `rung`: what it understands, its exit codes and its messages.

stdout carries the result alone; headings, warnings and what the user's program prints go to stderr.
Exit codes: 0 done, 1 the program or its compilation failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from rung.core.config import Settings, by_table
from rung.core.errors import RungError
from rung.core.options import Options
from rung.targets import TARGETS
from rung.tools.benchmarks import GPU, GROUPS, NAMES

PASSED, FAILED, USAGE, PIPE, INTERRUPTED = 0, 1, 2, 141, 130
RUNGS = ("torch", "program", "tensor", "loop", "tile", "kernel", "source")
SECTIONS = ("dynamo", "guards", "bytecode", "functional", "aten", "decompositions", "saved",
            "passes", "fusions", "kernels", "splits", "plan", "costs",
            "model")
Report = str | tuple[str, bool]  # the text for stdout, and whether it reports no failure
Result = TypeVar("Result")


class CommandLine(argparse.ArgumentParser):
    """One that speaks as the rest of `rung` does."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"rung: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit code."""
    try:
        settings = Settings.from_environment()
    except ValueError as error:
        return _complain(str(error), USAGE)
    args = parser().parse_args(argv)
    try:
        found = args.run(args)
        text, fine = found if isinstance(found, tuple) else (found, True)
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough; Python must not flush again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except (RungError, OSError) as error:
        if settings.debug:
            raise
        return _complain(str(error) or type(error).__name__, _code(error))
    except Exception as error:
        if settings.debug:
            raise
        return _complain(f"a bug in rung: {type(error).__name__}: {error} (RUNG_DEBUG=1 shows "
                         f"where)", FAILED)
    return PASSED if fine else FAILED


def _complain(message: str, code: int) -> int:
    print(f"rung: error: {message}", file=sys.stderr)
    return code


def _code(error: Exception) -> int:
    from rung.targets.base import UnknownTarget
    from rung.tools.given import UsageError

    return USAGE if isinstance(error, UsageError | UnknownTarget) else FAILED


# --- commands; each imports what it needs, so that `--help` does not load torch

def _show(args: argparse.Namespace) -> str:
    from rung.tools import show

    by_table()
    return _of_a_function(args, show.show)


def _explain(args: argparse.Namespace) -> Report:
    from rung.tools import explain

    if args.html:
        from rung.tools.page import report

        Path(args.html).write_text(_of_a_function(args, report.page), encoding="utf-8")
        print(f"rung: wrote {args.html}", file=sys.stderr)
        return ""
    only = SECTIONS if args.all else tuple(x for x in args.only.split(",") if x)
    text, data = _of_a_function(args, partial(explain.report, only=only))
    return _as_asked(args, text, True, data)


def _bisect(args: argparse.Namespace) -> Report:
    from rung.tools import bisect

    return _of_a_function(args, bisect.bisect)


def _repro(args: argparse.Namespace) -> Report:
    from rung.tools import repro

    made = _of_a_function(args, partial(repro.repro, kernel=args.kernel, out=args.out))
    if not args.out:
        return made
    Path(args.out).write_text(made)
    beside = f" and {Path(args.out).with_suffix('.pt')}, its inputs" * ("torch.load(" in made)
    said = made.splitlines()[0].strip('"')
    print(f"rung: wrote {args.out}{beside}\n{said}", file=sys.stderr)
    return ""


def _certify(args: argparse.Namespace) -> Report:
    from rung.tools import certify

    with redirect_stdout(sys.stderr):
        found = certify.certify(args.build, args.dim, args.target, args.train)
    return _as_asked(args, *found)


def _fuzz(args: argparse.Namespace) -> Report:
    from rung.tools.fuzz import run

    return run.fuzz(run.Request(args.seed, args.count, args.minutes, args.kind, args.target,
                                args.out))


def _doctor(args: argparse.Namespace) -> Report:
    from rung.tools import doctor

    with redirect_stdout(sys.stderr):
        found = doctor.calibrated() if args.calibrate else doctor.doctor()
    return _as_asked(args, *found)


def _as_asked(args: argparse.Namespace, text: str, fine: bool, data: object) -> Report:
    """The text, and with `--json FILE` the data in a file; with `--json` alone the data."""
    made = json.dumps(data, indent=2) + "\n"
    if args.json == "-":
        return made, fine
    if args.json:
        Path(args.json).write_text(made)
    return text, fine


def _of_a_function(args: argparse.Namespace, run: Callable[..., Result]) -> Result:
    from rung.tools import given, show

    request = show.Request(getattr(args, "rung", "all"), args.target, args.train, args.mapping,
                           args.kernel if args.run is _show else "")
    with redirect_stdout(sys.stderr):  # the user's program may print
        what = (given.from_expression(args.expression) if args.expression is not None
                else given.from_file(args.build))
        again = tuple(map(given.arguments, getattr(args, "again", ())))
        return run(replace(what, again=again), request)


def _opt(args: argparse.Namespace) -> str:
    from rung.tools import opt

    passes = tuple(x for x in args.passes.split(",") if x)
    return opt.opt(args.file, opt.Request(passes, args.to, args.target, args.run_it))


def _bench(args: argparse.Namespace) -> Report:
    from rung.tools import bench

    against = tuple(x for x in args.against.split(",") if x)
    return "", bench.bench(args.name, bench.Request(
        against, args.json, args.quick, args.target, args.threads,
        tuple(x for x in args.rows.split(",") if x), args.bars))


# --- arguments; what is wrong with one is told before torch is loaded

def _build(text: str) -> str:
    """FILE.py:BUILD, where the file is there."""
    path, _, name = text.rpartition(":")
    if not path or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected FILE.py:BUILD or -c EXPR, not {text!r}")
    _input(path)
    return text


def _input(text: str) -> str:
    """A file that is there; - is stdin, "" is none."""
    if text not in ("", "-") and (not Path(text).exists() or Path(text).is_dir()):
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return text


def _output(text: str) -> str:
    """A file that can be written to; "" is none."""
    path = Path(text)
    if text and (path.is_dir() or not os.access(
            path if path.exists() else path.parent, os.W_OK)):
        raise argparse.ArgumentTypeError(f"{text} cannot be written to")
    return text


def _benchmark(text: str) -> str:
    if text in NAMES:
        return text
    if ":" in text:
        return _build(text)
    raise argparse.ArgumentTypeError(f"there is no benchmark {text!r}; there are "
                                     f"{', '.join(NAMES)}, or FILE.py:BUILD")


def _at_least(least: int, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    """A number that is not less."""
    def number(text: str) -> float:
        try:
            found = kind(text)
        except ValueError:
            found = float("nan")
        if found >= least:
            return found
        raise argparse.ArgumentTypeError(f"expected a number from {least} on, not {text!r}")
    return number


# --- the parser

def parser() -> CommandLine:
    """All commands and options."""
    made = CommandLine(prog="rung", description="An ML compiler one can read: see every step from "
                       "a PyTorch function to the kernels that run it.", epilog=_epilog(),
                       formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--version", action="version", version=_version())
    commands = made.add_subparsers(title="commands", metavar="COMMAND", required=True)
    show = _command(commands, "show", "print a function on every rung, or on one of them", _show)
    show.add_argument("--rung", choices=(*RUNGS, "nest", "all"), default="all",
                      help="only this rung, with nothing else on stdout (default: all), or `nest`: "
                      "the loops of the mappings, between tile and kernel")
    show.add_argument("--kernel", default="", metavar="NAME",
                      help="only this kernel; of a function of many, the default is their index")
    _function_options(show)
    explain = _command(commands, "explain", "tell what became of a function, and why", _explain)
    _function_options(explain)
    explain.add_argument("--only", default="", metavar="A,B",
                         help=f"these sections, in full: {', '.join(SECTIONS)}")
    explain.add_argument("--html", type=_output, default="", metavar="FILE",
                         help="write one page of all of it instead, which opens in a browser "
                         "without a network: every rung, with what each line came from and became")
    explain.add_argument("--all", action="store_true", help="all sections in full")
    explain.add_argument("--again", action="append", default=[], metavar="EXPR",
                         help="call it again with these arguments, an expression such as "
                         "(torch.randn(3, 8), 2): what is compiled anew, and why")
    _json_option(explain)
    opt = _command(commands, "opt", "read a dump, run passes on it, and print it", _opt)
    opt.add_argument("file", type=_input, metavar="FILE.ir",
                     help="a dump of `rung show`; - is stdin")
    opt.add_argument("--passes", default="", metavar="A,B", help="run these passes")
    opt.add_argument("--to", choices=RUNGS[1:], default="", help="lower to this rung")
    _target_option(opt)
    opt.add_argument("--run", dest="run_it", action="store_true",
                     help="run the text before and after on random arguments, and compare")
    _function_options(_command(commands, "bisect", "name the first pass that changes the result",
                               _bisect))
    repro = _command(commands, "repro", "write a file that runs a graph or a kernel alone", _repro)
    _function_options(repro)
    repro.add_argument("--kernel", default="", metavar="NAME",
                       help="one kernel, as a dump for rung opt --run; as C where -o ends in .c")
    repro.add_argument("-o", dest="out", type=_output, default="", metavar="FILE",
                       help="write this file, and the inputs beside it (default: stdout)")
    certify = _command(commands, "certify", "compare a function with eager over ranges of sizes",
                       _certify)
    certify.add_argument("build", type=_build, metavar="FILE.py:BUILD",
                         help="BUILD(batch=3) returns (function or module, example arguments)")
    certify.add_argument("--dim", action="append", default=[], metavar="NAME=LOW..HIGH",
                         help="an argument of BUILD, and the sizes it may have, as batch=0..64")
    _json_option(certify)
    certify.add_argument("--train", action="store_true", help="compare gradients too")
    _target_option(certify, "")
    _fuzz_options(_command(commands, "fuzz", "look for random programs that come out wrong", _fuzz))
    doctor = _command(commands, "doctor", "tell whether this machine has what rung needs", _doctor)
    doctor.add_argument("--calibrate", action="store_true",
                        help="measure this CPU again with the threads that there are, and show it")
    _json_option(doctor)
    _bench_options(_command(commands, "bench", "measure against eager and Inductor", _bench))
    return made


def _command(commands: argparse._SubParsersAction[CommandLine], name: str, text: str,
             run: Callable[[argparse.Namespace], Report]) -> CommandLine:
    made = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    made.set_defaults(run=run)
    return made


def _function_options(made: CommandLine) -> None:
    what = made.add_mutually_exclusive_group(required=True)
    what.add_argument("-c", dest="expression", metavar="EXPR",
                      help="an expression; torch, nn and F are in scope, and the results of "
                      "torch.randn and other factories are the inputs")
    what.add_argument("build", nargs="?", type=_build, metavar="FILE.py:BUILD",
                      help="BUILD() returns (function or module, example arguments)")
    _target_option(made, "")
    made.add_argument("--train", action="store_true", help="the forward and backward graphs")
    made.add_argument("--mapping", type=_input, default="", metavar="FILE",
                      help="mappings to use, by kernel")


def _json_option(made: CommandLine) -> None:
    made.add_argument("--json", nargs="?", type=_output, const="-", default="", metavar="FILE",
                      help="the report as JSON, in this file too, or instead of the text")


def _target_option(made: CommandLine, default: str = "cpu") -> None:
    """The option of a machine; without a default it is that of the tensors' device."""
    made.add_argument("--target", default=Settings.from_environment().target or default,
                      metavar="NAME", help="the machine: " + ", ".join(TARGETS)
                      + " (default: RUNG_TARGET, else " + ("cpu" if default else "cpu or cuda, by "
                      "the tensors") + "; cpu is this machine's best)")


def _fuzz_options(made: CommandLine) -> None:
    made.add_argument("--seed", type=_at_least(0), default=0, help="the first seed (default: 0)")
    made.add_argument("--count", type=_at_least(0), default=100, help="how many (default: 100)")
    made.add_argument("--minutes", type=_at_least(0, float), default=0,
                      help="stop after so long (default: 0, no limit)")
    made.add_argument("--mappings", dest="kind", action="store_const", const="mappings",
                      default="programs", help="random mappings of known kernels, not programs; "
                      "those of a target run on its device too, those of any machine (default) on "
                      "NumPy alone")
    made.add_argument("--text", dest="kind", action="store_const", const="text",
                      help="damaged dumps, which must be refused in words")
    made.add_argument("-o", dest="out", default=".", metavar="FOLDER",
                      help="where files of what is wrong go (default: here)")
    _target_option(made)


def _bench_options(made: CommandLine) -> None:
    made.add_argument("name", nargs="?", type=_benchmark, metavar="NAME",
                      help=f"one of {', '.join(NAMES)}, or FILE.py:BUILD, where BUILD() returns "
                      "(function or module, example arguments) (default: all without models; "
                      f"{', '.join(GROUPS)} run groups of these, {', '.join(GPU)} those of a GPU)")
    made.add_argument("--against", default="eager,inductor", metavar="A,B",
                      help="what to compare with (default: eager,inductor)")
    made.add_argument("--json", type=_output, default="", metavar="FILE",
                      help="write the figures here too")
    made.add_argument("--quick", action="store_true", help="tiny sizes: does it run at all?")
    made.add_argument("--threads", type=_at_least(1), default=0, metavar="N",
                      help="threads of all that is measured (default: torch's)")
    made.add_argument("--rows", default="", metavar="A,B",
                      help="of a GPU's rows only those whose names have one of these words")
    made.add_argument("--bars", action="store_true",
                      help="exit with 1 if a row is below what a release must have")
    _target_option(made)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"rung {version('rung')}"
    except PackageNotFoundError:
        return "rung (not installed)"


def _epilog() -> str:
    """The options of torch.compile's `options=` and the environment's variables."""
    rows = [f"  {name:<16} {text} ({kind}, default: {default})"
            for name, kind, default, text in Options.describe()]
    rows += [f"  {'':<16} targets: {', '.join(TARGETS)}", "", "environment variables:"]
    rows += [f"  {name:<16} {text} (default: {default})"
             for name, text, default in Settings.describe()]
    return "\n".join(['options of torch.compile(model, backend="rung", options={...}):', *rows,
                      "", "exit codes: 0 done, 1 the program or its compilation failed, "
                      "2 wrong usage"])
