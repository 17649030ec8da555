"""Write the C sources that are generated from the table: codes, prototypes, operations, calls without own code."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from . import table
from .table import NATIVE

_ON_RING = {"size": "uint64_t", "func": "uint32_t"}
"""C types of roles that are sent as another type: functions are sent as the worker's ids."""


def sources() -> dict[str, str]:
    """Return the text of each generated file, by name."""
    return {
        "gen_numbers.h": _numbers_h(),
        "gen_structs.h": _structs_h(),
        "gen_calls.h": _calls_h(),
        "gen_ops.h": _ops_h(),
        "gen_layer.c": exported_symbols("layer.h", "return ww_refused({0});", _has_own_code, _forward) + _layer_calls(),
        "gen_layer.h": _layer_h(),
        "gen_worker.h": _worker_h(),
        "gen_worker.c": _worker_c(),
        "gen_passthrough.h": _passthrough_h(),
        "gen_passthrough.c": _passthrough_c(),
    }


def protocol_hash() -> int:
    """Return a hash of the table and of wire.h, which must be equal in layer and worker."""
    text = [table.DATA, NATIVE / "wire.h", NATIVE / "calls.h"]
    return int.from_bytes(hashlib.sha256(b"".join(path.read_bytes() for path in text)).digest()[:8], "little")


def replayed() -> list[table.Call]:
    """Return the calls that generated code sends and replays."""
    return [call for call in table.calls().values() if call.kind in ("call", "send")]


def _native() -> list[table.Call]:
    """Return the driver calls that a worker may make."""
    return [call for call in table.calls().values() if call.kind != "near"]


def flagged(call: table.Call) -> bool:
    """Return True if no argument shows that a call is the variant for per-thread streams, so its body has a flag."""
    variants = {table.plain_symbol(entry.symbol) for entry in table.entries() if entry.per_thread}
    return call.symbol in variants and "stream" not in call.roles


def _parameters(call: table.Call, first: str = "") -> str:
    named = [f"{c}a{i}" if c.endswith("*") else f"{c} a{i}" for i, c in enumerate(call.c_types)]
    return ", ".join([first, *named] if first else named) or "void"


def _prototype(call: table.Call, symbol: str = "") -> str:
    return f"CUresult {symbol or call.symbol}({_parameters(call)})"


def _body(call: table.Call) -> str:
    return f"CUresult ww_{call.symbol}({_parameters(call, 'int per_thread')})"


# -- codes, prototypes, operations -------------------------------------------------------------------------------------


def _header(*c_lines: str) -> str:
    return "\n".join(["/* Generated. */", "#pragma once", *c_lines, ""])


def _numbers_h() -> str:
    c_lines = [f"#define WW_HAND_OPS {table.HAND_OPERATIONS}", "enum ww_op {"]
    c_lines += [f"    WW_OP_{operation.name}, /* {operation.description} */" for operation in table.operations()]
    c_lines += ["    WW_OP_BEFORE = WW_HAND_OPS - 1,"]
    c_lines += [f"    WW_OP_{call.symbol}," for call in replayed()] + ["    WW_OPS", "};"]
    c_lines += [f"#define WW_ABSENT {', '.join(table.absent())}"]
    return _header(*c_lines, "enum {", *(f"    {name} = {number}," for name, number in table.numbers().items()), "};")


def _structs_h() -> str:
    c_lines = []
    for name, size, fields in table.structs():
        c_lines += [f"struct {name} {{ {fields}; }};", f'_Static_assert(sizeof(struct {name}) == {size}, "layout");']
    return _header(*c_lines)


def _calls_h() -> str:
    c_lines = ['#include "cu.h"', '#define WW_API __attribute__((visibility("default")))']
    c_lines += ["enum ww_code {"] + [f"    {name} = {code}," for code, name in table.errors().items()] + ["};"]
    c_lines += ["struct ww_error { int code; const char *name, *text; };", "static const struct ww_error ww_errors[]"]
    c_lines += ["    __attribute__((unused)) = {"]
    for code, name in table.errors().items():
        description = name.removeprefix("CUDA_").removeprefix("ERROR_").replace("_", " ").lower()
        c_lines.append(f'    {{{code}, "{name}", "{description if code else "no error"}"}},')
    sticky = " || ".join(f"code == CUDA_ERROR_{name}" for name in table.sticky())
    c_lines += ["};", f"static inline int ww_is_sticky(int code) {{ return {sticky}; }}"]
    c_lines += ["struct ww_variant { const char *name; int version; void *symbol; int per_thread; };"]
    c_lines += ["extern const struct ww_variant ww_variants[]; /* ends with a null name */"]
    for call in table.calls().values():
        c_lines.append(f"WW_API {_prototype(call)};")
        if flagged(call):
            c_lines.append(f"{_body(call)};")
    return _header(*c_lines)


def _struct(name: str, fields: list[tuple[str, str]]) -> str:
    inside = " ".join(f"{c} {field};" for c, field in fields)
    return f"struct __attribute__((packed)) {name} {{ {inside} }};"


def arguments(call: table.Call, prefix: str = "") -> list[tuple[str, str]]:
    """Return (C type, field) of the values that are sent to the worker; with `prefix`, only of roles with it."""
    roles = [(i, role[len(prefix) :]) for i, role in enumerate(call.roles) if role.startswith("out_") == bool(prefix)]
    return [(_ON_RING.get(role, table.ROLES[role]), f"a{i}") for i, role in roles]


def results(call: table.Call) -> list[tuple[str, str]]:
    """Return (C type, field) of the values that the worker returns."""
    return arguments(call, "out_")


def _ops_h() -> str:
    c_lines = ['#include "calls.h"', f"#define WW_HASH {protocol_hash():#x}ull"]
    for name, fields in table.operation_arguments().items():
        c_lines.append(
            f"struct ww_args_{name} {{ {' '.join(f'{table.ROLES[role]} {names};' for role, names in fields)} }};"
        )
    for call in replayed():
        c_lines += [_struct(f"ww_args_{call.symbol}", arguments(call)), _struct(f"ww_out_{call.symbol}", results(call))]
    return _header(*c_lines)


# -- exported symbols --------------------------------------------------------------------------------------------------


def _has_own_code(call: table.Call) -> bool:
    return call.kind in ("hand", "near", "inner")


def exported_symbols(
    header: str,
    absent: str,
    weak: Callable[[table.Call], bool],
    body: Callable[[table.Call], str] = lambda call: "",
) -> str:
    """Return C code that defines every symbol of the driver.

    Parameters
    ----------
    header : str
        Header that declares the function in `absent`.
    absent : str
        Statement of a symbol without code; ``{0}`` is replaced by the quoted name of the symbol.
    weak : callable
        Return True for calls that get a weak definition here, which other sources replace.
    body : callable
        Return the definition of a call, or nothing if other sources may define it.
    """
    c_lines = ["/* Generated: every symbol of the driver. */", f'#include "{header}"', '#include "gen_calls.h"']
    c_lines += ["#include <string.h>"]
    served = table.calls()
    for entry in table.entries():
        plain = table.plain_symbol(entry.symbol)
        if plain not in served:
            c_lines.append(f"WW_API __attribute__((weak)) CUresult {entry.symbol}(void);")
            c_lines.append(f"CUresult {entry.symbol}(void)\n{{\n    {absent.format(_quoted(entry.symbol))}\n}}")
        elif entry.per_thread:
            c_lines.append(_per_thread(served[plain], entry.symbol))
        elif flagged(served[plain]):
            c_lines.append(body(served[plain]) or _weak(_body(served[plain]), served[plain], absent))
            passed = _passed(served[plain], "0")
            c_lines.append(f"{_prototype(served[plain])}\n{{\n    return ww_{plain}({passed});\n}}")
        elif weak(served[plain]):
            c_lines.append(body(served[plain]) or _weak(_prototype(served[plain]), served[plain], absent))
    c_lines.append("const struct ww_variant ww_variants[] = {")
    c_lines += [f'    {{"{e.name}", {e.version}, (void *){e.symbol}, {int(e.per_thread)}}},' for e in table.entries()]
    return "\n".join([*c_lines, "    {0, 0, 0, 0}", "};", ""])


def _quoted(symbol: str) -> str:
    return f'"{symbol}"'


def _weak(head: str, call: table.Call, absent: str) -> str:
    unused = [f"(void)a{i};" for i in range(len(call.roles))] + ["(void)per_thread;"] * ("per_thread" in head)
    inside = "".join(f"    {statement}\n" for statement in [*unused, absent.format(_quoted(call.symbol))])
    return f"__attribute__((weak)) {head}\n{{\n{inside}}}"


CHECKS = {
    "ready": "ww_ready()",
    "need": "ww_need(&d)",
    "context": "ww_context_or_current({0}, &d)",
    "device": "ww_device_at({0}, &d)",
    "owner": "ww_device_at({0}, &owner)",
    "stream": "ww_stream_of({0}, &d, &id)",
    "current": "ww_current_stream({0}, &d, &id)",
    "captured": "ww_captured(d, id, &captured)",
    "enter": "ww_enter({0}, &d, &id, &captured)",
    "function": "ww_fn_any({0}, &f)",
    "kernel": "ww_fn_of({0}, d, &f)",
    "pool": "ww_pool_at({0}, &pool)",
    "handle": "ww_object_at({0}, &o)",
    "library": "ww_library({0}, &o, &c)",
    "unsafe": "ww_unsafe()",
    "unwatched": "ww_no_synchronize(d, id)",
    "done": "{0}",
}
"""C expressions by the name of a check. A result other than 0 is the result of the call. The check ``graphs`` locks
graphs until the call returns, and the last check, ``library``, locks loads."""
_LOCKS = {"graphs": "WW_LOCK_GRAPHS()", "loading": "WW_LOCK(&layer.loading)"}
_OF_GRAPHS = {"graph", "node", "exec", "user"}
_LOCALS = {
    "d": "struct ww_device *d",
    "owner": "struct ww_device *owner",
    "id": "uint32_t id",
    "captured": "bool captured",
    "r": "struct ww_span r",
    "f": "struct ww_fn *f",
    "o": "struct ww_object *o",
    "c": "struct ww_loaded_image *c",
    "pool": "struct ww_pool *pool",
}
_BODY = re.compile(r"body\((.*)\)")


def _layer_h() -> str:
    """Return declarations of the bodies that other sources define."""
    c_lines = ["/* Generated: bodies of calls behind their checks. */"]
    for call in table.calls().values():
        if body := _BODY.fullmatch(call.forward):
            types = {f"a{i}": f"{c_type} a{i}" for i, c_type in enumerate(call.c_types)}
            types |= _LOCALS | {name: f"struct ww_{name} *{name}" for name in _OF_GRAPHS}
            c_lines.append(f"int ww_body_{call.symbol}({', '.join(types[name] for name in body[1].split(', '))});")
    c_lines += [text for name, fields in table.operation_arguments().items() for text in _senders(name, fields)]
    return "\n".join([*c_lines, ""])


def _senders(name: str, fields: list[tuple[str, str]]) -> Iterator[str]:
    """Yield functions that send an entry with these arguments, and that also wait for its answer."""
    named = [(table.ROLES[role], field) for role, names in fields for field in names.split(", ") if field != "unused"]
    parameters = "".join(f", {c_type} {field}" for c_type, field in named)
    values = ", ".join(f".{field} = {field}" for _, field in named)
    for verb, more, passed in (("send", "", ""), ("call", ", void *out, size_t nout", ", out, nout")):
        head = (
            f"static inline int ww_{verb}_{name}(struct ww_device *d, uint16_t op, uint32_t stream{parameters}{more})"
        )
        yield f"{head} {{ return ww_{verb}(d, op, stream, &(struct ww_args_{name}){{{values}}}, "
        yield f"sizeof(struct ww_args_{name}){passed}); }}"


def _forward(call: table.Call) -> str:
    """Return the definition of a call whose body is in the table."""
    if not call.forward:
        return ""
    forward = _BODY.sub(rf"ww_body_{call.symbol}(\1)", call.forward)
    text = " ".join([*(_check_code(check) for check in call.checks), forward])
    names = set(re.findall(r"\w+", text))
    c_lines = [_body(call) if flagged(call) else _prototype(call), "{"]
    c_lines += [f"    (void)a{i};" for i in range(len(call.roles)) if f"a{i}" not in names]
    if flagged(call):
        c_lines.append("    CUstream stream = per_thread ? CU_STREAM_PER_THREAD : NULL;")
    c_lines += [f"    {declaration};" for name, declaration in _LOCALS.items() if re.search(rf"&{name}\b", text)]
    if not call.checks:
        return "\n".join([*c_lines, f"    return {forward};", "}"])
    c_lines += ["    int error = 0;"]
    for check in call.checks:
        c_lines += _check(check)
    c_lines += [f"    {forward}" if forward.startswith("{") else f"    error = {forward};"]
    return "\n".join([*c_lines, "    return error;", "}"])


def _check_code(check: str) -> str:
    """Return the C expression of a check."""
    name, _, argument = check.partition(" ")
    return CHECKS[name].format(argument) if name in CHECKS else check


def _check(check: str) -> Iterator[str]:
    """Yield the C code of a check. ``graphs`` and ``loading`` hold a lock until the call returns."""
    name, _, argument = check.partition(" ")
    if name in _LOCKS:
        yield f"    if ((error = ww_ready()))\n        return error;\n    {_LOCKS[name]};"
    elif name in _OF_GRAPHS and argument:
        yield f"    struct ww_{name} *{name} = ww_{name}({argument});"
        yield f"    if (!{name})\n        return CUDA_ERROR_INVALID_VALUE;"
    elif name in CHECKS:
        yield f"    if ((error = {_check_code(check)}))\n        return error;"
    else:
        condition, _, code = check.partition(" else ")
        yield f"    if (!({condition}))\n        return CUDA_ERROR_{code or 'INVALID_VALUE'};"


def _passed(call: table.Call, first: str = "", own: str = "") -> str:
    """Return the names of a call's parameters, to pass on; `own` replaces a null stream."""
    names = [f"a{i} ? a{i} : {own}" if own and r == "stream" else f"a{i}" for i, r in enumerate(call.roles)]
    return ", ".join([first, *names] if first else names)


def _per_thread(call: table.Call, symbol: str) -> str:
    target = f"ww_{call.symbol}({_passed(call, '1')})" if flagged(call) else ""
    target = target or f"{call.symbol}({_passed(call, own='CU_STREAM_PER_THREAD')})"
    return f"WW_API {_prototype(call, symbol)};\n{_prototype(call, symbol)}\n{{\n    return {target};\n}}"


# -- the layer's calls and the worker's replay -------------------------------------------------------------------------


def _layer_calls() -> str:
    return '#include "gen_ops.h"\n' + "\n".join(_layer_call(call) for call in replayed()) + "\n"


def _layer_call(call: table.Call) -> str:
    """Return a call that a worker replays: `_forward` of the checks of its roles, and of the entry for the ring."""
    name, outs = call.symbol, [field for _, field in results(call)]
    fields = {field: field for _, field in arguments(call)}
    checks = ["need", *([" && ".join(outs)] if outs else [])]
    if "func" in call.roles:
        field = f"a{call.roles.index('func')}"
        checks.append(f"done ww_function({field}, d, &id)")
        fields[field] = "id"
    values = ", ".join(f".{field} = {value}" for field, value in fields.items())
    entry = f"d, WW_OP_{name}, 0, &(struct ww_args_{name}){{{values}}}, sizeof(struct ww_args_{name})"
    forward = f"ww_send({entry})"
    if call.kind == "call":
        stores = " ".join(f"*{field} = out.{field};" for field in outs)
        forward = f"{{struct ww_out_{name} out; if (!(error = ww_call({entry}, &out, sizeof out))) {{{stores}}}}}"
    return _forward(replace(call, checks=tuple(checks), forward=forward))


def _worker_h() -> str:
    c_lines = ['#include "gen_calls.h"', '#include "gen_ops.h"', "struct ww_native {"]
    for call in _native():
        c_lines.append(f"    CUresult (*{call.symbol})({_parameters(call)});")
    c_lines += ["};", "struct ww_call;", "struct ww_stream;"]
    c_lines += sorted({f"{_step(step, operation)};" for step, operation in _steps()})
    return _header(*c_lines, _WORKER)


_STEPS = {
    "read": ("CUresult", "const struct ww_call *call"),
    "check": ("CUresult", "struct ww_call *call"),
    "is_due": ("int", "const struct ww_call *call"),
    "issue": ("CUresult", "struct ww_stream *s, struct ww_call *call"),
}
"""Return type and parameters of an operation's step; see ``struct ww_operation``."""


def _steps() -> Iterator[tuple[str, table.Operation]]:
    """Yield each step of each operation that is a function."""
    for operation in table.operations():
        yield from ((step, operation) for step in operation.steps if step in _STEPS)


def _step(step: str, operation: table.Operation) -> str:
    """Return the head of a step's function, which gets the call, the arguments of its entry, or both."""
    name, parameters = operation.steps[step]
    returned, passed = _STEPS[step]
    if "call" not in parameters:
        passed = passed.rpartition(", ")[0]
    if "args" in parameters:
        passed = f"{passed}, " * bool(passed) + f"const struct ww_args_{operation.arguments} *args"
    return f"{returned} ww_{name}({passed})"


def _entry_of_step(step: str, operation: table.Operation) -> str:
    """Return a function with the parameters of ``struct ww_operation`` that calls a step's function."""
    name, parameters = operation.steps[step]
    returned, passed = _STEPS[step]
    values = ["s"] * (step == "issue") + ["call"] * ("call" in parameters)
    values += ["(const void *)call->args"] * ("args" in parameters)
    return f"static {returned} {step}_{operation.name}({passed}) {{ return ww_{name}({', '.join(values)}); }}"


_WORKER = """\
extern struct ww_native native;
/* Open the driver and fill `native`; symbols that an older driver lacks stay NULL. 0, or -1 and `why` has a line. */
int ww_load_native(const char *path, char *why, size_t room);
/* Replay a generated call: CUresult. NOT_FOUND: no such call. INVALID_VALUE: `nargs` is less than its arguments. */
int ww_run(uint16_t op, const void *args, uint32_t nargs, void *out, uint32_t room, uint32_t *nout);
/* A function of the worker by its id; CUresult. */
int ww_find_function(uint32_t id, CUfunction *out);"""


def _worker_c() -> str:
    c_lines = [
        '/* Generated. */\n#include "worker.h"',
        "#include <dlfcn.h>",
        "#include <stdio.h>",
        "#include <string.h>",
    ]
    c_lines += ["struct ww_native native;", "int ww_load_native(const char *path, char *why, size_t room)", "{"]
    c_lines += ["    void *driver = dlopen(path, RTLD_NOW | RTLD_LOCAL);", "    if (!driver) {"]
    c_lines += ['        snprintf(why, room, "%s", dlerror());', "        return -1;", "    }"]
    c_lines += ['    if (dlsym(driver, "ww_layer")) { /* layer.c has it */', "        dlclose(driver);"]
    c_lines += ['        snprintf(why, room, "%s is the layer of Warpwell itself, not a driver", path);']
    c_lines += ["        return -1;", "    }"]
    for call in _native():
        c_lines.append(f'    *(void **)&native.{call.symbol} = dlsym(driver, "{call.symbol}");')
    c_lines += ["    if (!native.cuInit) {", '        snprintf(why, room, "%s is not a CUDA driver", path);']
    c_lines += ["        dlclose(driver);", "        return -1;", "    }", "    return 0;", "}"]
    c_lines += [
        "int ww_run(uint16_t op, const void *args, uint32_t nargs, void *out, uint32_t room, uint32_t *nout)",
        "{",
    ]
    c_lines += ["    *nout = 0;", "    switch (op) {"]
    for call in replayed():
        c_lines += _replay(call)
    c_lines += ["    default:", "        return CUDA_ERROR_NOT_FOUND;", "    }", "}"]
    c_lines += [_entry_of_step(step, operation) for step, operation in _steps()]
    c_lines += ["const struct ww_operation ww_operations[WW_HAND_OPS] = {"]
    c_lines += [f"    [WW_OP_{operation.name}] = {{{_operation(operation)}}}," for operation in table.operations()]
    return "\n".join([*c_lines, "};", ""])


def _operation(operation: table.Operation) -> str:
    fields = [f".{step} = {step}_{operation.name}" if step in _STEPS else f".{step} = 1" for step in operation.steps]
    size = f"sizeof(struct ww_args_{operation.arguments})" if operation.arguments else "0"
    return ", ".join([f".bytes = {size}", *fields])


def _replay(call: table.Call) -> Iterator[str]:
    name = call.symbol
    outs = [(i, role[4:]) for i, role in enumerate(call.roles) if role.startswith("out_")]
    yield f"    case WW_OP_{name}: {{"
    if arguments(call):  # an entry is padded, so `nargs` may be larger
        yield f"        if (nargs < sizeof(struct ww_args_{name}))"
        yield "            return CUDA_ERROR_INVALID_VALUE;"
    yield f"        if (!native.{name})"
    yield "            return CUDA_ERROR_NOT_SUPPORTED;"
    if arguments(call):
        yield f"        struct ww_args_{name} a;"
        yield "        memcpy(&a, args, sizeof a);"
    passed = []
    for i, role in enumerate(call.roles):
        passed.append(f"&o{i}" if role.startswith("out_") else f"f{i}" if role == "func" else f"a.a{i}")
        if role == "func":
            yield f"        CUfunction f{i};"
            yield f"        int missing = ww_find_function(a.a{i}, &f{i});"
            yield "        if (missing)"
            yield "            return missing;"
    if not outs:
        yield f"        return native.{name}({', '.join(passed)});"
    else:
        yield f"        struct ww_out_{name} sent;"
        yield "        if (room < sizeof sent)"
        yield "            return CUDA_ERROR_INVALID_VALUE;"
        yield from (f"        {table.ROLES[role]} o{i} = 0;" for i, role in outs)
        yield f"        CUresult error = native.{name}({', '.join(passed)});"
        yield from (f"        sent.a{i} = o{i};" for i, _ in outs)
        yield "        memcpy(out, &sent, sizeof sent);"
        yield "        *nout = sizeof sent;"
        yield "        return error;"
    yield "    }"


# -- the pass-through --------------------------------------------------------------------------------------------------

PASSED = re.compile(
    r"cu(Launch(Kernel|KernelEx|CooperativeKernel)|GraphLaunch|Mem(cpy|set)\w*|Stream(Synchronize|Query|WaitEvent)|"
    r"CtxSynchronize|StreamDestroy_v2|DevicePrimaryCtxRe(lease|set)(_v2)?|CtxDestroy_v2|GetProcAddress(_v2)?)"
)
"""Symbols that the pass-through driver defines, without the suffixes of per-thread streams."""


def passed() -> list[tuple[table.Entry, table.Call]]:
    """Return the symbols that the pass-through driver defines, with their calls."""
    calls = table.calls()
    symbols = [(entry, table.plain_symbol(entry.symbol)) for entry in table.entries()]
    return [(entry, calls[symbol]) for entry, symbol in symbols if symbol in calls and PASSED.fullmatch(symbol)]


def _passthrough_h() -> str:
    c_lines = ["/* Generated: functions of the machine's driver. */", "struct ww_machine {"]
    c_lines += [f"    CUresult (*{entry.symbol})({_parameters(call)});" for entry, call in passed()]
    c_lines += ["};", "extern struct ww_machine ww_machine;", f"#define WW_PASSED {len(passed())}u"]
    return "\n".join([*c_lines, "extern const struct ww_passed ww_passed[WW_PASSED];", ""])


def _passthrough_c() -> str:
    c_lines, rows = ["/* Generated: the pass-through driver. */", '#include "passthrough.h"'], []
    for number, (entry, call) in enumerate(passed()):
        symbol = entry.symbol
        rows.append(
            f'    {{"{symbol}", "{entry.name}", {entry.version}, {int(entry.per_thread)}, (void *){symbol}, '
            f"(void **)&ww_machine.{symbol}}},"
        )
        if "GetProcAddress" not in symbol:
            c_lines += [f"WW_API {_prototype(call, symbol)};", f"{_prototype(call, symbol)}", "{"]
            c_lines += [f"    if (!ww_machine.{symbol})", "        return CUDA_ERROR_NOT_SUPPORTED;"]
            c_lines += [f"    {statement}" for statement in _pass_on(number, entry, call)] + ["}"]
    return "\n".join([*c_lines, "const struct ww_passed ww_passed[WW_PASSED] = {", *rows, "};", ""])


def _pass_on(number: int, entry: table.Entry, call: table.Call) -> Iterator[str]:
    """Yield statements that call the machine's function, and the gate's functions before and after it."""
    default = "CU_STREAM_PER_THREAD" if entry.per_thread else "CU_STREAM_LEGACY"
    argument = f"a{call.roles.index('stream')}" if "stream" in call.roles else ""
    if call.symbol == "cuLaunchKernelEx":
        argument = "((const struct cu_launch_config *)a0)->stream"
    stream = f"{argument} ? {argument} : {default}" if argument else default
    machine = f"ww_machine.{entry.symbol}({_passed(call)})"
    if re.match("cu(StreamDestroy|CtxDestroy|DevicePrimary)", call.symbol):
        if call.symbol == "cuStreamDestroy_v2":
            yield "ww_forget_stream(a0);"
        yield f"CUresult result = {machine};"
        if call.symbol != "cuStreamDestroy_v2":
            yield f"ww_forget_contexts({'a0' if call.roles == ('ctx',) else 'NULL'});"
        yield "return result;"
        return
    yield "if (!ww_must_enter())"
    yield f"    return {machine};"
    if call.symbol == "cuStreamWaitEvent":
        yield f"return ww_wait_event({stream}, a1, a2, ww_machine.{entry.symbol});"
    elif re.match("cu(Stream|Ctx)", call.symbol):
        yield f"uint64_t entered[WW_STREAMS];\n    ww_before_wait({stream if argument else 'NULL'}, entered);"
        yield f"CUresult result = {machine};"
        yield "if (!result)\n        ww_after_wait(entered);\n    return result;"
    else:
        key = f"(uintptr_t)a{call.roles.index('func')}" if "func" in call.roles else "(uintptr_t)a0"
        if call.symbol.startswith("cuMem"):
            sizes = [i for i, role in enumerate(call.roles) if role == "size"]
            key = f"ww_size_key({number}, {' * '.join(f'a{i}' for i in sizes[-2:]) or '1'})"
        yield "struct ww_call call;"
        yield f"if (!ww_before({stream}, {key}, &call))\n        return {machine};"
        yield f"CUresult result = {machine};"
        yield f"ww_after(&call, {'!result' if call.symbol == 'cuMemcpyDtoH_v2' else 'false'});\n    return result;"
