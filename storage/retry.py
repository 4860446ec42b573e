"""Which failures of a remote place pass by themselves, and how long they are waited for.

What passes (a connection reset, a timeout, 5xx, throttling, a server that restarts) is tried again with exponential
back-off and jitter, for up to RETRY_SECONDS. What does not pass (a missing bucket, refused or expired credentials, a
full disk) is told at once: to wait for it would only hide it. Tried again is whole-object work alone, which may be done
twice without harm.

Every backend has errors of its own, and none of them is imported here unless the backend already was. All of them
leave this module as OSError with one scrubbed line, so that callers add what they were doing and nothing else.
"""

from __future__ import annotations

import errno
import logging
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import stamina

from storage.errors import one_line

logger = logging.getLogger(__name__)

RETRY_SECONDS = 120.0
"""How long one request is tried: longer than a server takes to restart."""

_Result = TypeVar("_Result")

_BACKEND_ERRORS = (
    ("aiohttp", "ClientError"),
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("botocore.exceptions", "HTTPClientError"),
    ("gcsfs.retry", "HttpError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("requests.exceptions", "RequestException"),
    ("azure.core.exceptions", "AzureError"),
)
_TRANSIENT_ERRNO = {
    errno.EAGAIN, errno.EBUSY, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH,
    errno.ENETDOWN, errno.ENETUNREACH, errno.EPIPE, errno.ETIMEDOUT,
    # What s3fs makes of InternalError and 500.
    getattr(errno, "EREMOTEIO", errno.EIO),
}  # fmt: skip
_TRANSIENT_CODES = {
    "500", "502", "503", "504", "429", "408", "InternalError", "RequestTimeout", "RequestTimeoutException",
    "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "IncompleteBody",
}  # fmt: skip
# Class names say what the classes' trees do not: they lie in optional packages.
_TRANSIENT_NAMES = {
    "ClientConnectionError", "ClientOSError", "ClientPayloadError", "ServerDisconnectedError", "ServerTimeoutError",
    "ClientConnectorError", "ConnectionClosedError", "ConnectTimeoutError", "EndpointConnectionError",
    "HTTPClientError", "ConnectionError", "IncompleteRead", "IncompleteReadError", "ReadTimeoutError",
    "ResponseStreamingError", "ResponseParserError", "FSTimeoutError", "TransportError", "ServiceRequestError",
    "ServiceResponseError", "ChunkedEncodingError",
}  # fmt: skip
_PERMANENT = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
_SECRETS = (
    re.compile(r"(?i)(://)[^/\s@]+@"),
    re.compile(
        r"(?i)\b(x-amz-[a-z-]+|signature|awsaccesskeyid|access_token|token|key|secret|sig|credential)(=)[^&\s\"']+"
    ),
    re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{12,}\b"),
    re.compile(r"(?i)\b(bearer|aws4-hmac-sha256)\s+\S.*"),
)


class _PassingError(OSError):
    """A failure worth another try; its text is scrubbed."""


def retried(request: Callable[..., _Result], *arguments: Any, where: str) -> _Result:
    """`request(*arguments)`, tried again while it fails with what passes. OSError, scrubbed, when it does not pass."""
    for attempt in _attempts():
        with attempt:
            try:
                return request(*arguments)
            except _backend_errors() as error:
                text = f"{scrubbed(error)}{_way_out(error)}"
                if isinstance(error, FileNotFoundError):
                    raise FileNotFoundError(errno.ENOENT, f"no such bucket or object: {text}") from None
                if is_transient(error):
                    logger.info("%s: %s; trying again", where, text)
                    raise _PassingError(f"{text}; it did not pass within {RETRY_SECONDS:.0f} s") from None
                raise OSError(getattr(error, "errno", None) or errno.EIO, text) from None
    raise AssertionError("stamina raises the last error")


def is_transient(error: BaseException) -> bool:
    """Whether an error of any backend is of the kind that passes."""
    for link in _chain(error):
        response = getattr(link, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            code = str(response.get("Error", {}).get("Code"))
            if code in _TRANSIENT_CODES or (isinstance(status, int) and (status >= 500 or status == 429)):
                return True
            if isinstance(status, int):
                return False
        status = getattr(link, "status", None) or getattr(link, "status_code", None) or getattr(link, "code", None)
        if isinstance(status, int) and (status >= 500 or status in (408, 429)):
            return True
        if isinstance(link, _PERMANENT):
            return False
        if isinstance(link, TimeoutError | ConnectionError | EOFError) or type(link).__name__ in _TRANSIENT_NAMES:
            return True
        if isinstance(link, OSError) and link.errno in _TRANSIENT_ERRNO:
            return True
    return False


def scrubbed(error: BaseException) -> str:
    """An error's text on one line, without anything that looks like a credential."""
    text = one_line(error)
    text = _SECRETS[0].sub(r"\1***@", text)
    text = _SECRETS[1].sub(r"\1\2***", text)
    text = _SECRETS[2].sub("***", text)
    return _SECRETS[3].sub(r"\1 ***", text)


def _attempts() -> Iterator[Any]:
    return iter(
        stamina.retry_context(
            on=_PassingError, attempts=None, timeout=RETRY_SECONDS, wait_initial=0.1, wait_max=5.0, wait_jitter=0.5
        )
    )


def _backend_errors() -> tuple[type[Exception], ...]:
    found: list[type[Exception]] = [OSError, EOFError]
    for module, name in _BACKEND_ERRORS:
        if module in sys.modules:
            found.append(getattr(sys.modules[module], name))
    return tuple(found)


def _way_out(error: BaseException) -> str:
    name = type(error).__name__
    if isinstance(error, PermissionError) or name in ("NoCredentialsError", "PartialCredentialsError"):
        return " (check that the environment's credentials are there, have not expired, and may do this)"
    return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
