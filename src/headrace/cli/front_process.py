"""A server process that others were started before: `python -m headrace.cli.front_process`."""

from __future__ import annotations

import gc
import os
import shutil
import socket
import sys
import threading
from pathlib import Path

import msgspec

from headrace.cli.fronts import FrontOrder, RuntimeEnd
from headrace.env import metrics_folder
from headrace.runtime.children import STDIN, read_order


class DistantRuntime:
    """The runtime of the first server process. Implements `ChildRuntime`, and starts and ends nothing."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._end: RuntimeEnd | None = None

    @property
    def returncode(self) -> int | None:
        return None if self._end is None else self._end.returncode

    @property
    def stderr_tail(self) -> str:
        return "" if self._end is None else self._end.stderr_tail

    def start(self) -> None:
        threading.Thread(target=self._listen, name="headrace-parent-watch", daemon=True).start()

    def close(self, timeout_s: float) -> None:
        pass

    def _listen(self) -> None:
        """Until the first process closes the pipe or ends; then this one has nothing to live for."""
        data = b""
        while part := os.read(STDIN, 1 << 16):
            data += part
            if data.endswith(b"\n"):
                self._end = msgspec.json.decode(data, type=RuntimeEnd)
        if folder := metrics_folder():
            shutil.rmtree(folder, ignore_errors=True)  # a first process that was killed leaves it to the others
        os._exit(1)


def main() -> int:
    order = msgspec.json.decode(read_order(), type=FrontOrder)
    from headrace import log
    from headrace.cli.serving import rpc_of, service_options, tls_of
    from headrace.config.serving import ServerOptions
    from headrace.front.text_side import load_text_side
    from headrace.runtime.packing import unpack_args, unpack_source
    from headrace.server.run import Process, serve

    args, source = unpack_args(order.args), unpack_source(order.source)
    options = ServerOptions.model_validate(order.options)
    # The first process tells what all have in common.
    log.setup("warning" if options.log_level in ("info", "verbose") else options.log_level)
    gc.set_threshold(args.garbage_collection_gen0_threshold)
    listener = socket.socket(fileno=order.descriptor)
    listener.setblocking(False)
    tls = tls_of(options)
    outcome = serve(
        listener,
        DistantRuntime(order.address),
        lambda: load_text_side(args, source, chat_template=options.chat_template),
        service_options(args, options, front=order.front),
        version=order.version,
        process=Process(tls=tls, rpc=rpc_of(options, listener, tls), pulse=Path(order.pulse), waits_until_ready=True),
    )
    return outcome.exit_code


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())
