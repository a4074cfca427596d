"""Typed doors to numba: one decorator for every compiled function, where its machine code is kept, and a cache hint."""

import contextlib
import functools
import inspect
import os
import stat
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba.core import caching, cgutils, types
from numba.extending import intrinsic

from specds.caches import SUGGESTION, StartUpWarning, cache_directories, cache_directory, claim, is_private, lasts
from specds.errors import OutputError
from specds.version import __version__

F = TypeVar("F", bound=Callable[..., Any])
_KIND = "compiled"
_ROOT = 0
_OPEN_FILES = Path("/proc/self/fd")

# Widens array entries before arithmetic, which in uint16 would wrap; typed as what it is once compiled.
int64 = cast(Callable[[Any], int], np.int64)


def compiled(function: F) -> F:
    """Compile `function` on its first call, keep the machine code on disk, and release the GIL while it runs.

    Strict arithmetic is asked for by name: what is not said is taken over from whoever calls the function first, a
    loose one included, and would be kept on disk so.
    """
    return cast(F, _cached(numba.njit(nogil=True, fastmath=False)(function), function))


def compiled_inside(function: F) -> F:
    """The same for functions that compiled ones call often: no references are counted, which costs more than they do.

    Such a function makes no array and returns none, slices included; the first is refused, the second is not.
    """
    return cast(F, _cached(numba.njit(nogil=True, fastmath=False, _nrt=False)(function), function))


def compiled_loosely(function: F) -> F:
    """The same with sums and maxima in any order, so that they run many numbers at a time.

    For what drafts are chosen by, never for what a text depends on. NaN is not expected.
    """
    return cast(F, _cached(numba.njit(nogil=True, fastmath=True)(function), function))


def _cached(dispatcher: Any, function: Callable[..., Any]) -> Any:
    """The compiled function, with a cache of ours in the place of numba's.

    numba's own refuses to compile at all where it can write nowhere, and takes a directory whoever owns it.
    """
    with contextlib.suppress(OSError, TypeError):  # a function without a file is compiled each time
        places = _places(Path(inspect.getfile(function)).parent)
        writable = None if places.own is None else _cache_at(places.own)(function)
        dispatcher._cache = _Kept(writable, [_cache_at(place)(function) for place in places.others], places.complaint)
    return dispatcher


class _Kept:
    """A compiled function's cache over several directories, as numba asks for one. None of them is needed.

    Args:
        own: what is compiled is kept there; None: nowhere.
        others: what is compiled already may lie there, too.
        complaint: what is to be said, once, when something had to be compiled.
    """

    def __init__(self, own: Any, others: Sequence[Any], complaint: str | None) -> None:
        self._own, self._others, self._complaint = own, others, complaint
        self.cache_path = None if own is None else own.cache_path

    def load_overload(self, signature: Any, context: Any) -> Any:
        """The machine code for a signature; None if it is kept nowhere."""
        for cache in filter(None, (self._own, *self._others)):
            try:
                code = cache.load_overload(signature, context)
            except Exception:  # a file cut by a power failure is unpickled: anything may come of it
                if cache is self._own:
                    self.flush()
                continue
            if code is not None:
                return code
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Keep machine code. A disk that is full by now costs the next start, not this run."""
        if self._complaint is not None:
            _warn(self._complaint)
        if self._own is not None:
            with contextlib.suppress(OSError):
                self._own.save_overload(signature, result)

    def flush(self) -> None:
        """Forget what is kept."""
        if self._own is not None:
            with contextlib.suppress(OSError):
                self._own.flush()

    def enable(self) -> None:
        """Always so."""

    def disable(self) -> None:
        """Never so."""


@functools.cache
def _cache_at(place: Path) -> Any:
    """numba's class of caches, for one directory."""

    class Here(caching.InTreeCacheLocator):  # type: ignore[misc]
        def get_cache_path(self) -> str:
            return str(place)

        def get_source_stamp(self) -> Any:
            # A file's own content says nothing about what it calls in other files; another version says: all is new.
            return __version__, super().get_source_stamp()

        @classmethod
        def from_function(cls, function: Any, file: str) -> Any:
            return cls(function, file)

    class Files(caching.CompileResultCacheImpl):  # type: ignore[misc]
        _locator_classes = (Here,)

    class Cache(caching.FunctionCache):  # type: ignore[misc]
        _impl_class = Files

    return Cache


class _Places(NamedTuple):
    own: Path | None
    others: tuple[Path, ...] = ()
    complaint: str | None = None


@functools.cache
def _places(package: Path) -> _Places:
    """Where machine code of a package's functions is kept from now on, and where else some may lie.

    The first of: what numba was told, the package's `__pycache__`, the user's cache, a temporary directory. None but
    those that nobody may write to who could not change the code itself.
    """
    inside = package / "__pycache__"
    with contextlib.suppress(OSError):
        inside.mkdir(exist_ok=True)
    baked = [inside] if _is_as_safe_as(inside, package) else []
    name = caching.UserProvidedCacheLocator.get_suitable_cache_subpath(str(package / "__init__.py"))
    if numba.config.CACHE_DIR and (own := _own(Path(numba.config.CACHE_DIR).absolute() / name)):
        return _Places(own, tuple(baked))
    if baked and os.access(inside, os.W_OK | os.X_OK):
        return _Places(inside)
    kept: Path | None = None
    complaint: str | None = "compiled code can be kept nowhere, so that each start compiles for some ten seconds"
    with contextlib.suppress(OutputError):
        kept = cache_directory(_KIND)
    own = None if kept is None else _own(kept / name)
    others = [folder / name for folder in cache_directories(_KIND) if folder != kept]
    if kept is not None and own is not None:
        said = f"compiled code is kept in {kept}: a start that does not find it there compiles for some ten seconds"
        complaint = None if lasts(kept) else said
    return _Places(own, (*baked, *filter(None, map(_pinned, others))), complaint)


def _own(directory: Path) -> Path | None:
    return _pinned(directory) if claim(directory) else None


def _pinned(directory: Path) -> Path | None:
    """A private directory by an open file: whatever comes to stand at its path, it stays the one that was checked.

    None where it is not private, or where the system has no such paths.
    """
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    path = _OPEN_FILES / str(handle)
    if is_private(os.fstat(handle)) and path.is_dir():
        return path
    os.close(handle)
    return None


def _is_as_safe_as(inside: Path, package: Path) -> bool:
    """Whether nobody may write to a directory who may not write to the package, too."""
    try:
        found, code = inside.lstat(), package.stat()
    except OSError:
        return False
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (_ROOT, os.geteuid(), code.st_uid):
        return False
    open_to = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return not open_to & ~code.st_mode and (found.st_gid == code.st_gid or not open_to & stat.S_IWGRP)


@functools.cache
def _warn(text: str) -> None:
    """Once for all packages."""
    warnings.warn(f"{text} — {SUGGESTION}", StartUpWarning, stacklevel=2)


_BYTE_POINTER = ir.PointerType(ir.IntType(8))


def _hint(builder: Any, address: Any) -> None:
    flag = ir.IntType(32)
    hint = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, flag, flag, flag]),
        "llvm.prefetch.p0",
    )
    # read, keep in every level, data cache
    builder.call(hint, [address, flag(0), flag(3), flag(1)])


def _prefetch(typingctx: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of `array[index]`. A hint: an index outside the array is harmless."""
    if not (isinstance(array, types.Array) and array.ndim == 1 and isinstance(index, types.Integer)):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, args[0])
        offset = context.cast(builder, args[1], signature.args[1], types.intp)
        _hint(builder, builder.bitcast(builder.gep(view.data, [offset]), _BYTE_POINTER))
        return context.get_dummy_value()

    return types.void(array, index), codegen


def _prefetch_address(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line of an address. A hint: any address is harmless."""
    if not isinstance(address, types.Integer):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        where = context.cast(builder, args[0], signature.args[0], types.intp)
        _hint(builder, builder.inttoptr(where, _BYTE_POINTER))
        return context.get_dummy_value()

    return types.void(address), codegen


prefetch = cast(Callable[[Any, Any], None], intrinsic(_prefetch))
prefetch_address = cast(Callable[[int], None], intrinsic(_prefetch_address))


def _loader(bits: int, signed: bool) -> Any:
    """An integer at an address, widened to int64. Nothing checks the address."""

    def load(typingctx: Any, address: Any) -> Any:
        if not isinstance(address, types.Integer):
            return None

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            where = context.cast(builder, args[0], signature.args[0], types.intp)
            pointer = builder.inttoptr(where, ir.PointerType(ir.IntType(bits)))
            value = builder.load(pointer, align=1)
            word = ir.IntType(64)
            if bits == 64:
                return value
            return builder.sext(value, word) if signed else builder.zext(value, word)

        return types.int64(address), codegen

    return load


load_uint16 = cast(Callable[[int], int], intrinsic(_loader(16, False)))
load_uint32 = cast(Callable[[int], int], intrinsic(_loader(32, False)))
load_int32 = cast(Callable[[int], int], intrinsic(_loader(32, True)))
load_int64 = cast(Callable[[int], int], intrinsic(_loader(64, True)))
