"""Types of the tokenizer in ``rustvllm._core``, where it is found; there is no module of this name."""

from collections.abc import Iterator, Sequence
from typing import Self, final, overload

import numpy as np
import numpy.typing as npt

@final
class Tokenizer:
    """A Hugging Face fast tokenizer (``tokenizer.json``). Long calls release the interpreter."""

    @staticmethod
    def from_file(path: str) -> Tokenizer: ...
    @staticmethod
    def from_bytes(data: bytes) -> Tokenizer: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def encode_ids(self, text: str, add_special_tokens: bool = True) -> TokenIds: ...
    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]: ...
    def decode(self, token_ids: Sequence[int] | TokenIds, skip_special_tokens: bool = True) -> str: ...
    def id_to_token(self, token_id: int) -> str | None: ...
    def token_bytes(self, token_id: int) -> bytes:
        """What an id adds to a text, which need not be whole characters."""

    def token_to_id(self, token: str) -> int | None: ...
    @property
    def vocab_size(self) -> int:
        """Entries with the added tokens."""

@final
class TokenIds:
    """The ids of a prompt, kept in Rust on their way from the tokenizer to the engine; an immutable sequence."""

    def __new__(cls, ids: list[int] | npt.NDArray[np.int32] | TokenIds, limit: int | None = None) -> Self:
        """Raises ``ValueError`` unless each is an int (no bool) from 0 to ``limit`` − 1."""

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> TokenIds: ...
    def __iter__(self) -> Iterator[int]: ...
    def largest(self) -> int:
        """The largest id; −1 when there is none."""

    def tolist(self) -> list[int]: ...
    def __copy__(self) -> TokenIds: ...
    def __deepcopy__(self, _memo: object, /) -> TokenIds: ...

@final
class TokenizerPool:
    """Tokenises long texts in threads of its own, which never take the interpreter."""

    def __new__(cls, tokenizer: Tokenizer) -> Self:
        """As many threads as processors, 2 to 4; they start with the first texts."""

    @property
    def fd(self) -> int:
        """A descriptor that is readable when there is something to take."""

    def submit(self, text: str, add_special_tokens: bool = True) -> int:
        """Hand a text in; returns the number under which it comes back."""

    def cancel(self, job: int) -> None:
        """Drop a text: its caller no longer waits."""

    def take(self) -> list[tuple[int, TokenIds | Exception]]:
        """What is done since the last call: number and ids, or the error to raise."""

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes of the texts that wait and are worked on."""

def count_body_values(body: bytes) -> list[tuple[str, int, int, int]] | None:
    """What the fields of a JSON object hold, counted without the interpreter and without making any of it.

    Returns:
        Of each field in its order: its name, its values at any depth with itself, and how many of these are objects
        and lists; the fields behind the 256th count as the last one's. None: ``body`` is not one. Whether it is JSON
        at all is for its parser to say.
    """
