"""Errors as gRPC has them: a code, the message, and google.rpc's details in the trailing metadata."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from headrace.front.errors import RequestError
from headrace.server.errors import Unavailable
from headrace.server.replies import GONE_STATUS

__all__ = ["code_of", "trailers_of"]

DOMAIN = "headrace"
DETAILS = "grpc-status-details-bin"

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    GONE_STATUS: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
BY_NAME = {
    "already_exists": grpc.StatusCode.ALREADY_EXISTS,
    "not_enabled": grpc.StatusCode.FAILED_PRECONDITION,
    "unsupported_parameter": grpc.StatusCode.UNIMPLEMENTED,
}


def code_of(error: RequestError) -> grpc.StatusCode:
    named = BY_NAME.get(error.code or "")
    return named or CODES.get(error.status, grpc.StatusCode.INTERNAL)


def trailers_of(error: RequestError) -> tuple[tuple[str, bytes], ...]:
    """`ErrorInfo` with the code and the field, `BadRequest` for a field, `RetryInfo` where it may be tried again."""
    info = ErrorInfo(domain=DOMAIN, reason=(error.code or str(error.status)).upper())
    details: list[Any] = [info]
    if error.param is not None:
        info.metadata["param"] = error.param
        violation = BadRequest.FieldViolation(field=error.param, description=error.message)
        details.append(BadRequest(field_violations=[violation]))
    if isinstance(error, Unavailable):
        details.append(RetryInfo(retry_delay=Duration(seconds=error.retry_after_s)))
    status = Status(code=code_of(error).value[0], message=error.message)
    for detail in details:
        packed = Packed()
        packed.Pack(detail)
        status.details.append(packed)
    return ((DETAILS, status.SerializeToString()),)
