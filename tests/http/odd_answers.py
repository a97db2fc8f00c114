"""Answers that servers should not give and do: bytes on the wire, in all the ways a framing can be bent."""

import gzip
import zlib
from typing import NamedTuple

from tests.http.raw_peers import plain

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
HELLO = b"Content-Length: 5\r\n\r\nhello"
TEXT = b"much of the same " * 50


class Odd(NamedTuple):
    """What a server says to a request, and whether it then ends the connection."""

    data: bytes
    ends: bool = False
    method: str = "GET"


def chunks(*pieces: bytes) -> bytes:
    return CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def zipped(kind: str, data: bytes) -> bytes:
    return plain(data, "200 OK", f"Content-Encoding: {kind}")


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


STATUS_LINES = {
    "a plain answer": Odd(plain(b"hello")),
    "no reason": Odd(b"HTTP/1.1 200\r\n" + HELLO),
    "no reason but a space": Odd(b"HTTP/1.1 200 \r\n" + HELLO),
    "a reason of odd bytes": Odd(b"HTTP/1.1 200 g\xc3\xbcn\xff\r\n" + HELLO),
    "status 299": Odd(plain(b"hello", "299 What")),
    "status 600": Odd(plain(b"hello", "600 What")),
    "status 999": Odd(plain(b"hello", "999 What")),
    "status 099": Odd(b"HTTP/1.1 099 Odd\r\n" + HELLO, ends=True),
    "status of two digits": Odd(b"HTTP/1.1 20 OK\r\n" + HELLO, ends=True),
    "status of four digits": Odd(b"HTTP/1.1 2000 OK\r\n" + HELLO, ends=True),
    "status in words": Odd(b"HTTP/1.1 two hundred\r\n\r\n", ends=True),
    "HTTP/1.0": Odd(b"HTTP/1.0 200 OK\r\n" + HELLO),
    "HTTP/1.0 kept alive": Odd(b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n" + HELLO),
    "HTTP/1.0 without length": Odd(b"HTTP/1.0 200 OK\r\n\r\nhello", ends=True),
    "HTTP/0.9": Odd(b"hello", ends=True),
    "HTTP/2.0": Odd(b"HTTP/2.0 200 OK\r\n" + HELLO, ends=True),
    "HTTP/1.2": Odd(b"HTTP/1.2 200 OK\r\n" + HELLO, ends=True),
    "HTTP/3": Odd(b"HTTP/3 200 OK\r\n" + HELLO, ends=True),
    "http in small letters": Odd(b"http/1.1 200 OK\r\n" + HELLO, ends=True),
    "blank lines before": Odd(b"\r\n\r\n" + plain(b"hello")),
    "a space before": Odd(b" " + plain(b"hello"), ends=True),
    "lines that end with LF only": Odd(plain(b"hello").replace(b"\r\n", b"\n")),
    "chunks that end with LF only": Odd(chunks(b"hello").replace(b"\r\n", b"\n"), ends=True),
    "lines that end with CR only": Odd(plain(b"hello").replace(b"\r\n", b"\r"), ends=True),
}
INTERIM = {
    "100 before": Odd(b"HTTP/1.1 100 Continue\r\n\r\n" + plain(b"hello")),
    "102, 103 before": Odd(
        b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + plain(b"hello")
    ),
    "100 with a length before": Odd(b"HTTP/1.1 100 Continue\r\nContent-Length: 0\r\n\r\n" + plain(b"hello")),
    "100 and no more": Odd(b"HTTP/1.1 100 Continue\r\n\r\n", ends=True),
    "101 to who knows what": Odd(
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n\x00\x01", ends=True
    ),
    "199 before": Odd(b"HTTP/1.1 199 What\r\n\r\n" + plain(b"hello")),
}
BODILESS = {
    "204": Odd(b"HTTP/1.1 204 No Content\r\n\r\n"),
    "204 with a length of 0": Odd(b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n"),
    "204 with a length": Odd(b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n"),
    "204 with a body": Odd(b"HTTP/1.1 204 No Content\r\n" + HELLO),
    "204 with chunks": Odd(b"HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    "205 without length": Odd(b"HTTP/1.1 205 Reset Content\r\n\r\n", ends=True),
    "304": Odd(b"HTTP/1.1 304 Not Modified\r\n\r\n"),
    "304 with a length": Odd(b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n"),
    "304 with a body": Odd(b"HTTP/1.1 304 Not Modified\r\n" + HELLO),
    "length 0": Odd(plain(b"")),
    "an error without body": Odd(plain(b"", "500 Internal Server Error")),
}
LENGTHS = {
    "no length, then the end": Odd(OK + b"\r\nhello", ends=True),
    "no length and nothing": Odd(OK + b"\r\n", ends=True),
    "equal lengths twice": Odd(OK + b"Content-Length: 5\r\n" + HELLO),
    "different lengths": Odd(OK + b"Content-Length: 4\r\n" + HELLO, ends=True),
    "lengths in a list": Odd(OK + b"Content-Length: 5, 5\r\n\r\nhello", ends=True),
    "a negative length": Odd(OK + b"Content-Length: -5\r\n\r\nhello", ends=True),
    "a length with a plus": Odd(OK + b"Content-Length: +5\r\n\r\nhello", ends=True),
    "a length in hex": Odd(OK + b"Content-Length: 0x5\r\n\r\nhello", ends=True),
    "a length in words": Odd(OK + b"Content-Length: five\r\n\r\nhello", ends=True),
    "a fraction as length": Odd(OK + b"Content-Length: 5.0\r\n\r\nhello", ends=True),
    "an empty length": Odd(OK + b"Content-Length: \r\n\r\nhello", ends=True),
    "a length with spaces": Odd(OK + b"Content-Length:   5  \r\n\r\nhello"),
    "a length with zeros in front": Odd(OK + b"Content-Length: 0005\r\n\r\nhello"),
    "a length beyond 64 bits": Odd(OK + b"Content-Length: 99999999999999999999\r\n\r\nhello", ends=True),
    "too long a length": Odd(OK + b"Content-Length: 6\r\n\r\nhello", ends=True),
    "too short a length": Odd(OK + b"Content-Length: 4\r\n\r\nhello"),
    "length and chunks": Odd(
        OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", ends=True
    ),
    "chunks and length": Odd(
        OK + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n5\r\nhello\r\n0\r\n\r\n", ends=True
    ),
    "truncated in the status line": Odd(b"HTTP/1.1 20", ends=True),
    "truncated in a header": Odd(OK + b"X-A: 1\r\nX-", ends=True),
    "truncated before the blank line": Odd(OK + b"X-A: 1\r\n", ends=True),
    "nothing at all": Odd(b"", ends=True),
}
CHUNKS = {
    "chunks": Odd(chunks(b"hel", b"lo")),
    "no chunk": Odd(chunks()),
    "chunk extensions": Odd(CHUNKED + b'3;a=b;c\r\nhel\r\n2;x="y;z"\r\nlo\r\n0;last\r\n\r\n'),
    "an empty chunk extension": Odd(CHUNKED + b"5;\r\nhello\r\n0\r\n\r\n", ends=True),
    "trailers": Odd(CHUNKED + b"5\r\nhello\r\n0\r\nX-Trailer: 1\r\nContent-Length: 9\r\n\r\n"),
    "trailers that are announced": Odd(
        OK + b"Trailer: X-T\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-T: 1\r\n\r\n"
    ),
    "sizes with zeros in front": Odd(CHUNKED + b"00005\r\nhello\r\n0000\r\n\r\n"),
    "sizes in capitals": Odd(CHUNKED + b"A\r\n0123456789\r\n0\r\n\r\n"),
    "spaces after a size": Odd(CHUNKED + b"5  \r\nhello\r\n0\r\n\r\n", ends=True),
    "a space before a size": Odd(CHUNKED + b" 5\r\nhello\r\n0\r\n\r\n", ends=True),
    "a size in hex notation": Odd(CHUNKED + b"0x5\r\nhello\r\n0\r\n\r\n", ends=True),
    "a negative size": Odd(CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n", ends=True),
    "a size in words": Odd(CHUNKED + b"xyz\r\nhello\r\n0\r\n\r\n", ends=True),
    "no size": Odd(CHUNKED + b"\r\nhello\r\n0\r\n\r\n", ends=True),
    "a size beyond 64 bits": Odd(CHUNKED + b"fffffffffffffffff\r\nhello\r\n0\r\n\r\n", ends=True),
    "a huge size": Odd(CHUNKED + b"fffffffffffffff\r\nhello\r\n0\r\n\r\n", ends=True),
    "too short a size": Odd(CHUNKED + b"4\r\nhello\r\n0\r\n\r\n", ends=True),
    "too long a size": Odd(CHUNKED + b"6\r\nhello\r\n0\r\n\r\n", ends=True),
    "no break after a chunk": Odd(CHUNKED + b"5\r\nhello0\r\n\r\n", ends=True),
    "no last chunk": Odd(CHUNKED + b"5\r\nhello\r\n", ends=True),
    "no end after the last chunk": Odd(CHUNKED + b"5\r\nhello\r\n0\r\n", ends=True),
    "truncated in a chunk": Odd(CHUNKED + b"5\r\nhel", ends=True),
    "truncated in a size": Odd(CHUNKED + b"5", ends=True),
    "Transfer-Encoding: identity": Odd(OK + b"Transfer-Encoding: identity\r\n" + HELLO, ends=True),
    "Transfer-Encoding: Chunked": Odd(OK + b"Transfer-Encoding: Chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"),
    "Transfer-Encoding: gzip, chunked": Odd(OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"),
    "Transfer-Encoding: chunked, gzip": Odd(
        OK + b"Transfer-Encoding: chunked, gzip\r\n\r\n5\r\nhello\r\n0\r\n\r\n", ends=True
    ),
    "Transfer-Encoding: nonsense": Odd(OK + b"Transfer-Encoding: nonsense\r\n\r\nhello", ends=True),
    "Transfer-Encoding twice": Odd(
        OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", ends=True
    ),
    "chunks over HTTP/1.0": Odd(
        b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", ends=True
    ),
}
HEADERS = {
    "a folded header": Odd(OK + b"X-A: one\r\n two\r\n\tthree\r\n" + HELLO),
    "a folded length": Odd(OK + b"Content-Length:\r\n 5\r\n\r\nhello", ends=True),
    "a folded first line": Odd(OK + b" folded\r\n" + HELLO, ends=True),
    "a header twice": Odd(OK + b"X-A: 1\r\nX-a: 2\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\n" + HELLO),
    "an empty header": Odd(OK + b"X-A:\r\nX-B: \r\n" + HELLO),
    "no space after the colon": Odd(OK + b"X-A:1\r\n" + HELLO),
    "a space before the colon": Odd(OK + b"X-A : 1\r\n" + HELLO, ends=True),
    "a length with a space before the colon": Odd(OK + b"Content-Length : 5\r\n\r\nhello", ends=True),
    "a header without colon": Odd(OK + b"X-A\r\n" + HELLO, ends=True),
    "a header without name": Odd(OK + b": 1\r\n" + HELLO, ends=True),
    "a header with spaces in its name": Odd(OK + b"X A: 1\r\n" + HELLO, ends=True),
    "a header of odd bytes": Odd(OK + b"X-A: \xff\xfe g\xc3\xbcn \x01\x7f\r\n" + HELLO, ends=True),
    "a header name of odd bytes": Odd(OK + b"X-\xff: 1\r\n" + HELLO, ends=True),
    "a null in a header": Odd(OK + b"X-A: 1\x002\r\n" + HELLO, ends=True),
    "a CR in a header": Odd(OK + b"X-A: 1\r2\r\n" + HELLO, ends=True),
    "an LF in a header": Odd(OK + b"X-A: 1\nX-B: 2\r\n" + HELLO),
    "spaces around a header": Odd(OK + b"X-A: \t 1 2 \t \r\n" + HELLO),
    "Connection: close": Odd(plain(b"hello", "200 OK", "Connection: close")),
    "Connection: Close, x": Odd(plain(b"hello", "200 OK", "Connection: Close, x")),
    "Connection: nonsense": Odd(plain(b"hello", "200 OK", "Connection: nonsense")),
    "Connection: close, more to come": Odd(plain(b"hello", "200 OK", "Connection: close") + b"more"),
    "an upgrade offered": Odd(plain(b"hello", "200 OK", "Connection: Upgrade", "Upgrade: h2c"), ends=True),
    "a hundred headers": Odd(plain(b"hello", "200 OK", *(f"X-{n}: {n}" for n in range(100)))),
    "a header of 60 KB": Odd(plain(b"hello", "200 OK", f"X-A: {'a' * 60_000}")),
    "a header of 70 KB": Odd(plain(b"hello", "200 OK", f"X-A: {'a' * 70_000}"), ends=True),
    "a reason of 70 KB": Odd(plain(b"hello", f"200 {'a' * 70_000}"), ends=True),
    "a name of 70 KB": Odd(plain(b"hello", "200 OK", f"{'a' * 70_000}: 1"), ends=True),
    "two headers of 40 KB": Odd(plain(b"hello", "200 OK", f"X-A: {'a' * 40_000}", f"X-B: {'a' * 40_000}"), ends=True),
    "2,000 headers": Odd(plain(b"hello", "200 OK", *(f"X-{n}: {n}" for n in range(2_000))), ends=True),
}
AFTER = {
    "garbage after the end": Odd(plain(b"hello") + b"garbage"),
    "an answer after the end": Odd(plain(b"hello") + plain(b"evil")),
    "half an answer after the end": Odd(plain(b"hello") + b"HTTP/1.1 200 OK\r\nX-Half: "),
    "blank lines after the end": Odd(plain(b"hello") + b"\r\n\r\n"),
    "garbage after the last chunk": Odd(chunks(b"hello") + b"garbage"),
    "garbage after 204": Odd(b"HTTP/1.1 204 No Content\r\n\r\ngarbage"),
}
PACKED = {
    "gzip": Odd(zipped("gzip", gzip.compress(TEXT))),
    "x-gzip": Odd(zipped("x-gzip", gzip.compress(TEXT))),
    "GZip": Odd(zipped("GZip", gzip.compress(TEXT))),
    "gzip in chunks": Odd(
        OK + b"Content-Encoding: gzip\r\n" + chunks(gzip.compress(TEXT)[:20], gzip.compress(TEXT)[20:])[len(OK) :]
    ),
    "gzip of nothing": Odd(zipped("gzip", b"")),
    "gzip in two members": Odd(zipped("gzip", gzip.compress(TEXT[:99]) + gzip.compress(TEXT[99:]))),
    "gzip and garbage": Odd(zipped("gzip", gzip.compress(TEXT) + b"garbage")),
    "gzip and zeros": Odd(zipped("gzip", gzip.compress(TEXT) + b"\0" * 20)),
    "gzip cut short": Odd(zipped("gzip", gzip.compress(TEXT)[:-9])),
    "gzip with a wrong sum": Odd(zipped("gzip", gzip.compress(TEXT)[:-8] + b"\0" * 8)),
    "gzip that is none": Odd(zipped("gzip", b"plain text")),
    "gzip that is deflate": Odd(zipped("gzip", zlib.compress(TEXT))),
    "deflate": Odd(zipped("deflate", zlib.compress(TEXT))),
    "deflate without a header": Odd(zipped("deflate", raw_deflate(TEXT))),
    "deflate that is gzip": Odd(zipped("deflate", gzip.compress(TEXT))),
    "deflate cut short": Odd(zipped("deflate", zlib.compress(TEXT)[:-9])),
    "identity": Odd(zipped("identity", b"hello")),
    "an encoding nobody knows": Odd(zipped("rot13", b"hello")),
    "gzip twice": Odd(zipped("gzip, gzip", gzip.compress(gzip.compress(TEXT)))),
    "gzip with 304": Odd(b"HTTP/1.1 304 Not Modified\r\nContent-Encoding: gzip\r\n\r\n"),
}
ODD = STATUS_LINES | INTERIM | BODILESS | LENGTHS | CHUNKS | HEADERS | AFTER | PACKED
