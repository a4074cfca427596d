"""Break files at random, have them read, and see that every time it ends as it should; `python -m tests.hostile.fuzz`.

A mutation is known by its reader, its seed and its number. Children read, so that deaths, hangs and hunger for memory
are seen from outside; the parent goes on after the mutation that did it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import mmap
import os
import random
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specds.cli.main import explained
from specds.errors import SpecdsError, shortage

from ..conftest import make_model
from .mutations import mutate_bytes, reseal
from .readers import CommandFailed, Reader, check_text, language_model, make_base, outcome, readers

MOST_SECONDS, MOST_WAIT = 20.0, 300.0  # of one mutation: computed, and waited for
MOST_GROWTH = 512 << 20  # bytes that a child may come to hold above what it held at first
_ROOM = 4 << 30
_LOOK = 1.0  # seconds between looks at a child that is silent
_COMMANDS = 0.06  # of the mutations are read by a command; the others by the library, which is faster


@dataclass
class Mutant:
    """What became of one mutation."""

    what: str
    how: list[str]
    ended: str
    finding: str = ""


class Folder:
    """Files that are put back before each mutation."""

    def __init__(self, path: Path, base: Path) -> None:
        self.path = path
        self.pristine = {one.relative_to(base).as_posix(): one.read_bytes() for one in base.rglob("*") if one.is_file()}
        self._touched = set(self.pristine)
        self._stamps: dict[str, tuple[int, int]] = {}
        self.reset(thorough=True)

    def write(self, name: str, data: bytes) -> None:
        """Put something else in the place of a file, until the next `reset`."""
        (self.path / name).write_bytes(data)
        self._touched.add(name)

    def touch(self, name: str) -> None:
        """Say that a file is another now."""
        self._touched.add(name)

    def reset(self, *, thorough: bool) -> None:
        """Put back what was changed.

        Args:
            thorough: look at all files, and take away what was added; else only those that `write` changed.
        """
        names = self._touched
        if thorough:
            there = {one.relative_to(self.path).as_posix(): one for one in self.path.rglob("*") if not one.is_dir()}
            for name in there.keys() - self.pristine.keys():
                there[name].unlink()
            known = self.pristine.keys() & there.keys()
            changed = {name for name in known if self._stamps.get(name) != self._stamp(there[name])}
            names = (names | changed | (self.pristine.keys() - there.keys())) & self.pristine.keys()
        for name in names:
            file = self.path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)
            file.write_bytes(self.pristine[name])
            self._stamps[name] = self._stamp(file)
        self._touched = set()

    @staticmethod
    def _stamp(file: Path) -> tuple[int, int]:
        about = file.lstat()
        return about.st_ino, about.st_mtime_ns


def mutate(reader: Reader, folder: Folder, rng: random.Random) -> list[str]:
    """Break one or two files of a reader; returns what was done."""
    done = []
    for name in rng.sample(sorted(reader.files), min(len(reader.files), rng.choice([1, 1, 1, 1, 2]))):
        ways = reader.files[name]
        place = rng.randrange(len(ways))
        data = folder.pristine[name]
        state = rng.getstate()
        try:
            changed = ways[place](rng, data)
        except Exception as error:  # what cannot be written is not there to be read
            rng.setstate(state)
            changed = mutate_bytes(rng, data, [])
            done.append(f"{type(error).__name__} from way {place}: {str(error)[:80]}")
        folder.write(name, changed)
        done.append(f"{name} way {place}: {len(data)} → {len(changed)} bytes")
    if reader.sealed is not None and rng.random() < 0.9:
        folder.touch(f"{reader.sealed}/manifest.json")
        done.append("resealed" if reseal(folder.path / reader.sealed) else "not resealed")
    return done


def attempt(reader: Reader, folder: Folder, rng: random.Random, *, commands: float) -> Mutant:
    """One mutation, read."""
    how = mutate(reader, folder, rng)
    if reader.commands and rng.random() < commands:
        argv = rng.choice(reader.commands)
        mutant = _by_command(argv, how)
        folder.reset(thorough=True)
        return mutant
    try:
        return _by_library(reader, how)
    finally:
        folder.reset(thorough=reader.writes)


def _by_library(reader: Reader, how: list[str]) -> Mutant:
    try:
        reader.read()
    except CommandFailed as error:
        return Mutant(reader.name, how, "shown", str(error))
    except Exception as error:
        # What was asked for beyond all memory was not bounded before, whatever name the failure got.
        told = shortage(error) or (error if isinstance(error, SpecdsError) else explained(error))
        finding = ""
        if told is not error:
            finding = f"{told.message}\n{''.join(traceback.format_exception(error))}"
        elif len(told.message) > 20_000:
            finding = f"a message of {len(told.message)} characters: {told.message[:300]}"
        return Mutant(reader.name, how, type(error).__name__, finding)
    return Mutant(reader.name, how, "read")


def _by_command(argv: Sequence[str], how: list[str]) -> Mutant:
    what = " ".join(argv)
    os.environ["SPECDS_DEBUG"] = ""
    code, out, err = outcome(argv)
    complaints = [line for line in err.splitlines() if line.startswith("error: ")]
    finding = ""
    if code not in (0, 1, 2):
        finding = f"exit code {code}"
    elif "Traceback" in err + out or "error: unexpected" in err or "error: not enough memory —" in err:
        finding = "an error without a name"
    elif len(complaints) > 1 or (complaints and " — " not in complaints[0]):
        finding = "not one line with a hint"
    else:
        try:
            check_text(what, out)
            check_text(what, err)
        except CommandFailed as error:
            finding = str(error)
    if finding:
        finding += f"\n{out[-300:]!r}\n{err[-2_000:]}"
    return Mutant(what, how, f"exit {code}", finding)


@dataclass
class Tally:
    """What came of all mutations of one reader."""

    mutations: int = 0
    seconds: float = 0.0
    ended: dict[str, int] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)


def hunt(
    base: Path,
    chosen: Sequence[Reader],
    *,
    count: int,
    seed: int,
    seconds: float | None = None,
    first: int = 0,
    commands: float = _COMMANDS,
    keep: Path | None = None,
) -> dict[str, Tally]:
    """Share out mutations among readers, by weight and in turns, until they or the time are used up."""
    ends = None if seconds is None else time.monotonic() + seconds
    found = {reader.name: Tally() for reader in chosen}
    turns = [reader for reader in chosen for _ in range(reader.weight)]
    random.Random(seed).shuffle(turns)
    at = first
    while at < first + count and (ends is None or time.monotonic() < ends):
        for line in _child(base, turns, at, first + count, seed, ends, commands, keep):
            tally = found[line["reader"]]
            tally.mutations += 1
            tally.seconds += line["seconds"]
            tally.ended[line["ended"]] = tally.ended.get(line["ended"], 0) + 1
            if line["finding"]:
                tally.findings.append(line)
                print(f"{line['reader']} {line['number']}: {line['finding'][-300:]}", file=sys.stderr)
            at = line["number"] + 1
    return found


def _child(
    base: Path,
    turns: Sequence[Reader],
    at: int,
    end: int,
    seed: int,
    ends: float | None,
    commands: float,
    keep: Path | None,
) -> Iterator[dict[str, Any]]:
    """What a child makes of mutations, from `at` on, until it is through, or dies, or hangs."""
    shared = mmap.mmap(-1, 16)
    reading, writing = os.pipe()
    work = Path(tempfile.mkdtemp(prefix="specds-fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reading)
        code = 1
        try:
            _work(base, work, turns, at, end, seed, ends, commands, shared, writing)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    held, last, seen, used = b"", -1, time.monotonic(), 0.0
    while True:
        if select.select([reading], [], [], _LOOK)[0]:
            piece = os.read(reading, 1 << 16)
            if not piece:
                break
            held += piece
            *lines, held = held.split(b"\n")
            yield from map(json.loads, lines)
            continue
        number = struct.unpack("<q", shared[:8])[0]
        if number != last:
            last, seen, used = number, time.monotonic(), _used(child)
        # A busy machine may leave the child without a turn for long; what waits for nothing never gets one.
        if _used(child) - used > MOST_SECONDS or time.monotonic() - seen > MOST_WAIT:
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(reading)
    code = os.waitstatus_to_exitcode(status)
    number, done = struct.unpack("<qq", shared[:16])
    if code != 0 and number > done:
        reader = turns[number % len(turns)]
        hung = code == -signal.SIGKILL
        ended = "hang" if hung else f"death by {code}"
        yield {
            "reader": reader.name,
            "what": f"see it with --first {number} --count 1",
            "how": [],
            "number": number,
            "seconds": 0.0,
            "ended": ended,
            "finding": ended,
        }
    elif code not in (0, 3):
        raise RuntimeError(f"the harness itself failed with {code}")
    if keep is not None and code not in (0, 3):
        shutil.copytree(work, keep / f"{number}", dirs_exist_ok=True)
    shutil.rmtree(work, ignore_errors=True)


def _work(
    base: Path,
    work: Path,
    turns: Sequence[Reader],
    at: int,
    end: int,
    seed: int,
    ends: float | None,
    commands: float,
    shared: mmap.mmap,
    pipe: int,
) -> None:
    folder = Folder(work, base)
    os.chdir(work)
    # Hunger is found by what is held, and stopped by what may be asked for.
    resource.setrlimit(resource.RLIMIT_AS, (_virtual() + _ROOM, resource.RLIM_INFINITY))
    least = _peak()
    for number in range(at, end):
        if ends is not None and time.monotonic() > ends:
            return
        shared[:8] = struct.pack("<q", number)
        reader = turns[number % len(turns)]
        began = time.monotonic()
        mutant = attempt(reader, folder, random.Random(f"{seed}:{number}"), commands=commands)
        grown = _peak() - least
        if grown > MOST_GROWTH and not mutant.finding:
            mutant.finding = f"took {grown >> 20} MiB"
        record = {
            "reader": reader.name,
            "what": mutant.what,
            "how": mutant.how,
            "number": number,
            "seconds": time.monotonic() - began,
            "ended": mutant.ended,
            "finding": mutant.finding,
        }
        os.write(pipe, (json.dumps(record) + "\n").encode())
        shared[8:16] = struct.pack("<q", number)
        if grown > MOST_GROWTH:
            os._exit(3)  # the next one begins with a clean slate


def _used(child: int) -> float:
    """Seconds of CPU that a process has had."""
    fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _virtual() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main(argv: Sequence[str] | None = None) -> int:
    """Hunt, and print a JSON report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1 << 40, help="mutations")
    parser.add_argument("--seconds", type=float, help="stop after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first mutation")
    parser.add_argument("--commands", type=float, default=_COMMANDS, help="share that is read by commands")
    parser.add_argument("--readers", default="", help="only those whose name holds this")
    parser.add_argument("--libraries", action="store_true", help="break the files of ScaNN and faiss, too")
    parser.add_argument("--base", type=Path, help="keep the good files here, or take them from here")
    parser.add_argument("--keep", type=Path, help="keep the folders of deaths and hangs here")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        base = options.base or Path(temporary) / "base"
        os.environ["XDG_CACHE_HOME"] = str(base.resolve() / "cache")
        if not base.exists():
            base.mkdir(parents=True)
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    make_base(base.resolve(), make_model())
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            if os.waitpid(child, 0)[1]:
                return 1
        base = base.resolve()
        os.chdir(base)
        language_model()
        chosen = [one for one in readers(base, libraries=options.libraries) if options.readers in one.name]
        found = hunt(
            base,
            chosen,
            count=options.count,
            seed=options.seed,
            seconds=options.seconds,
            first=options.first,
            commands=options.commands,
            keep=options.keep,
        )
    report = {name: dataclasses.asdict(tally) for name, tally in found.items()}
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
