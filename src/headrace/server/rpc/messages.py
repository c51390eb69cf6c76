"""The messages of the committed .proto files, made from their compiled descriptors: no generated code, which would be
bound to the protobuf release that generated it."""

from __future__ import annotations

from importlib import resources
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

__all__ = ["POOL", "SERVICE", "add_file", "message", "methods"]

SERVICE = "trtllm.TrtllmService"

POOL = DescriptorPool()
"""Of its own: a program may have other files of the same names loaded."""


def add_file(descriptor: Any) -> None:
    """Let reflection tell of the file of another service."""
    POOL.AddSerializedFile(descriptor.serialized_pb)


def _load() -> None:
    data = resources.files("headrace.server.rpc").joinpath("services.binpb").read_bytes()
    for file in FileDescriptorSet.FromString(data).file:
        POOL.AddSerializedFile(file.SerializeToString())


_load()


def message(name: str) -> Any:
    """The class of a message, by its full name or by its name within the service's package."""
    full = name if "." in name else f"{SERVICE.partition('.')[0]}.{name}"
    return GetMessageClass(POOL.FindMessageTypeByName(full))


def methods() -> dict[str, Any]:
    """Descriptors of the service's methods by name."""
    found: Any = POOL.FindServiceByName(SERVICE)
    return dict(found.methods_by_name)
