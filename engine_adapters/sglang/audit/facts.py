"""What a release does about early reads, late writes and aborts: one question and one small function each.

An answer is a word: `yes`, `no`, `-` (the release has nothing the question is about), or what the question asks for.
A function that does not find what it knows to look for answers `no` or `-`, never `yes`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import NamedTuple

from dsv4ctl.engine_adapters.sglang.audit.consumers import Access, accessors
from dsv4ctl.engine_adapters.sglang.audit.sources import Sources
from dsv4ctl.engine_adapters.sglang.audit.tree import calls, constants, find, names

YES, NO, ABSENT = "yes", "no", "-"

_ENVIRON = "srt/environ.py"
_COMMON = "srt/disaggregation/common/conn.py"
_NIXL = "srt/disaggregation/nixl/conn.py"
_PREFILL = "srt/disaggregation/prefill.py"
DECODE = "srt/disaggregation/decode.py"
_POLLS = "srt/disaggregation/utils.py"
_SCHEDULER = "srt/managers/scheduler.py"
_READ_EVENT = "srt/model_executor/runner_utils/shared_read_event.py"
_CONTROLLER = "srt/managers/cache_controller.py"
_ASSEMBLER = "srt/mem_cache/hybrid_cache/hybrid_pool_assembler.py"
TREE = "srt/mem_cache/unified_radix_cache.py"

_BOOTSTRAP = "NixlKVManager._start_bootstrap_thread"
_EARLY = "maybe_send_cached_prefix_chunk"
_EARLY_DEFAULT = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"
_READ_DONE = "SGLANG_ENABLE_PREFILL_WAR_READ_DONE"
_DEFERRED = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"
_BACKENDS = ("mooncake", "mori", "nixl")
#: The wire word of an abort, and the constant that later releases give it.
_ABORT: frozenset[object] = frozenset({b"ABORT"})
_ABORT_NAMES = frozenset({"ABORT_TAG", "AbortNotification"})


class Answer(NamedTuple):
    value: str
    #: `path:line` below the package, if there is a place to look at.
    where: str = ""


def _at(value: str, path: str, node: ast.AST) -> Answer:
    return Answer(value, f"{path}:{getattr(node, 'lineno', 0)}")


def gated(name: str) -> Callable[[Sources], Answer]:
    def read(sources: Sources) -> Answer:
        for accessor in accessors(sources):
            if accessor.name == name:
                return Answer(YES if accessor.access is Access.GATED else NO, accessor.where)
        return Answer(ABSENT)

    return read


def _speaks_of_abort(node: ast.AST) -> bool:
    return bool(_ABORT & constants(node) or _ABORT_NAMES & names(node))


def abort_sent(sources: Sources) -> Answer:
    sent = [call for call in calls(sources.tree(_COMMON), "send_multipart") if _speaks_of_abort(call)]
    return _at(YES, _COMMON, sent[-1]) if sent else Answer(NO)


def abort_survived(sources: Sources) -> Answer:
    """The bootstrap thread asserts that a frame begins with GUARD: an abort has to be taken out before that."""
    tree = sources.tree(_NIXL)
    loop = find(tree, f"{_BOOTSTRAP}.bootstrap_thread")
    if loop is None or abort_sent(sources).value == NO:
        return Answer(ABSENT)
    for node in ast.walk(loop):
        if isinstance(node, ast.If) and (_speaks_of_abort(node.test) or _calls_abort_handler(tree, node.test)):
            return _at(YES, _NIXL, node)
    return _at(NO, _NIXL, loop)


def _calls_abort_handler(tree: ast.Module, test: ast.expr) -> bool:
    match test:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
            handler = find(tree, f"NixlKVManager.{name}")
            return handler is not None and _speaks_of_abort(handler)
    return False


def frames_survived(sources: Sources) -> Answer:
    """Whatever a frame raises must be caught inside the loop."""
    loop = find(sources.tree(_NIXL), f"{_BOOTSTRAP}.bootstrap_thread")
    if loop is None:
        return Answer(ABSENT)
    rounds = [node for node in ast.walk(loop) if isinstance(node, ast.While)]
    caught = rounds and any(isinstance(statement, ast.Try) for statement in rounds[0].body)
    return _at(YES if caught else NO, _NIXL, loop)


def bootstrap_death_logged(sources: Sources) -> Answer:
    start = find(sources.tree(_NIXL), _BOOTSTRAP)
    if start is None:
        return Answer(NO)
    handlers = [node for node in ast.walk(start) if isinstance(node, ast.ExceptHandler)]
    logged = [node for node in handlers if calls(node, "exception") or calls(node, "error")]
    return _at(YES, _NIXL, logged[0]) if logged else _at(NO, _NIXL, start)


def sender_timeout(sources: Sources) -> Answer:
    """`NixlKVSender.poll`, its own or the common one, and the method of the same class that it leaves the work to."""
    for path, owner in ((_NIXL, "NixlKVSender"), (_COMMON, "CommonKVSender")):
        poll = find(sources.tree(path), f"{owner}.poll")
        if poll is not None:
            inner = find(sources.tree(path), f"{owner}._poll_with_status")
            steps = [poll, inner] if inner is not None and calls(poll, "_poll_with_status") else [poll]
            found = [call for step in steps for call in calls(step, "_check_bootstrap_timeout")]
            return _at(YES, path, found[0]) if found else _at(NO, path, poll)
    return Answer(NO)


def _default(sources: Sources, variable: str) -> Answer:
    """`on` or `off`, as environ.py declares it: `NAME = EnvBool(True)`."""
    for node in ast.walk(sources.tree(_ENVIRON)):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(args=[ast.Constant(value=bool(on))])):
                if name == variable:
                    return _at("on" if on else "off", _ENVIRON, node)
    return Answer(ABSENT)


def early_send(sources: Sources) -> Answer:
    return _default(sources, _EARLY_DEFAULT)


def early_send_skips_loads(sources: Sources) -> Answer:
    """`run_batch` must tell the sender that this batch started a load, and the sender must heed it."""
    send = find(sources.tree(_PREFILL), f"SchedulerDisaggregationPrefillMixin.{_EARLY}")
    if send is None:
        return Answer(ABSENT)
    run = find(sources.tree(_SCHEDULER), "Scheduler.run_batch")
    told = run and "hicache_consumer_index" in names(run)
    passed = run and any(keyword.arg == "allow_send" for call in calls(run, _EARLY) for keyword in call.keywords)
    heeded = any(isinstance(node, ast.If) and "allow_send" in names(node.test) for node in ast.walk(send))
    return _at(YES if told and passed and heeded else NO, _PREFILL, send)


def early_send_fenced(sources: Sources) -> Answer:
    """The transfer backends whose worker waits for the event behind the forward before."""
    if early_send(sources).value == ABSENT:
        return Answer(ABSENT)
    waiting, where = [], ""
    for backend in _BACKENDS:
        path = f"srt/disaggregation/{backend}/conn.py"
        for call in calls(sources.tree(path), "synchronize"):
            if "wait_event" in names(call):
                waiting.append(backend)
                where = where or f"{path}:{call.lineno}"
                break
    return Answer(", ".join(waiting) or NO, where)


def war_barrier(sources: Sources) -> Answer:
    barrier = find(sources.tree(_SCHEDULER), "Scheduler._apply_war_barrier")
    if barrier is None:
        return Answer(NO)
    return _at(YES if calls(barrier, "wait_stream") else NO, _SCHEDULER, barrier)


def early_send_ordered(sources: Sources) -> Answer:
    """The barrier orders it by accident: unless a prefill publishes, before it ends, that it read its inputs."""
    if early_send(sources).value == ABSENT:
        return Answer(ABSENT)
    if "nixl" in early_send_fenced(sources).value:
        return Answer("event")
    barrier, published = war_barrier(sources), _default(sources, _READ_DONE)
    if barrier.value == NO or published.value != "on":
        return Answer(NO if barrier.value == NO else "barrier", barrier.where)
    publish = find(sources.tree(_READ_EVENT), "maybe_publish_prefill_shared_read_done")
    spared = publish is not None and "enable_hierarchical_cache" in names(publish)
    return Answer("barrier if HiCache" if spared else NO, published.where)


def fence(stream: str) -> Callable[[Sources], Answer]:
    """The copy's stream waits for `stream`, and the scheduler sets it."""

    def read(sources: Sources) -> Answer:
        waits = [call for call in calls(sources.tree(_CONTROLLER), "wait_stream") if stream in names(call)]
        if not waits or stream not in names(sources.tree(_SCHEDULER)):
            return Answer(NO)
        return _at(YES, _CONTROLLER, waits[0])

    return read


def deferred_release(sources: Sources) -> Answer:
    return _default(sources, _DEFERRED)


def enters(
    path: str, function: str, collective: tuple[str, ...], agreed: frozenset[str]
) -> Callable[[Sources], Answer]:
    """No return before `collective`, except on a test of names that are the same on every rank."""

    def read(sources: Sources) -> Answer:
        found = find(sources.tree(path), function)
        if found is None:
            return Answer(ABSENT)
        for statement in found.body:
            if any(calls(statement, name) for name in collective):
                return _at(YES, path, statement)
            if isinstance(statement, ast.If) and _returns(statement) and not names(statement.test) <= agreed:
                break
        return _at(NO, path, found)

    return read


def _returns(statement: ast.If) -> bool:
    return any(isinstance(node, ast.Return) for node in ast.walk(statement))


def metadata_gate(sources: Sources) -> Answer:
    """It must hold back a slot that another room wrote, not only an empty one, before the ranks reduce their polls."""
    gate = find(sources.tree(_POLLS), "_apply_metadata_gate")
    if gate is None:
        return Answer(ABSENT)
    compared = [node for node in ast.walk(gate) if isinstance(node, ast.Compare) and "actual_room" in names(node)]
    expected = any(not isinstance(side, ast.Constant) for node in compared for side in node.comparators)
    return _at(YES if expected else NO, _POLLS, gate)


def counter_waits(sources: Sources) -> Answer:
    update = find(sources.tree(_CONTROLLER), "LayerDoneCounter.update_producer")
    if update is None:
        return Answer(ABSENT)
    asserts = any(isinstance(node, ast.Assert) for node in ast.walk(update))
    return _at(NO if asserts else YES, _CONTROLLER, update)


def hicache_size(sources: Sources) -> Answer:
    for node in ast.walk(sources.tree(_ASSEMBLER)):
        match node:
            case ast.If(test=test, body=[ast.Raise() as refusal, *_]) if "hicache_size" in names(test):
                if any("DeepSeek V4" in str(word) for word in constants(refusal)):
                    return _at("refused", _ASSEMBLER, node)
    return Answer("accepted")
