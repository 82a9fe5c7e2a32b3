# SPDX-License-Identifier: MIT
# Copyright (c) 2026 the llama_info authors
"""Ask a `llama-server` (llama.cpp) behind a Unix socket four things, and get one of five errors when that fails.

What can a model do (`Client.props`), which of its slots are busy (`Client.slots`), how many tokens is
a text (`Client.tokenize`), and did the server lose the prompt cache between two requests of one
conversation (`cache_outcome`). One file, the standard library alone, Python 3.7 and newer: copy it.
The routes are described in llama.cpp's tools/server/README.md, the numbered rules in this file's README.

    from llama_info import Client, InferError

    client = Client("/run/llama.sock", "qwen3-4b", liveness_ms=60_000)
    try:
        print(client.props().n_ctx, client.tokenize("How long is this?"))
    except InferError as error:
        print(f"{type(error).__name__}: {error}")

Once a call has begun, nothing but an `InferError` leaves it, whatever the server does:

    InferError
    +-- ConnectError            no connection could be opened (also a ConnectionError)
    +-- StalledError            nothing moved for `liveness_ms` (also a TimeoutError)
    +-- StreamClosedEarlyError  the server hung up before its answer was whole (also a ConnectionError)
    +-- ProtocolError           what came is not the HTTP or the JSON expected
    +-- HttpError               another status than 200

`liveness_ms` bounds silence and not the whole call: a server that keeps sending, or taking what is
sent, is alive. The first call for a model loads it, and is silent for as long as that takes.
"""

from __future__ import annotations

import dataclasses
import errno
import http.client
import json
import os
import re
import reprlib
import socket
import sys
import time
from urllib.parse import quote

TYPE_CHECKING = False  # as in typing, which costs a device time and may be absent there
if TYPE_CHECKING:
    from io import BufferedReader
    from typing import Any, Callable, Iterator, TypeVar

    T = TypeVar("T")
    StrOrBytesPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]

__version__ = "1.0.0"
__all__ = [
    "MAX_BODY", "MAX_ERROR_BODY", "CACHE_TOLERANCE", "__version__",
    "InferError", "ConnectError", "StalledError", "StreamClosedEarlyError", "ProtocolError", "HttpError",
    "map_http", "error_text", "Props", "SlotInfo", "Timings", "CacheOutcome", "Hit", "Loss", "cache_outcome",
    "UnixHTTPConnection", "Client",
]

MAX_BODY = 4 * 1024 * 1024  #: bytes; the longest body that is taken for an answer
MAX_ERROR_BODY = 4 * 1024  #: bytes; how much of the body is kept in an `HttpError`
CACHE_TOLERANCE = 64  #: tokens; how far the reuse may fall short and still be a `Hit`

_MAX_LINE = 64 * 1024  # bytes in a line of a head, as in http.client
_MAX_FIELDS = 100  # header fields in a head, about as in http.client
_MAX_HEADS = 9  # before a body: those of interim answers, and its own
_PIECE = 64 * 1024  # bytes of a body asked for at a time
_MAX_DIGITS = 4300  # in a row in JSON: newer Pythons refuse a longer number, older ones take minutes for it
_MAX_DEPTH = 100  # of lists and objects in JSON: little enough for the smallest stack that a thread may have
_MAX_LIVENESS = 2**31 - 1  # ms, 24 days: the longest wait that poll() takes
_MAX_SHOWN = 160  # characters of anything that is quoted in an error
_U32, _U64 = 2**32, 2**64


class InferError(Exception):
    """Base of all that a call can raise; never raised itself."""


class ConnectError(InferError, ConnectionError):
    """Raised when no connection could be opened; `__cause__` is the `OSError` that says why."""


class StalledError(InferError, TimeoutError):
    """Raised when nothing moved, in either direction, for `liveness_ms`."""


class StreamClosedEarlyError(InferError, ConnectionError):
    """Raised when the server closed or reset the connection before its answer was whole."""


class ProtocolError(InferError):
    """Raised when what came is not the HTTP or the JSON expected; the text names the field or the fault."""


class HttpError(InferError):
    """Raised when the server answered with another status than 200.

    `status` (int) is that status; `body` (str) is the start of its body as `error_text` made it, and
    may hold control characters, which the error's own text shows escaped.
    """

    def __init__(self, status: int, body: str) -> None:
        super().__init__(status, body)  # as args, from which pickle and copy make the error anew

    status: int = property(lambda self: self.args[0])  # type: ignore[assignment]
    body: str = property(lambda self: self.args[1])  # type: ignore[assignment]

    def __str__(self) -> str:
        return f"HTTP {self.status}: {_brief(self.body)}" if self.body else f"HTTP {self.status}"


_HANG_UPS = (ConnectionResetError, BrokenPipeError, ConnectionAbortedError, http.client.IncompleteRead)


def map_http(error: Exception) -> InferError:
    """Return the `InferError` for what the transport raised (rule 2); an `InferError` comes back as it is.

    A timeout is a `StalledError`; a hang-up (`http.client.RemoteDisconnected` or `IncompleteRead`, a reset,
    a broken pipe) a `StreamClosedEarlyError`; everything else a `ProtocolError` with the error's message.
    `error` becomes the `__cause__`.
    """
    if isinstance(error, InferError):
        return error
    mapped: InferError
    text = f"{type(error).__name__}: {_brief(str(error))}"
    if isinstance(error, (socket.timeout, TimeoutError)):  # one class only since Python 3.10
        mapped = StalledError(f"nothing moved for liveness_ms ({text})")
    elif isinstance(error, _HANG_UPS):
        mapped = StreamClosedEarlyError(text)
    else:
        mapped = ProtocolError(text)
    mapped.__cause__ = error
    return mapped


def error_text(data: bytes | bytearray | memoryview) -> str:
    """Return the start of an error body (any bytes-like object) as text (rule 3).

    What is not UTF-8 becomes U+FFFD. The text is at most `MAX_ERROR_BODY` bytes when encoded again,
    and is never cut inside a character.
    """
    text = memoryview(data).tobytes().decode("utf-8", "replace")
    return text.encode("utf-8")[:MAX_ERROR_BODY].decode("utf-8", "ignore")


def _brief(text: str) -> str:
    """Return `text` as it may stand in an error: short, on one line, with nothing that drives a terminal."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: _MAX_SHOWN + 1])
    return shown if len(shown) <= _MAX_SHOWN else shown[: _MAX_SHOWN - 3] + "..."


@dataclasses.dataclass(frozen=True)
class Props:
    """What a model can do: three of the many fields of `/props` (rule 4)."""

    chat_template: str  #: the model's chat template, in Jinja
    n_ctx: int  #: tokens, unsigned 64-bit: the context of one slot
    total_slots: int  #: unsigned 32-bit: how many slots the model has


@dataclasses.dataclass(frozen=True)
class SlotInfo:
    """One slot of a model, as `/slots` lists it."""

    id: int  #: unsigned 32-bit
    is_processing: bool  #: whether the slot is busy


@dataclasses.dataclass(frozen=True)
class Timings:
    """The token counts of one request, each an unsigned 64-bit integer.

    After the request its slot holds `cache_n + prompt_n + predicted_n` tokens.
    """

    cache_n: int  #: prompt tokens reused from the prompt cache
    prompt_n: int  #: prompt tokens that had to be processed
    predicted_n: int  #: tokens generated

    @classmethod
    def from_dict(cls, obj: dict[str, Any]) -> Timings:
        """Read the `timings` object that the server sends with a completion; unknown fields are ignored.

        Raises `ProtocolError` where a count is missing or is not a count. A missing `cache_n` is not taken for
        0: older servers did not send it, and nothing can be said of their cache.
        """
        return cls(*(_field(obj, "timings", name, _U64) for name in ("cache_n", "prompt_n", "predicted_n")))


@dataclasses.dataclass(frozen=True)
class CacheOutcome:
    """What became of the prompt cache between two requests: a `Hit` or a `Loss`."""


@dataclasses.dataclass(frozen=True)
class Hit(CacheOutcome):
    """The prompt cache held."""


@dataclasses.dataclass(frozen=True)
class Loss(CacheOutcome):
    """The prompt cache was lost: of `expected` tokens that the slot held, `got` were reused."""

    expected: int
    got: int


def cache_outcome(previous: Timings, current: Timings) -> CacheOutcome:
    """Return whether the prompt cache held from one request of a conversation to its next (rule 7).

    `expected` is what the slot held after `previous`: `cache_n + prompt_n + predicted_n`. It is a `Hit`
    where `current.cache_n` falls short of that by at most `CACHE_TOLERANCE` tokens (a normal turn loses
    one to four at the boundary), else a `Loss`. Where `expected` is itself no more than that, even a
    reuse of 0 is a `Hit`: there was nothing worth losing.
    """
    expected = previous.cache_n + previous.prompt_n + previous.predicted_n
    if current.cache_n + CACHE_TOLERANCE >= expected:
        return Hit()
    return Loss(expected, current.cache_n)


_SURROGATE = "[\ud800-\udfff]"  # what a str can hold, JSON can spell, and nothing can encode
_KINDS = {bool: "true or false", int: "an integer", str: "a string of Unicode", list: "a list", dict: "an object"}
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = 400  # more than _brief() leaves, so that what is cut is the end and not the middle


def _expect(value: Any, path: str, kind: Any) -> Any:
    """Return `value` if it is a `kind`: a type or, for a count, the number it must be below; `path` is its place."""
    if type(kind) is int:
        fits = type(value) is int and 0 <= value < kind
    elif isinstance(value, bool):  # to Python an int, to JSON none
        fits = kind is bool
    else:
        fits = isinstance(value, kind) and not (kind is str and re.search(_SURROGATE, value))
    if not fits:
        wanted = _KINDS.get(kind) or f"an integer from 0 to {kind - 1}"
        raise ProtocolError(f"{path} is {_brief(_SHOWN.repr(value))}, not {wanted}")
    return value


def _field(obj: Any, path: str, name: str, kind: Any) -> Any:
    """Return `obj[name]` as `_expect` does; `path` is the place of `obj`, empty for the whole answer."""
    _expect(obj, path or "the answer", dict)
    path = f"{path}.{name}" if path else name
    if name not in obj:
        raise ProtocolError(f"{path} is missing in {_brief(_SHOWN.repr(obj))}")
    return _expect(obj[name], path, kind)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse)


def _parse(data: bytes) -> Any:
    """Return what strict JSON in UTF-8 says; refuse, on every Python, what stalls or crashes some of them."""
    try:
        if b"0" * (_MAX_DIGITS + 1) in data.translate(bytes.maketrans(b"123456789", b"000000000")):
            raise ValueError(f"over {_MAX_DIGITS} digits in a row")
        if data.count(b"[") + data.count(b"{") > _MAX_DEPTH:
            depth = 0
            unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # each quote left begins or ends a string
            for bracket in re.finditer(rb"[][{}]", b"".join(unescaped.split(b'"')[::2])):
                depth += 1 if bracket[0] in b"[{" else -1
                if depth > _MAX_DEPTH:
                    raise ValueError(f"nested over {_MAX_DEPTH} deep")
        return _JSON.decode(data.decode("utf-8"))
    except (ValueError, RecursionError, MemoryError) as error:
        raise ProtocolError(f"not JSON: {_brief(repr(data[:40]))} ({_brief(str(error))})") from error


def _read_props(answer: Any) -> Props:
    settings = _field(answer, "", "default_generation_settings", dict)
    return Props(
        chat_template=_field(answer, "", "chat_template", str),
        n_ctx=_field(settings, "default_generation_settings", "n_ctx", _U64),
        total_slots=_field(answer, "", "total_slots", _U32),
    )


def _read_slots(answer: Any) -> list[SlotInfo]:
    return [
        SlotInfo(_field(slot, f"[{i}]", "id", _U32), _field(slot, f"[{i}]", "is_processing", bool))
        for i, slot in enumerate(_expect(answer, "the answer", list))
    ]


def _read_token_count(answer: Any) -> int:
    tokens = _field(answer, "", "tokens", list)
    for strange in set(map(type, tokens)) - {int}:  # fast, for there may be a million; seldom is there one
        i = list(map(type, tokens)).index(strange)
        _expect(tokens[i], f"tokens[{i}]", int)
    return len(tokens)


class _Socket(socket.socket):
    """A socket whose timeout bounds each wait of `sendall`; the standard one's bounds them all together."""

    def sendall(self, data: Any, flags: int = 0) -> None:
        flags |= getattr(socket, "MSG_NOSIGNAL", 0)  # a program that does not ignore SIGPIPE lives on
        view = memoryview(data).cast("B")
        while view:
            view = view[self.send(view, flags):]


class UnixHTTPConnection(http.client.HTTPConnection):
    """`http.client.HTTPConnection` over the Unix socket at `socket_path` (str, bytes or path-like).

    `timeout` is in seconds and bounds each wait: for room in the listener's backlog, to send, to
    receive. `None` waits for ever. A `socket_path` that cannot be encoded is a `ValueError`.
    """

    def __init__(self, socket_path: StrOrBytesPath, timeout: float | None = None) -> None:
        super().__init__("localhost", timeout=timeout)
        self.socket_path = os.fsencode(socket_path)

    def connect(self) -> None:
        """Open the connection; raise `ConnectError`, and leave no socket behind, where that fails."""
        try:
            self.sock = self._connected()
        except OSError as error:
            path = _brief(os.fsdecode(self.socket_path))
            raise ConnectError(f"cannot connect to '{path}': {error.strerror or error}") from error

    def _connected(self) -> socket.socket:
        if not hasattr(socket, "AF_UNIX"):
            raise OSError(errno.EAFNOSUPPORT, "this platform has no Unix sockets")
        if self.socket_path.find(b"\0") > 0:  # the kernel would stop reading there; in front it makes an abstract name
            raise OSError(errno.EINVAL, "the path holds a NUL")
        sock = _Socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(self.timeout)
            deadline = time.monotonic() + (self.timeout or 0)
            while True:
                try:
                    sock.connect(self.socket_path)
                    return sock
                except BlockingIOError:  # a full backlog: with a timeout set, Linux does not wait but says so at once
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise OSError(errno.EAGAIN, "the listener's backlog stayed full") from None
                    time.sleep(min(left, 0.01))
        except BaseException:
            sock.close()
            raise


# http.client's own reader is not used for the answers: it takes a head that was cut for a whole one, a length that
# is no number for none and a negative chunk for an endless one, and differs from one Python to the next.

# Each kind of line: its name, a pattern for a whole one, and one for what may have come of it when the peer closed.
_STATUS = "the status line", rb"HTTP/1\.[0-9] ([1-9][0-9]{2})(?: .*)?\r?\n", rb"H?|HTT?|HTTP/?|HTTP/1(?:\..*)?"
_FIELD = "a header field", rb"(?:([^:\s]+):(.*)|\r?)\n", rb".*"
_CHUNK = "a chunk size", rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;.*)?\r?\n", rb"(?:[0-9A-Fa-f]{1,16}(?:[ \t;\r].*)?)?"
_CHUNK_END = "the end of a chunk", rb"\r\n", rb"\r?"


def _read_line(fp: BufferedReader, what: str, whole: bytes, cut: bytes) -> re.Match[bytes]:
    """Read a line of the kind that is given; return the match of its pattern."""
    line = fp.readline(_MAX_LINE)
    match = re.fullmatch(whole, line)
    if match:
        return match
    if len(line) == _MAX_LINE:
        raise ProtocolError(f"{what} is over {_MAX_LINE} bytes")
    if not re.fullmatch(cut, line):
        raise ProtocolError(f"{what} is {_brief(repr(line))}")
    raise StreamClosedEarlyError(f"the peer closed in {what}")


def _read_head(fp: BufferedReader) -> tuple[int, dict[bytes, bytes]]:
    """Read a head; return its status, and its header fields by their names in lower case."""
    for _ in range(_MAX_HEADS):
        status = int(_read_line(fp, *_STATUS)[1])
        fields = _read_fields(fp)
        if status != 100:  # Continue: an interim answer, to be skipped
            break
    if status < 200:
        raise ProtocolError(f"status {status}, an interim answer, where the answer was due")
    return status, fields


def _read_fields(fp: BufferedReader) -> dict[bytes, bytes]:
    fields: dict[bytes, bytes] = {}
    for _ in range(_MAX_FIELDS + 1):
        match = _read_line(fp, *_FIELD)
        if not match[1]:
            return fields
        name, value = match[1].lower(), match[2].strip()
        if fields.setdefault(name, value) != value:
            fields[name] += b", " + value
    raise ProtocolError(f"the head is over {_MAX_FIELDS} fields")


def _chunk_sizes(fp: BufferedReader) -> Iterator[int]:
    """Yield the size of each chunk; whoever asks for the next has read this one. A trailer is left unread."""
    size = int(_read_line(fp, *_CHUNK)[1], 16)
    while size:
        yield size
        _read_line(fp, *_CHUNK_END)
        size = int(_read_line(fp, *_CHUNK)[1], 16)


def _read_body(fp: BufferedReader, fields: dict[bytes, bytes], limit: int) -> Iterator[bytes]:
    """Yield a body as it comes; raise `ProtocolError` as soon as it is known to be over `limit` bytes."""
    coding, length = fields.get(b"transfer-encoding"), fields.get(b"content-length")
    if coding is not None:
        if coding.lower() != b"chunked":
            raise ProtocolError(f"Transfer-Encoding is {_brief(repr(coding))}, not chunked")
        sizes = _chunk_sizes(fp)
    elif length is not None:
        if not re.fullmatch(rb"[0-9]{1,19}", length):
            raise ProtocolError(f"Content-Length is {_brief(repr(length))}, not a number of bytes")
        sizes = iter([int(length)])
    elif fp.peek():
        sizes = iter(lambda: len(fp.peek()), 0)  # up to the close, as much as is buffered each time
    else:
        raise StreamClosedEarlyError("the peer closed before the body")
    left = limit
    for size in sizes:
        left -= size
        if left < 0:
            raise ProtocolError(f"the body is over {limit} bytes")
        while size:
            piece = fp.read1(min(size, _PIECE))
            if not piece:
                raise StreamClosedEarlyError(f"the peer closed with {size} bytes still to come")
            size -= len(piece)
            yield piece


def _text(name: str, value: str) -> str:
    """Return a caller's `value` if it can be sent; the error where it cannot does not show it: it may be the key."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}")
    surrogate = re.search(_SURROGATE, value)
    if surrogate:
        raise ValueError(f"{name} holds a lone surrogate at {surrogate.start()}")
    return value


@dataclasses.dataclass(frozen=True, init=False, eq=False)
class Client:
    """The way to one model of the `llama-server` that listens on a Unix socket.

    `socket_path` (str, bytes or path-like) is that socket; `model` (str, not empty) the model's id, as the
    server's `/models` lists it; `liveness_ms` (above 0, at most 2**31 - 1) for how long nothing may move
    before a call is given up; `api_key` (str, without control characters) is sent as a bearer token and
    never shown. Anything else is a `ValueError` or a `TypeError` at once.

    A client is immutable, may be shared between threads, and holds nothing open: a call is a connection of
    its own. Any call may load, wake or evict a model, and raises, once it has begun, nothing but an `InferError`.
    """

    socket_path: str | bytes
    model: str
    liveness_ms: float
    api_key: str | None = dataclasses.field(repr=False)

    def __init__(
        self, socket_path: StrOrBytesPath, model: str, *, liveness_ms: float = 60_000, api_key: str | None = None
    ) -> None:
        os.fsencode(socket_path)  # raises for what is no path
        if not _text("model", model):
            raise ValueError("model is empty")
        if not 0 < liveness_ms <= _MAX_LIVENESS:  # NaN is neither
            raise ValueError(f"liveness_ms is {liveness_ms}, not above 0 and at most {_MAX_LIVENESS}")
        if api_key is not None and re.search("[\0-\x1f\x7f-\x9f]", _text("api_key", api_key)):
            raise ValueError("api_key holds a control character")
        self.__dict__.update(
            socket_path=os.fspath(socket_path), model=model, liveness_ms=liveness_ms, api_key=api_key)

    def call(self, method: str, path: str, body: bytes | bytearray | memoryview | None = None) -> bytes:
        """Make one whole exchange and return the body of the answer, at most `MAX_BODY` bytes (rule 1).

        `method` is in capitals (GET, POST), `path` starts with `/` and is percent-encoded, `body` is
        bytes-like JSON. Raises `HttpError` for another status than 200, another `InferError` for what
        else fails, and `ValueError` or `TypeError`, before it connects, for what cannot be sent.
        """
        if not (re.fullmatch("[A-Z]+", method) and re.fullmatch("/[!-~]*", path)):
            raise ValueError(f"cannot request {_brief(method)} {_brief(path)}")
        headers: dict[str, str | bytes] = {"Connection": "close"}
        if body is not None:
            body = memoryview(body).cast("B")  # raises for what is not like bytes
            headers["Content-Type"] = "application/json"
        if self.api_key:
            headers["Authorization"] = b"Bearer " + self.api_key.encode("utf-8")
        connection = UnixHTTPConnection(self.socket_path, float(self.liveness_ms) / 1000)
        connection.connect()
        try:
            try:
                connection.request(method, path, body, headers)
            except _HANG_UPS:
                pass  # a peer that hung up may have answered first; reading shows whether it did
            with connection.sock.makefile("rb") as fp:
                status, fields = _read_head(fp)
                data = bytearray()
                if status == 200:
                    for piece in _read_body(fp, fields, MAX_BODY):
                        data += piece
                    return bytes(data)
                try:
                    for piece in _read_body(fp, fields, _U64):  # as good as no limit: the text is cut here
                        data += piece
                        if len(data) > MAX_ERROR_BODY:
                            break
                except Exception:
                    pass  # what is wrong with the body does not hide the status
                raise HttpError(status, error_text(data))
        except Exception as error:
            mapped = map_http(error)
            if isinstance(mapped, StalledError):
                mapped.args = (f"nothing moved for {self.liveness_ms} ms",)
            raise self._without_key(mapped)
        finally:
            connection.close()

    def _without_key(self, error: InferError) -> InferError:
        """Blot the key out of an `error` that quotes a peer that echoes it: as it is or as `repr` shows it, and
        where its end is cut off, down to eight characters. The blot is no longer than what it hides."""
        key = self.api_key or ""
        for shown in (key, repr(key)[1:-1], repr(key.encode("utf-8"))[2:-1]):
            for size in range(len(shown), min(len(shown), 8) - 1, -1):
                error.args = tuple(
                    arg.replace(shown[:size], "***"[:size]) if isinstance(arg, str) else arg for arg in error.args)
        return error

    def _ask(self, read: Callable[[Any], T], path: str, body: bytes | None = None) -> T:
        """Send a POST of `body` or, without one, a GET for the model; return what `read` makes of the JSON answer."""
        if body is None:
            data = self.call("GET", f"{path}?model={quote(self.model, safe='')}")
        else:
            data = self.call("POST", path, body)
        try:
            return read(_parse(data))
        except ProtocolError as error:
            raise self._without_key(error)

    def props(self) -> Props:
        """Return what the model can do: `GET /props?model=<id>` (rule 4)."""
        return self._ask(_read_props, "/props")

    def slots(self) -> list[SlotInfo]:
        """Return the model's slots in the server's order: `GET /slots?model=<id>`."""
        return self._ask(_read_slots, "/slots")

    def tokenize(self, text: str) -> int:
        """Return how many tokens `text` is: `POST /tokenize` with the model and the text (rule 5).

        Raises `ProtocolError` where the list of tokens is over `MAX_BODY` (some 700,000 tokens), and
        `ValueError` for a lone surrogate in `text`.
        """
        request = {"model": self.model, "content": _text("text", text)}
        return self._ask(_read_token_count, "/tokenize", json.dumps(request, ensure_ascii=False).encode("utf-8"))


def _report(model: str, props: Props, slots: list[SlotInfo], as_json: bool) -> str:
    if as_json:
        return json.dumps({**dataclasses.asdict(props), "slots": [dataclasses.asdict(slot) for slot in slots]})
    ids = " ".join(f"[{slot.id}]" if slot.is_processing else str(slot.id) for slot in slots)
    return (
        f"model          {_brief(model)}\n"
        f"context        {props.n_ctx:,} tokens per slot\n"
        f"slots          {props.total_slots}, {sum(slot.is_processing for slot in slots)} busy: {ids}\n"
        f"chat template  {len(props.chat_template):,} characters"
    )


def _main() -> int | str:
    """Run as a command; return what `sys.exit` takes: the exit status or, for 1, the line that says why."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="llama_info.py",
        description="Ask a llama-server behind a Unix socket what a model can do and which of its slots are busy.",
        epilog="Where the server wants an API key, it is taken from LLAMA_API_KEY, as the server does.",
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object")
    add("--tokenize", metavar="FILE", help="print how many tokens the text in FILE is (UTF-8; - is standard input)")
    add("--liveness-ms", metavar="MS", type=int, default=60_000, help="give up after MS ms of silence (%(default)s)")
    add("--version", action="version", version=f"llama_info {__version__}")
    add("socket", metavar="SOCKET", help="where llama-server listens")
    add("model", metavar="MODEL", help="the model's id, as the server's /models lists it")
    args = parser.parse_args()
    try:
        model, keys = (
            # Where the locale is not UTF-8, bytes that are have come as surrogates: turn them back.
            value.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
            for value in (args.model, os.environ.get("LLAMA_API_KEY", ""))
        )
        client = Client(args.socket, model, liveness_ms=args.liveness_ms, api_key=keys.split(",")[0])
        if args.tokenize is not None:
            with open(0 if args.tokenize == "-" else args.tokenize, "rb") as file:
                text = file.read().decode("utf-8")
    except (OSError, ValueError, MemoryError) as error:
        parser.error(f"{type(error).__name__}: {error}")
    try:
        if args.tokenize is not None:
            output = str(client.tokenize(text))
        else:
            output = _report(model, client.props(), client.slots(), args.json)
        # Not through sys.stdout, which would fail once more, and loudly, when Python ends.
        with open(1, "wb", closefd=False) as out:
            out.write(f"{output}\n".encode(sys.stdout.encoding, "backslashreplace"))
    except BrokenPipeError:
        return 1  # the reader of the output is gone, and wants no word of it
    except (InferError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return 0


if __name__ == "__main__":
    try:
        sys.exit(_main())
    except KeyboardInterrupt:
        sys.exit(130)
