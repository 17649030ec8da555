"""Faults planted into layer, worker and the mirror between hosts; random programs must find them."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.harness.driver.natives import Changes, edit

SOURCES = Path(__file__).parents[3] / "src" / "warpwell"
AT_ONCE = """\
    if (todo->kind == KIND) {
        todo->next = NULL;
        do_all(s, todo);
        return;
    }
    m->waited |= todo->kind == WW_ANSWER"""
USED, FILLED = "use = ++c->place_use[place];\n", "    memcpy(p.entry + 1, args, nargs);\n"

FREED_AT_ONCE: Changes = {
    "worker_memory.c": {
        "    releases++;\n": "    ww_arena_free(&ww_arena, args->address);\n",
        "ww_stream_mark(s, (struct ww_todo){.kind = WW_THEN, .then = release, .address = args->address});": (
            "(void)s, (void)args, (void)release;"
        ),
    },
}
LAST_ROW: Changes = {
    "layer_copy.c": {
        "y < rows && !error; y++) {\n            str": "y < rows - (rows > 2) && !error; y++) {\n            str"
    }
}

OLD_VALUES = """\
        p->steps[i].off = x->plan->steps[i].off;
        if (p->steps[i].work.kind == CU_NODE_SET)
            p->steps[i].work.of.set = x->plan->steps[i].work.of.set;"""

PLANTED: dict[str, Changes] = {
    "waits for events are dropped": {
        "worker_streams.c": {
            "return call->generation->recorded ? native.cuStreamWaitEvent(s->native, call->generation->native, 0)"
            " : CUDA_SUCCESS;": "return s && call ? CUDA_SUCCESS : CUDA_SUCCESS;"
        }
    },
    "a wait does not wait until its record is issued": {
        "worker_streams.c": {"return !call->generation->parked;": "return call != NULL;"}
    },
    "a record takes the generation that others wait for": {"worker_streams.c": {"if (g->refs > 1) {": "if (0) {"}},
    "a legacy call passes parked calls of blocking streams": {
        "worker_streams.c": {"p->first->order < call->order) return 0;": "p->first->order < call->order) return 1;"}
    },
    "a blocking stream's call passes parked legacy calls": {
        "worker_streams.c": {"} else if (!s->nonblocking && legacy->first && legacy->first->order": "} else if (0 && 0"}
    },
    "a place is given back when the copy is issued": {
        "worker_streams.c": {"    m->waited |= todo->kind == WW_ANSWER": AT_ONCE.replace("KIND", "WW_PLACE")}
    },
    "a cell is given back when the copy is issued": {
        "worker_streams.c": {
            "void ww_stream_later(struct ww_stream *s, struct ww_todo todo) {": """\
void ww_stream_later(struct ww_stream *s, struct ww_todo todo) {
    if (todo.kind == WW_CELL) {
        do_one(s, &todo);
        return;
    }"""
        }
    },
    "a call that no mark covers counts as done": {
        "worker_streams.c": {"    if (s->done == s->issued && !s->first_mark) {": "    if (!s->first_mark) {"}
    },
    "a synchronization answers when it is read": {
        "worker_streams.c": {"    m->waited |= todo->kind == WW_ANSWER": AT_ONCE.replace("KIND", "WW_ANSWER")}
    },
    "memory that is freed is used again at once": {
        "worker_memory.c": {"    if (!ngroup) start_group();": "    ww_arena_free(&ww_arena, frees[--nfrees]);"}
    },
    "work of destroyed streams is not waited for": {
        "worker_streams.c": {"if (s->gone ? !s->first_mark :": "if (s->gone ? 1 :"}
    },
    "an entry is published before it is whole": {
        "layer_ring.c": {
            f"{USED}{FILLED}    return ww_finish(&p);": f"{USED}    error = ww_finish(&p);\n{FILLED}    return error;"
        }
    },
    "a place is filled while its last copy is under way": {
        "layer_ring.c": {"c->place_held[*place] = true;": "c->place_held[*place] = false;"}
    },
    "calls pass a host function of the legacy stream": {
        "layer_hold.c": {" || (h->stream == WW_LEGACY && ww_host_blocking(d, stream));": ";"}
    },
    "a host function runs when it is posted": {
        "layer_host.c": {"if (*code != CUDA_ERROR_NOT_READY)": "if ((*code %= CUDA_ERROR_NOT_READY) >= 0)"}
    },
    "a wait for another device's event is dropped": {
        "layer_peer.c": {
            "error ? error : ww_send_signal(d, WW_OP_AWAIT": "error || number ? error : ww_send_signal(d, WW_OP_AWAIT"
        }
    },
    "an event is signaled to another device before it has been passed": {
        "worker_streams.c": {"    else wait_for(g, todo);": "    else do_one(NULL, &todo), (void)wait_for;"}
    },
    "an event is signaled to another device before its record is issued": {
        "worker_streams.c": {"if (!g || !g->recorded) do_one": "if (!g || !g->recorded || g->parked) do_one"}
    },
    "new memory is granted before other devices have it": {
        "worker_memory.c": {"job->result = ww_links_add(job->a, job->b, handle);": "job->result = 0;"}
    },
    "kernels of a graph pass their stream": {
        "layer_exec.c": {"ww_work_post(r->device, r->stream, w": "ww_work_post(r->device, WW_LEGACY, w"}
    },
    "a launch of a graph does not wait for its last one": {
        "layer_exec.c": {"error = behind(x, d, stream, WW_OP_STREAM_WAIT);": "error = 0;"}
    },
    "a graph calls a host function when it is launched": {
        "layer_exec.c": {
            "            error = ww_host_post(r->device, r->stream, true,"
            " &(struct ww_host){.run = call_host, .then = go_on, .data = r});\n"
            "            if (!error)\n                return 0;\n": "            call_host(r);\n"
        }
    },
    "a captured copy has the bytes of its capture": {
        "layer_work_calls.c": {
            ".from = end3(from, from_is, nbytes), .to": ".from = end3(from_is == WW_HOST ? (uintptr_t)memcpy("
            "malloc(nbytes), (void *)(uintptr_t)from, nbytes) : from, from_is, nbytes), .to",
            "#include <string.h>": "#include <stdlib.h>\n#include <string.h>",
        }
    },
    "memory that one stream frees is another's at once": FREED_AT_ONCE,
    "a copy of rows drops its last one": LAST_ROW,
    "an update has the old values": {
        "layer_exec.c": {"        p->steps[i].off = x->plan->steps[i].off;": OLD_VALUES},
    },
    "the ring's end is not padded": {"layer_ring.c": {"if (size > rest) {": "if (size > rest + 64) {"}},
}
"""Name of a fault -> the change that plants it."""

PEERS: dict[str, tuple[str, Changes]] = {
    "graphs wait while memory of one waits for the other device": (
        "graph_memory",
        {
            "layer_owned.c": {
                "    pthread_mutex_unlock(&ww_graphs);\n    while (user) {": "    while (user) {",
                "        memory = next;\n    }\n": (
                    "        memory = next;\n    }\n    pthread_mutex_unlock(&ww_graphs);\n"
                ),
            }
        },
    ),
    "host functions wait while memory of a graph waits for the other device": (
        "graph_memory_behind",
        {"layer_owned.c": {"if (ww_in_host_thread && !is_unused(m))": "if (0)"}},
    ),
    "a synchronous copy between devices passes the other's legacy stream": (
        "synchronous",
        {"layer_copy.c": {"k->begins ? stream_done(ends[i], WW_LEGACY) : ww_context_code(ends[i]);": "0;"}},
    ),
    "rows but the last pass the other device's legacy stream": (
        "rows",
        {"layer_copy.c": {"row, waits && !z && !y,": "row, waits && z + 1 == planes && y + 1 == rows,"}},
    ),
    "a synchronous copy to memory that others use is not waited for": (
        "synchronous",
        {"layer_copy.c": {"|| atomic_load_explicit(&k->device->shared, memory_order_relaxed);": ";"}},
    ),
    "a free does not wait for the other device": (
        "frees",
        {"layer_memory_calls.c": {"ww_peers_done(owner);": ""}},
    ),
    "memory is given back while others have it mapped": (
        "comes_back",
        {"worker_memory.c": {"    ww_links_drop(job->a, job->b);\n": ""}},
    ),
    "a thread that waits for a worker that has ended is not woken": (
        "lost",
        {"worker_links.c": {"a->is_done = 1;\n        a->result": "a->result"}},
    ),
    "memory of a worker that has ended goes while it is used": (
        "lost",
        {"worker_links.c": {"    ww_barrier((struct": "    start_forget(&(struct"}},
    ),
}
"""The same, and the act of peer_acts.py that finds it."""


CHECKED: dict[str, tuple[str, Changes]] = {
    "nodes are carried out in the order in which they were made": (
        "graph_checks",
        {"layer_exec.c": {"ready(g->nodes[i], placed)) {": "(ready(g->nodes[i], placed) || 1)) {"}},
    ),
    "nodes that are switched off are carried out": (
        "graph_checks",
        {"layer_exec.c": {"} else if (!s->off) {": "} else {"}},
    ),
    "an update changes the form of a graph": (
        "graph_checks",
        {"layer_exec.c": {"old->shape))\n        return CU_UPDATE_TOPOLOGY;": "old->shape))\n        return 0;"}},
    ),
    "a stream that is destroyed loses what a graph has behind a host function": (
        "graph_checks",
        {"layer_stream.c": {"ww_host_has(what->device, what->id) &&": "0 &&"}},
    ),
    "a free does not wait for nodes behind a host function of a graph": (
        "graph_checks",
        {"layer_memory_calls.c": {"ww_host_wait(d, d == on ? stream : 0);": "(void)on, (void)stream;"}},
    ),
    "a user object goes while a launch is under way": (
        "graph_checks",
        {"layer_exec.c": {"bool over = !p->nusers ||": "bool over = 1 ||"}},
    ),
    "memory of a graph is allocated when the stream gets there": (
        "graph_checks",
        {
            "layer_exec.c": {
                "        count_memory(r->plan);": "        (void)0;",
                "    behind(r->exec, r": "    count_memory(r->plan);\n    behind(r->exec, r",
                "void go_on(void *data, int code);": (
                    "void go_on(void *data, int code);\nstatic void count_memory(const struct ww_plan *p);"
                ),
            }
        },
    ),
    "a conditional node does not come behind what was recorded before": (
        "condition_checks",
        {"worker_graphs.c": {"if (!code && recording.last) code = native": "if (0) code = native"}},
    ),
    "recorded calls do not come behind a conditional node": (
        "condition_checks",
        {"worker_graphs.c": {"size_t n = recording.last ? 1 : 0;": "size_t n = recording.last && 0 ? 1 : 0;"}},
    ),
    "a graph that is made executable again keeps what was recorded before": (
        "condition_checks",
        {"worker_graphs.c": {"int stays = 0;": "int stays = 1;"}},
    ),
    "an executable graph ends before its launches that wait": (
        "condition_checks",
        {"worker_graphs.c": {"    x->refs++;\n    call->exec = x;": "    call->exec = x;"}},
    ),
    "nodes behind the last conditional node are left out": (
        "condition_checks",
        {"layer_exec.c": {"r->at = r->plan->twins;": "r->at = r->plan->n;"}},
    ),
    "copies of plain memory are recorded by way of staging": (
        "condition_checks",
        {"layer_copy.c": {"if (k->stream == WW_RECORDED)": "if (0)"}},
    ),
    "memory of the host that a stream frees holds up host functions": (
        "pool_checks",
        {
            "layer_memory.c": {
                "        ww_send_free(d, WW_OP_UNPIN, 0, r->start);": (
                    "        ww_call_free(d, WW_OP_UNPIN, 0, r->start, NULL, 0);"
                )
            }
        },
    ),
    "memory of the host that a graph leaves behind holds up host functions": (
        "pool_checks",
        {"layer_owned.c": {"m->on_host && ww_in_host_thread": "m->on_host && 0"}},
    ),
    "a synchronous copy to pinned memory is not waited for": (
        "managed_checks",
        {"layer_copy.c": {"bool others = k->seen || k->stream": "bool others = k->stream"}},
    ),
    "managed memory is offered to programs with several devices": (
        "managed_checks",
        {"layer_managed.c": {"return layer.ndevices == 1 &&": "return"}},
    ),
    "a stream that joins a capture does not come behind the event": (
        "capture_checks",
        {
            "layer_capture.c": {
                "(d, stream), &e->last)": "(d, stream), &(struct nodes){NULL, 0})",
            }
        },
    ),
    "an event belongs to all captures that recorded it": (
        "capture_checks",
        {"layer_capture.c": {"    forget(event);\n    if (!e)": "    if (!e)"}},
    ),
    "branches that are not joined are let go": (
        "capture_checks",
        {"layer_capture.c": {"all = in(&reached, m->last.all[i]);": "all = true;"}},
    ),
    "a capture forbids calls of its own thread alone": (
        "capture_checks",
        {"layer_capture.c": {"if (mine || anyones) {": "if (mine && (anyones || mine)) {"}},
    ),
    "the legacy stream posts while a blocking one records": (
        "capture_checks",
        {"layer_capture.c": {"if (m->blocking) {": "if (m->blocking && !m->stream) {"}},
    ),
    "calls do not know host memory of a graph": (
        "pool_checks",
        {"layer_memory_calls.c": {"    if (r->flags & WW_OF_GRAPH)\n        return d;": ""}},
    ),
    "memory of the host's pools is given back each time": (
        "pool_checks",
        {"layer_memory.c": {"kept_bytes + r->size > KEEP_BYTES": "1"}},
    ),
    "memory of the host's pools is kept before its stream is done": (
        "pool_checks",
        {
            "layer_memory.c": {
                "    int error = ww_host_after(d, stream, unpin_later, u);\n": (
                    "    int error = d == NULL && stream;\n    unpin_later(u, 0);\n"
                )
            }
        },
    ),
    "a pool gives more than its most": ("pool_checks", {"layer_pool.c": {"(p->props.most && ": "(0 && "}}),
    "allocations from a pool stay counted after a reset": (
        "pool_checks",
        {"layer_range.c": {"give(t->all[i].owner, t->all[i].size);": "(void)give;"}},
    ),
    "a pool keeps nothing": ("pool_checks", {"layer_pool.c": {"shrink(p, p->threshold);": "shrink(p, 0);"}}),
    "planes lie one behind another": (
        "row_checks",
        {"layer_copy.c": {"c->to.pitch * (c->to.height ? c->to.height : rows);": "c->to.pitch * rows;"}},
    ),
    "sizes of rows overflow": (
        "row_checks",
        {"layer_copy.c": {"|| !extent_of(e, c, &before, &nbytes)": "|| (extent_of(e, c, &before, &nbytes), 0)"}},
    ),
    "rows of a memset lie one behind another": (
        "row_checks",
        {"layer_copy.c": {"fill_row(&k, s->to + y * s->pitch,": "fill_row(&k, s->to + y * s->width,"}},
    ),
}
"""The same, and the area of checks that finds it."""


def lands_at_once(client: Any, answers: bytes, slots: tuple[Any, ...]) -> None:
    """`NearClient.apply_answers` that does not wait for bulk data."""
    near = client._near
    near.apply(answers)
    for slot, use, result, payload in slots:
        if isinstance(payload, bytes):
            near.write(slot, payload)
        near.complete_slot(slot, use, result)


WRONG, STUCK, OVERRUN = "wrong", "stuck", "overrun"
"""Symptoms: random programs are wrong, do not end, or a program is wrong that posts more than the rings hold."""

MIRRORED: dict[str, tuple[Changes, dict[str, Any], str]] = {
    "entries are published before their bytes are there": (
        {},
        {"warpwell.pool.cuda.far._Stop.ready": property(lambda stop: stop.started)},
        WRONG,
    ),
    "a place is done before its bytes have landed": (
        {},
        {"warpwell.pool.cuda.near.NearClient.apply_answers": lands_at_once},
        WRONG,
    ),
    "finished staging slots wake no mirror": (
        {"worker_answer.c": {"ww_wake_all(&p->use);\n    ww_changed();": "ww_wake_all(&p->use);"}},
        {},
        STUCK,
    ),
    "memory that is pinned for another host's device is the worker's": (
        {"layer_copy.c": {"r->type == WW_PINNED_MEMORY && k->device->facts.remote ? NULL : k->device": "k->device"}},
        {},
        WRONG,
    ),
    "pinned memory is read before a host function has run": (
        {"layer_copy.c": {"if (k->device->facts.remote && atomic_load(&k->device->holds))": "if (0)"}},
        {},
        WRONG,
    ),
    "the ring of the other host is overrun": (
        {
            "relay.c": {
                "if (n->tail + e.size - atomic_load(&n->far_tail) > WW_RING_BYTES) return NOTHING;": "",
                "|| to - tail > WW_RING_BYTES": "|| to < tail",
            }
        },
        {},
        OVERRUN,
    ),
    "replies are awaited although no entry requests one": (
        {"relay.c": {"if (e.slot != WW_NO_SLOT) atomic_store": "if (e.slot == 0) atomic_store"}},
        {},
        STUCK,
    ),
}
"""Faults of the mirror between hosts: changes of native parts, replacements of names in Python, and the symptom."""

NAP = "static void nap(void) {\n    nanosleep(&(struct timespec){0, 200000}, NULL);\n}\n\n"
OVER_MPI: dict[str, Changes] = {
    "entries are published before their bytes are there": {
        "far.py": {" and (self.transfer is None or self.transfer.completed >= self.transfer.chunks)": ""}
    },
    "a place is done before its bytes have landed": {
        "near.py": {"transfer.wait(transfer.chunks, _COPY_SECONDS)": "pass"}
    },
    "an answer is announced before it has arrived": {
        "relay.c": {
            "static size_t padded(": f"{NAP}static size_t padded(",
            "        s->result = a.result;\n": "        atomic_store(&s->seq, a.seq);\n        ww_wake_all(&s->seq);\n"
            "        nap();\n        s->result = a.result;\n",
        }
    },
    "the worker is not woken": {
        "relay.c": {"    atomic_fetch_add(&f->ring->wake, 1);\n    ww_wake_all(&f->ring->wake);\n": ""}
    },
    "a thread that waits for an answer is not woken": {"relay.c": {"        ww_wake_all(&s->seq);\n": ""}},
    "an entry that arrives while the far end polls is missed": {
        "relay.c": {
            "            f->seen = changes;\n            int n = scan(f, out, room, places, nplaces);\n": (
                "            int n = scan(f, out, room, places, nplaces);\n            sched_yield();\n"
                "            f->seen = atomic_load(&f->status->changes);\n"
            )
        }
    },
    "replies are awaited although no entry requests one": {
        "relay.c": {"if (e.slot != WW_NO_SLOT) atomic_store": "if (e.slot == 0) atomic_store"}
    },
    "memory that is pinned for another host's device is the worker's": {
        "layer_copy.c": {"r->type == WW_PINNED_MEMORY && k->device->facts.remote ? NULL : k->device": "k->device"}
    },
}
"""Faults of the mirror, as changes of sources: an MPI job must find them. A thread that is not woken polls later."""


def every() -> Iterator[tuple[str, Changes]]:
    """Yield the names and native changes of all faults; those in Python apply."""
    yield from PLANTED.items()
    yield from ((name, changes) for name, (_, changes) in [*PEERS.items(), *CHECKED.items()])
    for name, (changes, patches, _) in MIRRORED.items():
        for target in patches:
            pkgutil.resolve_name(target)
        yield name, changes
    for name, changes in OVER_MPI.items():
        for file in (file for file in changes if file.endswith(".py")):
            edit((SOURCES / "pool" / "cuda" / file).read_text(), changes[file], f"{name}: {file}")
        yield name, {file: pairs for file, pairs in changes.items() if file.endswith(".c")}
