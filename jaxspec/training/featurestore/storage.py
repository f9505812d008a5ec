"""Where shards, manifests and a spool lie: one class, a folder today.

Everything that reads or writes stored features goes through `Storage`: whole objects under flat names that appear
atomically, one creation that only the first caller wins, deletion, and a local path for what must be a file. An object
store needs these and nothing else (`create` is a conditional put, `local` a download). The append of the ledger is the
one exception; it belongs to the trainer alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from jaxspec.checkpoints.atomic import replacing_file
from jaxspec.errors import ConfigError, DataError, problem

__all__ = ["Storage"]


class Storage:
    """A folder of objects. Names are flat; those that begin with a dot are not objects.

    Args:
      path: folder; it need not be there to be written.

    Raises:
      ConfigError: a URL; object stores are not supported yet.
    """

    def __init__(self, path: str | os.PathLike[str]):
        if "://" in str(path):
            expected = "a folder (object stores are not supported yet)"
            raise ConfigError(problem("features.path", str(path), expected))
        self.root = Path(path)

    def __str__(self) -> str:
        return str(self.root)

    def names(self, prefix: str = "", suffix: str = "") -> list[str]:
        """Objects with this prefix and suffix, sorted."""
        if not self.root.is_dir():
            return []
        found = (entry.name for entry in os.scandir(self.root) if not entry.name.startswith("."))
        return sorted(name for name in found if name.startswith(prefix) and name.endswith(suffix))

    def check_ours(self, names: tuple[str, ...], what: str) -> None:
        """Raises DataError for a folder that holds something, and none of these."""
        if self.root.exists() and not self.root.is_dir():
            raise DataError(problem("features.path", f"the file {self}", f"{what}, or a free place"))
        found = self.names()
        if found and not set(found) & set(names):
            raise DataError(problem("features.path", f"{self} with {found[0]!r} in it", f"{what}, or a free place"))

    def exists(self, name: str) -> bool:
        """Whether the object is there, whole."""
        return (self.root / name).is_file()

    def size(self, name: str) -> int:
        """Bytes. Raises FileNotFoundError."""
        return (self.root / name).stat().st_size

    def age(self, name: str) -> float | None:
        """Seconds since the object was written or touched; None where it is gone."""
        try:
            return time.time() - (self.root / name).stat().st_mtime
        except FileNotFoundError:
            return None

    def read(self, name: str) -> bytes | None:
        """The whole object; None where it is not there."""
        try:
            return (self.root / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            found = f"{self.root / name}, which cannot be read ({error.strerror or error})"
            raise DataError(problem("features.path", found, "a folder of `jaxspec capture`")) from error

    def local(self, name: str) -> Path:
        """A local file with the object's bytes."""
        return self.root / name

    @contextlib.contextmanager
    def publish(self, name: str) -> Iterator[Path]:
        """A local file to write that becomes the object when the block ends without an error."""
        with self.writing(), replacing_file(self.root / name) as fresh:
            yield fresh

    def write(self, name: str, content: bytes) -> None:
        """Replaces the object."""
        with self.publish(name) as fresh:
            fresh.write_bytes(content)

    def create(self, name: str, content: bytes) -> bool:
        """Writes the object unless it is there; whether this call did. It is never seen with part of its content."""
        with self.writing():
            self.root.mkdir(parents=True, exist_ok=True)
            fresh = self.root / f".{name}.new-{uuid.uuid4().hex[:12]}"
            try:
                fresh.write_bytes(content)
                os.link(fresh, self.root / name)
            except FileExistsError:
                return False
            finally:
                fresh.unlink(missing_ok=True)
            return True

    def touch(self, name: str) -> None:
        """Makes the object young; one that is gone stays gone."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.root / name)

    def delete(self, name: str) -> None:
        """Removes the object if it is there."""
        with self.writing():
            (self.root / name).unlink(missing_ok=True)

    def take(self, name: str) -> bytes | None:
        """Removes the object and returns what it held: of several callers one gets it, the others None."""
        mine = self.root / f".{name}.new-{uuid.uuid4().hex[:12]}"
        try:
            os.rename(self.root / name, mine)
        except FileNotFoundError:
            return None
        content = mine.read_bytes()
        mine.unlink()
        return content

    def sweep(self, older: float = 0.0) -> None:
        """Deletes what writers that died left unfinished, if it was not touched for `older` seconds."""
        if not self.root.is_dir():
            return
        for entry in list(os.scandir(self.root)):
            with contextlib.suppress(FileNotFoundError):
                if (
                    entry.name.startswith(".")
                    and ".new-" in entry.name
                    and time.time() - entry.stat().st_mtime >= older
                ):
                    Path(entry.path).unlink()

    def free(self) -> int:
        """Bytes that the disk has left."""
        place = self.root.absolute()
        while not place.exists():
            place = place.parent
        return shutil.disk_usage(place).free

    @contextlib.contextmanager
    def locked(self, name: str, who: str) -> Iterator[None]:
        """Holds the folder as `name` for this process; the lock ends with it. Raises DataError where another has it."""
        with self.writing():
            self.root.mkdir(parents=True, exist_ok=True)
            try:
                held = FileLock(self.root / f".{name}.lock").acquire(timeout=0)
            except Timeout as error:
                found = f"{self.root}, in use by another {who}"
                raise DataError(problem("features.path", found, f"one {who} at a time")) from error
        with held:
            yield

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around work that writes: DataError where the system refuses."""
        try:
            yield
        except OSError as error:
            found = f"{self.root}, which cannot be written ({error.strerror or error})"
            raise DataError(problem("features.path", found, "a writable place with room")) from error
