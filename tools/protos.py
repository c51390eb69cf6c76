"""Compiles the committed .proto files to the descriptors that the server reads (needs grpcio-tools).

    python tools/protos.py [--check]

`--check` writes nothing and ends with 1 where the committed descriptors differ from what the files say.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "src/headrace/server/rpc"
DESCRIPTORS = FOLDER / "services.binpb"


def compiled() -> bytes:
    """A FileDescriptorSet of all files, imported ones first, without comments and positions."""
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.binpb"
        names = sorted(path.name for path in FOLDER.glob("*.proto"))
        if protoc.main(["protoc", f"-I{FOLDER}", "--include_imports", f"--descriptor_set_out={out}", *names]) != 0:
            raise SystemExit(1)
        return out.read_bytes()


def are_current() -> bool:
    """By meaning: another release of protoc may write the same differently."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    committed, fresh = (FileDescriptorSet.FromString(data) for data in (DESCRIPTORS.read_bytes(), compiled()))
    return committed == fresh


def main() -> int:
    if "--check" in sys.argv[1:]:
        if are_current():
            return 0
        print(f"{DESCRIPTORS.name} is not what the .proto files say: run python tools/protos.py", file=sys.stderr)
        return 1
    DESCRIPTORS.write_bytes(compiled())
    return 0


if __name__ == "__main__":
    sys.exit(main())
