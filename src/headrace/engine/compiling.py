"""Grammars compiled beside the steps, and kept for the requests that come with the same ones."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.sampling.grammar import CompiledGrammar, GrammarCompiler
from headrace.seam import Command
from headrace.types import Grammar

__all__ = ["Compiling", "OpenCompiler"]

log = logging.getLogger("headrace.engine")

MAX_KEPT = 128
"""Compiled grammars; the least recently used one is forgotten."""
MAX_THREADS = 4
NUM_TRIED = 4
MAX_FILL_S = 1.0
"""Of a mask that is tried out; all sequences would wait for it."""

OpenCompiler = Callable[[int], GrammarCompiler]
"""For that many ids; takes a second or so for a large vocabulary. Raises ValueError: this model can have none."""

Key = tuple[str, str]
CommandResult = dict[str, Any]
"""`error`: "" when it is compiled; `compile_s`: what that took, without it when the grammar was there."""


class Compiling:
    """`begin`, `take_done` and `get` are for one thread, the one that runs steps."""

    def __init__(self, open_compiler: OpenCompiler | None, *, num_ids: int) -> None:
        """
        Args:
            open_compiler: None where there is no tokenizer.
            num_ids: ids from here on are never sampled.
        """
        self._open = open_compiler
        self._num_ids = num_ids
        self._compiler: GrammarCompiler | None = None
        self._kept: OrderedDict[Key, CompiledGrammar | ValueError] = OrderedDict()
        self._jobs: queue.SimpleQueue[tuple[int, Grammar]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, CommandResult]] = queue.SimpleQueue()
        self._num_threads = 0
        self._num_busy = 0
        self._lock = threading.Lock()
        """Of what is kept and of the counts; held for moments."""
        self._opening = threading.Lock()

    @property
    def compiler(self) -> GrammarCompiler:
        """Made when the first grammar comes. Raises ValueError."""
        if self._open is None:
            raise ValueError("guided_decoding: this engine has no tokenizer, and a grammar is about text")
        with self._opening:
            if self._compiler is None:
                self._compiler = self._open(self._num_ids)
            return self._compiler

    def begin(self, command: Command) -> None:
        """A grammar that is known is reported at once; others by and by, whatever becomes of them."""
        assert command.name == "compile_grammar", command.name
        grammar = Grammar(kind=command.args["kind"], spec=command.args["spec"])
        found = self._find(_key(grammar))
        if found is not None:
            self._done.put((command.id, _result(found)))
            return
        with self._lock:
            self._num_busy += 1
            if self._num_busy > self._num_threads and self._num_threads < MAX_THREADS:
                threading.Thread(target=self._work, name=f"headrace-grammar-{self._num_threads}", daemon=True).start()
                self._num_threads += 1
        self._jobs.put((command.id, grammar))

    def take_done(self) -> dict[int, CommandResult]:
        """By command, what came of it."""
        done: dict[int, CommandResult] = {}
        while not self._done.empty():
            command, result = self._done.get()
            done[command] = result
        return done

    def get(self, grammar: Grammar) -> CompiledGrammar:
        """Compiles it here and now if it has been forgotten meanwhile. Raises ValueError."""
        found = self._find(_key(grammar)) or self._compile(grammar)
        if isinstance(found, ValueError):
            raise found
        return found

    def _find(self, key: Key) -> CompiledGrammar | ValueError | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _work(self) -> None:
        while True:
            command, grammar = self._jobs.get()
            begin_s = time.perf_counter()
            found = self._compile(grammar)
            with self._lock:
                self._num_busy -= 1
            self._done.put((command, {**_result(found), "compile_s": time.perf_counter() - begin_s}))

    def _compile(self, grammar: Grammar) -> CompiledGrammar | ValueError:
        try:
            found = self.compiler.compile(grammar)
            _try_out(self.compiler, found, num_words=-(-self._num_ids // 32))
        except ValueError as error:
            found = error
        except Exception as error:  # a fault of the library is this grammar's alone
            log.exception("a grammar could not be compiled")
            found = ValueError(f"it could not be compiled: {type(error).__name__}: {error}")
        with self._lock:
            self._kept[_key(grammar)] = found
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return found


def _try_out(compiler: GrammarCompiler, compiled: CompiledGrammar, *, num_words: int) -> None:
    """A few steps here, where they delay nobody: the first are the slowest, and some grammars never become quick.

    Raises:
        ValueError: it is too complex.
    """
    matcher = compiled.matcher()
    row = np.zeros((1, num_words), np.int32)
    for _ in range(NUM_TRIED):
        begin_s = time.perf_counter()
        errors = compiler.fill([matcher], row)
        if errors:
            raise ValueError(f"too complex: {errors[0]}")
        if time.perf_counter() - begin_s > MAX_FILL_S:
            raise ValueError("too complex: what may come next takes too long to tell; simplify its repetitions")
        allowed = np.flatnonzero(row[0])
        if not len(allowed):
            return
        word = int(allowed[0])
        bits = int(row[0, word]) & 0xFFFFFFFF
        matcher.advance(word * 32 + (bits & -bits).bit_length() - 1)


def _result(found: CompiledGrammar | ValueError) -> CommandResult:
    return {"error": str(found) if isinstance(found, ValueError) else ""}


def _key(grammar: Grammar) -> Key:
    return grammar.kind, grammar.spec
