""":class:`BatchJournal`: the answers of a batch, on disk from the moment they are there.

While a batch runs, answers are appended to ``OUTPUT.partial`` in the order in which they come, one write each, so that
killed process loses none that was finished. At the end they are put into the order of the input; the journal goes.
"""

import errno
import fcntl
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rustvllm.exceptions import ConfigError
from rustvllm.process.private_file import open_private

SUFFIX = ".partial"
WHOLE_SUFFIX = ".writing"
"""Of the output while it is put together at the end."""
_BEGINNING = b'{"id":'
"""Of every answer."""

Place = tuple[int, int]
"""Where an answer is in the journal: its first byte, and how many."""


class BatchJournal:
    """Answers so far, each a line of the output.

    Args:
        output: The file that the answers are for in the end.
        resume: Go on from the journal of a run that was ended.

    Attributes:
        path: Of the journal.
        earlier: Answers with status 200 of that run, by id.

    Raises:
        ConfigError: A journal exists without ``resume``; it cannot be written; another run writes it.
    """

    def __init__(self, output: Path, *, resume: bool = False) -> None:
        if output.exists() and not output.is_file():
            raise ConfigError(f"the output {output} exists and is not a regular file")
        self.path = output.with_name(output.name + SUFFIX)
        self.earlier: dict[str, Place] = {}
        self._output = output
        try:
            self._file = open(self.path, "ab+", buffering=0, opener=open_private)  # noqa: SIM115 -- closed on exit
        except OSError as exc:
            raise ConfigError(f"the output cannot be written: {self.path}: {exc.strerror}") from exc
        self._end = self._file.seek(0, os.SEEK_END)
        try:
            self._take_over(resume=resume)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it; an empty one goes."""
        if self.path.exists() and not self._end:
            self.path.unlink()
        self._file.close()

    def _take_over(self, *, resume: bool) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"another run is writing {self.path}") from None
        if self._end and not resume:
            raise ConfigError(
                f"{self.path} has the answers of an interrupted run; continue it with --resume, or delete the file"
            )
        self._read_earlier()

    def _read_earlier(self) -> None:
        """Find what was answered; what a killed process left of half a line is cut off."""
        place = 0
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    if not line.startswith(_BEGINNING[: len(line)]):  # another program's file, which must stay whole
                        raise self._stranger(place)
                    break
                try:
                    answer = json.loads(line)
                    if answer["response"]["status_code"] == 200:
                        self.earlier[str(answer["id"])] = (place, len(line))
                except (ValueError, KeyError, TypeError):
                    raise self._stranger(place) from None
                place += len(line)
        self._file.truncate(place)
        self._end = place

    def _stranger(self, place: int) -> ConfigError:
        return ConfigError(
            f"{self.path} is not a journal of a batch at byte {place}; delete or rename it, or choose another output"
        )

    def add(self, answer: bytes) -> Place:
        """Append an answer, a line with its line end.

        Raises:
            OSError: It cannot be written: the disk is full, for instance. Half an answer is taken back.
        """
        place = (self._end, len(answer))
        try:
            rest = memoryview(answer)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(self._end)
            raise
        self._end += len(answer)
        return place

    def finish(self, places: Sequence[Place]) -> None:
        """Write the output, its answers in the order of ``places``, and remove the journal.

        The output is there whole or not at all: it takes its name when it is complete. One that replaces another has
        that one's mode.

        Raises:
            OSError: It cannot be written; the journal stays.
        """
        whole = self._output.with_name(self._output.name + WHOLE_SUFFIX)
        try:
            whole.unlink(missing_ok=True)  # of a run that was killed here
            with self.path.open("rb") as journal, open(whole, "xb", opener=open_private) as output:
                if self._output.exists():
                    whole.chmod(stat.S_IMODE(self._output.stat().st_mode))
                for first, size in places:
                    journal.seek(first)
                    answer = journal.read(size)
                    if len(answer) != size:
                        raise OSError(errno.EIO, "the file shrank while it was read", str(self.path))
                    output.write(answer)
            whole.replace(self._output)
        except OSError:
            whole.unlink(missing_ok=True)
            raise
        self.path.unlink()
        self._end = 0
