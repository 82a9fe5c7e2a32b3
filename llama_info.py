# SPDX-License-Identifier: MIT
# Copyright (c) 2026 the llama_info authors
"""Ask a `llama-server` (llama.cpp) behind a Unix socket what it can do, and see whether its prompt cache held.

`Client.props` tells what a model can do, `Client.slots` which of its slots are busy, `Client.tokenize` how many
tokens a text has. `cache_outcome` and `prompt_kept` compare the token counts of two requests of one conversation.
One file, the standard library alone, Python 3.7 and newer: copy it. The server's endpoints are described in
llama.cpp's tools/server/README.md, the numbered rules in this file's README.

    from llama_info import Client, InferError

    client = Client("/run/llama.sock", "smollm2-135m", liveness_ms=60_000)
    try:
        print(client.props().n_ctx, client.tokenize("How long is this?"))
    except InferError as error:
        print(f"{type(error).__name__}: {error}")

Once a call has begun, it raises nothing but an `InferError`, whatever the server does:

    InferError
    +-- ConnectError            no connection could be opened (also a ConnectionError)
    +-- StalledError            the server was silent for `liveness_ms` (also a TimeoutError)
    +-- StreamClosedEarlyError  the connection was closed before the response was complete (also a ConnectionError)
    +-- ProtocolError           the response is not valid HTTP, or not the JSON that the endpoint should return
    +-- HttpError               the response has a status code other than 200

`liveness_ms` limits silence and not the whole call: a server that keeps sending, or keeps reading what it is sent,
may take as long as it likes. The first call for a model loads it, and is silent while that lasts.
"""

from __future__ import annotations

import dataclasses
import errno
import http.client
import itertools
import json
import os
import re
import reprlib
import socket
import sys
import time
from urllib.parse import quote

TYPE_CHECKING = False  # as in typing, which is slow to import and which some devices do not have
if TYPE_CHECKING:
    from io import BufferedReader
    from typing import Any, Callable, Iterator, TypeVar

    T = TypeVar("T")
    _Fields = dict[bytes, list[bytes]]
    StrOrBytesPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]

__version__ = "2.0.0"
__all__ = [
    "MAX_BODY", "MAX_ERROR_BODY", "CACHE_TOLERANCE", "__version__",
    "InferError", "ConnectError", "StalledError", "StreamClosedEarlyError", "ProtocolError", "HttpError",
    "map_http", "error_text", "Props", "SlotInfo", "Timings", "CacheOutcome", "Hit", "Loss", "cache_outcome",
    "prompt_kept", "UnixHTTPConnection", "Client",
]

MAX_BODY = 4 * 1024 * 1024  #: bytes; the longest body of a response with status code 200
MAX_ERROR_BODY = 4 * 1024  #: bytes; how much of the body an `HttpError` keeps
CACHE_TOLERANCE = 64  #: tokens; how far the reuse may fall short and still be a `Hit`

_MAX_LINE = 64 * 1024  # bytes in one line of the head or of the chunked coding, as in http.client
_MAX_FIELD_LINES = 100  # in one head, about as in http.client
_MAX_INFORMATIONAL = 8  # responses before the final one; servers send one or two
_READ_SIZE = 64 * 1024  # bytes of a body that are asked for at a time
_MAX_DIGITS = 4300  # in an integer in JSON: the default of Pythons that have such a limit
_MAX_DEPTH = 100  # of nested lists and objects in JSON: decoding them fits into the smallest stack of a thread
_MAX_CONTAINERS = 10_000  # lists and objects in one answer: an empty object is 2 bytes of JSON and 64 to 240 of memory
_MAX_LIVENESS = 2**31 - 1  # ms, 24 days: the longest wait that poll() takes
_MAX_QUOTED = 160  # characters of a text that is quoted in an error


class InferError(Exception):
    """The base class of everything that a call can raise; never raised itself."""


class ConnectError(InferError, ConnectionError):
    """Raised when no connection could be opened; `__cause__` is the `OSError` that says why."""


class StalledError(InferError, TimeoutError):
    """Raised when the server neither sent anything nor took what was sent for `liveness_ms`."""


class StreamClosedEarlyError(InferError, ConnectionError):
    """Raised when the server closed or reset the connection before its response was complete."""


class ProtocolError(InferError):
    """Raised when a response is not valid HTTP or not the expected JSON; the text names the field or the fault."""


class HttpError(InferError):
    """Raised when a response has a status code other than 200.

    `status` (int) is that status code; `body` (str) is the start of the response's body, as `error_text` returns it.
    `body` may contain control characters, which the text of the error shows escaped. It ends where the server quotes
    the API key.
    """

    def __init__(self, status: int, body: str) -> None:
        super().__init__(status, body)
        self.status = status
        self.body = body

    def __str__(self) -> str:
        return f"HTTP {self.status}: {_brief(self.body)}" if self.body else f"HTTP {self.status}"


_CLOSED_BY_PEER = (ConnectionResetError, BrokenPipeError, ConnectionAbortedError, http.client.IncompleteRead)
# All that sending, reading, decoding and checking can raise. Any other exception is the program's own, such as that of
# a signal handler which limits the time of a job, and passes through.
_FAULTS = (InferError, OSError, http.client.HTTPException, ValueError, MemoryError, RecursionError)


def map_http(error: Exception) -> InferError:
    """Return the `InferError` for an exception of the transport (rule 2); an `InferError` is returned as it is.

    A timeout becomes a `StalledError`; a connection closed by the other side (`http.client.RemoteDisconnected` and
    `IncompleteRead`, a reset, a broken pipe) a `StreamClosedEarlyError`; everything else a `ProtocolError`. The text
    is the class and the message of `error`, which becomes the `__cause__`. The cause loses its traceback, which would
    keep the connection, the request and the response in memory.
    """
    if isinstance(error, InferError):
        return error
    kind: type[InferError] = ProtocolError
    if isinstance(error, (socket.timeout, TimeoutError)):  # one class only since Python 3.10
        kind = StalledError
    elif isinstance(error, _CLOSED_BY_PEER):
        kind = StreamClosedEarlyError
    mapped = kind(f"{type(error).__name__}: {_brief(str(error) or 'no message')}")
    mapped.__cause__ = error.with_traceback(None)
    return mapped


def error_text(data: bytes | bytearray | memoryview) -> str:
    """Return the start of an error body, which is any bytes-like object, as text (rule 3).

    Bytes that are not UTF-8 become U+FFFD. The text has at most `MAX_ERROR_BODY` bytes when it is encoded again, and
    never ends inside a character.
    """
    text = memoryview(data).tobytes().decode("utf-8", "replace")
    return text.encode("utf-8")[:MAX_ERROR_BODY].decode("utf-8", "ignore")


def _printable(text: str) -> str:
    """Return `text` on one line, with the characters escaped that could control a terminal."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _brief(text: str) -> str:
    """Return `text` as it may be quoted in an error: printable and short."""
    shown = _printable(text[: _MAX_QUOTED + 1])
    return shown if len(shown) <= _MAX_QUOTED else shown[: _MAX_QUOTED - 3] + "..."


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

    After the request the slot holds `cache_n + prompt_n + predicted_n` tokens, less one: the last token that was
    generated is not stored. `prompt_n` is what the prompt cost; the reused `cache_n` cost nothing.
    """

    cache_n: int  #: prompt tokens that were reused from the prompt cache
    prompt_n: int  #: prompt tokens that had to be processed
    predicted_n: int  #: tokens that were generated

    @classmethod
    def from_dict(cls, obj: dict[str, Any]) -> Timings:
        """Read a `timings` object of the server; unknown fields are ignored.

        `/completion`, `/v1/completions` and `/v1/chat/completions` return one; of a streamed response take the one
        in the last chunk. Raises `ProtocolError` where a count is missing or out of range. A missing `cache_n` is not
        taken for 0: older servers did not send it, and nothing can be said about their cache.
        """
        return cls(*(_field(obj, "timings", name, int, 64) for name in ("cache_n", "prompt_n", "predicted_n")))


@dataclasses.dataclass(frozen=True)
class CacheOutcome:
    """How much of what the slot held was reused: a `Hit` or a `Loss`; tell them apart with `isinstance`."""


@dataclasses.dataclass(frozen=True)
class Hit(CacheOutcome):
    """All that the slot held was reused, but for at most `CACHE_TOLERANCE` tokens."""


@dataclasses.dataclass(frozen=True)
class Loss(CacheOutcome):
    """The reuse fell short: of `expected` tokens only `got` were reused. It does not say whose doing that was."""

    expected: int
    got: int


def cache_outcome(previous: Timings, current: Timings) -> Hit | Loss:
    """Return whether a request reused what its slot held after the previous request of the conversation (rule 7).

    `expected` is `cache_n + prompt_n + predicted_n` of `previous`. The outcome is a `Hit` where `current.cache_n` falls
    short of that by at most `CACHE_TOLERANCE` tokens, else a `Loss`. An `expected` of no more is always a `Hit`.

    The comparison means something only where the second request extends the first: the same messages, then the answer,
    then more. A `Loss` says that the reuse fell short of what the slot held. What that cost is `current.prompt_n`, and
    `prompt_kept` tells whether the answer alone was processed again or the prompt too. Whose doing it was is another
    question, since a caller can change the prompt as well as a server can lose it: see the README.
    """
    expected = previous.cache_n + previous.prompt_n + previous.predicted_n
    if current.cache_n + CACHE_TOLERANCE >= expected:
        return Hit()
    return Loss(expected, current.cache_n)


def prompt_kept(previous: Timings, current: Timings) -> bool:
    """Return whether the prompt of the previous request was reused, whatever became of the answer to it.

    True: at most `CACHE_TOLERANCE` tokens of that prompt, and never more than half of it, were processed again. After
    a `Loss` that means that only what followed the prompt was not reused, as is normal for some models and templates.
    False: the prompt was processed again from some point on. Where the current prompt is the shorter one, it is
    measured by its own length, as it can reuse no more. The counts cannot tell whose doing it was.
    """
    prompt = min(previous.cache_n + previous.prompt_n, current.cache_n + current.prompt_n)
    return current.cache_n + min(CACHE_TOLERANCE, prompt // 2) >= prompt


# Half of a UTF-16 pair: a str can hold one, and JSON can spell one, but UTF-8 cannot encode it.
_SURROGATE = "[\ud800-\udfff]"
_KINDS = {
    bool: "true or false", int: "an integer", str: "a string (without lone surrogates)", list: "a list",
    dict: "an object",
}


class _Repr(reprlib.Repr):
    """Quotes the start of any value; unlike its base class, it does not sort the keys of an object, however large."""

    def repr_dict(self, obj: dict[Any, Any], level: int) -> str:
        return super().repr_dict(dict(itertools.islice(obj.items(), self.maxdict + 1)), level)


_REPR = _Repr()
_REPR.maxstring = 400  # over _MAX_QUOTED, so that _brief() cuts off the end; reprlib would cut out the middle


def _expect(value: Any, path: str, kind: Any, bits: int = 0) -> Any:
    """Return `value` if it is a `kind` and, with `bits`, an unsigned integer of so many; errors name it by `path`."""
    fits = (
        isinstance(value, kind)
        and isinstance(value, bool) == (kind is bool)  # in Python, though not in JSON, True is an integer
        and (not bits or 0 <= value < 2**bits)
        and not (kind is str and re.search(_SURROGATE, value))
    )
    if not fits:
        wanted = f"an integer from 0 to {2**bits - 1}" if bits else _KINDS[kind]
        raise ProtocolError(f"{path} is {_brief(_REPR.repr(value))}, not {wanted}")
    return value


def _field(obj: Any, path: str, name: str, kind: Any, bits: int = 0) -> Any:
    """Return `obj[name]` as `_expect` does; `path` names `obj`, and is empty for the whole answer."""
    _expect(obj, path or "the answer", dict)
    path = f"{path}.{name}" if path else name
    if name not in obj:
        raise ProtocolError(f"{path} is missing in {_brief(_REPR.repr(obj))}")
    return _expect(obj[name], path, kind, bits)


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _limited_int(digits: str) -> int:
    """`int` with the limit that newer Pythons have themselves, for the time that it takes is quadratic."""
    if len(digits.lstrip("-")) > _MAX_DIGITS:
        raise ValueError(f"an integer has over {_MAX_DIGITS} digits")
    return int(digits)


_DECODER = json.JSONDecoder(
    parse_constant=_refuse_constant, parse_int=int if hasattr(sys, "get_int_max_str_digits") else _limited_int)
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{}'))


def _check_structure(data: bytes) -> None:
    """Raise `ValueError` for JSON that could exhaust memory or the stack: too many lists and objects, or too deep.

    Invalid JSON may pass: the count is right up to its first fault, and the decoder stops there.
    """
    if data.count(b"[") + data.count(b"{") <= _MAX_DEPTH:
        return  # so few are neither too deep nor too many
    # Without escapes, each quote begins or ends a string. Without all but quotes and brackets, two quotes that meet are
    # an empty string or lie between two strings, and are removed too. What is left: brackets and strings of brackets.
    structure = (
        data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NOT_STRUCTURE).replace(b'""', b""))
    depth = containers = 0
    for match in re.finditer(rb'"[^"]*"?|[][{}]', structure):
        if match[0] in (b"[", b"{"):
            depth += 1
            containers += 1
            if depth > _MAX_DEPTH:
                raise ValueError(f"nested over {_MAX_DEPTH} deep")
            if containers > _MAX_CONTAINERS:
                raise ValueError(f"over {_MAX_CONTAINERS} lists and objects")
        elif match[0] in (b"]", b"}"):
            depth -= 1
            if depth < 0:
                return  # unbalanced: the decoder will say so


def _parse(data: bytes) -> Any:
    """Return the value of `data`, which must be strict JSON in UTF-8, else raise `ProtocolError`."""
    try:
        _check_structure(data)
        return _DECODER.decode(data.decode("utf-8"))
    except ValueError as error:
        reason = _brief(str(error))
    # Not raised while the other is handled: as its context, that would keep the whole text in memory.
    raise ProtocolError(f"not JSON: {_brief(repr(data[:40]))} ({reason})")


def _read_props(answer: Any) -> Props:
    return Props(
        chat_template=_field(answer, "", "chat_template", str),
        n_ctx=_field(
            _field(answer, "", "default_generation_settings", dict), "default_generation_settings", "n_ctx", int, 64),
        total_slots=_field(answer, "", "total_slots", int, 32),
    )


def _read_slots(answer: Any) -> list[SlotInfo]:
    return [
        SlotInfo(_field(slot, f"[{i}]", "id", int, 32), _field(slot, f"[{i}]", "is_processing", bool))
        for i, slot in enumerate(_expect(answer, "the answer", list))
    ]


def _read_token_count(answer: Any) -> int:
    tokens = _field(answer, "", "tokens", list)
    if not set(map(type, tokens)) <= {int}:  # two million tokens are not checked one by one
        i = next(i for i, token in enumerate(tokens) if type(token) is not int)
        _expect(tokens[i], f"tokens[{i}]", int)
    return len(tokens)


class _Socket(socket.socket):
    """A socket whose timeout applies to each wait of `sendall`; that of `socket.socket` applies to all together."""

    def sendall(self, data: Any, flags: int = 0) -> None:
        flags |= getattr(socket, "MSG_NOSIGNAL", 0)  # no SIGPIPE, which ends a program that does not ignore it
        view = memoryview(data).cast("B")
        while view:
            view = view[self.send(view, flags):]


class UnixHTTPConnection(http.client.HTTPConnection):
    """`http.client.HTTPConnection` over the Unix socket at `socket_path` (str, bytes or path-like).

    `timeout` is in seconds and limits each wait: for room in the listener's backlog, to send, to receive. `None` waits
    for ever. A `socket_path` that cannot be encoded is a `ValueError`. `getresponse()` is that of `http.client` and
    lacks the checks of `Client.call`: it can take a truncated response for a complete one.
    """

    def __init__(self, socket_path: StrOrBytesPath, timeout: float | None = None) -> None:
        super().__init__("localhost", timeout=timeout)
        self.socket_path = os.fsencode(socket_path)

    def connect(self) -> None:
        """Open the connection; raise `ConnectError`, and leave no socket behind, where that fails."""
        try:
            if not hasattr(socket, "AF_UNIX"):
                raise OSError(errno.EAFNOSUPPORT, "this platform has no Unix sockets")
            if self.socket_path.find(b"\0") > 0:  # the kernel would stop there; at the start it makes an abstract name
                raise OSError(errno.EINVAL, "the path contains a NUL")
            self.sock = _Socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(self.timeout)
            deadline = time.monotonic() + (self.timeout or 0)
            code = self.sock.connect_ex(self.socket_path)
            while code == errno.EAGAIN and time.monotonic() < deadline:
                time.sleep(0.01)  # where a timeout is set, Linux does not wait for room in the backlog
                code = self.sock.connect_ex(self.socket_path)
            if code:
                raise OSError(
                    code, "the listener's backlog stayed full" if code == errno.EAGAIN else os.strerror(code))
        except OSError as error:
            self.close()
            path = _brief(os.fsdecode(self.socket_path))
            raise ConnectError(f"cannot connect to '{path}': {error.strerror or error}") from error.with_traceback(None)
        except BaseException:
            self.close()
            raise


# Responses are not read by http.client: it takes a truncated head for a complete one, a junk Content-Length for none
# and a negative chunk size for an endless chunk, and differs from one Python to the next.
#
# The patterns follow the grammar of RFC 9112. A line of the head may end in a bare LF, as its section 2.2 allows; this
# reader lets a chunk size do so too.
#
# *( HTAB / SP / VCHAR / obs-text ): what a reason-phrase and a field-value consist of. No CR, no NUL.
_TEXT = rb"[\t -~\x80-\xff]*"
# status-line = HTTP-version SP status-code SP [ reason-phrase ] CRLF. Any version 1.x is read as 1.1 (RFC 9110, section
# 6.2). The second SP may be missing, for some servers leave it out together with the reason-phrase.
_STATUS_LINE = re.compile(rb"HTTP/1\.[0-9] ([1-9][0-9]{2})(?: " + _TEXT + rb")?\r?\n")
# field-line = field-name ":" OWS field-value OWS, or the continuation of one by obs-fold = OWS CRLF RWS, which section
# 5.2 asks a client to accept, or the empty line that ends the head. A field-name is a token.
_FIELD_LINE = re.compile(rb"(?:([-!#$%&'*+.^_`|~0-9A-Za-z]+):(" + _TEXT + rb")|([ \t]" + _TEXT + rb")|)\r?\n")
# chunk-size [ chunk-ext ] CRLF, and the CRLF after the data. 16 digits are 64 bits. There may be white space before the
# extension (section 7.1.1) and, from servers that pad the size with it, before the CRLF.
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;" + _TEXT + rb")?\r?\n")
_CHUNK_END = re.compile(rb"\r\n")


def _read_line(fp: BufferedReader, what: str, pattern: re.Pattern[bytes], start: bytes = b"") -> re.Match[bytes]:
    """Read a line and return the match of its `pattern`; `what` names the line in errors.

    A line without its end is a truncated response, unless it does not even begin as `start` does.
    """
    line = fp.readline(_MAX_LINE)
    match = pattern.fullmatch(line)
    if match:
        return match
    if line.endswith(b"\n") or not start.startswith(line[: len(start)]):
        raise ProtocolError(f"{what} is {_brief(repr(line))}")
    if len(line) == _MAX_LINE:
        raise ProtocolError(f"{what} is over {_MAX_LINE} bytes")
    raise StreamClosedEarlyError(f"the server closed the connection in {what}")


def _read_head(fp: BufferedReader) -> tuple[int, _Fields]:
    """Return the status code of the final response, and its header fields.

    Informational responses that come before it are skipped, as section 15.2 of RFC 9110 asks.
    """
    for _ in range(_MAX_INFORMATIONAL + 1):
        status = int(_read_line(fp, "the status line", _STATUS_LINE, start=b"HTTP/1.")[1])
        fields = _read_fields(fp)
        if status == 101:
            raise ProtocolError("status code 101: the server switches to a protocol that was not asked for")
        if status >= 200:
            return status, fields
    raise ProtocolError(f"over {_MAX_INFORMATIONAL} informational responses, the last with status code {status}")


def _read_fields(fp: BufferedReader) -> _Fields:
    """Return the header fields up to the empty line: their values, in order, by their names in lower case."""
    fields: _Fields = {}
    values: list[bytes] = []
    for _ in range(_MAX_FIELD_LINES + 1):
        match = _read_line(fp, "a header field", _FIELD_LINE)
        if match[1]:
            values = fields.setdefault(match[1].lower(), [])
            values.append(match[2].strip())
        elif not match[3]:
            return fields
        elif values:
            values[-1] = (values[-1] + b" " + match[3].strip()).strip()
        else:
            raise ProtocolError(f"a header field is {_brief(repr(match[0]))}")
    raise ProtocolError(f"the head has over {_MAX_FIELD_LINES} header lines")


def _body_sizes(fp: BufferedReader, fields: _Fields) -> Iterator[int]:
    """Yield the size of each part of a body, in bytes; that part must have been read before the next is asked for."""
    if b"transfer-encoding" in fields:
        # A field that is sent more than once is a list. The same value again, which some servers send, counts once.
        coding = b", ".join(dict.fromkeys(fields[b"transfer-encoding"]))
        if coding.lower() != b"chunked":
            raise ProtocolError(f"Transfer-Encoding is {_brief(repr(coding))}, not chunked")
        size = int(_read_line(fp, "a chunk size", _CHUNK_SIZE)[1], 16)
        while size:
            yield size
            _read_line(fp, "the line end after a chunk", _CHUNK_END)
            size = int(_read_line(fp, "a chunk size", _CHUNK_SIZE)[1], 16)
        # The body is complete. Trailers may follow, which nobody needs.
    elif b"content-length" in fields:
        length = b", ".join(dict.fromkeys(fields[b"content-length"]))
        if not re.fullmatch(rb"[0-9]{1,19}", length):  # 1*DIGIT; 19 are the most that always fit into 64 bits
            raise ProtocolError(f"Content-Length is {_brief(repr(length))}, not a number of bytes")
        yield int(length)
    elif fp.peek():  # which waits for data, and is empty where the server closes the connection: there the body ends
        while fp.peek():
            yield len(fp.peek())
    else:  # no body at all looks the same as a response that was truncated after its head
        raise StreamClosedEarlyError("the server closed the connection before the body")


def _read_body(fp: BufferedReader, fields: _Fields, limit: int) -> Iterator[bytes]:
    """Yield a body as it arrives; raise `ProtocolError` as soon as it is known to have over `limit` bytes."""
    left = limit
    for size in _body_sizes(fp, fields):
        left -= size
        if left < 0:
            raise ProtocolError(f"the body has over {limit} bytes")
        while size:
            piece = fp.read1(min(size, _READ_SIZE))
            if not piece:
                raise StreamClosedEarlyError(f"the server closed the connection {size} bytes too early")
            size -= len(piece)
            yield piece


def _read_error(fp: BufferedReader, fields: _Fields) -> str:
    """Return as much of an error body as can be read and is kept; a fault in it does not hide the status code."""
    data = bytearray()
    try:
        for piece in _read_body(fp, fields, 2**64):  # more than any length that is read
            data += piece
            if len(data) > MAX_ERROR_BODY:
                break
    except _FAULTS:
        pass
    return error_text(data)


def _encodable(name: str, value: str) -> str:
    """Return a caller's `value` if it is text that can be sent. The errors do not show it: it may be the API key."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}")
    surrogate = re.search(_SURROGATE, value)
    if surrogate:
        raise ValueError(f"{name} has a lone surrogate at {surrogate.start()}")
    return str.__str__(value)  # a subclass may have an encode() or a __str__() of its own


@dataclasses.dataclass(frozen=True, init=False, eq=False)
class Client:
    """A client for one model of a `llama-server` on a Unix socket.

    `socket_path` (str, bytes or path-like) is the socket; `model` (str, not empty) the model's id, as the server's
    `/models` lists it; `liveness_ms` (above 0, at most 2**31 - 1) how long the server may be silent before a call is
    given up; `api_key` (str, without control characters) is sent as a bearer token and never shown. Other values
    are a `ValueError` or a `TypeError` at once.

    A client is immutable and may be shared between threads. It keeps no connection open: each call opens one. Any
    call may load, wake or evict a model. Once it has begun, it raises nothing but an `InferError`.
    """

    socket_path: str | bytes
    model: str
    liveness_ms: float
    api_key: str | None = dataclasses.field(repr=False)

    def __init__(
        self, socket_path: StrOrBytesPath, model: str, *, liveness_ms: float = 60_000, api_key: str | None = None
    ) -> None:
        os.fsencode(socket_path)  # raises where it is no path
        model = _encodable("model", model)
        if not model:
            raise ValueError("model is empty")
        if not (0 < liveness_ms <= _MAX_LIVENESS and float(liveness_ms) / 1000 > 0):  # NaN fails the comparison
            raise ValueError(f"liveness_ms is {liveness_ms}, not above 0 (in seconds too) and at most {_MAX_LIVENESS}")
        if api_key is not None:
            api_key = _encodable("api_key", api_key)
            if re.search("[\0-\x1f\x7f-\x9f]", api_key):
                raise ValueError("api_key has a control character")
        for name, value in [("socket_path", os.fspath(socket_path)), ("model", model), ("liveness_ms", liveness_ms),
                            ("api_key", api_key)]:
            object.__setattr__(self, name, value)  # a frozen dataclass has no other way

    def call(self, method: str, path: str, body: bytes | bytearray | memoryview | None = None) -> bytes:
        """Make one whole exchange and return the body of the response, at most `MAX_BODY` bytes (rule 1).

        `method` is in capitals (GET, POST), `path` starts with `/` and is percent-encoded, `body` is bytes-like
        JSON. Raises `HttpError` for a status code other than 200, another `InferError` for any other failure, and,
        before it connects, `ValueError` or `TypeError` for what cannot be sent. `HEAD` returns `b""`.
        """
        verb, target = re.fullmatch("[A-Z]+", method), re.fullmatch("/[!-~]*", path)
        if not (verb and target):
            raise ValueError(f"cannot request {_brief(method)} {_brief(path)}")
        headers: dict[str, str | bytes] = {"Connection": "close"}  # else the server waits for another request
        if body is not None:
            if type(body) is not bytes:
                body = bytes(memoryview(body).cast("B"))  # a failed call must not hold on to the caller's buffer
            headers["Content-Type"] = "application/json"
        if self.api_key:
            headers["Authorization"] = b"Bearer " + self.api_key.encode("utf-8")  # http.client would encode as Latin-1
        connection = UnixHTTPConnection(self.socket_path, float(self.liveness_ms) / 1000)
        activity = "sending the request"
        try:
            _send(connection, verb[0], target[0], body, headers)  # the text that was matched, of a subclass of str too
            activity = "waiting for the response"
            with connection.sock.makefile("rb") as fp:
                status, fields = _read_head(fp)
                if verb[0] == "HEAD" or status in (204, 304):
                    fields = {b"content-length": [b"0"]}  # no body follows, whatever the fields say
                if status != 200:
                    raise HttpError(status, self._redact(_read_error(fp, fields)))
                data = bytearray()  # not a list of pieces: they may be of one byte each
                for piece in _read_body(fp, fields, MAX_BODY):
                    data += piece
                return bytes(data)
        except _FAULTS as error:
            raise self._failure(error, activity)
        finally:
            connection.close()

    def _failure(self, error: Exception, activity: str) -> InferError:
        """Return the `InferError` for an `error` during this `activity`, without the API key.

        It must be raised directly: a local variable that holds it would make a cycle of error, traceback and frame.
        """
        mapped = map_http(error)
        if isinstance(mapped, StalledError):
            mapped.args = (f"no progress for {self.liveness_ms} ms while {activity}",)
        elif isinstance(mapped, ProtocolError):  # the one that quotes the server; an HttpError is redacted already
            mapped.args = (self._redact(str(mapped)),)
        return mapped

    def _redact(self, text: str) -> str:
        """Return `text` up to where it shows the API key, which a server may quote: as it is, escaped or truncated."""
        pattern = ""
        # The first eight characters are looked for: the text may have been truncated inside the key. Backslashes are
        # passed over, however many there are: escaping doubles them, and doubles them again in JSON that is quoted.
        for char in (self.api_key or "").replace("\\", "")[:8]:
            forms = {char, ascii(char)[1:-1], repr(char.encode("utf-8"))[2:-1], json.dumps(char)[1:-1]}
            pattern += r"\\*(?:" + "|".join(re.escape(form.lstrip("\\")) for form in sorted(forms)) + ")"
        key = re.search(pattern, text, re.IGNORECASE) if pattern else None
        # Never longer than before: an error body must stay within its limit. What follows may be the rest of the key.
        return text[: key.start()] + "***"[: len(key[0])] if key else text

    def _get(self, path: str) -> bytes:
        return self.call("GET", f"{path}?model={quote(self.model, safe='')}")

    def _read(self, data: bytes, shape: Callable[[Any], T]) -> T:
        """Parse `data` and return what `shape` makes of it, which is one of the `_read_…` functions for JSON."""
        try:
            return shape(_parse(data))
        except _FAULTS as error:
            raise self._failure(error, "reading the answer")

    def props(self) -> Props:
        """Return what the model can do: `GET /props?model=<id>` (rule 4)."""
        return self._read(self._get("/props"), _read_props)

    def slots(self) -> list[SlotInfo]:
        """Return the model's slots in the server's order: `GET /slots?model=<id>`."""
        return self._read(self._get("/slots"), _read_slots)

    def tokenize(self, text: str) -> int:
        """Return how many tokens `text` has: `POST /tokenize` with the model and the text (rule 5).

        Raises `ProtocolError` where the list of tokens is over `MAX_BODY` (some 700,000 tokens), and `ValueError`
        for a lone surrogate in `text`.
        """
        request = {"model": self.model, "content": _encodable("text", text)}
        body = json.dumps(request, ensure_ascii=False).encode("utf-8")
        return self._read(self.call("POST", "/tokenize", body), _read_token_count)


def _send(
    connection: UnixHTTPConnection, method: str, path: str, body: bytes | None, headers: dict[str, str | bytes]
) -> None:
    """Open the connection and send a request, or as much of it as the server reads before it answers."""
    try:
        connection.request(method, path, body, headers)
        return
    except _CLOSED_BY_PEER:
        return  # the server may have answered first: reading the response tells
    except socket.timeout:
        pass
    # Sending timed out. If the server has answered without reading it all, its answer is there to be read; if not, this
    # read times out too, after a millisecond.
    connection.sock.settimeout(0.001)
    connection.sock.recv(1, socket.MSG_PEEK)
    connection.sock.settimeout(connection.timeout)


def _read_models(answer: Any) -> list[dict[str, str | None]]:
    models = []
    for i, model in enumerate(_field(answer, "", "data", list)):
        entry = {"id": _field(model, f"data[{i}]", "id", str), "status": None}
        if "status" in model:  # a server of one model does not say
            entry["status"] = _field(_field(model, f"data[{i}]", "status", dict), f"data[{i}].status", "value", str)
        models.append(entry)
    return models


def _list_models(client: Client, as_json: bool) -> str:
    models = client._read(client.call("GET", "/models"), _read_models)
    if as_json:
        return json.dumps(models) + "\n"
    # The id comes last, for it may be long or contain spaces, and its width on a terminal is unknown.
    return "".join(
        (f"{_printable(model['status']):9} " if model["status"] else "") + _printable(model["id"] or "") + "\n"
        for model in models)


def _describe_model(client: Client, as_json: bool) -> str:
    props, slots = client.props(), client.slots()
    if as_json:
        return json.dumps({**dataclasses.asdict(props), "slots": [dataclasses.asdict(slot) for slot in slots]}) + "\n"
    ids = " ".join(f"[{slot.id}]" if slot.is_processing else str(slot.id) for slot in slots)
    return (
        f"model          {_printable(client.model)}\n"
        f"context        {props.n_ctx:,} tokens per slot\n"
        f"slots          {props.total_slots}, {sum(slot.is_processing for slot in slots)} busy: {ids}\n"
        f"chat template  {len(props.chat_template):,} characters\n"
    )


def _arguments() -> Any:
    """Return the arguments of the command, and with them the `client` and, for --tokenize, the `text`."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="llama_info.py",
        description="Ask a llama-server behind a Unix socket which models it has or, with MODEL, what that model can "
        "do and which of its slots are busy.",
        epilog="Where the server wants an API key, it is taken from LLAMA_API_KEY, as the server does. Exit status: 0; "
        "2 wrong usage; 7 no connection; 8 not the expected response; 18 connection closed early; 22 a status code "
        "other than 200; 23 output not written; 28 silence; 130 interrupted.",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument(
        "--tokenize", metavar="FILE", help="print how many tokens the text in FILE has (UTF-8; - is standard input)")
    parser.add_argument(
        "--liveness-ms", metavar="MS", type=int, default=60_000, help="give up after MS ms of silence (%(default)s)")
    parser.add_argument("--version", action="version", version=f"llama_info {__version__}")
    parser.add_argument("socket", metavar="SOCKET", help="where llama-server listens")
    parser.add_argument("model", metavar="MODEL", nargs="?", help="the model's id, as it is listed without MODEL")
    args = parser.parse_args()
    if args.model is None and args.tokenize is not None:
        parser.error("--tokenize needs MODEL")
    try:
        # Both are UTF-8, whatever the locale is. A client needs a model, though the list of models does not.
        model = os.fsencode("any" if args.model is None else args.model).decode("utf-8", "surrogateescape")
        key = os.fsencode(os.environ.get("LLAMA_API_KEY", "").split(",")[0]).decode("utf-8", "surrogateescape")
        args.client = Client(args.socket, model, liveness_ms=args.liveness_ms, api_key=key)
        if args.tokenize is not None:
            with open(0 if args.tokenize == "-" else args.tokenize, "rb") as file:
                args.text = file.read().decode("utf-8")
    except (OSError, ValueError, MemoryError) as error:
        parser.error(f"{type(error).__name__}: {error}")
    return args


# The exit status for each class of error is that of curl.
_EXIT_STATUS = {ConnectError: 7, StalledError: 28, StreamClosedEarlyError: 18, ProtocolError: 8, HttpError: 22}


def _main() -> int:
    """Run as a command; return the exit status."""
    args = _arguments()
    try:
        if args.model is None:
            output = _list_models(args.client, args.json)
        elif args.tokenize is not None:
            output = f"{args.client.tokenize(args.text)}\n"
        else:
            output = _describe_model(args.client, args.json)
    except InferError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return _EXIT_STATUS[type(error)]
    try:
        # Not through sys.stdout, which would fail once more, and with a message, when Python ends.
        with open(1, "wb", closefd=False) as out:
            out.write(output.encode(sys.stdout.encoding if sys.stdout else "utf-8", "backslashreplace"))
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # where the reader has gone, nobody needs a message
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 23
    return 0


if __name__ == "__main__":
    try:
        sys.exit(_main())
    except KeyboardInterrupt:
        sys.exit(130)
