"""Run the guarded process of environments: one event loop, in which all conversations of the process advance.

Imports only the standard library and what the environment needs, so that a replacement starts in a fraction of a
second. Before any code of an environment runs, the number of its order is written to memory that the pool reads when
the process ends or its loop is blocked."""

import asyncio
import mmap
import os
import pickle
import socket
import struct
import sys
import time
from collections.abc import Callable, Coroutine, Generator, Iterator
from importlib import import_module
from traceback import StackSummary
from types import FrameType, coroutine
from typing import Any

from fusion.environments.interface import (
    Environment,
    EnvironmentFailed,
    StepOrder,
    Turn,
    checked_start,
    checked_turn,
    digest_of,
)
from fusion.environments.tool_calls import Schemas, parse
from fusion.environments.wire import EndOrder, NextOrder, Order, Reply, pack_reply, pack_start
from fusion.rewards.child import (
    attempt,
    end_if_forked,
    memory_limit,
    open_child,
    raise_memory_limit,
    trace_of_exception,
)
from fusion.rewards.user import import_file
from fusion.rewards.wire import HEADER

NUMBER = struct.Struct("<I")
"""Number of the order whose code runs; 0: none"""
METHODS = ("reset", "step", "close")


def main(options_json: str) -> None:
    """Run a child with the options that `pool.EnvChild` writes."""
    options, connection = open_child(options_json)
    pid, limit = os.getpid(), memory_limit(options["memory_mib"], "environment.memory_mib")
    create, error = attempt(lambda: load(options["target"], options["label"]), options["label"], limit)
    end_if_forked(pid)
    try:
        connection.sendall(pack_start(error))
    except ConnectionError:  # the pool has been closed meanwhile
        return
    if create is not None:
        asyncio.run(Server(create, options).serve(connection))


def load(target: str, label: str) -> Callable[[], Environment]:
    """Return the class of a built-in or of a user's own environment.
    Raise ValueError: it cannot be imported, or is no environment (names the config key)."""
    if target.rpartition(":")[0].endswith(".py"):
        module, name = import_file(target, "environment")
    else:
        module, name = import_module(target.partition(":")[0]), target.partition(":")[2]
    environment = getattr(module, name, None)
    if environment is None:
        raise ValueError(f"{label}: the file defines no {name!r}")
    for method in METHODS:
        if not asyncio.iscoroutinefunction(getattr(environment, method, None)):
            raise ValueError(f"{label}: expected a class with async methods {', '.join(METHODS)}; {method} is none")
    return environment


def frames_of(work: Any) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of a coroutine that waits, and their lines, the innermost last."""
    while (frame := getattr(work, "cr_frame", None)) is not None:
        yield frame, frame.f_lineno
        work = work.cr_await


class OpenEnvironment:
    """An environment under way, its tools, and the seconds that it has taken."""

    def __init__(self) -> None:
        self.environment: Environment | None = None
        self.tools: Schemas = ()
        self.seconds = 0.0


class Server:
    """Answer the orders of one connection, each in a task of its own."""

    def __init__(self, create: Callable[[], Environment], options: dict[str, Any]) -> None:
        self._create, self._options, self._pid = create, options, os.getpid()
        self._live: dict[str, OpenEnvironment] = {}
        self._running: dict[str, asyncio.Task] = {}
        self._reported: set[str] = set()
        self._culprit = mmap.mmap(options["culprit_fd"], NUMBER.size)

    async def serve(self, connection: socket.socket) -> None:
        """Answer until the connection closes."""
        connection.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=connection)
        tasks: set[asyncio.Task] = set()
        while True:
            try:
                number, size = HEADER.unpack(await reader.readexactly(HEADER.size))
                payload = await reader.readexactly(size)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            task = asyncio.create_task(self._answer(number, payload, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _answer(self, number: int, payload: bytes, writer: asyncio.StreamWriter) -> None:
        """Carry out an order, and reply to it unless it ends a conversation."""
        started, id = time.perf_counter(), ""
        try:
            order: Order = pickle.loads(payload)
            if isinstance(order, EndOrder):
                await self._end(number, order.id)
                return
            if isinstance(order, NextOrder) or order.actions:
                id = order.id
                reply = await self._step(number, order)
            else:
                reply = await self._start(number, order)
        except EnvironmentFailed as failed:
            reply = Reply(failed.kind, failed.detail, 0.0)
        except Exception:  # a field of the row that cannot be loaded
            reply = Reply("raised", trace_of_exception(), 0.0)
        end_if_forked(self._pid)
        writer.write(pack_reply(number, reply._replace(seconds=time.perf_counter() - started)))
        if reply.failure == "memory":
            await writer.drain()
            os._exit(0)  # what has filled the memory may still be referenced
        if reply.failure or reply.done:
            await self._close(number, self._live.pop(id, None))

    async def _end(self, number: int, id: str) -> None:
        if running := self._running.get(id):
            running.cancel()
        await self._close(number, self._live.pop(id, None))

    async def _start(self, number: int, order: StepOrder) -> Reply:
        conversation = OpenEnvironment()
        try:
            first = await self._begin(number, conversation, order)
            return Reply(None, "", 0.0, first.messages, tools=conversation.tools)
        finally:
            await self._close(number, conversation)

    async def _step(self, number: int, order: StepOrder | NextOrder) -> Reply:
        task = asyncio.current_task()
        assert task is not None
        self._running[order.id] = task
        try:
            if isinstance(order, NextOrder):
                conversation, action = self._live[order.id], order.action
            else:
                conversation, action = await self._repeated(number, order), order.actions[-1]
            turn = await self._advance(number, conversation, action)
            return Reply(None, "", 0.0, turn.messages, turn.done, turn.reward)
        finally:
            if self._running.get(order.id) is task:
                del self._running[order.id]

    async def _repeated(self, number: int, order: StepOrder) -> OpenEnvironment:
        """Return a fresh conversation in which all before the ordered step has been repeated.
        Raise EnvironmentFailed: also `diverged`: it says something else."""
        self._live[order.id] = conversation = OpenEnvironment()
        said = await self._begin(number, conversation, order)
        for num_turns, expected in enumerate(order.observed):
            if num_turns:
                said = await self._advance(number, conversation, order.actions[num_turns - 1])
            if digest_of(said) != expected:
                where = f"after turn {num_turns}" if num_turns else "at the start"
                shown = f"{[*said.messages]!r:.200}, done={said.done}, reward={said.reward}"
                raise EnvironmentFailed(
                    "diverged", f"{where}: something else with the same seed and the same actions: {shown}"
                )
        return conversation

    async def _begin(self, number: int, conversation: OpenEnvironment, order: StepOrder) -> Turn:
        async def begin() -> tuple[Any, Any]:
            conversation.environment = environment = self._create()
            return await environment.reset(order.task, order.seed), getattr(environment, "tools", ())

        first, conversation.tools = checked_start(*await self._call(number, conversation, begin()))
        return first

    async def _advance(self, number: int, conversation: OpenEnvironment, text: str) -> Turn:
        calls = parse(text, self._options["tools"], conversation.tools)
        message = {"role": "assistant", "content": text, "tool_calls": calls}
        assert conversation.environment is not None
        return checked_turn(await self._call(number, conversation, conversation.environment.step(message)))

    async def _close(self, number: int, conversation: OpenEnvironment | None) -> None:
        if conversation is None or conversation.environment is None:
            return
        try:
            await self._call(number, conversation, conversation.environment.close(), bounded=False)
        except EnvironmentFailed as failed:  # the conversation has ended: only the user can make use of it
            if failed.detail not in self._reported:
                self._reported.add(failed.detail)
                print(f"{self._options['label']}: close failed ({failed.kind})\n{failed.detail}", file=sys.stderr)

    async def _call(
        self, number: int, conversation: OpenEnvironment, work: Coroutine[Any, Any, Any], bounded: bool = True
    ) -> Any:
        """Await an environment's code, within what is left of the episode's seconds if ``bounded``.
        Raise EnvironmentFailed: it raised, or exceeded a limit."""
        limit_s, key = self._options["step_timeout_s"], "step_timeout_s"
        left_s = self._options["episode_timeout_s"] - conversation.seconds
        if bounded and left_s < limit_s:
            limit_s, key = left_s, "episode_timeout_s"
        started = time.perf_counter()
        task = asyncio.create_task(self._guarded(number, work))
        try:
            done, _ = await asyncio.wait({task}, timeout=max(0.0, limit_s))
            if not done:
                place = "".join(StackSummary.extract(frames_of(work)).format())
                exceeded = f"exceeded environment.{key}={self._options[key]}; it awaits\n{place}".rstrip()
                raise EnvironmentFailed("timeout", exceeded)
            if task.cancelled():
                raise EnvironmentFailed("raised", "it has cancelled itself")
            return task.result()
        finally:
            task.cancel()
            conversation.seconds += time.perf_counter() - started

    async def _guarded(self, number: int, work: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await self._marked(number, work)
        except (EnvironmentFailed, asyncio.CancelledError):
            raise
        except BaseException as error:  # including a user's sys.exit()
            mib = self._options["memory_mib"]
            if isinstance(error, MemoryError) and mib is not None:
                raise_memory_limit()
                limit = memory_limit(mib, "environment.memory_mib")
                raise EnvironmentFailed("memory", f"exceeded the {limit}\n{trace_of_exception()}") from None
            raise EnvironmentFailed("raised", trace_of_exception()) from None

    @coroutine
    def _marked(self, number: int, work: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Drive a coroutine, and name its order as the culprit while its code runs."""
        value, error = None, None
        while True:
            NUMBER.pack_into(self._culprit, 0, number)
            try:
                awaited = work.send(value) if error is None else work.throw(error)
            except StopIteration as ended:
                return ended.value
            finally:
                NUMBER.pack_into(self._culprit, 0, 0)
            try:
                value, error = (yield awaited), None
            except BaseException as thrown:
                value, error = None, thrown
